"""`check` with what vLLM itself says: a dry load that runs while the files are read."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from vexport.checkpoint.index import require_checkpoint
from vexport.checks import completeness, targets
from vexport.checks.vllm.unjudged import NAMES
from vexport.checks.vllm.view import Target
from vexport.engine.arguments import require_layers
from vexport.engine.dry.judge import Require, errors_or_doubt, unused
from vexport.engine.dry.load import CAPABILITIES, DryLoad
from vexport.errors import VexportError
from vexport.errors.extras import attempt, is_installed
from vexport.records import CheckReport, DryLoadReport, Finding, NotJudged, OnProgress
from vexport.version import short_version

DRY_LOAD = "vLLM's own loaders"
NO_VLLM = "vLLM is not installed: install it, name its interpreter (--vllm-python), or check with --static"
# Families whose errors are about what the loaders see too: these are right where they find no fault.
SEEN_BY_LOADERS = (completeness.NAME, targets.NAME)


def checked_in_vllm(
    roots: Mapping[str, Path],
    target: Target,
    read: Callable[[], list[CheckReport]],
    *,
    vllm_python: Path | None,
    trust_remote_code: bool,
    on_progress: OnProgress,
) -> list[CheckReport]:
    """The reports that `read` makes of the folders `roots`, by name, each with what a dry load shows.

    The dry load starts before `read`, in a process that is gone when this returns or raises. Where it cannot
    run the reports say so in `not_judged`. `vllm_python` is the interpreter, None our own.
    """
    loadable = {name: root for name, root in roots.items() if _is_loadable(root)}
    require: Require = "all" if target.sm else "any"
    dry_load = DryLoad(
        checkpoints=[*loadable.values()],
        tp=target.tp or (1,),
        sm=target.sm or CAPABILITIES,
        require=require,
        vllm_python=vllm_python,
        trust_remote_code=trust_remote_code,
        speculative=target.speculative,
    )
    with ExitStack() as stack:
        running = attempt(partial(stack.enter_context, dry_load.started()), DRY_LOAD) if loadable else None
        reports = read()
        loads = attempt(partial(running, on_progress), DRY_LOAD) if callable(running) else running
    if isinstance(loads, VexportError):
        reason = loads.got if vllm_python or is_installed("vllm") else NO_VLLM
        return [_not_loaded(each, reason) if each.checkpoint in loadable else each for each in reports]
    by_name = dict(zip(loadable, loads or (), strict=True))
    return [
        with_load(each, load, target, require) if (load := by_name.get(each.checkpoint)) else each
        for each in reports
    ]


def _is_loadable(root: Path) -> bool:
    """Return whether vLLM has anything to begin with; what it has not the check says."""
    steps = (require_checkpoint, require_layers)
    return not any(isinstance(attempt(partial(step, root), ""), VexportError) for step in steps)


def with_load(report: CheckReport, load: DryLoadReport, target: Target, require: Require) -> CheckReport:
    """A check with the dry load of the same checkpoint.

    What the loaders refuse or copy wrongly is an error. Where they find no fault they have judged
    names and shapes, also those that the check takes for wrong.
    """
    version = short_version(target.vllm)
    if not f"{load.vllm}.".startswith(f"{version}."):
        return _not_loaded(report, f"those here are of vLLM {load.vllm}, not {version}")
    outcome = errors_or_doubt(load, require)
    if isinstance(outcome, str):
        return _not_loaded(report, outcome)
    not_judged = tuple(each for each in report.not_judged if outcome or each.what != NAMES)
    more = [*outcome, *(unused(load) if not_judged != report.not_judged else ())]
    findings = (*(report.findings if outcome else map(_loaded, report.findings)), *more)
    ok = not any(finding.severity == "error" for finding in findings)
    return replace(report, ok=ok, findings=findings, not_judged=not_judged)


def _loaded(finding: Finding) -> Finding:
    """A finding on a checkpoint of which the loaders take every tensor that they need."""
    if finding.severity != "error" or finding.check not in SEEN_BY_LOADERS:
        return finding
    got = f"{finding.got}; vLLM's loaders find no fault in it"
    return replace(finding, severity="warning", got=got, fix="nothing, or compare with the source (--source)")


def _not_loaded(report: CheckReport, reason: str) -> CheckReport:
    return replace(report, not_judged=(*report.not_judged, NotJudged(what=DRY_LOAD, why=reason)))
