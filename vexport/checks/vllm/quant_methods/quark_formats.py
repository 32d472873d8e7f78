"""How AMD Quark stores a layer, for each of its types (vllm/.../quantization/quark/schemes)."""

from collections.abc import Mapping
from dataclasses import replace

from vexport.checks.vllm.quant_methods.auto_round import from_turing
from vexport.checks.vllm.quant_methods.awq import PLACES, Awq
from vexport.checks.vllm.quant_methods.base import MethodFormat
from vexport.checks.vllm.quant_methods.modelopt import ModelOptFp8, ModelOptNvfp4
from vexport.formats.arguments import Arguments
from vexport.formats.base import GpuSupport, Parameter
from vexport.formats.fp8 import Fp8
from vexport.formats.integer import Int8
from vexport.formats.mxfp import Mxfp4
from vexport.formats.parameters import exact


def at_least(support: GpuSupport, sm: int) -> GpuSupport:
    """Without GPUs below a capability."""
    return replace(support, input_bits={max(sm, start): bits for start, bits in support.input_bits.items()})


class QuarkFp8(ModelOptFp8):
    """weight, weight_scale (out,) or one number, input_scale where inputs are static."""

    name = "quark"

    def vllm_scheme(self, args: Arguments) -> str:
        return "QuarkW8A8Fp8"

    def gpu_support(self, args: Arguments) -> GpuSupport:
        """SM 89 or above (get_min_capability)."""
        return at_least(Fp8.gpu_support(self, args), 89)


class QuarkFp8Block(MethodFormat, Fp8):
    """weight and weight_scale as compressed-tensors has them."""

    name = "quark"

    def vllm_scheme(self, args: Arguments) -> str:
        return "QuarkW8A8Fp8PerBlock"

    def gpu_support(self, args: Arguments) -> GpuSupport:
        return at_least(super().gpu_support(args), 89)


class QuarkInt8(MethodFormat, Int8):
    """weight, weight_scale (out,); weight_zero_point, which vLLM drops."""

    name = "quark"
    unread = frozenset({"weight_zero_point", "input_zero_point"})

    def vllm_scheme(self, args: Arguments) -> str:
        return "QuarkW8A8Int8"

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        found = dict(super().parameters(args, shape))
        if args.weights.strategy == "channel":
            found["weight_scale"] = replace(found["weight_scale"], shape=shape[:1], along=(0,))
        scale = found["weight_scale"]
        return found | {"weight_zero_point": exact("I8", scale.shape, along=scale.along)}


class QuarkMxfp4(MethodFormat, Mxfp4):
    """weight (two codes a byte) and weight_scale."""

    name = "quark"
    weight = "weight"
    names = {"weight_packed": "weight"}

    def vllm_scheme(self, args: Arguments) -> str:
        return "QuarkOCP_MX"

    def gpu_support(self, args: Arguments) -> GpuSupport:
        """The scheme asks for less than compressed-tensors', and Marlin's kernel takes SM 75."""
        return from_turing(super().gpu_support(args))


class QuarkNvfp4(ModelOptNvfp4):
    """As ModelOpt, but for the name of the inputs' scale."""

    name = "quark"
    names = {**ModelOptNvfp4.names, "input_global_scale": "input_scale_2"}

    def vllm_scheme(self, args: Arguments) -> str:
        return "QuarkNVFP4"


class QuarkInt4(Awq):
    """weight (in, out/8), weight_scale and weight_zero_point (groups, out) as AWQ has them.

    `reordered` is AWQ's order of codes in a word, else they follow each other; symmetric codes have a sign.
    """

    name = "quark"
    weight = "weight"
    names = {
        "weight_packed": "weight",
        "weight_scale": "weight_scale",
        "weight_zero_point": "weight_zero_point",
    }
    unread = frozenset({"weight_zero_point"})

    def __init__(self, *, reordered: bool) -> None:
        self.reordered = reordered
        self.places = PLACES if reordered else tuple(range(8))

    def vllm_scheme(self, args: Arguments) -> str:
        return "QuarkW4A16Int4"
