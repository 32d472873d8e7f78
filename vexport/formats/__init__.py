"""Storage formats. The object of a format has all properties that depend on the storage.

To add a format, add a file, a line in `FORMATS`, its packing and its presets.
"""

from collections.abc import Sequence

from vexport.formats.arguments import Arguments, contradictions, described
from vexport.formats.base import WITH_INPUTS, Format
from vexport.formats.fp8 import Fp8
from vexport.formats.integer import Int4, Int8, PackedIntegers
from vexport.formats.mxfp import Mxfp4, Mxfp8
from vexport.formats.nvfp4 import Nvfp4

NVFP4, MXFP4, MXFP8 = Nvfp4(), Mxfp4(), Mxfp8()
PACKED, FP8, INT8, INT4 = PackedIntegers(), Fp8(), Int8(), Int4()
# All formats, in the order in which vLLM tries their schemes on a device that supports all of them
# (`_get_scheme_from_parts` in compressed_tensors.py).
FORMATS: Sequence[Format] = (NVFP4, MXFP4, MXFP8, PACKED, FP8, INT8, INT4)
# Formats that vexport writes, the preferred format first. INT8 comes before packed integers.
WRITTEN_FORMATS: Sequence[Format] = (NVFP4, MXFP4, MXFP8, FP8, INT8, PACKED)


def vllm_format(args: Arguments, stored_as: str) -> Format | str:
    """Return the format that vLLM selects for a config group, or why the group is refused.

    Either vLLM or compressed-tensors refuses the group. `stored_as` is the format name in the
    config: vLLM accepts several names for the same format.
    """
    reason = next(contradictions(args), None)
    if reason:
        return reason
    if args.input_activations is None and stored_as in WITH_INPUTS and not args.weights.is_float:
        return f"format {stored_as} for integers without input_activations"
    storage = next((each for each in FORMATS if each.matches(args, stored_as)), None)
    if storage is None:
        return f"a combination that no vLLM scheme runs: {described(args)}, format {stored_as}"
    return storage.refusal(args) or storage


def nearest_format(args: Arguments, stored_as: str) -> Format:
    """Return vLLM's format for a config group, or the most similar format if it is refused."""
    storage = vllm_format(args, stored_as)
    if not isinstance(storage, str):
        return storage
    weights = args.weights
    if weights.is_float:
        four_bits = NVFP4 if weights.strategy == "tensor_group" else MXFP4
        return FP8 if weights.num_bits == 8 else four_bits
    return PACKED if "pack" in stored_as else INT8


def written_format(args: Arguments) -> Format | None:
    """Return the format in which vexport stores weights, or None if vLLM would not run them."""
    runs = (
        each
        for each in WRITTEN_FORMATS
        if each.matches(args, each.name) and each.refusal(args) is None
    )
    return None if next(contradictions(args), None) else next(runs, None)
