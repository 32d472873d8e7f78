"""Run the stages in vLLM: load the checkpoint dry, serve both models, and compare their responses.

Earlier stages made the checkpoint, or the user gave it to the run.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from vexport.calibration.data import first_texts
from vexport.checkpoint.chat_template import chat_templates
from vexport.checkpoint.index import find_quantization, folder_digest, read_index
from vexport.checkpoint.source import parse_data
from vexport.engine.describe import NONE, kernel_environment
from vexport.engine.dry.load import dry_load_checkpoints
from vexport.engine.installed import installed_text
from vexport.engine.messages import SessionResult
from vexport.errors import CheckpointFailed, InputError, VexportError
from vexport.files import digest_file
from vexport.inference.answers import Answers, ServedSession
from vexport.inference.endpoint.server import require_address
from vexport.inference.endpoint.tokenizer import tokenizer_of
from vexport.inference.options import BASELINE, CANDIDATE
from vexport.inference.prompting import lm_eval_settings
from vexport.inference.prompts import CONTINUED_PROMPTS
from vexport.inference.requested_tasks import fetch_tasks
from vexport.inference.response_sources import (
    DEFAULT_LM_EVAL,
    EndpointSource,
    EngineSource,
    ExistingResults,
    Questions,
    ResponseSource,
)
from vexport.inference.session_folder import clear_session, remove_answers
from vexport.inference.tasks import task_files
from vexport.judge.accepting import expected_questions
from vexport.judge.drift import drift_warnings
from vexport.judge.drift import measure_drift as drift_between
from vexport.judge.load_judgement import judge_by_reference
from vexport.judge.task_settings import require_valid_settings
from vexport.names import Folder, ResultFiles, Server
from vexport.records import (
    CandidateKind,
    Drift,
    DryLoadReport,
    LoadReport,
    Verdict,
    named,
)
from vexport.records.margin import margin_of_shares
from vexport.run.directory import Digests, Run, Stage, data_digest, value_digest
from vexport.run.given import RunModel
from vexport.run.judging import outcome_and_reason, verdict_of
from vexport.run.stages.making import check, checkpoint_inputs
from vexport.scenario import Calibration
from vexport.scenario.evaluate import JudgementSettings, LmEvalSettings, TransportSettings
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


@partial(Stage, "questions", LmEvalSettings)
def resolve_prompting(run: Run) -> LmEvalSettings:
    """Choose the settings of lm-eval's prompts for both models.

    A checkpoint that the run makes has the source's tokenizer and chat template. The tasks'
    documents are downloaded into the cache first, unless both models have finished them. Raises
    InputError if the same prompts cannot be used for both models, or if a margin or gate does not
    fit the tasks' metrics.
    """
    settings = run.evaluation
    if not settings.tasks:
        return DEFAULT_LM_EVAL
    if run.given is not None:
        return lm_eval_settings(settings, run.given.prompt_folders)
    for url in filter(None, (settings.endpoint, settings.baseline_endpoint)):
        require_address(url)
    if not (run.place(CANDIDATE) / SESSION).is_file():
        require_valid_settings(settings, fetch_tasks(settings, run.options))
    return lm_eval_settings(settings, {BASELINE: run.baseline, "source": run.index.root})


def _device_inputs(run: Run) -> Digests:
    serve = run.options.serve
    return {
        **checkpoint_inputs(run),
        "serve devices": value_digest([serve.dry_ranks, serve.compute]),
    }


@partial(
    Stage,
    "dry load",
    DryLoadReport,
    file="dry-load.json",
    when=lambda run: run.result(check).ok and bool(run.options.serve.capabilities),
    digest=_device_inputs,
    makes_checkpoint=True,
)
def dry_load(run: Run) -> DryLoadReport:
    """Load the checkpoint dry for each GPU of the scenario and each tensor parallel size."""
    serve = run.options.serve
    (report,) = dry_load_checkpoints(
        [Folder.at(run.checkpoint)],
        [run.options.vllm_python],
        tp=serve.dry_ranks,
        sm=serve.capabilities,
        trust_remote_code=run.options.trust_remote_code,
        timeout=serve.timeout,
        on_progress=run.options.on_progress,
    )
    return report


def _is_loadable(run: Run) -> bool:
    """Return True if no earlier stage found an error in the checkpoint."""
    checked = run.get(check)
    dry = run.get(dry_load)
    return (checked is None or checked.ok) and (dry is None or dry.ok)


def _texts(run: Run) -> tuple[str, ...]:
    """Return the first halves of calibration texts, for the model to continue.

    Only local text and the default text are used. A run with a given checkpoint has no calibration
    text.
    """
    if run.given is not None:
        return ()
    settings, most = run.scenario.calibration, max(CONTINUED_PROMPTS, run.evaluation.kl_prompts)
    sources = settings.sources() if settings is not None else ()
    local = [data for data in sources if parse_data(data.name).kind != "hub"]
    texts = [text for data in local for text in first_texts(data, most)][:most]
    return tuple(text[: text.rfind(" ", 0, len(text) // 2 + 1)] for text in texts if " " in text)


def serve_digest(arguments: EngineArguments) -> str:
    """Return a digest of the engine's arguments and of the environment that selects its kernels."""
    chosen = kernel_environment()
    return value_digest(dict(arguments) if chosen == NONE else {**arguments, "environment": chosen})


