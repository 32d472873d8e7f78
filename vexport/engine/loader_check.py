"""Load checkpoints with vLLM's loaders, for `check` and for the output of `quantize`.

`quantize` renames its output only after this load.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.architectures.fusion import moe_layer
from vexport.checkpoint.index import (
    require_checkpoint,
    require_weights_found,
    vllm_finds_weights,
)
from vexport.checkpoint.source import resolve_source
from vexport.checks import INTERNAL, NAMES, faults, header_findings, is_ok
from vexport.checks.vllm.view import Target
from vexport.engine.arguments import require_layers
from vexport.engine.dry.controls import is_shared_refusal
from vexport.engine.dry.load import (
    CAPABILITIES,
    DryLoad,
    Require,
    errors_or_uncertainty,
    is_stretched,
    unused,
)
from vexport.engine.same_faults import without_repetitions
from vexport.engine.session import EngineFault
from vexport.errors import CheckpointFailed, InputError, VexportError
from vexport.errors.extras import attempt, is_installed
from vexport.formats.plan import FusionGroup, Plan
from vexport.records import (
    LOADERS,
    CheckReport,
    DryLoadReport,
    Finding,
    LoaderFault,
    NotJudged,
    OnProgress,
    without_details,
)
from vexport.records.shared_faults import shared_as_warnings, shared_errors
from vexport.rules import shards
from vexport.words import plural

if TYPE_CHECKING:
    from vexport.quantize.job import QuantizeJob

NO_VLLM = (
    "vLLM is not installed: install it, give its interpreter (--vllm-python), or check with "
    "--static"
)
# Kinds of wrong copies that an error of the static check can have as a cause.
_KINDS: tuple[LoaderFault, ...] = ("missing", "cast", "narrowed")
CONTRADICTION = "but vLLM's loaders find no problem"
# Advice lists at most this many layers by name. For more layers, it lists patterns of projections.
_MAX_NAMED_LAYERS = 6
_NUMBERED = re.compile(r"[^.\s]+\.\d+\.\S+")


def check_with_dry_load(
    roots: Mapping[str, Path],
    target: Target,
    read: Callable[[], list[CheckReport]],
    *,
    vllm_python: Path | None,
    trust_remote_code: bool,
    on_progress: OnProgress,
    on_fault: Callable[[EngineFault], None],
    source: Path | None = None,
) -> list[CheckReport]:
    """Run the static checks and a dry load at the same time, and return the joined reports.

    `read` runs the static checks and returns a report for each checkpoint. `roots` maps the name
    of each checkpoint to its folder. The dry load starts before `read` is called, in a separate
    process. The process has ended when this function returns or raises. If the dry load cannot
    run, `not_judged` in the reports has the reason. `on_fault` receives the error if vLLM crashed
    or took too long. `vllm_python` is the interpreter, or None for the running interpreter.

    A fault is not judged if vLLM has the same fault with the unquantized model. This is the model
    in the folder `source`. Without `source`, transformers builds a model of the checkpoint's class
    (see `dry/controls.py`).
    """
    loadable = {
        name: root
        for name, root in roots.items()
        if _is_loadable(root) and vllm_finds_weights(root)
    }
    require: Require = "all" if target.sm else "any"
    dry_load = DryLoad(
        checkpoints=[*loadable.values()],
        tp=target.tp or (1,),
        sm=target.sm or CAPABILITIES,
        require=require,
        vllm_python=vllm_python,
        trust_remote_code=trust_remote_code,
        speculative=target.speculative,
        controlled=True,
        source=_unquantized_model(source),
        requested=bool(target.tp or target.sm),
    )
    with ExitStack() as stack:
        running = (
            attempt(partial(stack.enter_context, dry_load.started()), LOADERS) if loadable else None
        )
        reports = read()
        loads = attempt(partial(running, on_progress), LOADERS) if callable(running) else running
    outcomes: dict[str, DryLoadReport | VexportError]
    if isinstance(loads, EngineFault):
        outcomes = dict(zip(loadable, dry_load.outcomes(loads, on_progress), strict=True))
    elif isinstance(loads, VexportError):
        outcomes = dict.fromkeys(loadable, loads)
    else:
        outcomes = dict(zip(loadable, loads or (), strict=True))
    for name in roots.keys() - loadable.keys():
        error = attempt(partial(require_weights_found, roots[name]), "")
        if error is not None:
            outcomes[name] = error
    for each in outcomes.values():
        if isinstance(each, EngineFault) and each.failure.kind != "missing":
            on_fault(each)
    vllm_is_there = vllm_python is not None or is_installed("vllm")
    return [
        _joined(each, outcome, require, vllm_is_there)
        if (outcome := outcomes.get(each.checkpoint)) is not None
        else each
        for each in reports
    ]


def _joined(
    report: CheckReport,
    outcome: DryLoadReport | VexportError,
    require: Require,
    vllm_is_there: bool,
) -> CheckReport:
    if isinstance(outcome, VexportError):
        is_known = vllm_is_there or isinstance(outcome, InputError)
        return _not_loaded(report, outcome.got if is_known else NO_VLLM)
    return with_load(report, outcome, require)


def _is_loadable(root: Path) -> bool:
    """Return True if the folder has the files that vLLM needs to start loading.

    The static check reports missing files and files that cannot be read, such as pipes.
    """
    steps = (require_checkpoint, require_layers)
    return not any(isinstance(attempt(partial(step, root), ""), VexportError) for step in steps)


def _unquantized_model(source: Path | None) -> Path | None:
    """Return the source, or None if vLLM could not load it for a reason that is not its own."""
    is_usable = source is not None and _is_loadable(source) and vllm_finds_weights(source)
    return source if is_usable else None


def with_load(report: CheckReport, load: DryLoadReport, require: Require) -> CheckReport:
    """Join a check with the dry load of the same checkpoint.

    A tensor that the loaders refuse or copy incorrectly is an error. An error of the check that the
    loaders contradict becomes a warning (see `downgrade_errors`). Errors that the unquantized model
    has as well become warnings, too.
    """
    version = report.vllm
    if not f"{load.vllm}.".startswith(f"{version}."):
        return _not_loaded(report, f"the installed version of vLLM is {load.vllm}, not {version}")
    outcome = errors_or_uncertainty(load, require)
    is_refused = isinstance(outcome, str) and is_shared_refusal(outcome)
    root = Path(load.checkpoint)
    findings = tuple(
        shared_as_warnings(report.findings, root, load.unquantized, root, is_refused=is_refused)
    )
    report = replace(report, ok=is_ok(findings), findings=findings)
    if isinstance(outcome, str):
        return _not_loaded(report, outcome)
    known = [each for each in load.findings if each.check == faults.CHECK]
    errors = [each for each in outcome if each not in known]
    not_judged = tuple(each for each in report.not_judged if errors or each.what != NAMES)
    more = [*errors, *(unused(load) if not_judged != report.not_judged else ())]
    # The dry load knows the kernels of all layers.
    others = [each for each in report.findings if each.check != faults.CHECK]
    ignored = tuple(each for each in report.ignored if each.check != faults.CHECK)
    static = tuple(downgrade_errors(others, load, faulty=bool(errors)))
    findings = tuple(chain(*without_repetitions(static, more), known))
    not_judged += load.not_judged
    joined = replace(
        report, ok=is_ok(findings), findings=findings, ignored=ignored, not_judged=not_judged
    )
    if load.not_judged:
        count = plural(len(load.not_judged), "fault")
        why = f"{count} that the unquantized model has as well: {load.not_judged[0].what}"
        return _not_loaded(joined, why)
    return replace(joined, judged_by="loaders")


def downgrade_errors(
    findings: Sequence[Finding], load: DryLoadReport, *, faulty: bool = False
) -> Iterator[Finding]:
    """Yield the findings of a check, given the result of vLLM's loaders.

    The loaders decide about each error that a dry load can show (`loader_faults`). If they load the
    checkpoint, the error becomes a warning that names both. It stays an error in two more cases:
    the loaders fill a parameter by repeating this tensor's values, or a loader fault of the same
    kind was excluded because the unquantized model has it too. `faulty` is True if the loaders
    found an error.
    """
    kinds = {kind for each in load.not_judged for kind in _KINDS if f"({kind})" in each.what}
    repeated = {place for each in load.findings if is_stretched(each) for place in each.every_place}
    for finding in findings:
        doubtful = repeated & {*finding.every_place} or kinds & {*finding.loader_faults}
        if _can_be_overruled(finding) and not doubtful and _is_contradicted(finding, load, faulty):
            got = f"{finding.got}; {CONTRADICTION}"
            fix = "ignore this, or compare with the source to be sure (--source)"
            yield replace(finding, severity="warning", got=got, fix=fix)
        else:
            yield finding


def _can_be_overruled(finding: Finding) -> bool:
    return finding.severity == "error" and bool(finding.loader_faults)


def _is_contradicted(finding: Finding, load: DryLoadReport, faulty: bool) -> bool:
    """Return True if the loaders accept what the finding calls an error.

    A finding on certain ranks or GPUs is contradicted if the checkpoint loads in all these cells. A
    finding on GPUs needs the loaders of a CUDA build. Any other finding is contradicted if the
    loaders found no error at all.
    """
    if not finding.tp and not finding.sm:
        return not faulty
    cells = [
        cell
        for cell in load.cells
        if cell.tp in (finding.tp or (cell.tp,)) and cell.sm in (finding.sm or (cell.sm,))
    ]
    tried = {cell.sm for cell in cells} >= {*finding.sm}
    return (
        bool(cells)
        and tried
        and all(cell.loads for cell in cells)
        and (load.cuda or not finding.sm)
    )


def _not_loaded(report: CheckReport, reason: str) -> CheckReport:
    return replace(report, not_judged=(*report.not_judged, NotJudged(what=LOADERS, why=reason)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadVerifier:
    """Checks that a written checkpoint loads, before it is renamed to the job's `out`.

    Its config, names and headers are checked in this process. With `dry`, and if vLLM is installed,
    a dry load follows. For each rank count of the plan, the checkpoint must load on at least one
    GPU that runs the schemes. Other GPUs that run the schemes may refuse its attention or its
    quantized KV cache. `note` is called with each part that could not be judged.
    `command_that_keeps` receives patterns of layers. It returns advice on how to keep these layers
    unquantized.
    """

    note: Callable[[str], None]
    command_that_keeps: Callable[[Sequence[str]], str]
    dry: bool = True

    def failure(self, job: "QuantizeJob", folder: Path, plan: Plan) -> CheckpointFailed | None:
        """Return an error if the checkpoint in `folder` must not become `job.out`, else None.

        Errors that the source has as well are not errors of the quantization. For these, and for
        parts of the checkpoint that could not be judged, a note is added instead.
        """
        job.on_progress("verify (config and names)", 0, 1)
        found = [each for each in header_findings(folder) if each.severity == "error"]
        not_judged = [f"{each.where}: {each.got}" for each in found if each.check == INTERNAL]
        errors = [each for each in found if each.check != INTERNAL]
        source = _source(job)
        of_source = header_findings(source) if source is not None else ()
        shared = shared_errors(errors, folder, of_source, source or folder)
        not_judged += _shared_note(job, [each for each in errors if each in shared])
        errors = [each for each in errors if each not in shared]
        job.on_progress("verify (config and names)", 1, 1)
        if self.dry and all(map(_can_be_overruled, errors)):
            judged = _dry_loaded(job, folder, plan)
            outcome = judged if isinstance(judged, str) else errors_or_uncertainty(judged)
            if isinstance(outcome, str):
                reason = without_details(outcome)
                is_refused = is_shared_refusal(reason)
                not_judged.append(_may_not_load(job, reason) if is_refused else reason)
                root = source or folder
                shared = shared_errors(errors, folder, of_source, root, is_refused=is_refused)
                errors = [each for each in errors if each not in shared]
            elif isinstance(judged, DryLoadReport):
                not_judged += [_may_not_load(job, str(each.brief)) for each in judged.not_judged]
                left = errors if outcome else downgrade_errors(errors, judged)
                errors = [each for each in left if each.severity == "error"] or outcome
        for text in not_judged:
            self.note(text.replace(str(folder), str(job.out)))
        if not errors:
            return None
        first, keep = errors[0].brief, list(_patterns(list(_groups(plan, errors))))
        where = first.where if str(folder) in first.where else f"{job.out}: {first.where}"
        return CheckpointFailed(
            where.replace(str(folder), str(job.out)),
            got=first.got + (f" ({len(errors) - 1:,} more)" if len(errors) > 1 else ""),
            need=first.expected,
            fix=f"keep these layers unquantized: {self.command_that_keeps(keep)}"
            if keep
            else "complete the files of SOURCE, or report this as a bug of vexport",
            rule=first.rule,
            facts=first.facts,
        )


def _source(job: "QuantizeJob") -> Path | None:
    source = attempt(partial(resolve_source, job.source), "")
    return source if isinstance(source, Path) else None


def _may_not_load(job: "QuantizeJob", reason: str) -> str:
    return f"warning: {job.out} may not load in vLLM: {reason}"


def _shared_note(job: "QuantizeJob", shared: Sequence[Finding]) -> Iterator[str]:
    if shared:
        first = shared[0].brief
        more = f" ({len(shared) - 1:,} more)" if len(shared) > 1 else ""
        problem = f"{first.where}: got {first.got}{more}, need {first.expected}"
        yield _may_not_load(job, f"the unquantized source has the same problem: {problem}")


def _dry_loaded(job: "QuantizeJob", folder: Path, plan: Plan) -> DryLoadReport | str:
    """Run the dry load of a written checkpoint, and return the report.

    Faults that vLLM also has with the source are not judged. If the dry load is not possible,
    return the reason.
    """
    if not is_installed("vllm"):
        return (
            "not loaded, because vLLM is not installed; run `vexport load --dry` in an "
            "environment with vLLM"
        )
    if not vllm_finds_weights(job.out):
        rule = shards.PATTERN_IN_PATH
        return f"warning: {job.out} will not load in vLLM: {rule.got}; {rule.do}"
    supports = [scheme.format.gpu_support(scheme.args) for scheme in plan.used_schemes]
    sm = tuple(sm for sm in CAPABILITIES if not any(each.refuses(sm) for each in supports))
    if not sm:
        return "not loaded, because these schemes run on none of the GPUs that a dry load supports"
    source = _unquantized_model(_source(job))
    load = DryLoad(
        checkpoints=[folder],
        tp=job.planning.ranks,
        sm=sm,
        require="any",
        trust_remote_code=job.trust_remote_code,
        controlled=source is not None,
        source=source,
    )
    try:
        (report,) = load.reports(job.on_progress)
    except EngineFault as fault:
        return f"the dry load failed: {fault.got}"
    return report


def _groups(plan: Plan, errors: Sequence[Finding]) -> Iterator[FusionGroup]:
    """Yield the fusion groups of the plan that the findings are about.

    A finding contains the layer's name in the files or its name in vLLM.
    """
    named = {_last_part(word) for each in errors for word in re.findall(r"[\w.]+", each.where)} - {
        ""
    }
    for group in plan.groups:
        tails = {
            _last_part(name) for name in (group.name, *(member.name for member in group.members))
        } - {""}
        if any(
            word == tail or word.startswith(f"{tail}.") or (moe_layer(tail) or tail) == word
            for tail in tails
            for word in named
        ):
            yield group


def _last_part(name: str) -> str:
    """Return the part of a layer's name from its first numbered module on.

    For `model.layers.0.mlp.down_proj` it is `layers.0.mlp.down_proj`. The part before it can differ
    between the files and vLLM. Return "" if the name has no number.
    """
    numbered = _NUMBERED.search(name)
    return numbered[0] if numbered else ""


def _patterns(groups: Sequence[FusionGroup]) -> Iterator[str]:
    """Yield patterns for --ignore that keep these fusion groups unquantized.

    If a group contains an expert, a pattern matches all experts of the layer.
    """
    names = [member.name for group in groups for member in group.members]
    experts = dict.fromkeys(layer for name in names if (layer := moe_layer(name)))
    singles = [name for name in names if moe_layer(name) is None]
    if len(experts) + len(singles) <= _MAX_NAMED_LAYERS:
        yield from singles
        yield from (f"re:{re.escape(layer)}[.].*" for layer in experts)
        return
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in singles)
    yield from (f"re:.*[.]{leaf}" for leaf in leaves)
    if experts:
        yield "re:.*[.]experts[.].*"
