"""Check one checkpoint, or several checkpoints in one call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vexport.api.common import ModelName, Name, OnProblem, is_verifying, named, parsed, source_ref
from vexport.checkpoint.index import require_checkpoint, require_config
from vexport.checkpoint.source import resolve_drafter, resolve_source
from vexport.checks import SourceComparison, check_checkpoint, error_findings
from vexport.checks.ignoring import require_ignorable, without_ignored
from vexport.checks.vllm.view import Target
from vexport.engine.installed import known_version
from vexport.errors import VexportError
from vexport.errors.extras import attempt, require_extra
from vexport.formats.gpus import Names, cards, parse_capabilities, parse_sizes, with_cards
from vexport.outputs.digests import hub_digests as digests_of_hub
from vexport.outputs.digests import named_digests, require_list
from vexport.records import CheckReport, OnProgress, merged, silent
from vexport.version import Version, parse_version


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """Settings of a check; see `check`."""

    tp: tuple[int, ...] = ()
    sm: tuple[int, ...] = ()
    vllm: Version | None = None
    source: ModelName | None = None
    digests: Name | None = None
    hub_digests: bool = False
    speculative: str = ""
    static: bool = False
    ignore_rules: tuple[str, ...] = ()
    vllm_python: Path | None = None
    trust_remote_code: bool = False
    on_progress: OnProgress = silent


def check(
    checkpoint: ModelName,
    *,
    tp: Names = (),
    sm: Names = (),
    gpu: Names = (),
    vllm: Version | str | None = None,
    source: ModelName | None = None,
    digests: Name | None = None,
    hub_digests: bool = False,
    speculative: str = "",
    static: bool = False,
    ignore_rules: Sequence[str] = (),
    vllm_python: Path | None = None,
    trust_remote_code: bool = False,
    on_progress: OnProgress = silent,
) -> CheckReport:
    """Check whether vLLM loads a checkpoint, as `vexport check` does.

    `tp`, `sm` and `gpu` accept a value or several, as numbers or as text: `sm=90`, `sm="80,90"`,
    `sm=["sm90", "H100"]`. `gpu` contains GPU names. Their compute capabilities are added to `sm`.
    With `source`, the weights are compared with the source too. With `hub_digests`, the files are
    compared with the digests in the hub's cache or download folder. If vLLM is installed, its own
    loaders also load the checkpoint dry, unless `static` or VEXPORT_NO_VERIFY is set. Findings of
    the rules with the ids in `ignore_rules` are only listed in `ignored`. `vllm` is the version of
    vLLM to check against, such as "0.32". Its default is the version in `vllm_python`, or in this
    environment. Without a vLLM, it is the first version from 0.32 on that has the model's class.

    Raises an error if the checkpoint or another input cannot be read, or if vLLM crashed or took
    too long on a checkpoint without an error. Faults of the checkpoint are findings of the report.
    """
    problems: list[VexportError] = []
    faults: list[VexportError] = []
    settings = CheckSettings(
        tp=parsed("check: tp", parse_sizes, tp),
        sm=with_cards(
            parsed("check: sm", parse_capabilities, sm), parsed("check: gpu", cards, gpu)
        ),
        vllm=None if vllm is None else parsed("check: vllm", parse_version, vllm),
        source=source,
        digests=digests,
        hub_digests=hub_digests,
        speculative=speculative,
        static=static or not is_verifying(),
        ignore_rules=tuple(ignore_rules),
        vllm_python=vllm_python,
        trust_remote_code=trust_remote_code,
        on_progress=on_progress,
    )
    (report,) = check_checkpoints((checkpoint,), settings, problems.append, faults.append)
    if report.ok:
        problems += faults
    if problems:
        raise problems[0]
    return report


def check_checkpoints(
    checkpoints: Sequence[ModelName],
    settings: CheckSettings,
    on_problem: OnProblem,
    on_fault: OnProblem,
) -> list[CheckReport]:
    """Check several checkpoints with one start of vLLM, and return their reports in order.

    If a checkpoint cannot be read, `on_problem` receives the error, and the checkpoint's report
    contains it as a finding. `on_fault` receives the error if vLLM crashed or took too long.
    """
    require_ignorable(settings.ignore_rules, "--ignore-rule")
    refs = {
        str(ref): ref for ref in (source_ref("check: checkpoint", name) for name in checkpoints)
    }
    names = [*refs]
    target = Target(
        tp=settings.tp,
        sm=settings.sm,
        vllm=settings.vllm or known_version(settings.vllm_python),
        speculative=resolve_drafter(settings.speculative, settings.on_progress),
    )
    if settings.digests is not None:
        require_list(named("check: digests", settings.digests))
    found = {
        name: attempt(partial(resolve_source, ref, settings.on_progress), name)
        for name, ref in refs.items()
    }
    roots = {name: root for name, root in found.items() if isinstance(root, Path)}
    # The comparison with the source imports torch, which takes seconds. If no checkpoint exists, it
    # is skipped.
    is_there = any(root.exists() for root in roots.values())
    against = _source_comparison(settings) if is_there else None
    problems = _errors(found)

    def read() -> list[CheckReport]:
        outcomes = _outcomes(roots, target, against, settings)
        problems.update(_errors(outcomes))
        reports = [
            without_ignored(report, settings.ignore_rules)
            for report in outcomes.values()
            if isinstance(report, CheckReport)
        ]
        for name, error in problems.items():
            reports.append(CheckReport(checkpoint=name, ok=False, findings=error_findings(error)))
        return sorted(reports, key=lambda report: names.index(report.checkpoint))

    if settings.static:
        reports = read()
    else:
        from vexport.engine.loader_check import check_with_dry_load

        reports = check_with_dry_load(
            roots,
            target,
            read,
            vllm_python=settings.vllm_python,
            trust_remote_code=settings.trust_remote_code,
            on_progress=settings.on_progress,
            on_fault=on_fault,
            source=against.root if against is not None else None,
        )
        # The dry load reports known faults of vLLM again, with the kernels of all layers.
        reports = [without_ignored(report, settings.ignore_rules) for report in reports]
    for error in problems.values():
        on_problem(error)
    return [
        replace(report, findings=merged(report.findings), ignored=merged(report.ignored))
        for report in reports
    ]


def _errors(outcomes: Mapping[str, object]) -> dict[str, VexportError]:
    return {name: each for name, each in outcomes.items() if isinstance(each, VexportError)}


def _outcomes(
    roots: Mapping[str, Path],
    target: Target,
    against: SourceComparison | None,
    settings: CheckSettings,
) -> dict[str, CheckReport | VexportError]:
    def outcome(name: str, root: Path) -> CheckReport:
        file = None if settings.digests is None else str(settings.digests)
        known = named_digests(file, root)
        if settings.hub_digests:
            require_config(root)
        return check_checkpoint(
            name,
            target,
            against,
            root=root,
            digests=known,
            hub_digests=digests_of_hub(root) if settings.hub_digests else None,
            on_progress=settings.on_progress,
        )

    return {name: attempt(partial(outcome, name, root), name) for name, root in roots.items()}


def _source_comparison(settings: CheckSettings) -> SourceComparison | None:
    if settings.source is None:
        return None
    require_extra("torch", "--source")
    root = resolve_source(source_ref("check: source", settings.source), settings.on_progress)
    require_checkpoint(root)
    from vexport.fidelity.compare import source_comparison

    return source_comparison(root, on_layer=partial(settings.on_progress, "compare (layers)"))