def _model_inputs(run: Run, role: str) -> Digests:
    """Return the digests of a model's inputs, by their names in errors."""
    if run.given is None:
        if role == CANDIDATE:
            return checkpoint_inputs(run)
        return {"baseline": folder_digest(run.baseline)}
    model = run.model(role)
    assert model is not None
    name = "baseline" if role == BASELINE else "checkpoint"
    python = run.engine(role).vllm_python
    digests = {
        "interpreter of vLLM": value_digest(str(python or "")),
        "version of vLLM": value_digest(installed_text(python)),
    }
    if model.checkpoint is not None:
        digests[name] = folder_digest(model.checkpoint)
    if isinstance(model.ref, Server):
        digests[f"address of the {name}"] = value_digest([model.ref.url, str(model.tokenizer)])
        digests[f"model at the address of the {name}"] = value_digest(model.served)
    if role == CANDIDATE:  # some documents run twice if there is no session of the baseline
        digests["kind of baseline"] = value_digest("accepted" if run.given.against else "model")
    return digests


def _session_inputs(run: Run, *, role: str) -> Digests:
    """Return the digests of a session's inputs, including its model."""
    settings = run.evaluation
    files = list[Path]()
    for task in settings.tasks:
        files += sorted(task_files(Path(task)))
    for folder in settings.include_path:
        # Python writes compiled modules next to a task's code when it runs.
        files += [file for file in sorted(folder.rglob("*")) if "__pycache__" not in file.parts]
    ignored = {*JudgementSettings.model_fields, *TransportSettings.model_fields}
    evaluation = settings.model_dump(mode="json", exclude=ignored)
    digests = {f"`{setting}`": value_digest(value) for setting, value in evaluation.items()}
    if settings.text is not None:
        digests["content of `text`"] = data_digest(Calibration(data=settings.text))
    if not run.engine(role).serve.canaries:
        digests["`serve.canaries`"] = value_digest(False)
    return {
        **_model_inputs(run, role),
        **digests,
        "content of the tasks": value_digest(
            [digest_file(file) for file in files if file.is_file()]
        ),
        "chat template": value_digest(_templates(run)),
        "`serve`": serve_digest(run.arguments(role)),
        "prompts": value_digest(list(_texts(run))),
    }


def _templates(run: Run) -> Mapping[str, str] | None:
    """Return the chat templates of the first model, or None if no chat template is applied."""
    if not run.result(resolve_prompting).apply_chat_template:
        return None
    folder = run.baseline if run.given is None else next(iter(run.given.prompt_folders.values()))
    return chat_templates(folder)


