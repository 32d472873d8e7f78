"""The stages in vLLM: the checkpoint loaded dry, both models served, and their answers compared."""

import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from vexport.calibration.data import first_texts
from vexport.checkpoint.chat_template import chat_templates
from vexport.checkpoint.index import folder_digest
from vexport.checkpoint.source import DEFAULT
from vexport.engine.describe import NONE, answer_environment
from vexport.engine.dry.load import dry_load_checkpoints
from vexport.engine.load import CONTINUED
from vexport.errors import VexportError
from vexport.evaluation.drift import drift_warnings
from vexport.evaluation.drift import measure_drift as drift_between
from vexport.files import digest_file
from vexport.inference.answers import Served
from vexport.inference.endpoint.server import require_address
from vexport.inference.prompting import lm_eval_settings
from vexport.records import Drift, DryLoadReport, LmEvalSettings, LoadReport, Verdict, named
from vexport.run.directory import Digests, Run, Stage, data_digest, value_digest
from vexport.run.evaluating import first_line, verdict_of
from vexport.run.making import check, checkpoint_inputs
from vexport.run.serving import (
    BASELINE,
    CANDIDATE,
    PLAIN,
    ModelUnderTest,
    clear_session,
    fetch_tasks,
    remove_answers,
    require_served,
    serve_model,
    tokenizer_of,
)
from vexport.scenario import Calibration
from vexport.scenario.serve import EngineArguments

LOG = logging.getLogger(__name__)
# Settings of the evaluation that a session does not depend on: those that warn, those that decide.
_UNREAD = {
    *("kl_limit", "nll_limit", "margin", "alpha", "gate"),
    *("concurrency", "request_timeout", "retry_seconds"),
}
SESSION = "eval/{}/session.json"
SEEN_TEXT = (
    "the text that decides is the calibration data: give text that the checkpoint was not made with"
)
LOAD_DECIDES = "the checkpoint failed at load, which decides: what it answered is for information"


@partial(Stage, "questions", LmEvalSettings)
def settle_questions(run: Run) -> LmEvalSettings:
    """Decide how lm-eval asks both models; the candidate has the source's tokenizer and chat
    template.

    Brings the tasks' documents into the cache first, unless both models have had them. Raises
    InputError where the models cannot be asked alike.
    """
    settings = run.evaluation
    if not settings.tasks:
        return PLAIN
    for url in filter(None, (settings.endpoint, settings.baseline_endpoint)):
        require_address(url)
    if not (run.folder / SESSION.format(CANDIDATE)).is_file():
        fetch_tasks(settings, run.options)
    return lm_eval_settings(settings, {BASELINE: run.baseline, "source": run.index.root})


def _device_inputs(run: Run) -> Digests:
    serve = run.scenario.serve
    return {
        **checkpoint_inputs(run),
        "serve devices": value_digest([serve.dry_ranks, serve.compute]),
    }


@partial(
    Stage,
    "dry load",
    DryLoadReport,
    file="dry-load.json",
    when=lambda run: run.result(check).ok and bool(run.scenario.serve.capabilities),
    digest=_device_inputs,
)
def dry_load(run: Run) -> DryLoadReport:
    """Load the checkpoint dry on each GPU of the scenario, for each tensor parallel size."""
    serve = run.scenario.serve
    (report,) = dry_load_checkpoints(
        [str(run.checkpoint)],
        [run.options.vllm_python],
        tp=serve.dry_ranks,
        sm=serve.capabilities,
        trust_remote_code=run.options.trust_remote_code,
        timeout=serve.timeout,
        on_progress=run.options.on_progress,
    )
    return report


def _is_loadable(run: Run) -> bool:
    """Return whether nothing found so far keeps vLLM from loading the checkpoint."""
    dry = run.get(dry_load)
    return run.result(check).ok and (dry is None or dry.ok)


