"""Quantization by a method that is not judged: vLLM loads it by code that is not known here."""

from collections.abc import Iterator

from vexport.architectures.versions import VersionFacts, facts_of, known_versions
from vexport.checks.vllm.producers import (
    FROM_SOURCE,
    METHOD,
    PRODUCERS,
    TAKEN_AS,
    method_name,
)
from vexport.checks.vllm.quant_methods import METHODS
from vexport.checks.vllm.view import CheckpointView, error
from vexport.types import Finding
from vexport.version import short_version


def other_method(view: CheckpointView) -> str | None:
    """The name of the method, where it is neither compressed-tensors nor another that is judged."""
    name = method_name(view.quantization) if view.quantization is not None else None
    return None if name in METHODS else name


def is_in(method: str, facts: VersionFacts) -> bool:
    """Whether a vLLM has a method."""
    return method in facts.methods or TAKEN_AS.get(method) in facts.methods


def findings(view: CheckpointView, method: str, check: str) -> Iterator[Finding]:
    """The one finding on a checkpoint of such a method."""
    producer, way = PRODUCERS.get(method, ("an unknown producer", FROM_SOURCE))
    has = [version for version in known_versions() if is_in(method, facts_of(version))]
    loads = is_in(method, view.facts)
    last = f"; {short_version(has[-1])} is the last known one that has" if has and not loads else ""
    does = (
        "which vLLM may well load, by other code than is judged here"
        if loads
        else f"which vLLM {short_version(view.target.vllm)} has not{last}"
    )
    ask = "ask vLLM itself with `vexport load` (also --dry); to have it judged, " if loads else ""
    yield error(
        check,
        view.quantization_place,
        expected=f"{METHOD}, or another method that vexport judges: {', '.join(METHODS)}",
        got=f"{method!r} (of {producer}), {does}",
        fix=f"{ask}{way}",
    )
