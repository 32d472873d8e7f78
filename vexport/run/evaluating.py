"""`vexport eval`: checkpoints and their baseline served, compared, and then the cause of a loss
named.

A run compares its two models by the same functions.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vexport.checkpoint.index import find_quantization, read_index
from vexport.checkpoint.source import hub_name, require_source, resolve_source
from vexport.engine.arguments import require_arguments
from vexport.errors import CheckpointFailed, InputError
from vexport.errors.extras import attempt_all
from vexport.evaluation.accepted import (
    accept_results,
    choice_of,
    gates_of,
    lost_answers,
    read_accepted,
    require_writable,
)
from vexport.evaluation.attribution import attribute
from vexport.evaluation.drift import drift_warnings, measure_drift
from vexport.evaluation.given_answers import read_given, require_answers_to
from vexport.evaluation.held_out import decide_on_text
from vexport.evaluation.inputs import evaluation_inputs
from vexport.evaluation.results import result_files
from vexport.evaluation.verdict import decide
from vexport.files import user_path
from vexport.inference.answers import Served
from vexport.inference.endpoint.server import is_url, require_address
from vexport.inference.prompting import lm_eval_settings
from vexport.inference.tasks import named_in_files
from vexport.outputs.replaceable import FolderKind, NamedPath, require_separate, written_alone
from vexport.records import (
    Attribution,
    ComparedRun,
    OnProgress,
    Outcome,
    Verdict,
    named,
)
from vexport.reports.formatting import outcome_line
from vexport.run.comparison import mark_smallest, worst_task
from vexport.run.directory import logged_to, portable
from vexport.run.loading import require_servable
from vexport.run.options import EngineOptions, Explaining
from vexport.run.serving import (
    BASELINE,
    CANDIDATE,
    TEXT_FILE,
    ModelUnderTest,
    clear_session,
    fetch_tasks,
    remove_answers,
    require_served,
    require_tasks,
    serve_model,
    tokenizer_of,
)
from vexport.scenario import Evaluate

RESULTS = FolderKind(
    name="an output folder of `vexport eval`",
    mark=".vexport-eval",
    text="Results of vexport. `vexport eval --overwrite` replaces everything in this folder.\n",
)

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalJob:
    """A request: checkpoints, the settings with their baseline, and the folder of the results.

    With `against`, an accepted baseline, that is the baseline. `accept` is where the caller will
    write one.
    """

    checkpoints: tuple[str, ...]
    settings: Evaluate
    folder: Path
    options: EngineOptions
    overwrite: bool = False
    against: Path | None = None
    accept: Path | None = None

    @property
    def candidates(self) -> dict[str, str]:
        """The checkpoints by their role, which is also the folder of their answers: `candidate`, of
        several `candidate/1-NAME`.
        """
        if len(self.checkpoints) == 1:
            return {CANDIDATE: self.checkpoints[0]}
        numbered = enumerate(self.checkpoints, 1)
        return {f"{CANDIDATE}/{number}-{Path(name).name}": name for number, name in numbered}

    @property
    def names(self) -> dict[str, str]:
        """The models to serve by their role, the baseline first: unless it is sound, nothing is
        compared.
        """
        baseline = self.settings.baseline
        return {**({BASELINE: baseline} if baseline is not None else {}), **self.candidates}

    @property
    def asked(self) -> dict[str, str]:
        """The models that are asked, by their role: those whose answers are not given."""
        return {role: name for role, name in self.names.items() if not is_results(name)}

    def answers(self, role: str) -> Path:
        """The folder of a model's answers, or lm-eval's file that was given."""
        return self.folder / role if role in self.asked else user_path(self.names[role])

    @property
    def known(self) -> Path | None:
        """The answers to compare with; None where there are none."""
        return self.against or (self.answers(BASELINE) if self.settings.baseline else None)

    @property
    def is_unfinished(self) -> bool:
        """Return whether an interrupted evaluation left the folder, whose answers are not asked
        again.
        """
        if self.overwrite or not (self.folder / RESULTS.mark).is_file():
            return False
        folders = (self.folder / role for role in self.asked)
        return any(
            not any(folder.glob("results_*.json")) and not (folder / TEXT_FILE).is_file()
            for folder in folders
        )

    @property
    def outputs(self) -> list[NamedPath]:
        """The paths that are written."""
        return _named({"--output": self.folder, "--accept": self.accept})


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One checkpoint's verdict, where there is a baseline, and the sessions that tell why."""

    checkpoint: str
    verdict: Verdict | None
    baseline: Served | None = None
    candidate: Served | None = None


