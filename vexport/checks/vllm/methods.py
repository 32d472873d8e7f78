"""Quantization by a method that is not judged: vLLM loads it by code that is not known here."""

from collections.abc import Iterator

from vexport.checks.vllm.producers import (
    FROM_SOURCE,
    METHOD,
    PRODUCERS,
    UNKNOWN_TO_VLLM,
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


def findings(view: CheckpointView, method: str, check: str) -> Iterator[Finding]:
    """The one finding on a checkpoint of such a method."""
    producer, way = PRODUCERS.get(method, ("an unknown producer", FROM_SOURCE))
    loads = method in PRODUCERS and method not in UNKNOWN_TO_VLLM
    does = (
        "which vLLM may well load, by other code than is judged here"
        if loads
        else f"which vLLM {short_version()} has not"
    )
    ask = "ask vLLM itself with `vexport load` (also --dry); to have it judged, " if loads else ""
    yield error(
        check,
        view.quantization_place,
        expected=f"{METHOD}, or another method that vexport judges: {', '.join(METHODS)}",
        got=f"{method!r} (of {producer}), {does}",
        fix=f"{ask}{way}",
    )
