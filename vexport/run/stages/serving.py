"""Get the responses of both sides, judge the load of the candidate, and compare the responses."""

import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from vexport.checkpoint.index import find_quantization, read_index
from vexport.engine.describe import NONE, kernel_environment
from vexport.engine.messages import SessionResult
from vexport.errors import CheckpointFailed, InputError, VexportError
from vexport.files import digest_file
from vexport.inference.answers import ServedSession
from vexport.inference.fingerprint import read_fingerprint
from vexport.inference.options import BASELINE, CANDIDATE
from vexport.inference.response_sources import Questions
from vexport.inference.session_folder import clear_session, remove_answers
from vexport.inference.tasks import task_files
from vexport.judge.accepting import expected_questions
from vexport.judge.drift import drift_warnings
from vexport.judge.drift import measure_drift as drift_between
from vexport.judge.held_out import decide_on_text
from vexport.judge.load_judgement import judge_by_reference
from vexport.judge.verdict import decide
from vexport.names import AcceptedFile, ResultFiles
from vexport.records import CandidateKind, Drift, EngineMode, LoadReport, Reason, Verdict, named
from vexport.records.margin import margin_of_shares
from vexport.rules import verdict as rules
from vexport.run.comparison import outcome_and_reason
from vexport.run.directory import Digests, data_digest, portable, value_digest
from vexport.run.run import Run
from vexport.run.side import Side
from vexport.run.work import Stage
from vexport.scenario import Calibration
from vexport.scenario.evaluate import JudgementSettings, TransportSettings
from vexport.scenario.serve import EngineArguments
from vexport.scores.readers.accepted import read_accepted_table

LOG = logging.getLogger(__name__)
SESSION = "session.json"
CALIBRATION_TEXT_WARNING = (
    "evaluate.text is also the calibration data: give a text that was not used for calibration"
)
LOAD_FAILED_WARNING = (
    "the load check failed, which decides the outcome; the responses are shown only for information"
)


def serve_digest(arguments: EngineArguments) -> str:
    """Return a digest of the engine's arguments and of the environment that selects its kernels."""
    chosen = kernel_environment()
    return value_digest(dict(arguments) if chosen == NONE else {**arguments, "environment": chosen})


def _session_inputs(run: Run, *, role: str) -> Digests:
    settings, side = run.evaluation, run.sides[role]
    files = list[Path]()
    for task in settings.tasks:
        files += sorted(task_files(Path(task)))
    for folder in settings.include_path:
        # Python writes compiled modules next to a task's code when it runs.
        files += [file for file in sorted(folder.rglob("*")) if "__pycache__" not in file.parts]
    files += [settings.tools] if settings.tools is not None else []
    ignored = {*JudgementSettings.model_fields, *TransportSettings.model_fields}
    evaluation = settings.model_dump(mode="json", exclude=ignored)
    digests = {f"`{setting}`": value_digest(value) for setting, value in evaluation.items()}
    if settings.text is not None:
        digests["content of `text`"] = data_digest(Calibration(data=settings.text))
    if not side.engine.serve.canaries:
        digests["`serve.canaries`"] = value_digest(False)
    if role == CANDIDATE:  # some documents run twice if there is no session of the baseline
        digests["kind of baseline"] = value_digest("accepted" if run.accepted else "model")
    return {
        **side.inputs,
        **digests,
        "content of the tasks": value_digest(
            [digest_file(file) for file in files if file.is_file()]
        ),
        "chat template": value_digest(run.preparation.templates),
        "`serve`": serve_digest(side.arguments),
        "prompts": value_digest(list(run.preparation.texts)),
    }


def _questions(run: Run, role: str) -> Questions:
    accepted = run.accepted
    return Questions(
        evaluate=run.evaluation,
        lm_eval=run.preparation.lm_eval,
        texts=run.preparation.texts,
        repeat=role == BASELINE or accepted is not None,
        accepted={} if accepted is None else expected_questions(read_accepted_table(accepted)),
    )


