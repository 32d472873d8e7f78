"""One engine start for a model and everything that is asked of it there."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vexport.checkpoint.index import require_checkpoint
from vexport.checkpoint.source import require_source, resolve_source
from vexport.engine.arguments import require_arguments, require_heads
from vexport.engine.load import load_report, load_request, shortest_length
from vexport.engine.messages import Progress, SessionRequest, SessionResult
from vexport.engine.prompts import CONTINUED, Prompts, fixed_prompts
from vexport.engine.session import run_session
from vexport.errors import CheckpointFailed, InputError
from vexport.evaluation.accepted import read_accepted
from vexport.evaluation.attribution import attribute
from vexport.evaluation.drift import Limits, Scored, drift_warnings, measure_drift
from vexport.evaluation.fingerprint import engine_fingerprint, write_fingerprint
from vexport.evaluation.harness import differences
from vexport.evaluation.prompting import lm_eval_settings
from vexport.evaluation.repeat import read_repeated, require_deterministic
from vexport.evaluation.stopping import stopping_rule
from vexport.evaluation.task_data import fetch_task_data
from vexport.evaluation.tasks import resolve_tasks
from vexport.evaluation.verdict import decide
from vexport.files import to_json, write_text
from vexport.outputs import FolderKind, NamedPath, require_separate
from vexport.scenario import Evaluate
from vexport.scenario.serve import Serve
from vexport.types import LmEvalSettings, LoadReport, OnProgress, Verdict

# What an evaluation reserves its cache for where no length is given; longer prompts are an error, never cut.
EVALUATION_LENGTH = 4096
BASELINE = "baseline"
CANDIDATE = "candidate"
PLAIN = LmEvalSettings()
RESULTS = FolderKind(
    name="an output folder of `vexport eval`",
    mark=".vexport-eval",
    text="Results of vexport. `vexport eval --overwrite` replaces everything in this folder.\n",
    entries=frozenset((BASELINE, CANDIDATE)),
    earlier_mark=f"{CANDIDATE}/vllm.log",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How every engine of a call is started."""

    serve: Serve
    vllm_python: Path | None
    trust_remote_code: bool
    on_progress: OnProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A finished session with the prompts that it answered."""

    result: SessionResult
    prompts: Prompts

    @property
    def scored(self) -> Scored | None:
        """The session's log-probabilities, where it has them."""
        file = self.result.logprobs_file
        if file is None:
            return None
        return Scored(checkpoint=self.result.checkpoint, prompts=self.prompts, logprobs_file=file)

    def report(self, baseline: "Served | None" = None) -> LoadReport:
        """Judge the session; builds the reference model in this process."""
        return load_report(self.result, self.prompts, baseline=baseline.result if baseline else None)