def _texts(run: Run) -> tuple[str, ...]:
    """The first halves of calibration texts as prompts: the model knows their kind and can go
    on.
    """
    settings, most = run.scenario.calibration, max(CONTINUED, run.evaluation.kl_prompts)
    local = settings is not None and (settings.path or settings.data == DEFAULT)
    texts = first_texts(settings.source(), most) if settings and local else []
    return tuple(text[: text.rfind(" ", 0, len(text) // 2 + 1)] for text in texts if " " in text)


def serve_digest(arguments: EngineArguments) -> str:
    """Digest the arguments that an engine is started with, and the environment that chooses its
    kernels.
    """
    chosen = answer_environment()
    return value_digest(dict(arguments) if chosen == NONE else {**arguments, "environment": chosen})


def _session_inputs(run: Run, *, is_baseline: bool) -> Digests:
    """Digests of the inputs of a session, its model among them."""
    settings = run.evaluation
    files = [Path(task) for task in settings.tasks]
    files += [file for folder in settings.include_path for file in sorted(folder.rglob("*"))]
    digests = [digest_file(path) for path in files if path.is_file()]
    if settings.text is not None:
        digests.append(data_digest(Calibration(data=settings.text)))
    evaluation = settings.model_dump(mode="json", exclude=_UNREAD)
    templates = (
        chat_templates(run.baseline) if run.result(settle_questions).apply_chat_template else None
    )
    return {
        **({"baseline": folder_digest(run.baseline)} if is_baseline else checkpoint_inputs(run)),
        "evaluation": value_digest([evaluation, templates, *digests]),
        "serve section": serve_digest(run.scenario.serve.arguments(is_baseline=is_baseline)),
        "prompts": value_digest(list(_texts(run))),
    }


def _serve(run: Run, role: str, model: Path) -> Served:
    """One of the models in vLLM; where the baseline's answers change, nothing is compared."""
    folder, settings = run.folder / "eval" / role, run.evaluation
    clear_session(folder, run.folder)
    asked = ModelUnderTest(
        role=role,
        checkpoint=model,
        folder=folder,
        options=run.options,
        texts=_texts(run),
        evaluate=settings,
        lm_eval=run.result(settle_questions),
        repeat=role == BASELINE,
    )
    url = settings.endpoint if role == CANDIDATE else settings.baseline_endpoint
    if url is None:
        served = serve_model(asked)
    else:
        served = serve_model(replace(asked, evaluate=settings.model_copy(update={"tasks": ()})))
        if served.result.failure is None:
            tokenizer = tokenizer_of(role, url, settings, run.options, model)
            trusted = tokenizer.is_trusted
            serve_model(
                replace(asked, url=url, checkpoint=tokenizer.folder, trust_tokenizer=trusted)
            )
    remove_answers(folder)
    return served


@partial(
    Stage,
    "serve baseline",
    Served,
    file=SESSION.format(BASELINE),
    when=_is_loadable,
    digest=partial(_session_inputs, is_baseline=True),
)
def serve_baseline(run: Run) -> Served:
    """The baseline in vLLM."""
    return _serve(run, BASELINE, run.baseline)


@partial(
    Stage,
    "serve candidate",
    Served,
    file=SESSION.format(CANDIDATE),
    when=_is_loadable,
    digest=partial(_session_inputs, is_baseline=False),
)
def serve_candidate(run: Run) -> Served:
    """The checkpoint in vLLM; InputError where the baseline was refused there."""
    baseline = run.result(serve_baseline)
    require_served(BASELINE, baseline.result)
    served = _serve(run, CANDIDATE, run.checkpoint)
    if run.scenario.evaluate is not None and served.result.failure is None:
        with suppress(VexportError):  # which `judge` raises, unless the load gate decides
            LOG.info(first_line(_verdict(run, baseline, served)))
    return served


def is_served(run: Run) -> bool:
    """Return whether both models were started in vLLM, which may have refused the checkpoint."""
    return run.get(serve_candidate) is not None


def _load_stage(role: str, session: Stage[Served], name: str, file: str) -> Stage[LoadReport]:
    """The report on a model's session; the continuations are judged against the baseline's."""

    def inputs(run: Run) -> Digests:
        canaries = run.result(serve_baseline).result.canaries
        result = run.result(session).result
        return {"session": value_digest(result), "baseline session": value_digest(canaries)}

    @partial(Stage, name, LoadReport, file=file, when=is_served, digest=inputs)
    def load(run: Run) -> LoadReport:
        progress = named(role, run.options.on_progress)
        return run.result(session).report(run.result(serve_baseline), progress)

    return load


load_baseline = _load_stage(BASELINE, serve_baseline, "load baseline", "eval/baseline/load.json")
load_candidate = _load_stage(CANDIDATE, serve_candidate, "load", "load.json")


@partial(Stage, "drift", Drift, when=is_served)
def measure_drift(run: Run) -> Drift | None:
    """The distance of both models' log-probabilities on the same prompts."""
    return drift_between(run.result(serve_baseline), run.result(serve_candidate), run.evaluation)


def _is_evaluated(run: Run) -> bool:
    """Return whether both models answered tasks, or read the text that decides."""
    served = run.get(serve_candidate)
    return (
        served is not None and served.result.failure is None and run.scenario.evaluate is not None
    )


@partial(Stage, "judge", Verdict, when=_is_evaluated)
def judge(run: Run) -> Verdict | None:
    """The paired comparison of both models' answers, or of what they make of the text.

    Where the load gate has failed it decides nothing, and is None for answers that cannot be
    compared.
    """
    is_loaded = run.result(load_candidate).ok
    try:
        verdict = _verdict(run, run.result(serve_baseline), run.result(serve_candidate))
    except VexportError:
        if is_loaded:
            raise
        return None
    if run.evaluation.text is None:
        drift = run.get(measure_drift)
        warnings = drift_warnings(drift) if drift else ()
    else:
        calibration = run.scenario.calibration
        warnings = (SEEN_TEXT,) if calibration and calibration.data == run.evaluation.text else ()
    return replace(
        verdict, warnings=(*verdict.warnings, *warnings, *(() if is_loaded else (LOAD_DECIDES,)))
    )


def _verdict(run: Run, baseline: Served, candidate: Served) -> Verdict:
    answers = run.folder / "eval" / BASELINE, run.folder / "eval" / CANDIDATE
    return verdict_of(run.evaluation, answers, baseline, candidate)
