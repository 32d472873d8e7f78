"""Commands, options and scenario keys that are gone, and what to do instead."""

from collections.abc import Mapping

_BUDGET = "set a budget of bits, bytes, share or loss"
_DATA_PARALLEL = "evaluate the model where it is served: `vllm serve` has data parallel"
_DRY = "ask vLLM's own code: `vexport load CHECKPOINT --dry --gpu NAME`"
_FIXED = "evaluate a number of documents: limit (--limit), or what `vexport plan` says"
_MORE = "choose more bits, or `scheme: auto` with a budget, which measures what each layer loses"
_RANKS = "share the work by torchrun: `torchrun --nproc-per-node N -m vexport quantize ...`"
_SOURCE = "`vexport check CHECKPOINT --source MODEL` compares with the model it was made from"
_TIME = "time it with `vllm bench serve`"
INSTEAD: Mapping[str, str] = {
    "bench": _TIME,
    "convert": "export it again from the model; compressed-tensors has converters",
    "diff": _SOURCE,
    "merge": _RANKS,
    "recommend": "the README has a table of GPUs; `vexport load CHECKPOINT --dry --gpu NAME` tells memory",
    "--context": _DRY,
    "--dp": _DATA_PARALLEL,
    "--gpu": _DRY,
    "--part": _RANKS,
    "--stopping": _FIXED,
    "--until-pass": _MORE,
    "data_parallel_size": _DATA_PARALLEL,
    "gpu": _BUDGET,
    "held_out": "a rule may say `rounding: {method: refit, strength: 0.5}`",
    "speed": _TIME,
    "step_ms": _BUDGET,
    "stopping": _FIXED,
    "tokens_per_second": _BUDGET,
}


def instead_of(name: str) -> str:
    """The advice for a command, an option or a key that is gone; empty for any other."""
    return INSTEAD.get(name, "")