def is_results(name: str) -> bool:
    """Return whether the name of a model is lm-eval's results: a file, or a folder with one."""
    path = user_path(name)
    return not (path / "config.json").exists() and bool(result_files(path))


def evaluate_checkpoints(job: EvalJob) -> list[Judged]:
    """Score checkpoints and their baseline and decide; lm-eval's files and vLLM's logs go to the
    folder.

    There is no verdict where there is no baseline. Raises CheckpointFailed where vLLM refuses the
    only checkpoint, InputError where it refuses the baseline, and where an output overlaps what is
    read.
    """
    _require_usable(job)
    fetch_tasks(job.settings, job.options)
    models = {role: _model(job, role, name) for role, name in job.asked.items()}
    require_separate(
        job.outputs, _named({role: model.checkpoint for role, model in models.items()})
    )
    with written_alone(job.folder, "--output-dir"):
        judged = list(_evaluated(job, models))
    for model in models.values():
        remove_answers(model.folder)
    return judged


def _model(job: EvalJob, role: str, name: str) -> ModelUnderTest:
    """Resolve a name to a model, downloading it; InputError where vLLM could not serve it."""
    url = name if is_url(name) else None
    is_trusted = False
    if url is None:
        checkpoint = resolve_source(name, job.options.on_progress)
        require_servable(checkpoint, [job.options.serve])
    else:
        tokenizer = tokenizer_of(role, url, job.settings, job.options)
        checkpoint, is_trusted = tokenizer.folder, tokenizer.is_trusted
    return ModelUnderTest(
        role=role,
        checkpoint=checkpoint,
        folder=job.folder / role,
        options=job.options,
        url=url,
        evaluate=job.settings,
        repeat=role == BASELINE or job.against is not None,
        trust_tokenizer=is_trusted,
    )


def explained(
    job: EvalJob, judged: Judged, explaining: Explaining, on_progress: OnProgress
) -> Judged:
    """Add the cause of a loss to the verdict, if asked for and found in time."""
    verdict, baseline, candidate = judged.verdict, judged.baseline, judged.candidate
    if (
        verdict is None
        or baseline is None
        or candidate is None
        or not explaining.is_due(verdict.outcome)
    ):
        return judged
    options = replace(job.options, on_progress=on_progress)
    with written_alone(job.folder, "--output-dir"):
        cause = cause_of(
            baseline, candidate, job.settings, verdict.outcome, options, explaining.seconds
        )
    return replace(judged, verdict=replace(verdict, attribution=cause))


def compared(judged: Sequence[Judged]) -> tuple[ComparedRun, ...]:
    """A row for each checkpoint, the smallest that passes marked."""
    return mark_smallest(list(map(_row, judged)))


def _row(judged: Judged) -> ComparedRun:
    verdict, candidate, baseline = judged.verdict, judged.candidate, judged.baseline
    assert verdict is not None
    index = read_index(candidate.result.checkpoint) if candidate else None
    quantization = find_quantization(index.root, index.config) if index else None
    values = quantization.values if quantization else {}
    parameters = read_index(baseline.result.checkpoint).num_parameters if baseline else 0
    num_bytes = index.num_bytes if index else 0
    return ComparedRun(
        name=judged.checkpoint,
        folder=judged.checkpoint,
        schemes=str(values.get("format") or values.get("quant_method") or ""),
        outcome=verdict.outcome,
        reason=verdict.reason,
        num_bytes=num_bytes,
        bits_per_weight=8 * num_bytes / parameters if parameters else 0.0,
        mean_kl=verdict.drift.mean_kl if verdict.drift else None,
        worst=worst_task(verdict),
    )


