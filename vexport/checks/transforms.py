"""Does vLLM compute the rotations that a checkpoint leaves to the running model?"""

from collections.abc import Iterator

from vexport.architectures.fusion import moe_layer
from vexport.checks.vllm.groups import INPUT, OUTPUT, FusedLinear, OnlineTransform
from vexport.checks.vllm.view import CheckpointView, error
from vexport.records import Finding

NAME = "transforms"
DESCRIPTION = "online rotations (transform_config) are ones that vLLM computes, and have their matrices"


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on transforms of inputs and outputs; those in the weights are of no concern."""
    where = f"{view.quantization_place}.transform_config"
    for transform in view.transforms:
        if transform.location not in (INPUT, OUTPUT):
            expected = "transforms of inputs and outputs of linear layers, the only ones that vLLM computes"
            got = f"{transform.scheme} of {transform.location}"
            yield _wrong(f"{where}.{transform.scheme}", expected, got)
            continue
        yield from _matrix(view, transform)
        for fused in view.fused_linears:
            yield from _fused(transform, fused)
    for ranks in (ranks for ranks in view.target.tp if ranks > 1 and view.transforms):
        yield error(
            NAME,
            f"{where} (tp {ranks})",
            expected="no online transforms: vLLM computes them on one rank only",
            got=", ".join(sorted({transform.submodule for transform in view.transforms})),
            fix="serve it on one GPU, or rotate in the weights only",
        )


def _matrix(view: CheckpointView, transform: OnlineTransform) -> Iterator[Finding]:
    """Every producer stores it; without, vLLM multiplies with uninitialized memory (SharedWeightParameter),
    or rotates the inputs of weights that were not rotated the other way."""
    if not any(name.endswith(f".{transform.submodule}.weight") for name in view.index.tensors):
        expected = f"the matrix of the {transform.kind} transform, with one of its layers"
        yield _wrong(f"{transform.submodule}.weight", expected, "none")


def _fused(transform: OnlineTransform, fused: FusedLinear) -> Iterator[Finding]:
    rotated = [member for member in fused.members if transform.applies(member)]
    if not rotated:
        return
    if moe_layer(rotated[0]) is not None:
        expected = "no online transform of routed experts, which vLLM does not compute"
        yield _wrong(fused.name, expected, transform.submodule)
    elif transform.location == INPUT and len(rotated) < len(fused.members):
        expected = "the same transform of the inputs of all layers that run as one"
        yield _wrong(fused.name, expected, f"{transform.submodule} for {', '.join(rotated)} only")
    if any("bias" in fused.members[member] for member in rotated):
        yield _wrong(fused.name, "no bias with an online transform: vLLM asserts it", transform.submodule)


def _wrong(where: str, expected: str, got: str) -> Finding:
    return error(NAME, where, expected=expected, got=got, fix="rotate in the weights only (R1, R2)")
