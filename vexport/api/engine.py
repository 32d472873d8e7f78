"""Settings of an engine for the functions that start vLLM."""

from dataclasses import dataclass, field
from pathlib import Path

from vexport.engine.session import require_engine
from vexport.inference.options import EngineOptions
from vexport.records import OnProgress
from vexport.scenario import Serve


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Settings for starting vLLM: a scenario's `serve` section, and the interpreter.

    If `vllm_python` is None, vLLM runs in vexport's interpreter.
    """

    serve: Serve = field(default_factory=Serve)
    vllm_python: Path | None = None
    trust_remote_code: bool = False

    def options(self, on_progress: OnProgress, serve: Serve | None = None) -> EngineOptions:
        """Return the options of an engine. Raise EnvironmentFault if vLLM is not installed."""
        require_engine((self.vllm_python,))
        return EngineOptions(
            serve=serve or self.serve,
            vllm_python=self.vllm_python,
            trust_remote_code=self.trust_remote_code,
            on_progress=on_progress,
        )