def accept_answers(job: EvalJob, verdict: Verdict | None) -> str:
    """Write the answers as the accepted baseline of `job.accept`, unless they fail; the answer says
    so.
    """
    if job.accept is None or (verdict is not None and verdict.outcome == "FAIL"):
        return ""
    choice = choice_of(read_accepted(job.against)) if job.against else job.settings.gate
    accepted = accept_results(job.answers(CANDIDATE), job.accept, choice)
    lines = [f"accepted: {job.accept}: {gates_of(accepted)}"]
    if verdict is None:  # else its warnings name the lost answers of both models
        lines += [f"warning: {lost}" for lost in lost_answers(accepted, job.settings.alpha)]
    return "\n".join(lines)


def _evaluated(job: EvalJob, models: Mapping[str, ModelUnderTest]) -> Iterator[Judged]:
    """Yield the verdict on each available model, the baseline asked first."""
    if job.settings.tasks:
        lm_eval = lm_eval_settings(
            job.settings, {role: each.checkpoint for role, each in models.items()}
        )
        models = {role: replace(model, lm_eval=lm_eval) for role, model in models.items()}
    if job.is_unfinished:
        for model in models.values():
            clear_session(model.folder, job.folder)
    else:
        RESULTS.require_replaceable(job.folder, overwrite=job.overwrite)
        RESULTS.begin(job.folder)
    with logged_to(job.folder):
        baseline = serve_model(models[BASELINE]) if BASELINE in models else None
        if baseline is not None:
            require_served(BASELINE, baseline.result)
        for role in job.candidates:
            candidate = serve_model(models[role]) if role in models else None
            yield _judged(job, role, baseline, candidate)


def _judged(job: EvalJob, role: str, baseline: Served | None, candidate: Served | None) -> Judged:
    """The verdict on one model's answers, which is logged where others follow."""
    name = job.candidates[role]
    try:
        if candidate is not None:
            require_served(CANDIDATE, candidate.result)
    except CheckpointFailed as refused:
        if len(job.checkpoints) == 1:
            raise
        verdict = Verdict(
            outcome="FAIL",
            reason=f"vLLM refused it: {refused.got}",
            margin=job.settings.margin,
            alpha=job.settings.alpha,
            method="not asked",
            tasks=(),
            checkpoint=name,
        )
        return Judged(checkpoint=name, verdict=verdict)
    if job.known is None:
        return Judged(checkpoint=name, verdict=None)
    verdict = verdict_of(job.settings, (job.known, job.answers(role)), baseline, candidate)
    # The cause of a loss cannot be found for models served elsewhere.
    baseline, candidate = (
        each if each and each.result.engine else None for each in (baseline, candidate)
    )
    if baseline is not None and candidate is not None:
        drift = measure_drift(baseline, candidate, job.settings)
        # What decided the verdict is not a warning.
        warnings = drift_warnings(drift) if drift and not verdict.text else ()
        verdict = replace(verdict, warnings=(*verdict.warnings, *warnings), drift=drift)
    if len(job.checkpoints) > 1:
        LOG.info("%s: %s", name, first_line(verdict))
    verdict = replace(verdict, checkpoint=name)
    return Judged(checkpoint=name, verdict=verdict, baseline=baseline, candidate=candidate)


class _OutOfTime(Exception):
    """The time for an explanation is over."""


def first_line(verdict: Verdict) -> str:
    """The outcome in a line, before anything is explained."""
    return f"accuracy: {outcome_line(verdict.outcome, verdict.device)}: {verdict.reason}"


