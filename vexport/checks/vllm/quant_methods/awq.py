"""`awq`: integers of 4 bits with zero points, packed along the outputs in AutoAWQ's order.

Source: vllm/model_executor/layers/quantization/auto_awq.py.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from vexport.checkpoint.derived import Derived
from vexport.checkpoint.reader import Reader
from vexport.checks.vllm.quant_methods.base import (
    MethodConfig,
    MethodGroup,
    QuantMethod,
    Translation,
    contains_listed,
)
from vexport.checks.vllm.quant_methods.integers import (
    PACKED_NAMES,
    Array,
    TransposedIntegers,
    bits_of,
    integer_group,
    packed,
    packed_integers,
    transposed_words,
    unpacked,
)
from vexport.formats.arguments import Arguments
from vexport.formats.base import Parameter
from vexport.numerics.constants import INT32_BITS
from vexport.records import TensorInfo

SOURCE = "auto_awq.py"
BITS = 4
CODES = INT32_BITS // BITS
# The place in a word of each of its eight codes (_REVERSE_AWQ_PACK_ORDER).
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
LAYOUT = "gemm"
# Codes with a sign are those without it less this.
SIGN = 8


class Awq(TransposedIntegers):
    """qweight (in, out/8), qzeros (groups, out/8), scales (groups, out).

    `places` are those of the codes in a word; codes of symmetric weights have a sign, others zero points.
    """

    name = "awq"
    places: Sequence[int] = PLACES

    def refusal(self, args: Arguments) -> str | None:
        bits = args.weights.num_bits
        return None if bits == BITS else f"{bits} bits: vLLM runs {BITS}"

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        ours = {stored: own for own, stored in PACKED_NAMES.items()}
        found = transposed_words(args, shape, packed_by="out")
        return {self.names[ours[name]]: form for name, form in found.items()}

    def shape(self, args: Arguments, stored: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
        codes = stored.get(self.weight)
        if codes is None or len(codes.shape) != 2:
            return None
        return codes.shape[1] * CODES, codes.shape[0]

    def translated(self, args: Arguments, stored: Mapping[str, TensorInfo]) -> Translation:
        """Codes and zero points in words along the inputs and outputs, in the plain order."""
        shape = self.shape(args, stored)
        assert shape is not None
        codes, symmetric = stored[self.weight], args.weights.symmetric
        packed_codes = Derived(
            dtype="I32",
            shape=(shape[0], shape[1] // CODES),
            sources=(codes,),
            rows=partial(self._repacked, codes, SIGN if symmetric else 0),
        )
        zeros = None if symmetric else stored[self.names["weight_zero_point"]]
        read = None if zeros is None else (zeros, partial(self._zero_points, zeros))
        return packed_integers(stored, shape, packed_codes, stored[self.names["weight_scale"]], read)

    def _repacked(self, codes: TensorInfo, sign: int, reader: Reader, rows: slice) -> Array:
        """Some rows (outputs) of the weight, in words along the inputs."""
        chosen = np.arange(codes.shape[1] * CODES)[rows]
        words, places = np.divmod(chosen, CODES)
        shifts = (np.asarray(self.places)[places] * BITS).astype(np.uint32)
        values = (bits_of(reader, codes)[:, words].astype(np.uint32) >> shifts) & np.uint32(15)
        return packed(values ^ np.uint32(sign), BITS).T

    def _zero_points(self, zeros: TensorInfo, reader: Reader, rows: slice) -> Array:
        return packed(unpacked(bits_of(reader, zeros), BITS, self.places).T, BITS)[rows]


def read(config: MethodConfig) -> QuantMethod:
    """The method as vLLM reads it: without a list, layers that are stored unquantized are kept."""
    values = config.values
    bits, size = config.required("w_bit", "bits"), config.required("q_group_size", "group_size")
    if config.required("zero_point") is False:
        expected = "true: without zero points vLLM takes slower kernels on GPUs, and others on CPUs"
        fix = "quantize with zero points"
        config.wrong("zero_point", expected, "false", fix, severity="warning")
    version = str(values.get("version", LAYOUT)).lower()
    if version != LAYOUT:
        expected = f"{LAYOUT}: vLLM reads every checkpoint as packed by AutoAWQ's WQLinear_GEMM"
        config.wrong("version", expected, version, "export it again as gemm")
    kept = config.names("modules_to_not_convert")
    group = integer_group("awq", Awq(), config, bits, size, symmetric=False)

    def group_of(layer: str, name: str) -> MethodGroup | None:
        if not kept:
            return group if layer.endswith(".experts") or name in config.quantized else None
        return None if contains_listed(layer, kept) or contains_listed(name, kept) else group

    return QuantMethod(
        name="awq",
        skip_key="modules_to_not_convert",
        groups=(group,),
        group_of=group_of,
        quantizes_head=values.get("lm_head") is True,
    )