def _questions(run: Run, role: str) -> Questions:
    """Return all questions for a model of the run."""
    against = run.given.against if run.given is not None else None
    return Questions(
        evaluate=run.evaluation,
        lm_eval=run.result(resolve_prompting),
        texts=_texts(run),
        repeat=role == BASELINE or against is not None,
        accepted={} if against is None else expected_questions(read_accepted_table(against)),
    )


def _source(run: Run, role: str) -> ResponseSource:
    """Return the source of a model's responses: given results, a server, or vLLM on this machine.

    The fixed prompts are an exception. If the model has a server and a checkpoint, they run in vLLM
    on this machine (see `_serve`).
    """
    model = _model(run, role)
    if isinstance(model.ref, ResultFiles):
        return ExistingResults(results=model.ref.path)
    if not isinstance(model.ref, Server):
        return _engine(run, role)
    if model.checkpoint is None:
        assert model.tokenizer is not None
        folder, is_trusted = model.tokenizer, model.trust_tokenizer
    else:
        tokenizer = tokenizer_of(role, model.ref.url, run.evaluation, run.options, model.checkpoint)
        folder, is_trusted = tokenizer.folder, tokenizer.is_trusted
    return EndpointSource(
        role=model.role,
        url=model.ref.url,
        tokenizer=folder,
        options=run.options,
        trust_tokenizer=is_trusted,
    )


def _engine(run: Run, role: str) -> EngineSource:
    """Return vLLM on this machine as the source of a model's responses."""
    model = _model(run, role)
    assert model.checkpoint is not None
    return EngineSource(
        role=model.role,
        checkpoint=model.checkpoint,
        options=run.engine(role),
        arguments=run.arguments(role),
    )


def _model(run: Run, role: str) -> RunModel:
    model = run.model(role)
    assert model is not None
    return model


def _serve(run: Run, role: str) -> ServedSession:
    """Get a model's responses from vLLM on this machine, from an address, or from both.

    Some documents run twice, to measure the noise. Raises EnvironmentFault if too many of their
    responses differ. Then nothing is compared.
    """
    model = _model(run, role)
    questions = _questions(run, role)
    folder = run.place(role)
    clear_session(folder, run.root)
    if not isinstance(model.ref, Server) or model.checkpoint is None:
        served = _source(run, role).get_responses(questions, folder).served
    else:
        without_tasks = questions.evaluate.model_copy(update={"tasks": ()})
        prompts = replace(questions, evaluate=without_tasks)
        served = _engine(run, role).get_responses(prompts, folder).served
        if served is not None and served.result.failure is None:
            _source(run, role).get_responses(questions, folder)
    remove_answers(folder)
    assert served is not None
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
    when=lambda run: _is_loadable(run) and run.needs_answers(BASELINE),
    digest=partial(_session_inputs, role=BASELINE),
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
    when=lambda run: _is_loadable(run) and run.needs_answers(CANDIDATE),
    digest=partial(_session_inputs, role=CANDIDATE),
)
def serve_candidate(run: Run) -> ServedSession:
    """Get the responses of the checkpoint. Raises InputError if vLLM refused the baseline."""
    baseline = run.get(serve_baseline)
    if baseline is not None:
        require_served(BASELINE, baseline.result)
    served = _serve(run, CANDIDATE)
    if run.given is None and run.work.evaluate is not None and served.result.failure is None:
        with suppress(VexportError):  # `judge` raises it later, unless the load gate decides
            LOG.info(outcome_and_reason(_verdict(run, served)))
    return served


def is_served(run: Run) -> bool:
    """Return True if vLLM was started with the checkpoint. vLLM may have refused it."""
    return run.get(serve_candidate) is not None


