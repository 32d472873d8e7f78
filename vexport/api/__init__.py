"""vexport from Python: the commands as functions, with the types that the command line uses.

    from vexport.api import check, quantize
    quantize("MODEL", "OUT", scheme="W4A16", group_size=64)
    assert check("OUT").ok

Every function raises what the command line prints: InputError for what was given, EnvironmentFault for what
is missing or has died, CheckpointFailed where there is no report to return. Engines are other processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vexport.calibration.coverage import expert_coverage
from vexport.checkpoint.source import resolve_source
from vexport.checks import check_checkpoint
from vexport.checks.vllm.target import Target
from vexport.engine.session import require_engine
from vexport.evaluation.verdict import decide
from vexport.plan import Settings as Planning
from vexport.plan.source import DEFAULTS, rules_for
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.reports.quantized import quantized_answer
from vexport.run.evaluating import EvalJob, evaluate_checkpoint
from vexport.run.loading import load_checkpoints
from vexport.run.serving import EngineOptions
from vexport.scenario import (
    DEFAULT_ALPHA,
    DEFAULT_MARGIN,
    Calibration,
    Evaluate,
    GroupSize,
    Rule,
    Serve,
    problems_at,
)
from vexport.types import CheckReport, LoadReport, OnProgress, Quantized, Verdict, silent

__all__ = [
    "Calibration",
    "Engine",
    "Evaluate",
    "Planning",
    "Rule",
    "Serve",
    "check",
    "evaluate",
    "load",
    "quantize",
    "verdict",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How vLLM is started: as `serve` of a scenario, by vexport's interpreter or another one."""

    serve: Serve = field(default_factory=Serve)
    vllm_python: Path | None = None
    trust_remote_code: bool = False

    def options(self, on_progress: OnProgress) -> EngineOptions:
        """The same for an engine of vexport's. EnvironmentFault where there is no vLLM."""
        require_engine((self.vllm_python,))
        return EngineOptions(
            serve=self.serve,
            vllm_python=self.vllm_python,
            trust_remote_code=self.trust_remote_code,
            on_progress=on_progress,
        )


def quantize(
    source: str | Path,
    out: str | Path,
    *,
    scheme: str | None = None,
    group_size: GroupSize | None = None,
    ignore: Sequence[str] = (),
    rules: Sequence[Rule] = (),
    calibration: Calibration | str | Path | None = None,
    planning: Planning = DEFAULTS,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    on_progress: OnProgress = silent,
) -> Quantized:
    """Quantize a folder or a model of the hub into the folder `out`, as `vexport quantize` does.

    `scheme` is for all linear layers but those to `ignore`; `rules` say the same layer by layer instead.
    `calibration` may be the name of the data alone; without any a scheme that needs samples is an InputError.
    """
    if (scheme is None) == (not rules):
        raise ValueError("quantize: got neither or both of scheme and rules, need one of them")
    wanted = rules or rules_for(scheme or "", observer=None, ignore=ignore, group_size=group_size)
    data = Calibration(data=str(calibration)) if isinstance(calibration, str | Path) else calibration
    job = QuantizeJob(
        source=str(source),
        out=Path(out),
        rules=tuple(wanted),
        planning=replace(planning, has_text=data is not None),
        calibration=data,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        on_progress=on_progress,
    )
    plan, seen, rounding = quantize_source(job)
    experts = expert_coverage(seen) if seen else ()
    return quantized_answer(str(out), plan, seen, experts, rounding)


def check(
    checkpoint: str | Path,
    *,
    tp: Sequence[int] = (),
    sm: Sequence[int] = (),
    source: str | Path | None = None,
    on_progress: OnProgress = silent,
) -> CheckReport:
    """Whether vLLM loads a checkpoint, as `vexport check` says; `source` compares the weights as well."""
    against = None
    if source is not None:
        from vexport.fidelity.compare import against as compared

        root = resolve_source(str(source), on_progress)
        against = compared(root, on_layer=lambda done, total: on_progress("compare (layers)", done, total))
    target = Target(tp=tuple(tp), sm=tuple(sm))
    root = resolve_source(str(checkpoint), on_progress)
    return check_checkpoint(str(checkpoint), target, against, root=root)


def load(
    checkpoint: str | Path, *, engine: Engine | None = None, on_progress: OnProgress = silent
) -> LoadReport:
    """Load a checkpoint in the real vLLM and look at what it writes, as `vexport load` does."""
    own = engine or Engine()
    options = own.options(on_progress)
    (report,) = load_checkpoints((str(checkpoint),), (own.vllm_python,), [own.serve], ("eager",), options)
    return report


def evaluate(
    checkpoint: str | Path,
    settings: Evaluate,
    folder: str | Path,
    *,
    engine: Engine | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = silent,
) -> Verdict:
    """Compare a checkpoint with `settings.baseline` by lm-eval, as `vexport eval` does.

    lm-eval's results and the logs of vLLM go to `folder`.
    """
    if settings.baseline is None:
        raise ValueError("evaluate: got no baseline in the settings, need the model to compare with")
    job = EvalJob(
        checkpoint=str(checkpoint),
        settings=settings,
        folder=Path(folder),
        options=(engine or Engine()).options(on_progress),
        overwrite=overwrite,
        against=None,
        accept=None,
    )
    judged = evaluate_checkpoint(job)
    assert judged is not None, "there is a baseline"
    return judged


def verdict(
    baseline_results: str | Path,
    results: str | Path,
    *,
    margin: float = DEFAULT_MARGIN,
    alpha: float = DEFAULT_ALPHA,
    gate: Mapping[str, str] | None = None,
) -> Verdict:
    """Compare two lm-eval result folders, as `vexport verdict` does; starts no model."""
    with problems_at("verdict"):
        Evaluate(tasks=("any",), margin=margin, alpha=alpha, gate=dict(gate or {}))
    return decide(Path(baseline_results), Path(results), margin=margin, alpha=alpha, gate=gate or {})
