"""The stages in vLLM: the checkpoint loaded dry, both models served, what they answered judged."""

import logging
from contextlib import suppress
from pathlib import Path

from vexport.calibration.data import first_texts
from vexport.checkpoint.chat_template import chat_templates
from vexport.checkpoint.data_name import DEFAULT
from vexport.checkpoint.index import folder_digest
from vexport.engine.dry.load import dry_load_checkpoints
from vexport.engine.prompts import CONTINUED
from vexport.errors import VexportError
from vexport.evaluation.prompting import lm_eval_settings
from vexport.run.directory import Digests, data_digest, path_digest, value_digest
from vexport.run.judging import first_line, verdict_of
from vexport.run.making import checkpoint_inputs
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
from vexport.run.state import CHECKED, DRY_LOADED, QUESTIONS, SERVED_BASELINE, SERVED_CANDIDATE, Run
from vexport.scenario import Calibration
from vexport.types import DryLoadReport, LmEvalSettings, LoadReport, named

LOG = logging.getLogger(__name__)
# Settings of the evaluation that a session does not depend on: those that warn, those that decide.
_UNREAD = {"kl_limit", "nll_limit", "margin", "alpha", "gate"}


def settle_questions(run: Run) -> LmEvalSettings:
    """Decide how lm-eval asks both models; the candidate has the source's tokenizer and chat template.

    Brings the tasks' documents into the cache first, unless both models have had them. Raises InputError
    where the models cannot be asked alike.
    """
    settings = run.scenario.evaluate
    if settings is None or not settings.tasks:
        return PLAIN
    if not (run.folder / str(SERVED_CANDIDATE.file)).is_file():
        fetch_tasks(settings, run.options)
    return lm_eval_settings(settings, {BASELINE: run.baseline, "source": run.index.root})


def names_devices(run: Run) -> bool:
    """Return whether a sound checkpoint has GPUs of the scenario to be loaded for."""
    return run.result(CHECKED).ok and bool(run.scenario.serve.capabilities)


def device_inputs(run: Run) -> Digests:
    """Digests of the inputs of the dry load."""
    serve = run.scenario.serve
    return {**checkpoint_inputs(run), "serve devices": value_digest([serve.dry_ranks, serve.compute])}


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


def is_loadable(run: Run) -> bool:
    """Return whether nothing found so far keeps vLLM from loading the checkpoint."""
    dry = run.get(DRY_LOADED)
    return run.result(CHECKED).ok and (dry is None or dry.ok)


def baseline_inputs(run: Run) -> Digests:
    """Digests of the inputs of the baseline's session."""
    return {"baseline": folder_digest(run.baseline), **_session_inputs(run, is_baseline=True)}


def candidate_inputs(run: Run) -> Digests:
    """Digests of the inputs of the checkpoint's session."""
    return {**checkpoint_inputs(run), **_session_inputs(run, is_baseline=False)}


def serve_baseline(run: Run) -> Served:
    """The baseline in vLLM, asked in part twice: where its answers change, nothing is compared."""
    return _served(run, BASELINE, run.baseline)


def serve_candidate(run: Run) -> Served:
    """The checkpoint in vLLM; InputError where the baseline was refused there."""
    baseline = run.result(SERVED_BASELINE)
    require_served(BASELINE, baseline.result)
    served = _served(run, CANDIDATE, run.checkpoint)
    if run.scenario.evaluate is not None and served.result.failure is None:
        answers = run.folder / "eval" / BASELINE, run.folder / "eval" / CANDIDATE
        with suppress(VexportError):  # which `judge` raises, unless the load gate decides
            LOG.info(first_line(verdict_of(run.scenario.evaluate, answers, baseline, served)))
    return served


def _served(run: Run, role: str, model: Path) -> Served:
    folder = run.folder / "eval" / role
    clear_session(folder)
    questions = Questions(
        texts=_texts(run),
        evaluate=run.scenario.evaluate,
        lm_eval=run.result(QUESTIONS),
        repeat=role == BASELINE,
    )
    served = serve_model(role, model, folder, run.options, questions)
    remove_answers(folder)
    return served


def is_served(run: Run) -> bool:
    """Return whether both models were started in vLLM, which may have refused the checkpoint."""
    return run.get(SERVED_CANDIDATE) is not None


def baseline_sessions(run: Run) -> Digests:
    """Digests of the inputs of the report on the baseline's session."""
    return _judged_inputs(run.result(SERVED_BASELINE), run.result(SERVED_BASELINE))


def candidate_sessions(run: Run) -> Digests:
    """Digests of the inputs of the report on the checkpoint's session."""
    return _judged_inputs(run.result(SERVED_CANDIDATE), run.result(SERVED_BASELINE))


def load_baseline(run: Run) -> LoadReport:
    """The report on the baseline's session."""
    return _judged(run, BASELINE, run.result(SERVED_BASELINE))


def load_candidate(run: Run) -> LoadReport:
    """The report on the checkpoint's session; its continuations are judged against the baseline's."""
    return _judged(run, CANDIDATE, run.result(SERVED_CANDIDATE))


def _judged(run: Run, role: str, served: Served) -> LoadReport:
    return served.report(run.result(SERVED_BASELINE), named(role, run.options.on_progress))


def _judged_inputs(served: Served, baseline: Served) -> Digests:
    return {
        "session": value_digest(served.result),
        "baseline session": value_digest(baseline.result.canaries),
    }


def _session_inputs(run: Run, *, is_baseline: bool) -> Digests:
    """Digests of the inputs of a session besides the model."""
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
        "evaluation": value_digest([evaluation, templates, *digests]),
        "serve section": serve_digest(run.scenario.serve.arguments(is_baseline=is_baseline)),
        "prompts": value_digest(list(_texts(run))),
    }


def _texts(run: Run) -> tuple[str, ...]:
    """The first halves of calibration texts as prompts: the model knows their kind and can go on."""
    settings, evaluate = run.scenario.calibration, run.scenario.evaluate
    most = max(CONTINUED, evaluate.kl_prompts if evaluate else 0)
    local = settings is not None and (settings.path or settings.data == DEFAULT)
    texts = first_texts(settings.source(), most) if settings and local else []
    return tuple(text[: text.rfind(" ", 0, len(text) // 2 + 1)] for text in texts if " " in text)