def _serve(run: Run, role: str) -> ServedSession:
    """Get a side's responses from vLLM on this machine, from an address, or from both.

    If a server runs a checkpoint of this machine, vLLM runs the fixed prompts here. Some documents
    run twice, to measure the noise. Raises EnvironmentFault if too many of their responses differ.
    Then nothing is compared.
    """
    side = run.sides[role]
    questions = _questions(run, role)
    folder = run.places[role].folder
    clear_session(folder, run.directory.root)
    if side.has_server_and_checkpoint:
        without_tasks = questions.evaluate.model_copy(update={"tasks": ()})
        prompts = replace(questions, evaluate=without_tasks)
        served = side.engine_source.get_responses(prompts, folder)
        if served.result.failure is None:
            answered = side.source(run.evaluation).get_responses(questions, folder)
            result = replace(served.result, files=answered.result.files)
            served = replace(served, result=result)
    else:
        served = side.source(run.evaluation).get_responses(questions, folder)
    remove_answers(folder)
    return served


def require_served(role: str, result: SessionResult) -> None:
    """Raise an error if vLLM refused a model.

    It is CheckpointFailed for the candidate, and InputError for the baseline.
    """
    if result.failure is None:
        return
    kind = CheckpointFailed if role == CANDIDATE else InputError
    raise kind(
        f"{role} {result.checkpoint}",
        got=f"vLLM does not load it: {result.failure.message}",
        need="",
        fix="find the fault with `vexport check`, or export it again",
    )


@partial(
    Stage,
    "serve baseline",
    ServedSession,
    file=SESSION,
    place=BASELINE,
    when=lambda run: run.is_served(BASELINE),
    digest=partial(_session_inputs, role=BASELINE),
    files=lambda session: session.result.files,
)
def serve_baseline(run: Run) -> ServedSession:
    """Get the responses of the baseline."""
    return _serve(run, BASELINE)


@partial(
    Stage,
    "serve candidate",
    ServedSession,
    file=SESSION,
    place=CANDIDATE,
    when=lambda run: run.is_served(CANDIDATE),
    digest=partial(_session_inputs, role=CANDIDATE),
    files=lambda session: session.result.files,
)
def serve_candidate(run: Run) -> ServedSession:
    """Get the responses of the checkpoint. Raises InputError if vLLM refused the baseline."""
    baseline = run.get(serve_baseline)
    if baseline is not None:
        require_served(BASELINE, baseline.result)
    served = _serve(run, CANDIDATE)
    if run.judges_load and run.evaluate is not None and served.result.failure is None:
        with suppress(VexportError):  # `judge` raises it later, unless the load gate decides
            LOG.info(outcome_and_reason(_verdict(run, served)))
    return served


def _load_stage(
    role: str, session: Stage[ServedSession], name: str, place: str
) -> Stage[LoadReport]:
    """Return the stage that judges how a model loaded.

    The model's session is compared with the baseline's session if there is one.
    """

    def inputs(run: Run) -> Digests:
        baseline = run.get(serve_baseline)
        canaries = baseline.result.canaries if baseline is not None else ()
        return {
            "session": value_digest(run.result(session).result),
            "baseline session": value_digest(canaries),
        }

    def is_judged(run: Run) -> bool:
        return run.judges_load and run.get(session) is not None

    @partial(Stage, name, LoadReport, file="load.json", place=place, when=is_judged, digest=inputs)
    def load(run: Run) -> LoadReport:
        side = run.sides[role]
        progress = named(side.label, run.options.on_progress)
        report = judge_by_reference(run.result(session), run.get(serve_baseline), progress)
        serve = side.engine.serve
        mode: EngineMode = "eager" if serve.enforce_eager else "default"
        return replace(report, mode=mode, tp=serve.ranks)

    return load


load_baseline = _load_stage(BASELINE, serve_baseline, "load baseline", BASELINE)
load_candidate = _load_stage(CANDIDATE, serve_candidate, "load", "")


def load_of(run: Run, session: Stage[ServedSession]) -> LoadReport | None:
    """Return a report on how a model's session started, without a judgement.

    Returns None if the model was not started on this machine.
    """
    served = run.find(session)
    if served is None:
        return None
    result = served.result
    if result.failure is not None:
        return judge_by_reference(served)
    if result.engine is None:
        return None
    return LoadReport(
        checkpoint=str(result.checkpoint),
        ok=True,
        findings=(),
        vllm=result.vllm,
        engine=result.engine,
        canaries=result.canaries,
    )


def local_sessions(run: Run) -> tuple[ServedSession, ServedSession] | None:
    """Return the sessions of both models if both ran in vLLM on this machine, otherwise None."""
    baseline = run.get(serve_baseline)
    candidate = run.get(serve_candidate)
    if baseline is None or candidate is None:
        return None
    is_here = baseline.result.engine is not None and candidate.result.engine is not None
    return (baseline, candidate) if is_here else None