def _judges_load(run: Run) -> bool:
    """Return True if the load is judged. `vexport eval` judges only the responses."""
    return is_served(run) and (run.given is None or run.given.evaluate is None)


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
        return _judges_load(run) and run.get(session) is not None

    @partial(Stage, name, LoadReport, file="load.json", place=place, when=is_judged, digest=inputs)
    def load(run: Run) -> LoadReport:
        model = run.given.candidate if run.given is not None else None
        progress = named(model.role if model else role, run.options.on_progress)
        report = judge_by_reference(run.result(session), run.get(serve_baseline), progress)
        if run.given is None:
            return report
        return replace(report, mode=run.given.mode, tp=run.options.serve.ranks)

    return load


load_baseline = _load_stage(BASELINE, serve_baseline, "load baseline", BASELINE)
load_candidate = _load_stage(CANDIDATE, serve_candidate, "load", "")


def load_of(run: Run, session: Stage[ServedSession]) -> LoadReport | None:
    """Return a report on how a model's session started, without a judgement.

    Returns None if the model was not started on this machine.
    """
    served = run.get(session)
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
    is_here = run.given is None or (baseline.result.engine and candidate.result.engine)
    return (baseline, candidate) if is_here else None


@partial(Stage, "drift", Drift, when=lambda run: local_sessions(run) is not None)
def measure_drift(run: Run) -> Drift | None:
    """Measure the distance between both models' log-probabilities on the same prompts."""
    sessions = local_sessions(run)
    assert sessions is not None
    return drift_between(*sessions, run.evaluation)


def _is_compared(run: Run) -> bool:
    """Return True if the run has both models' responses and compares them."""
    if run.given is None:
        served = run.get(serve_candidate)
        has_answers = served is not None and served.result.failure is None
        return has_answers and run.work.evaluate is not None
    return run.given.evaluate is not None and run.given.is_compared


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
    if run.given is not None and served is not None and served.result.failure is not None:
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
    verdict = replace(verdict, warnings=tuple(warnings), candidate=_candidate_kind(run))
    if run.given is None:
        return verdict
    name = run.given.candidate.name
    if run.given.candidate_folder:
        LOG.info("%s: %s", name, outcome_and_reason(verdict))
    return replace(verdict, checkpoint=name)


def _refused_verdict(run: Run, message: str) -> Verdict:
    """Return the verdict on a given checkpoint that vLLM refused."""
    assert run.given is not None
    return Verdict(
        outcome="FAIL",
        reason=f"vLLM refused it: {message}",
        margin=margin_of_shares(run.evaluation.margin),
        alpha=run.evaluation.alpha,
        method="not asked",
        tasks=(),
        checkpoint=run.given.candidate.name,
    )


def _other_warnings(run: Run) -> tuple[str, ...]:
    """Return warnings about the drift or the text, which are added to the verdict."""
    if run.evaluation.text is None:
        drift = run.get(measure_drift)
        return drift_warnings(drift) if drift else ()
    if run.given is not None:
        return ()
    calibration = run.scenario.calibration
    is_seen = calibration is not None and calibration.data == run.evaluation.text
    return (CALIBRATION_TEXT_WARNING,) if is_seen else ()


def _candidate_kind(run: Run) -> CandidateKind:
    """Return what the candidate is, for the names of columns in reports."""
    model = _model(run, CANDIDATE)
    if isinstance(model.ref, ResultFiles):
        return "candidate"
    if model.checkpoint is None:
        return "server"
    index = read_index(model.checkpoint)
    return "quantized" if find_quantization(index.root, index.config) else "unquantized"


def _verdict(run: Run, candidate: ServedSession | None) -> Verdict:
    """Compare the responses of both models. `candidate` is the candidate's session or None."""
    if run.given is not None and run.given.against is not None:
        baseline = Answers(results=run.given.against)
    else:
        baseline = _answers(run, BASELINE, run.get(serve_baseline))
    return verdict_of(run.evaluation, baseline, _answers(run, CANDIDATE, candidate))


def _answers(run: Run, role: str, served: ServedSession | None) -> Answers:
    """Return a model's responses, from its session in this run or from given results."""
    if run.needs_answers(role):
        return Answers(results=run.place(role), served=served)
    return _source(run, role).get_responses(_questions(run, role), run.place(role))
