"""Options for starting engines, and the roles of the two compared models. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from vexport.records import OnProgress
from vexport.scenario import Evaluate, Serve

BASELINE = "baseline"
CANDIDATE = "candidate"
# Evaluation of a scenario without an `evaluate` section: default settings, no tasks and no text.
NO_EVALUATION = Evaluate.model_construct(kl_prompts=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options with which a command starts all its engines."""

    serve: Serve
    vllm_python: Path | None
    trust_remote_code: bool
    on_progress: OnProgress
