"""`vexport eval`: a checkpoint and its baseline served, compared, and the cause of a loss named."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vexport.checkpoint.index import require_checkpoint
from vexport.checkpoint.source import hub_name, require_source, resolve_source
from vexport.engine.arguments import require_arguments, require_heads, require_layers
from vexport.errors.extras import attempt_all
from vexport.evaluation.accepted import accept_results, choice_of, gates_of, read_accepted, require_writable
from vexport.evaluation.prompting import lm_eval_settings
from vexport.outputs import FolderKind, NamedPath, require_separate, written_alone
from vexport.run.judging import (
    cause_of,
    drift_between,
    is_in_doubt,
    verdict_on,
    verdict_on_text,
    warnings_of,
)
from vexport.run.serving import (
    BASELINE,
    CANDIDATE,
    PLAIN,
    TEXT_FILE,
    EngineOptions,
    Questions,
    Served,
    clear_session,
    fetch_tasks,
    remove_answers,
    require_served,
    require_tasks,
    serve_model,
    task_files,
)
from vexport.scenario import Evaluate
from vexport.types import Verdict

RESULTS = FolderKind(
    name="an output folder of `vexport eval`",
    mark=".vexport-eval",
    text="Results of vexport. `vexport eval --overwrite` replaces everything in this folder.\n",
    entries=frozenset((BASELINE, CANDIDATE)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalJob:
    """What is asked for: a checkpoint, the settings with its baseline, and the folder of the results.

    With `against`, an accepted baseline, that is the baseline. `accept` is where the caller will write one.
    """

    checkpoint: str
    settings: Evaluate
    folder: Path
    options: EngineOptions
    overwrite: bool = False
    against: Path | None = None
    accept: Path | None = None

    @property
    def names(self) -> dict[str, str]:
        """The models to serve by their role, the baseline first: unless it is sound, nothing is compared."""
        names = {BASELINE: self.settings.baseline, CANDIDATE: self.checkpoint}
        return {role: name for role, name in names.items() if name is not None}

    @property
    def known(self) -> Path | None:
        """The answers to compare with; None where there are none."""
        return self.against or (self.folder / BASELINE if self.settings.baseline else None)

    @property
    def is_unfinished(self) -> bool:
        """Whether the folder is that of an interrupted evaluation, whose answers are not asked again."""
        results = (self.folder / CANDIDATE).glob("results_*.json")
        ended = any(results) or (self.folder / CANDIDATE / TEXT_FILE).is_file()
        return (self.folder / RESULTS.mark).is_file() and not ended and not self.overwrite

    @property
    def outputs(self) -> list[NamedPath]:
        """What is written."""
        return _named({"--output": self.folder, "--accept": self.accept})


def evaluate_checkpoint(job: EvalJob) -> Verdict | None:
    """Score a checkpoint and its baseline and decide; lm-eval's files and vLLM's logs go to the folder.

    None is the answer where there is no baseline. Raises CheckpointFailed where vLLM refuses the checkpoint,
    InputError where it refuses the baseline, and where an output overlaps what is read.
    """
    _require_usable(job)
    fetch_tasks(job.settings, job.options)
    models = {role: resolve_source(name, job.options.on_progress) for role, name in job.names.items()}
    attempt_all((str(model), partial(_require_fitting, model, job.options)) for model in models.values())
    require_separate(job.outputs, _named(models))
    with written_alone(job.folder, "--output-dir"):
        return _evaluated(job, models)


def accept_answers(job: EvalJob, verdict: Verdict | None) -> str:
    """Write the answers as the accepted baseline of `job.accept`, unless they fail; the answer says so."""
    if job.accept is None or (verdict is not None and verdict.outcome == "FAIL"):
        return ""
    choice = choice_of(read_accepted(job.against)) if job.against else job.settings.gate
    accepted = accept_results(job.folder / CANDIDATE, job.accept, choice)
    return f"accepted: {job.accept}: {gates_of(accepted)}"


def _evaluated(job: EvalJob, models: Mapping[str, Path]) -> Verdict | None:
    """The verdict on models that can be had; nobody else writes into the job's folder."""
    lm_eval = lm_eval_settings(job.settings, models) if job.settings.tasks else PLAIN
    if job.is_unfinished:
        for role in models:
            clear_session(job.folder / role)
    else:
        RESULTS.require_replaceable(job.folder, overwrite=job.overwrite)
        RESULTS.begin(job.folder)
    served: dict[str, Served] = {}
    for role, model in models.items():
        questions = Questions(
            evaluate=job.settings,
            lm_eval=lm_eval,
            repeat=role == BASELINE or job.against is not None,
        )
        served[role] = serve_model(role, model, job.folder / role, job.options, questions)
        require_served(role, served[role].result)
    for role in models:
        remove_answers(job.folder / role)
    if job.known is None:
        return None
    if job.settings.text is not None:
        verdict = verdict_on_text(served[BASELINE], served[CANDIDATE], job.settings)
    else:
        verdict = verdict_on(job.known, job.folder / CANDIDATE, job.settings)
    return verdict if job.against else _with_signals(verdict, served[BASELINE], served[CANDIDATE], job)


def _require_usable(job: EvalJob) -> None:
    """Raise for what needs no download and no engine to be found out."""
    if job.accept is not None:
        require_writable(job.accept)
    local = {"CHECKPOINT": job.checkpoint, "--baseline": job.settings.baseline}
    paths = {label: Path(name).expanduser() for label, name in local.items() if name}
    files = [*_named({"--against": job.against}), *task_files(job.settings, "--task")]
    require_separate(job.outputs, [*_named(paths), *files])
    RESULTS.require_replaceable(job.folder, overwrite=job.overwrite or job.is_unfinished)
    if job.against is not None:
        read_accepted(job.against)
    attempt_all(
        [
            ("tasks", partial(require_tasks, job.settings, job.options)),
            *((name, partial(_require_had, name, job.options)) for name in job.names.values()),
        ]
    )
    require_arguments([job.options.serve], job.options.vllm_python)


def _require_had(name: str, options: EngineOptions) -> None:
    """Raise for a model that cannot be had, or whose folder vLLM cannot serve."""
    if hub_name(name) is None:
        _require_fitting(Path(name).expanduser(), options)
    else:
        require_source(name)


def _require_fitting(model: Path, options: EngineOptions) -> None:
    require_checkpoint(model)
    require_layers(model)
    require_heads(model, options.serve.ranks)


def _with_signals(verdict: Verdict, baseline: Served, candidate: Served, job: EvalJob) -> Verdict:
    """The verdict with what the log-probabilities tell, and the cause where something is wrong."""
    drift = drift_between(baseline, candidate, job.settings)
    warnings = () if verdict.text else warnings_of(drift)  # what has decided is no warning
    warned = replace(verdict, warnings=(*verdict.warnings, *warnings), drift=drift)
    if not is_in_doubt(verdict, drift, baseline, candidate):
        return warned
    cause = cause_of(baseline, candidate, job.settings, verdict.outcome, job.options)
    return replace(warned, attribution=cause)


def _named(paths: Mapping[str, Path | None]) -> list[NamedPath]:
    return [NamedPath(label=label, path=path) for label, path in paths.items() if path]
