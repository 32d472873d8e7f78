"""Does vLLM compute the rotations that a checkpoint leaves to the running model?"""

from collections.abc import Iterator

from vexport.architectures.fusion import moe_layer
from vexport.checks.vllm.online import INPUT, OUTPUT, OnlineTransform
from vexport.checks.vllm.subject import Subject, Unit, error
from vexport.types import Finding

NAME = "transforms"
DESCRIPTION = "online rotations (transform_config) are ones that vLLM computes, and have their matrices"


def run(subject: Subject) -> Iterator[Finding]:
    """Findings on transforms of inputs and outputs; those in the weights are of no concern."""
    place = f"{subject.quantization_place}.transform_config"
    config = (subject.quantization or {}).get("transform_config")
    if config and (not isinstance(config, dict) or config.keys() != {"config_groups"}):
        yield _wrong(place, "none, or an object of config_groups and nothing else", repr(config))
    for transform in subject.transforms:
        if transform.location not in (INPUT, OUTPUT):
            expected = "transforms of inputs and outputs of linear layers, the only ones that vLLM computes"
            got = f"{transform.scheme} of {transform.location}"
            yield _wrong(f"{place}.{transform.scheme}", expected, got)
            continue
        yield from _matrix(subject, transform)
        for unit in subject.units:
            yield from _unit(transform, unit)
    for ranks in (ranks for ranks in subject.target.tp if ranks > 1 and subject.transforms):
        yield error(
            NAME,
            f"{place} (tp {ranks})",
            expected="no online transforms: vLLM computes them on one rank only",
            got=", ".join(sorted({transform.leaf for transform in subject.transforms})),
            fix="serve it on one GPU, or rotate in the weights only",
        )


def _matrix(subject: Subject, transform: OnlineTransform) -> Iterator[Finding]:
    """Every producer stores it; without, vLLM multiplies with uninitialized memory (SharedWeightParameter),
    or rotates the inputs of weights that were not rotated the other way."""
    if not any(name.endswith(f".{transform.leaf}.weight") for name in subject.index.tensors):
        expected = f"the matrix of the {transform.kind} transform, with one of its layers"
        yield _wrong(f"{transform.leaf}.weight", expected, "none")


def _unit(transform: OnlineTransform, unit: Unit) -> Iterator[Finding]:
    rotated = [member for member in unit.members if transform.applies(member)]
    if not rotated:
        return
    if moe_layer(rotated[0]) is not None:
        expected = "no online transform of routed experts, which vLLM does not compute"
        yield _wrong(unit.name, expected, transform.leaf)
    elif transform.location == INPUT and len(rotated) < len(unit.members):
        expected = "the same transform of the inputs of all layers that run as one"
        yield _wrong(unit.name, expected, f"{transform.leaf} for {', '.join(rotated)} only")
    if any("bias" in unit.members[member] for member in rotated):
        yield _wrong(unit.name, "no bias beside an online transform: vLLM asserts it", transform.leaf)


def _wrong(where: str, expected: str, got: str) -> Finding:
    return error(NAME, where, expected=expected, got=got, fix="rotate in the weights only (R1, R2)")
