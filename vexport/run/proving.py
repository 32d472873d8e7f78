"""The stages in vLLM: the checkpoint loaded dry, both models served, and their answers compared."""

import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from vexport.calibration.data import first_texts
from vexport.checkpoint.chat_template import chat_templates
from vexport.checkpoint.data_name import DEFAULT
from vexport.checkpoint.index import folder_digest
from vexport.engine.dry.load import dry_load_checkpoints
from vexport.engine.load import CONTINUED
from vexport.errors import VexportError
from vexport.evaluation.drift import drift_warnings
from vexport.evaluation.endpoint import require_address
from vexport.evaluation.prompting import lm_eval_settings
from vexport.records import Drift, DryLoadReport, LmEvalSettings, LoadReport, Verdict, named
from vexport.run.directory import Digests, data_digest, path_digest, value_digest
from vexport.run.endpoints import ask_endpoint, tokenizer_of
from vexport.run.judging import drift_between, first_line, verdict_of
from vexport.run.making import CHECKED, MIXED, checkpoint_inputs
from vexport.run.serving import (
    BASELINE,
    CANDIDATE,
    PLAIN,
    Questions,
    Served,
    clear_session,
    fetch_tasks,
    remove_answers,
    require_served,
    serve_digest,
    serve_model,
)
from vexport.run.state import Run, Stage
from vexport.scenario import Calibration

LOG = logging.getLogger(__name__)
# Settings of the evaluation that a session does not depend on: those that warn, those that decide.
_UNREAD = {
    *("kl_limit", "nll_limit", "margin", "alpha", "gate"),
    *("concurrency", "request_timeout", "retry_seconds"),
}
SESSION = "eval/{}/session.json"
SEEN_TEXT = "the text that decides is the calibration data: give text that the checkpoint was not made with"
LOAD_DECIDES = "the checkpoint failed at load, which decides: what it answered is for information"


def _settle_questions(run: Run) -> LmEvalSettings:
    """Decide how lm-eval asks both models; the candidate has the source's tokenizer and chat template.

    Brings the tasks' documents into the cache first, unless both models have had them. Raises InputError
    where the models cannot be asked alike.
    """
    settings = run.scenario.evaluate
    if settings is None or not settings.tasks:
        return PLAIN
    for url in filter(None, (settings.endpoint, settings.baseline_endpoint)):
        require_address(url)
    if not (run.folder / SESSION.format(CANDIDATE)).is_file():
        fetch_tasks(settings, run.options)
    return lm_eval_settings(settings, {BASELINE: run.baseline, "source": run.index.root})


QUESTIONS = Stage("questions", LmEvalSettings, _settle_questions)


def _device_inputs(run: Run) -> Digests:
    serve = run.scenario.serve
    return {**checkpoint_inputs(run), "serve devices": value_digest([serve.dry_ranks, serve.compute])}


def _dry_load(run: Run) -> DryLoadReport:
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


DRY_LOADED = Stage(
    "dry load",
    DryLoadReport,
    _dry_load,
    "dry-load.json",
    when=lambda run: run.result(CHECKED).ok and bool(run.scenario.serve.capabilities),
    reads=(MIXED, CHECKED),
    digest=_device_inputs,
)


def _is_loadable(run: Run) -> bool:
    """Return whether nothing found so far keeps vLLM from loading the checkpoint."""
    dry = run.get(DRY_LOADED)
    return run.result(CHECKED).ok and (dry is None or dry.ok)


