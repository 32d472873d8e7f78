"""The storage formats: one object each, which answers for all that depends on how weights are
stored.

Adding a format is one new file, one line in `FORMATS`, its packing and its presets.
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
# In the order in which vLLM tries their schemes: `_get_scheme_from_parts` in its
# compressed_tensors.py, on a device on which every scheme may run.
FORMATS: Sequence[Format] = (NVFP4, MXFP4, MXFP8, PACKED, FP8, INT8, INT4)
# In the order in which vexport prefers them for a scheme's weights: INT8 for what could be packed
# as well.
WRITTEN: Sequence[Format] = (NVFP4, MXFP4, MXFP8, FP8, INT8, PACKED)


def vllm_format(args: Arguments, stored_as: str) -> Format | str:
    """The format that vLLM takes for a config group's, or why vLLM or compressed-tensors refuses
    the group.

    `stored_as` is the format that the config announces: vLLM takes several for the same.
    """
    reason = next(contradictions(args), None)
    if reason:
        return reason
    if args.input_activations is None and stored_as in WITH_INPUTS and not args.weights.is_float:
        return f"format {stored_as} for integers without input_activations"
    storage = next((each for each in FORMATS if each.matches(args, stored_as)), None)
    if storage is None:
        return f"a combination that none of its schemes runs: {described(args)}, format {stored_as}"
    return storage.refusal(args) or storage


def nearest_format(args: Arguments, stored_as: str) -> Format:
    """The same; where vLLM refuses the group, the format that comes closest to its storage."""
    storage = vllm_format(args, stored_as)
    if not isinstance(storage, str):
        return storage
    weights = args.weights
    if weights.is_float:
        four = NVFP4 if weights.strategy == "tensor_group" else MXFP4
        return FP8 if weights.num_bits == 8 else four
    return PACKED if "pack" in stored_as else INT8


def written_format(args: Arguments) -> Format | None:
    """The format in which vexport stores weights; None where vLLM would not run them in any."""
    runs = (
        each for each in WRITTEN if each.matches(args, each.name) and each.refusal(args) is None
    )
    return None if next(contradictions(args), None) else next(runs, None)
