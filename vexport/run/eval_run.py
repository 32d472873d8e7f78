"""Run `vexport eval`: compare given checkpoints with a common baseline.

Each checkpoint is a run. All runs share one run directory.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vexport.checkpoint.source import resolve_source
from vexport.engine.arguments import require_arguments
from vexport.errors import InputError
from vexport.errors.extras import attempt_all
from vexport.inference.endpoint.server import require_address
from vexport.inference.endpoint.tokenizer import tokenizer_of
from vexport.inference.options import BASELINE, CANDIDATE, EngineOptions
from vexport.inference.requested_tasks import fetch_tasks, require_tasks
from vexport.inference.tasks import TaskMetrics, named_in_files
from vexport.judge.accepted_settings import (
    settings_to_store,
)
from vexport.judge.accepting import (
    accept_results,
    accepted_scores_text,
    lost_answers,
    require_writable,
)
from vexport.judge.task_settings import require_valid_against, require_valid_settings
from vexport.judge.verdict import tasks_without_loss
from vexport.names import ModelRef, ResultFiles, Server
from vexport.outputs.replaceable import NamedPath, locked_folder, require_separate
from vexport.records import ComparedRun, Verdict
from vexport.reports.run_record import Report
from vexport.run.comparison import compared_run, mark_smallest
from vexport.run.directory import Run, RunDirectory, logged_to, portable, require_run_folder
from vexport.run.given import Given, RunModel, candidate_folders
from vexport.run.load_run import require_available, require_servable
from vexport.run.options import DEFAULT_ATTRIBUTION, AttributionSettings
from vexport.run.scenario_run import VERDICT_STAGES
from vexport.run.stages.concluding import attribute, collect_report, now, report
from vexport.run.stages.serving import (
    SESSION,
    judge,
    measure_drift,
    require_served,
    serve_candidate,
)
from vexport.scenario import Evaluate
from vexport.scores.comparable_results import read_comparable, require_comparable_results
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
        rows = [
            compared_run(collect_report(run), _given_models_of(run).candidate.name)
            for run in self.runs
        ]
        return mark_smallest(rows)

    @property
    def reports(self) -> tuple[Report, ...]:
        """Return the reports that are written. There are none if there is no baseline."""
        written = [run.get(report) for run in self.runs if run.is_reached(report)]
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
            for stage in (attribute, report):
                run.do(stage)
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
    """Do every unfinished stage up to the verdict, and return a run for each checkpoint."""
    refs = _refs_by_role(checkpoints, settings.baseline)
    outputs = _named_paths({OUTPUT_DIR: folder, "--accept": accept})
    _require_usable(refs, settings, folder, options, outputs, against)
    served = [role for role, ref in refs.items() if not isinstance(ref, ResultFiles)]
    is_finished = all((folder / role / SESSION).is_file() for role in served)
    if overwrite or not is_finished:
        _require_valid_settings(settings, fetch_tasks(settings, options), against)
    models = {role: _model(role, ref, settings, options) for role, ref in refs.items()}
    folders = {role: models[role].prompt_folder for role in served}
    require_separate(outputs, _named_paths(folders))
    work = list(_given_models(checkpoints, models, settings, against))
    with locked_folder(folder, OUTPUT_DIR):
        directory = RunDirectory(folder, OUTPUT_DIR)
        directory.begin(overwrite=overwrite)
        directory.require_same_number(len(checkpoints))
        runs = tuple(Run(given, folder, options, attribution_settings, directory) for given in work)
        with logged_to(folder):
            for run in runs:
                _judge(run)
            if len(runs) == 1:
                _require_loaded(runs[0])
    return runs


def _judge(run: Run) -> None:
    """Do the stages up to the outcome."""
    for stage in VERDICT_STAGES:
        run.do(stage)


def _require_loaded(run: Run) -> None:
    """Raise CheckpointFailed if vLLM refused the checkpoint, after its report is written."""
    candidate = run.get(serve_candidate)
    if candidate is None or candidate.result.failure is None:
        return
    for stage in (attribute, report):
        run.do(stage)
    require_served(CANDIDATE, candidate.result)


def verdict_in(run: Run) -> Verdict | None:
    """Return the verdict with the drift, and with the cause of a loss if the run looked for it."""
    verdict = run.get(judge)
    if verdict is None:
        return None
    cause = run.get(attribute) if run.is_reached(attribute) else None
    return replace(verdict, drift=run.get(measure_drift), attribution=cause)


def _accept_answers(run: Run, accept: Path | None) -> str:
    """Write the candidate's scores to `accept` as an accepted baseline.

    Nothing is written if the candidate fails. Returns lines for the user about the accepted
    baseline, or an empty string if nothing is written.
    """
    verdict = run.get(judge)
    given = _given_models_of(run)
    settings = run.evaluation
    if accept is None or (verdict is not None and verdict.outcome == "FAIL"):
        return ""
    choice: Mapping[str, str] = settings.gate
    if given.against is not None:
        choice = read_accepted_table(given.against).gates
    folder = run.answers(CANDIDATE)
    stored = settings_to_store(settings, run.options.serve, accept)
    accepted = accept_results(
        folder,
        accept,
        choice,
        stored,
        margin=settings.margin,
        checkpoint=portable(given.candidate.name),
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


def _given_models_of(run: Run) -> Given:
    assert run.given is not None
    return run.given


def _refs_by_role(
    checkpoints: Sequence[ModelRef], baseline: ModelRef | None
) -> dict[str, ModelRef]:
    """Return the models by role, the baseline first.

    A role is also the folder of the model's responses: `baseline`, and `candidate` or, for several
    checkpoints, `candidate/1-NAME`.
    """
    refs = dict[str, ModelRef]()
    if baseline is not None:
        refs[BASELINE] = baseline
    for candidate_folder, checkpoint in zip(
        candidate_folders(checkpoints), checkpoints, strict=True
    ):
        refs[_candidate_role(candidate_folder)] = checkpoint
    return refs


def _candidate_role(candidate_folder: str) -> str:
    return f"{CANDIDATE}/{candidate_folder}" if candidate_folder else CANDIDATE


def _model(role: str, ref: ModelRef, settings: Evaluate, options: EngineOptions) -> RunModel:
    """Find a model, and download it. Raises InputError if vLLM cannot serve it."""
    if isinstance(ref, ResultFiles):
        return RunModel(ref=ref, role=role)
    if isinstance(ref, Server):
        tokenizer = tokenizer_of(role, ref.url, settings, options)
        return RunModel(
            ref=ref,
            role=role,
            tokenizer=tokenizer.folder,
            trust_tokenizer=tokenizer.is_trusted,
            served="" if tokenizer.model is None else repr(tokenizer.model),
        )
    checkpoint = resolve_source(ref, options.on_progress)
    require_servable(checkpoint, [options.serve])
    return RunModel(ref=ref, role=role, checkpoint=checkpoint)


def _given_models(
    checkpoints: Sequence[ModelRef],
    models: Mapping[str, RunModel],
    settings: Evaluate,
    against: Path | None,
) -> Iterator[Given]:
    """Yield the given models for the run of each checkpoint."""
    folders = {role: model.prompt_folder for role, model in models.items()}
    prompt_folders = {role: folder for role, folder in folders.items() if folder is not None}
    for candidate_folder, checkpoint in zip(
        candidate_folders(checkpoints), checkpoints, strict=True
    ):
        yield Given(
            name=checkpoint.title,
            candidate=models[_candidate_role(candidate_folder)],
            baseline=models.get(BASELINE),
            against=against,
            # Digests cover the baseline's files. They must not depend on the baseline's name.
            evaluate=settings.model_copy(update={"baseline": None}),
            candidate_folder=candidate_folder,
            prompt_folders=prompt_folders,
        )


def _require_usable(
    refs: Mapping[str, ModelRef],
    settings: Evaluate,
    folder: Path,
    options: EngineOptions,
    outputs: Sequence[NamedPath],
    against: Path | None,
) -> None:
    """Raise errors for problems that can be found without a download or an engine."""
    for output in outputs:
        if output.label == "--accept":
            require_writable(output.path)
    files = [*_named_paths({"--against": against}), *evaluation_inputs(settings, "--task")]
    for role, ref in refs.items():
        if isinstance(ref, Server):
            require_address(ref.url)
        files += named_model("--baseline" if role == BASELINE else "CHECKPOINT", ref)
    given = [ref.path for ref in refs.values() if isinstance(ref, ResultFiles)]
    if settings.text is not None and given:
        got, need = "lm-eval's results", "a checkpoint or an address: both models read the text"
        fix = "give a checkpoint or an address instead of the results, or use --task"
        raise InputError("--text", got=got, need=need, fix=fix)
    require_separate(outputs, files)
    if against is not None:
        given.append(against)
    _require_comparable(given, settings, options)
    require_run_folder(folder, OUTPUT_DIR)
    if against is not None:
        read_accepted_table(against)
    checkpoints = [ref for ref in refs.values() if not isinstance(ref, ResultFiles | Server)]
    attempt_all(
        [
            ("tasks", partial(_require_tasks, settings, options, against)),
            *(
                (str(ref), partial(require_available, ref, [options.serve]))
                for ref in dict.fromkeys(checkpoints)
            ),
        ]
    )
    require_arguments([options.serve], options.vllm_python)


def _require_tasks(settings: Evaluate, options: EngineOptions, against: Path | None) -> None:
    """Raise InputError if a task cannot be used, or if a margin or gate does not fit the tasks."""
    _require_valid_settings(settings, require_tasks(settings, options), against)


def _require_valid_settings(
    settings: Evaluate, tasks: Sequence[TaskMetrics] | None, against: Path | None
) -> None:
    """Raise InputError if a margin or gate does not fit the tasks, or the accepted baseline."""
    if against is None:
        require_valid_settings(settings, tasks)
    else:
        require_valid_against(settings.margin, tasks, read_accepted_table(against))


def _require_comparable(given: Sequence[Path], settings: Evaluate, options: EngineOptions) -> None:
    """Raise InputError if given results or the accepted baseline do not fit the tasks."""
    if not given or not settings.tasks:
        return
    exact = named_in_files(settings.tasks, trust_remote_code=options.trust_remote_code)
    tasks = [exact.get(task, task) for task in settings.tasks]
    for path in given:
        require_comparable_results(
            read_comparable(path), tasks, list(exact.values()), settings.limit
        )


def _named_paths(paths: Mapping[str, Path | None]) -> list[NamedPath]:
    return [NamedPath(label=label, path=path) for label, path in paths.items() if path]
