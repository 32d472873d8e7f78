"""Commands, options and scenario keys that are gone, and what to do instead."""

from collections.abc import Mapping

_DRY = "ask vLLM's own code: `vexport load CHECKPOINT --dry --gpu NAME`"
_FIXED = "evaluate a number of documents: limit (--limit), or what `vexport plan` says"
_MORE = "choose more bits, or `scheme: auto` with a budget, which measures what each layer loses"
_TIME = "time it with `vllm bench serve`"
INSTEAD: Mapping[str, str] = {
    "recommend": "the README has a table of GPUs; `vexport load CHECKPOINT --dry --gpu NAME` tells memory",
    "bench": _TIME,
    "speed": _TIME,
    "--gpu": _DRY,
    "--stopping": _FIXED,
    "stopping": _FIXED,
    "--until-pass": _MORE,
    "--context": _DRY,
    "gpu": "set a budget of bits, bytes, share or loss",
    "step_ms": "set a budget of bits, bytes, share or loss",
    "tokens_per_second": "set a budget of bits, bytes, share or loss",
}


def instead_of(name: str) -> str:
    """What to do instead of a command, an option or a key that is gone; empty for any other."""
    return INSTEAD.get(name, "")