def _texts(run: Run) -> tuple[str, ...]:
    """The first halves of calibration texts as prompts: the model knows their kind and can go on."""
    settings, evaluate = run.scenario.calibration, run.scenario.evaluate
    most = max(CONTINUED, evaluate.kl_prompts if evaluate else 0)
    local = settings is not None and (settings.path or settings.data == DEFAULT)
    texts = first_texts(settings.source(), most) if settings and local else []
    return tuple(text[: text.rfind(" ", 0, len(text) // 2 + 1)] for text in texts if " " in text)


def _session_inputs(run: Run, *, is_baseline: bool) -> Digests:
    """Digests of the inputs of a session, its model among them."""
    settings = run.scenario.evaluate
    evaluation = None
    files: list[Path] = []
    if settings is not None:
        evaluation = settings.model_dump(mode="json", exclude=_UNREAD)
        files = [Path(task) for task in settings.tasks]
        files += [file for folder in settings.include_path for file in sorted(folder.rglob("*"))]
    templates = chat_templates(run.baseline) if run.result(QUESTIONS).apply_chat_template else None
    digests = [path_digest(path) for path in files if path.is_file()]
    if settings is not None and settings.text is not None:
        digests.append(data_digest(Calibration(data=settings.text)))
    return {
        **({"baseline": folder_digest(run.baseline)} if is_baseline else checkpoint_inputs(run)),
        "evaluation": value_digest([evaluation, templates, *digests]),
        "serve section": serve_digest(run.scenario.serve.arguments(is_baseline=is_baseline)),
        "prompts": value_digest(list(_texts(run))),
    }


def _serve(run: Run, role: str, model: Path) -> Served:
    """One of the models in vLLM; the baseline is asked in part twice: where its answers change, nothing is
    compared.
    """
    folder = run.folder / "eval" / role
    clear_session(folder)
    questions = Questions(
        texts=_texts(run),
        evaluate=run.scenario.evaluate,
        lm_eval=run.result(QUESTIONS),
        repeat=role == BASELINE,
    )
    settings = run.scenario.evaluate
    url = (settings.endpoint if role == CANDIDATE else settings.baseline_endpoint) if settings else None
    here = questions
    if settings is not None and url is not None:
        here = replace(questions, evaluate=settings.model_copy(update={"tasks": ()}))
    served = serve_model(role, model, folder, run.options, here)
    if url is not None and served.result.failure is None:
        assert settings is not None
        tokenizer = tokenizer_of(role, url, settings, model)
        ask_endpoint(role, url, tokenizer, folder, run.options, questions)
    remove_answers(folder)
    return served


SERVED_BASELINE = Stage(
    "serve baseline",
    Served,
    lambda run: _serve(run, BASELINE, run.baseline),
    SESSION.format(BASELINE),
    when=_is_loadable,
    reads=(CHECKED, DRY_LOADED, QUESTIONS),
    digest=partial(_session_inputs, is_baseline=True),
)


def _serve_candidate(run: Run) -> Served:
    """The checkpoint in vLLM; InputError where the baseline was refused there."""
    baseline = run.result(SERVED_BASELINE)
    require_served(BASELINE, baseline.result)
    served = _serve(run, CANDIDATE, run.checkpoint)
    if run.scenario.evaluate is not None and served.result.failure is None:
        with suppress(VexportError):  # which `judge` raises, unless the load gate decides
            LOG.info(first_line(_verdict(run, baseline, served)))
    return served


SERVED_CANDIDATE = Stage(
    "serve candidate",
    Served,
    _serve_candidate,
    SESSION.format(CANDIDATE),
    when=_is_loadable,
    reads=(MIXED, CHECKED, DRY_LOADED, QUESTIONS, SERVED_BASELINE),
    digest=partial(_session_inputs, is_baseline=False),
)


def is_served(run: Run) -> bool:
    """Return whether both models were started in vLLM, which may have refused the checkpoint."""
    return run.get(SERVED_CANDIDATE) is not None


def _load_stage(role: str, name: str, file: str) -> Stage[LoadReport]:
    """The report on a model's session; the continuations are judged against the baseline's."""
    session = SERVED_BASELINE if role == BASELINE else SERVED_CANDIDATE

    def inputs(run: Run) -> Digests:
        canaries = run.result(SERVED_BASELINE).result.canaries
        result = run.result(session).result
        return {"session": value_digest(result), "baseline session": value_digest(canaries)}

    def load(run: Run) -> LoadReport:
        progress = named(role, run.options.on_progress)
        return run.result(session).report(run.result(SERVED_BASELINE), progress)

    both = (SERVED_BASELINE, SERVED_CANDIDATE)
    return Stage(name, LoadReport, load, file, when=is_served, reads=both, digest=inputs)


LOADED_BASELINE = _load_stage(BASELINE, "load baseline", "eval/baseline/load.json")
LOADED = _load_stage(CANDIDATE, "load", "load.json")


def _measure_drift(run: Run) -> Drift | None:
    """The distance of both models' log-probabilities on the same prompts."""
    return drift_between(run.result(SERVED_BASELINE), run.result(SERVED_CANDIDATE), run.scenario.evaluate)


DRIFT = Stage("drift", Drift, _measure_drift, when=is_served, reads=(SERVED_BASELINE, SERVED_CANDIDATE))


def _is_evaluated(run: Run) -> bool:
    """Return whether both models answered tasks, or read the text that decides."""
    served = run.get(SERVED_CANDIDATE)
    return served is not None and served.result.failure is None and run.scenario.evaluate is not None


def _judge(run: Run) -> Verdict | None:
    """The paired comparison of both models' answers, or of what they make of the text.

    Where the load gate has failed it decides nothing, and is None for answers that cannot be compared.
    """
    settings = run.scenario.evaluate
    assert settings is not None
    is_loaded = run.result(LOADED).ok
    try:
        verdict = _verdict(run, run.result(SERVED_BASELINE), run.result(SERVED_CANDIDATE))
    except VexportError:
        if is_loaded:
            raise
        return None
    if settings.text is None:
        drift = run.get(DRIFT)
        warnings = drift_warnings(drift) if drift else ()
    else:
        calibration = run.scenario.calibration
        warnings = (SEEN_TEXT,) if calibration and calibration.data == settings.text else ()
    return replace(verdict, warnings=(*verdict.warnings, *warnings, *(() if is_loaded else (LOAD_DECIDES,))))


def _verdict(run: Run, baseline: Served, candidate: Served) -> Verdict:
    assert run.scenario.evaluate is not None
    answers = run.folder / "eval" / BASELINE, run.folder / "eval" / CANDIDATE
    return verdict_of(run.scenario.evaluate, answers, baseline, candidate)


VERDICT = Stage(
    "judge", Verdict, _judge, when=_is_evaluated, reads=(LOADED, DRIFT, SERVED_BASELINE, SERVED_CANDIDATE)
)
