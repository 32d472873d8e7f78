"""`awq`: integers of 4 bits with zero points, packed along the outputs in AutoAWQ's order.

Source: vllm/model_executor/layers/quantization/auto_awq.py.
"""

from collections.abc import Sequence

from vexport.checks.vllm.quant_methods.base import MethodConfig, MethodGroup, QuantMethod, contains_listed
from vexport.checks.vllm.quant_methods.integers import USUAL_BITS, TransposedIntegers, integer_group
from vexport.formats.arguments import Arguments

SOURCE = "auto_awq.py"
# The place in a word of each of its eight codes (_REVERSE_AWQ_PACK_ORDER).
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
LAYOUT = "gemm"


class Awq(TransposedIntegers):
    """qweight (in, out/8), qzeros (groups, out/8), scales (groups, out)."""

    name = "awq"
    places: Sequence[int] = PLACES

    def refusal(self, args: Arguments) -> str | None:
        bits = args.weights.num_bits
        return None if bits == USUAL_BITS else f"{bits} bits: vLLM runs {USUAL_BITS}"


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