def verdict_of(
    settings: Evaluate,
    answers: tuple[Path, Path],
    baseline: Served | None,
    candidate: Served | None,
) -> Verdict:
    """The comparison of both models' answers to tasks, or of what they make of the text that
    decides.

    `answers` are folders of lm-eval's, or an accepted baseline and one; CheckpointFailed where a
    text cannot be compared.
    """
    if settings.text is None:
        return decide(*answers, margin=settings.margin, alpha=settings.alpha, gate=settings.gate)
    assert baseline is not None
    assert candidate is not None
    return decide_on_text(portable(settings.text), baseline, candidate, settings)


def cause_of(
    baseline: Served,
    candidate: Served,
    settings: Evaluate,
    outcome: Outcome,
    options: EngineOptions,
    seconds: float,
) -> Attribution | None:
    """Find the cause of a loss, given the outcome; None where vLLM refused a model, or time ran
    out.
    """
    if not baseline.is_scored or not candidate.is_scored:
        return None
    deadline, on_progress = time.monotonic() + seconds, named("attribution", options.on_progress)

    def tell(stage: str, done: int, total: int) -> None:
        if time.monotonic() > deadline:
            raise _OutOfTime
        on_progress(stage, done, total)

    try:
        return attribute(
            baseline,
            candidate,
            limit=settings.kl_limit,
            outcome=outcome,
            vllm_python=options.vllm_python,
            on_progress=tell,
        )
    except _OutOfTime:
        LOG.info(
            "attribution: stopped after %g s (--attribution-seconds); the verdict stands", seconds
        )
        return None


def _require_usable(job: EvalJob) -> None:
    """Raise for problems that show without a download or an engine."""
    if job.accept is not None:
        require_writable(job.accept)
    files = [*_named({"--against": job.against}), *evaluation_inputs(job.settings, "--task")]
    for name in job.names.values():
        if is_url(name):
            require_address(name)
            continue
        label = "--baseline" if name == job.settings.baseline else "CHECKPOINT"
        files.append(NamedPath(label=label, path=user_path(name)))
    if job.settings.text is not None and len(job.asked) < len(job.names):
        got, need = "lm-eval's results", "a checkpoint or an address: both models read the text"
        raise InputError("--text", got=got, need=need, fix="give one, or --task")
    require_separate(job.outputs, files)
    _require_comparable(job)
    RESULTS.require_replaceable(job.folder, overwrite=job.overwrite or job.is_unfinished)
    if job.against is not None:
        read_accepted(job.against)
    names = [name for name in dict.fromkeys(job.asked.values()) if not is_url(name)]
    attempt_all(
        [
            ("tasks", partial(require_tasks, job.settings, job.options)),
            *((name, partial(_require_had, name, job.options)) for name in names),
        ]
    )
    require_arguments([job.options.serve], job.options.vllm_python)


def _require_comparable(job: EvalJob) -> None:
    """Raise InputError if answers that are given cannot be compared with answers to the job's
    tasks.
    """
    given = [Path(name).expanduser() for name in job.names.values() if is_results(name)]
    given += [job.against] if job.against is not None else []
    if not given or not job.settings.tasks:
        return
    exact = named_in_files(job.settings.tasks, trust_remote_code=job.options.trust_remote_code)
    names = [exact.get(task, task) for task in job.settings.tasks]
    for path in given:
        require_answers_to(read_given(path), names, list(exact.values()), job.settings.limit)


def _require_had(name: str, options: EngineOptions) -> None:
    """Raise for a model that is not available, or whose folder vLLM cannot serve."""
    if hub_name(name) is None:
        require_servable(user_path(name), [options.serve])
    else:
        require_source(name)


def _named(paths: Mapping[str, Path | None]) -> list[NamedPath]:
    return [NamedPath(label=label, path=path) for label, path in paths.items() if path]