@partial(Stage, "drift", Drift, when=lambda run: local_sessions(run) is not None)
def measure_drift(run: Run) -> Drift | None:
    """Measure the distance between both models' log-probabilities on the same prompts."""
    sessions = local_sessions(run)
    assert sessions is not None
    return drift_between(*sessions, run.evaluation)


def _is_compared(run: Run) -> bool:
    if run.evaluate is None or run.baseline is None:
        return False
    if not run.candidate.is_served:
        return True
    served = run.get(serve_candidate)
    return served is not None and (served.result.failure is None or not run.judges_load)


@partial(Stage, "judge", Verdict, when=_is_compared)
def judge(run: Run) -> Verdict | None:
    """Compare both models' responses, or their log-probabilities of the text.

    If the load gate has failed, the load decides the outcome, and the verdict is for information.
    If the responses cannot be compared in this case, the result is None.
    """
    served = run.get(serve_candidate)
    loaded = run.get(load_candidate)
    baseline = run.get(serve_baseline)
    if baseline is not None:
        require_served(BASELINE, baseline.result)
    if served is not None and served.result.failure is not None:
        return _refused_verdict(run, served.result.failure.message)
    is_loaded = loaded is None or loaded.ok
    try:
        verdict = _verdict(run, served)
    except VexportError:
        if is_loaded:
            raise
        return None
    warnings = [*verdict.warnings, *_other_warnings(run)]
    if not is_loaded:
        warnings.append(LOAD_FAILED_WARNING)
    verdict = replace(verdict, warnings=tuple(warnings), candidate=_candidate_kind(run.candidate))
    name = run.candidate.name
    if run.candidate.part:
        LOG.info("%s: %s", name, outcome_and_reason(verdict))
    return replace(verdict, checkpoint=name)


def _refused_verdict(run: Run, message: str) -> Verdict:
    reason = Reason.of(rules.REFUSED, message=message)
    return Verdict(
        outcome="FAIL",
        rule=reason.rule,
        reason=reason.text,
        margin=margin_of_shares(run.evaluation.margin),
        alpha=run.evaluation.alpha,
        method="not asked",
        tasks=(),
        checkpoint=run.candidate.name,
    )


def _other_warnings(run: Run) -> tuple[str, ...]:
    if run.evaluation.text is None:
        drift = run.get(measure_drift)
        return drift_warnings(drift) if drift else ()
    calibration = run.made.calibration if run.made is not None else None
    is_seen = calibration is not None and calibration.data == portable(run.evaluation.text)
    return (CALIBRATION_TEXT_WARNING,) if is_seen else ()


def _candidate_kind(side: Side) -> CandidateKind:
    if not side.is_served:
        return "candidate"
    if side.checkpoint is None:
        return "server"
    index = read_index(side.checkpoint)
    return "quantized" if find_quantization(index.root, index.config) else "unquantized"


def _verdict(run: Run, candidate: ServedSession | None) -> Verdict:
    """Compare both sides' responses to tasks, or their log-probabilities of the text.

    `candidate` is the candidate's session or None. Raises CheckpointFailed if the log-probabilities
    of the text cannot be compared.
    """
    settings = run.evaluation
    results = {role: results_of(run, role) for role in run.sides}
    if settings.text is None:
        return decide(
            results[BASELINE],
            results[CANDIDATE],
            margin=settings.margin,
            alpha=settings.alpha,
            gate=settings.gate,
        )
    baseline = run.result(serve_baseline)
    assert candidate is not None
    verdict = decide_on_text(portable(settings.text), baseline, candidate, settings)
    return replace(
        verdict,
        fingerprint=read_fingerprint(results[CANDIDATE]),
        baseline_fingerprint=read_fingerprint(results[BASELINE]),
    )


def results_of(run: Run, role: str) -> Path:
    """Return the path of a side's responses: the given results, or a folder of the run."""
    ref = run.sides[role].ref
    return ref.path if isinstance(ref, ResultFiles | AcceptedFile) else run.places[role].folder


COMPARISON: tuple[Stage[object], ...] = (load_baseline, load_candidate, measure_drift, judge)
"""The stages after both sides have responded."""
