"""Which kernels vLLM takes for layers on a GPU, by each rank's part of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vexport.architectures.fusion import moe_layer
from vexport.architectures.versions import VersionFacts
from vexport.formats.arguments import UNQUANTIZED_BITS
from vexport.formats.kernels import Multiplication, described_kernel, is_weight_only, kernel_of
from vexport.formats.schemes import Scheme
from vexport.plan.linears import NUMBER, Names
from vexport.plan.shapes import kind_of_group, rank_part
from vexport.types import FusionGroup, Json

# Below it vLLM runs models in float16 (vllm/platforms/cuda.py).
BFLOAT16_FROM = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What layers are served with: a GPU's capability, ranks, a vLLM; and the language model's config."""

    sm: int
    ranks: int
    facts: VersionFacts
    names: Names
    text: Mapping[str, Json]

    @property
    def float16(self) -> bool:
        """Whether the model runs in float16."""
        return self.sm < BFLOAT16_FROM or "float16" in (self.text.get("dtype"), self.text.get("torch_dtype"))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelUse:
    """One of vLLM's classes; `lacks` are the bits of inputs that it leaves in 16 where other layers have a
    kernel for them on this GPU, else 0."""

    kernel: str
    lacks: int = 0

    def __str__(self) -> str:
        return described_kernel(self.kernel)


def kernels_on(
    groups: Iterable[tuple[FusionGroup, Scheme]], served: Served
) -> Mapping[KernelUse, tuple[str, ...]]:
    """The kinds of layers (numbers as *) of each kernel, in the order in which they are met.

    Nothing is said of layers that the GPU refuses, nor of routed experts, whose kernels also depend on the
    router.
    """
    chosen: dict[tuple[object, ...], KernelUse | None] = {}
    found: dict[KernelUse, dict[str, None]] = {}
    for group, scheme in groups:
        kind = (scheme.name, *kind_of_group(group))
        if kind not in chosen:
            chosen[kind] = _kernel(group, scheme, served)
        if (use := chosen[kind]) is not None:
            found.setdefault(use, {})[NUMBER.sub("*", group.name)] = None
    return {use: tuple(kinds) for use, kinds in found.items()}


def _kernel(group: FusionGroup, scheme: Scheme, served: Served) -> KernelUse | None:
    support = scheme.format.gpu_support(scheme.args)
    part = rank_part(group, served.names, served.ranks, served.text)
    if part is None or moe_layer(group.members[0].name) or support.refuses(served.sm):
        return None
    asked = Multiplication(args=scheme.args, shape=part, sm=served.sm, float16=served.float16)
    kernel = kernel_of(scheme.format, asked, served.facts)
    if kernel is None:
        return None
    bits = support.bits(served.sm)
    return KernelUse(kernel=kernel, lacks=bits if is_weight_only(kernel) and bits < UNQUANTIZED_BITS else 0)
