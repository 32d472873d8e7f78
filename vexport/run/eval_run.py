"""Run `vexport eval`: compare given checkpoints with a common baseline.

Each checkpoint is a run. All runs share one run directory.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vexport.engine.arguments import require_arguments
from vexport.errors import InputError
from vexport.inference.endpoint.server import require_address
from vexport.inference.options import BASELINE, CANDIDATE, EngineOptions
from vexport.judge.accepted_settings import settings_to_store
from vexport.judge.accepting import (
    accept_results,
    accepted_scores_text,
    lost_answers,
    require_writable,
)
from vexport.judge.verdict import tasks_without_loss
from vexport.names import AcceptedFile, ModelRef, ResultFiles, Server
from vexport.outputs.replaceable import NamedPath, locked_folder, require_separate
from vexport.records import ComparedRun, Verdict
from vexport.reports.run_record import Report
from vexport.rules import usage as rules
from vexport.run.checks import require_tasks_and_models
from vexport.run.comparison import compared_run, mark_smallest
from vexport.run.directory import KIND, logged_to, opened, portable
from vexport.run.run import DEFAULT_ATTRIBUTION, AttributionSettings, Run
from vexport.run.side import find_side, prepare
from vexport.run.stages.concluding import (
    STAGES_UP_TO_VERDICT,
    attribute,
    collect_report,
    now,
    report,
)
from vexport.run.stages.serving import (
    SESSION,
    judge,
    measure_drift,
    require_served,
    results_of,
    serve_candidate,
)
from vexport.scenario import Evaluate
from vexport.scores.inputs import evaluation_inputs, named_model
from vexport.scores.readers.accepted import read_accepted_table

OUTPUT_DIR = "--output-dir"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Evaluated checkpoints, in the order of the call, with a common baseline.

    `accepted` contains lines for the user about the accepted baseline that was written. It is empty
    if none was written.
    """

    runs: tuple[Run, ...]
    accepted: str = ""

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the verdict on each checkpoint. It is empty if there is no baseline."""
        verdicts = [verdict_in(run) for run in self.runs]
        return tuple(verdict for verdict in verdicts if verdict is not None)

    @property
    def rows(self) -> tuple[ComparedRun, ...]:
        """Return a row for each checkpoint. The smallest checkpoint that passes is marked."""
        rows = [compared_run(collect_report(run), run.candidate.name) for run in self.runs]
        return mark_smallest(rows)

    @property
    def reports(self) -> tuple[Report, ...]:
        """Return the reports that are written. There are none if there is no baseline."""
        written = [run.find(report) for run in self.runs]
        return tuple(each for each in written if each is not None)


OnJudged = Callable[[Evaluations], None]


def evaluate_checkpoints(
    checkpoints: Sequence[ModelRef],
    settings: Evaluate,
    folder: Path,
    options: EngineOptions,
    *,
    against: Path | None = None,
    accept: Path | None = None,
    overwrite: bool = False,
    attribution_settings: AttributionSettings = DEFAULT_ATTRIBUTION,
    on_judged: OnJudged | None = None,
) -> Evaluations:
    """Do every unfinished stage of a run for each checkpoint.

    The checkpoints are compared with `settings.baseline`, or with `against`, an accepted baseline.
    Without a baseline there is no verdict and no report. `on_judged` is called with the verdicts,
    before the search for the causes of losses, which takes minutes. If `accept` is given, the
    responses of the single checkpoint are written to this file as an accepted baseline, unless the
    checkpoint fails.

    If the call has only one checkpoint and vLLM refuses it, the report is written, and
    CheckpointFailed is raised. Raises InputError if vLLM refuses the baseline, or if an output
    overlaps an input.
    """
    runs = _judge_checkpoints(
        checkpoints,
        settings,
        folder,
        options,
        against=against,
        accept=accept,
        overwrite=overwrite,
        attribution_settings=attribution_settings,
    )
    if on_judged is not None:
        on_judged(Evaluations(runs=runs))
    with locked_folder(folder, OUTPUT_DIR), logged_to(folder):
        for run in runs:
            run.do(attribute, report)
    return Evaluations(runs=runs, accepted=_accept_answers(runs[0], accept))


def _judge_checkpoints(
    checkpoints: Sequence[ModelRef],
    settings: Evaluate,
    folder: Path,
    options: EngineOptions,
    *,
    against: Path | None,
    accept: Path | None,
    overwrite: bool,
    attribution_settings: AttributionSettings,
) -> tuple[Run, ...]:
    parts = _parts(checkpoints)
    refs: list[tuple[str, ModelRef, str]] = [
        (CANDIDATE, ref, part) for ref, part in zip(checkpoints, parts, strict=True)
    ]
    reference = settings.baseline if against is None else AcceptedFile.at(against)
    if reference is not None:
        refs.insert(0, (BASELINE, reference, ""))
    sessions = [
        folder / role / part / SESSION
        for role, ref, part in refs
        if not isinstance(ref, ResultFiles | AcceptedFile)
    ]
    downloads = overwrite or not all(session.is_file() for session in sessions)
    _require_usable(checkpoints, settings, folder, options, against, accept, downloads=downloads)
    # Digests cover the baseline's files. They must not depend on the baseline's name.
    settings = settings.model_copy(update={"baseline": None})
    sides = [find_side(role, ref, settings, options, part) for role, ref, part in refs]
    served = [side for side in sides if side.is_served]
    folders = {side.label: side.prompt_folder for side in served if side.prompt_folder is not None}
    require_separate(_outputs(folder, accept), _named_paths(folders))
    preparation = prepare(settings, folders)
    with opened(folder, OUTPUT_DIR, overwrite=overwrite) as directory:
        directory.require_same_number(len(checkpoints))
        baseline = [side for side in sides if side.role == BASELINE]
        runs = tuple(
            Run(
                directory,
                options,
                (*baseline, side),
                name=side.ref.title,
                evaluate=settings,
                preparation=preparation,
                attribution=attribution_settings,
            )
            for side in sides
            if side.role == CANDIDATE
        )
        for run in runs:
            run.do(*STAGES_UP_TO_VERDICT)
        if len(runs) == 1:
            _require_loaded(runs[0])
    return runs


def _require_loaded(run: Run) -> None:
    candidate = run.get(serve_candidate)
    if candidate is None or candidate.result.failure is None:
        return
    run.do(attribute, report)
    require_served(CANDIDATE, candidate.result)


def verdict_in(run: Run) -> Verdict | None:
    """Return the verdict with the drift, and with the cause of a loss if the run looked for it."""
    verdict = run.get(judge)
    if verdict is None:
        return None
    return replace(verdict, drift=run.get(measure_drift), attribution=run.find(attribute))


def _accept_answers(run: Run, accept: Path | None) -> str:
    """Write the candidate's scores to `accept` as an accepted baseline.

    Nothing is written if the candidate fails. Returns lines for the user about the accepted
    baseline, or an empty string if nothing is written.
    """
    verdict = run.get(judge)
    settings = run.evaluation
    if accept is None or (verdict is not None and verdict.outcome == "FAIL"):
        return ""
    choice: Mapping[str, str] = settings.gate
    if run.accepted is not None:
        choice = read_accepted_table(run.accepted).gates
    folder = results_of(run, CANDIDATE)
    stored = settings_to_store(settings, run.options.serve, accept)
    accepted = accept_results(
        folder,
        accept,
        choice,
        stored,
        margin=settings.margin,
        checkpoint=portable(run.candidate.name),
        accepted_at=now(),
    )
    lines = [f"warning: {each}" for each in tasks_without_loss(accept, folder, settings.alpha)]
    lines.append(f"accepted: {accept}: {accepted_scores_text(accepted)}")
    if verdict is None:  # a verdict's warnings already name lost responses
        lines += [f"warning: {lost}" for lost in lost_answers(accepted, settings.alpha)]
    against = shlex.quote(portable(str(accept)))
    lines.append(
        f"next  vexport eval CHECKPOINT --against {against}  # to compare a later checkpoint"
    )
    return "\n".join(lines)


def _parts(refs: Sequence[ModelRef]) -> tuple[str, ...]:
    """Return the folder of each candidate's results below `candidate`.

    It is empty for a single candidate.
    """
    if len(refs) == 1:
        return ("",)
    return tuple(f"{number}-{ref.file_name}" for number, ref in enumerate(refs, 1))


def _require_usable(
    checkpoints: Sequence[ModelRef],
    settings: Evaluate,
    folder: Path,
    options: EngineOptions,
    against: Path | None,
    accept: Path | None,
    *,
    downloads: bool,
) -> None:
    if accept is not None:
        require_writable(accept)
    files = [*_named_paths({"--against": against}), *evaluation_inputs(settings, "--task")]
    files += named_model("--baseline", settings.baseline)
    for ref in checkpoints:
        files += named_model("CHECKPOINT", ref)
    refs = [ref for ref in (settings.baseline, *checkpoints) if ref is not None]
    for ref in refs:
        if isinstance(ref, Server):
            require_address(ref.url)
    if settings.text is not None and any(isinstance(ref, ResultFiles) for ref in refs):
        raise InputError.of(rules.TEXT_OF_RESULTS, "--text")
    require_separate(_outputs(folder, accept), files)
    KIND.require_own(folder)
    require_tasks_and_models(
        settings, options, refs, [options.serve], downloads=downloads, against=against
    )
    require_arguments([options.serve], options.vllm_python)


def _outputs(folder: Path, accept: Path | None) -> list[NamedPath]:
    return _named_paths({OUTPUT_DIR: folder, "--accept": accept})


def _named_paths(paths: Mapping[str, Path | None]) -> list[NamedPath]:
    return [NamedPath(label=label, path=path) for label, path in paths.items() if path]