def serve_model(
    role: str,
    checkpoint: Path,
    folder: Path,
    options: EngineOptions,
    *,
    texts: Sequence[str] = (),
    settings: Evaluate | None = None,
    asked: LmEvalSettings = PLAIN,
    baseline: Path | None = None,
    repeat: bool = False,
) -> Served:
    """Start vLLM once: prompts, log-probabilities and, with `settings`, the tasks of lm-eval.

    `asked` says how lm-eval asks, its files, the log and the log-probabilities go to `folder`. Raises
    EnvironmentFault as `run_session`, InputError for unusable tasks; a checkpoint that vLLM refuses is a
    result. With `baseline`, lm-eval's folder of it or an accepted one, and `stopping: early`, the tasks end
    when they are decided;
    with `repeat` a part of them is asked again, and an engine that wavers is an EnvironmentFault.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prompts = fixed_prompts(checkpoint, texts=texts, count=settings.kl_prompts if settings else CONTINUED)
    request = load_request(checkpoint, prompts, logprobs_file=folder / "logprobs.safetensors")
    request = replace(
        request,
        name=role,
        enforce_eager=options.serve.enforce_eager,
        trust_remote_code=options.trust_remote_code,
        max_model_len=options.serve.max_model_len or request.max_model_len,
        arguments=options.serve.arguments(is_baseline=role == BASELINE),
    )
    if settings is not None:
        request = _with_tasks(request, settings, options, folder, repeat=repeat)
        request = replace(request, lm_eval=asked)
        if settings.stopping == "early" and baseline is not None:
            request = _stopping_early(request, settings, baseline, folder)

    def relay(progress: Progress) -> None:
        options.on_progress(f"{role}: {progress.stage}", progress.done, progress.total)

    result = run_session(
        request,
        log=folder / "vllm.log",
        timeout=options.serve.timeout,
        vllm_python=options.vllm_python,
        on_progress=relay,
    )
    if settings is not None and result.engine is not None:
        write_fingerprint(folder, engine_fingerprint(checkpoint, result.engine))
        if (repeated := read_repeated(folder)) is not None:
            require_deterministic(folder, repeated, settings.alpha)
    return Served(result=result, prompts=prompts)


def _with_tasks(
    request: SessionRequest, settings: Evaluate, options: EngineOptions, folder: Path, *, repeat: bool
) -> SessionRequest:
    """The request with lm-eval's tasks, whose files go to `folder`."""
    tasks = resolve_tasks(
        settings.tasks,
        folder=folder / "tasks",
        include_paths=settings.include_path,
        trust_remote_code=options.trust_remote_code,
    )
    length = options.serve.max_model_len or shortest_length(request.checkpoint, EVALUATION_LENGTH)
    return replace(
        request,
        max_model_len=length,
        tasks=tuple(task.spec for task in tasks),
        include_paths=settings.include_path,
        limit=settings.limit,
        output=folder,
        seed=settings.seed,
        repeat=repeat,
    )


def _stopping_early(
    request: SessionRequest, settings: Evaluate, baseline: Path, folder: Path
) -> SessionRequest:
    """The request whose tasks end when the comparison with the baseline's answers is decided."""
    rule = stopping_rule(
        baseline, settings.gate, margin=settings.margin, alpha=settings.alpha, seed=settings.seed
    )
    file = folder / "stopping.json"
    write_text(file, to_json(rule))
    return replace(request, stopping_file=file)


def evaluate_checkpoint(
    checkpoint: str,
    settings: Evaluate,
    folder: Path,
    options: EngineOptions,
    *,
    overwrite: bool,
    against: Path | None = None,
    accept: Path | None = None,
) -> Verdict | None:
    """Score a checkpoint and its baseline and decide; lm-eval's files and vLLM's logs go to `folder`.

    With `against`, an accepted baseline, that is the baseline; None is the answer where there is none.
    `accept` is where the caller will write one. Raises CheckpointFailed where vLLM refuses the checkpoint,
    InputError where it refuses the baseline, and where `folder` or `accept` overlaps what is read.
    """
    outputs = _named({"--output": folder, "--accept": accept})
    files = [*_named({"--against": against}), *task_files(settings, "--task")]
    names = {"CHECKPOINT": checkpoint, "--baseline": settings.baseline}
    local = {label: Path(name).expanduser() for label, name in names.items() if name}
    require_separate(outputs, [*_named(local), *files])
    RESULTS.require_replaceable(folder, overwrite=overwrite)
    if against is not None:
        read_accepted(against)
    compared = {BASELINE: settings.baseline, CANDIDATE: checkpoint}
    wanted = {role: name for role, name in compared.items() if name is not None}
    for source in wanted.values():
        require_source(source)
    require_tasks(settings, options)
    for path in local.values():
        if path.is_dir():  # before vLLM is asked, which takes longer
            require_checkpoint(path)
            require_heads(path, options.serve.ranks)
    require_arguments([options.serve], options.vllm_python)
    fetch_tasks(settings, options)
    models = {role: resolve_source(name, options.on_progress) for role, name in wanted.items()}
    for model in models.values():
        require_checkpoint(model)
        require_heads(model, options.serve.ranks)
    require_separate(outputs, _named(models))
    asked = lm_eval_settings(settings, models)
    RESULTS.begin(folder)
    known = against or (folder / BASELINE if settings.baseline else None)
    served: dict[str, Served] = {}
    for role in models:  # the baseline first: where it wavers, nothing is compared
        served[role] = serve_model(
            role,
            models[role],
            folder / role,
            options,
            settings=settings,
            asked=asked,
            baseline=known if role == CANDIDATE else None,
            repeat=role == BASELINE or against is not None,
        )
        require_served(role, served[role].result)
    if known is None:
        return None
    verdict = decide(
        known,
        folder / CANDIDATE,
        margin=settings.margin,
        alpha=settings.alpha,
        gate=settings.gate,
        early=settings.stopping == "early",
    )
    return verdict if against else _with_signals(verdict, served, settings, options)


def task_files(settings: Evaluate, label: str) -> list[NamedPath]:
    """The tasks that are files and the folders of tasks, under the label of what gave them."""
    files = [path for task in settings.tasks if (path := Path(task)).is_file()]
    return [NamedPath(label=label, path=path) for path in (*files, *settings.include_path)]


def _named(paths: Mapping[str, Path | None]) -> list[NamedPath]:
    return [NamedPath(label=label, path=path) for label, path in paths.items() if path]


def scored_pair(baseline: Served, candidate: Served) -> tuple[Scored, Scored] | None:
    """Both sessions' log-probabilities; None where vLLM refused a model."""
    old, new = baseline.scored, candidate.scored
    return (old, new) if old and new else None


def _with_signals(
    verdict: Verdict, served: Mapping[str, Served], settings: Evaluate, options: EngineOptions
) -> Verdict:
    """The verdict with what the log-probabilities tell; whose fault it is where something is wrong."""
    pair = scored_pair(served[BASELINE], served[CANDIDATE])
    if pair is None:
        return verdict
    limits = Limits(kl=settings.kl_limit, nll=settings.nll_limit)
    drift = measure_drift(*pair, limits=limits)
    warnings = drift_warnings(drift) if drift else ()
    blamed = None
    if verdict.outcome != "PASS" or warnings or drift is None or any(differences(*pair)):
        options.on_progress("whose fault", 0, 1)
        blamed = attribute(*pair, limit=limits.kl, outcome=verdict.outcome, vllm_python=options.vllm_python)
        options.on_progress("whose fault", 1, 1)
    return replace(verdict, warnings=(*verdict.warnings, *warnings), drift=drift, attribution=blamed)


def require_tasks(settings: Evaluate, options: EngineOptions) -> None:
    """InputError, for all tasks at once, where one cannot be used; nothing is kept."""
    with tempfile.TemporaryDirectory(prefix="vexport-tasks-") as folder:
        resolve_tasks(
            settings.tasks,
            folder=Path(folder),
            include_paths=settings.include_path,
            trust_remote_code=options.trust_remote_code,
        )


def fetch_tasks(settings: Evaluate, options: EngineOptions) -> None:
    """Bring the tasks' documents into the cache before an engine starts; raises as `fetch_task_data`."""
    with tempfile.TemporaryDirectory(prefix="vexport-tasks-") as name:
        folder = Path(name)
        tasks = resolve_tasks(
            settings.tasks,
            folder=folder / "tasks",
            include_paths=settings.include_path,
            trust_remote_code=options.trust_remote_code,
        )
        request = SessionRequest(
            checkpoint=folder,
            name="tasks",
            tasks=tuple(task.spec for task in tasks),
            include_paths=tuple(settings.include_path),
            trust_remote_code=options.trust_remote_code,
        )
        fetch_task_data(
            request,
            log=folder / "fetch.log",
            timeout=options.serve.timeout,
            vllm_python=options.vllm_python,
            on_progress=options.on_progress,
        )


def require_served(role: str, result: SessionResult) -> None:
    """Raise where vLLM refused a model: the candidate's own fault, or an unusable baseline."""
    if result.failure is None:
        return
    kind = CheckpointFailed if role == CANDIDATE else InputError
    raise kind(
        f"{role} {result.checkpoint}",
        got=result.failure.message,
        need="a checkpoint that vLLM loads",
        fix="find the fault with `vexport check`, or export it again",
    )
