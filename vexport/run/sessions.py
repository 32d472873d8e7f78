"""The stages in vLLM: both models served, judged and compared."""

import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from vexport.calibration.data import parse_rows
from vexport.checkpoint.chat_template import chat_templates
from vexport.checkpoint.source import resolve_source
from vexport.engine.dry.checkpoints import dry_load_checkpoints
from vexport.engine.prompts import CONTINUED
from vexport.evaluation.attribution import attribute
from vexport.evaluation.drift import Limits, drift_warnings, measure_drift
from vexport.evaluation.prompting import lm_eval_settings
from vexport.evaluation.verdict import decide
from vexport.files import from_json, to_json, write_text
from vexport.run.directory import Digests, checkpoint_digest, path_digest, value_digest
from vexport.run.serving import (
    BASELINE,
    CANDIDATE,
    PLAIN,
    Served,
    fetch_tasks,
    require_served,
    scored_pair,
    serve_model,
)
from vexport.run.stages import Stages
from vexport.run.weights import Weights
from vexport.types import Attribution, Drift, DryLoadReport, LmEvalSettings, LoadReport, Outcome, Verdict

# Settings that a session does not depend on.
_WARN = {"kl_limit", "nll_limit"}
SESSION = "session.json"
NOT_RUN = LoadReport(checkpoint="", ok=False, findings=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """What vLLM made of both models."""

    baseline: LoadReport
    candidate: LoadReport


class Sessions:
    """What vLLM makes of the source and of the checkpoint; each stage is done when first asked for."""

    def __init__(self, stages: Stages, weights: Weights) -> None:
        self.stages = stages
        self.weights = weights
        self.scenario = stages.scenario
        self.folder = stages.folder
        self.options = stages.options

    def fetch_tasks(self) -> None:
        """Bring the tasks' documents into the cache first, unless both models have had them."""
        settings = self.scenario.evaluate
        if settings is not None and not (self.folder / "eval" / CANDIDATE / SESSION).is_file():
            fetch_tasks(settings, self.options)

    @cached_property
    def dry_load(self) -> DryLoadReport | None:
        """Where else the checkpoint would load: each GPU of the scenario, for each tensor parallel size.

        None where it names none.
        """
        serve = self.scenario.serve
        if not serve.capabilities:
            return None
        file = self.folder / "dry-load.json"

        def make() -> None:
            (report,) = dry_load_checkpoints(
                [str(self.weights.checkpoint)],
                [self.options.vllm_python],
                tp=serve.dry_ranks,
                sm=serve.capabilities,
                trust_remote_code=self.options.trust_remote_code,
                timeout=serve.timeout,
                on_progress=self.options.on_progress,
            )
            write_text(file, to_json(report))

        devices = value_digest([serve.dry_ranks, serve.compute])
        self.stages.once("dry load", {**self.weights.made_from, "serve devices": devices}, make)
        return from_json(DryLoadReport, file)

    @cached_property
    def loads(self) -> Loads:
        """Both models in vLLM, the baseline first: where it wavers, nothing is compared."""
        baseline, candidate = self._served_baseline, self._served_candidate
        return Loads(
            baseline=self._judged(BASELINE, baseline, baseline),
            candidate=self._judged(CANDIDATE, candidate, baseline),
        )

    @cached_property
    def _served_baseline(self) -> Served:
        digests = {"baseline": checkpoint_digest(self.baseline)}
        served = self._served(BASELINE, self.baseline, digests)
        require_served(BASELINE, served.result)
        return served

    @cached_property
    def _served_candidate(self) -> Served:
        return self._served(CANDIDATE, self.weights.checkpoint, self.weights.made_from)

    @property
    def _early(self) -> bool:
        return self.scenario.evaluate is not None and self.scenario.evaluate.stopping == "early"

    @cached_property
    def verdict(self) -> Verdict:
        """The paired comparison of both models' answers."""
        settings = self.scenario.evaluate
        assert settings is not None
        folder = self.folder / "eval"
        verdict = decide(
            folder / BASELINE,
            folder / CANDIDATE,
            margin=settings.margin,
            alpha=settings.alpha,
            gate=settings.gate,
            early=self._early,
        )
        warned = drift_warnings(self.drift) if self.drift else ()
        return replace(verdict, warnings=(*verdict.warnings, *warned))

    @cached_property
    def drift(self) -> Drift | None:
        """Both models' log-probabilities on the same prompts; None where vLLM refused the candidate."""
        pair = scored_pair(self._served_baseline, self._served_candidate)
        return measure_drift(*pair, limits=self._limits) if pair else None

    def attribution(self, outcome: Outcome) -> Attribution | None:
        """Whose fault a loss is, given the run's outcome; None where vLLM refused the candidate."""
        pair = scored_pair(self._served_baseline, self._served_candidate)
        python = self.options.vllm_python
        if pair is None:
            return None
        return attribute(*pair, limit=self._limits.kl, outcome=outcome, vllm_python=python)

    @property
    def _limits(self) -> Limits:
        settings = self.scenario.evaluate
        return Limits(kl=settings.kl_limit, nll=settings.nll_limit) if settings else Limits()

    @cached_property
    def baseline(self) -> Path:
        """The checkpoint to compare with."""
        settings = self.scenario.evaluate
        name = settings.baseline if settings and settings.baseline else self.scenario.source
        return resolve_source(name, self.options.on_progress)

    @cached_property
    def asked(self) -> LmEvalSettings:
        """How lm-eval asks both models; the candidate has the source's tokenizer and chat template."""
        settings = self.scenario.evaluate
        models = {BASELINE: self.baseline, "source": self.weights.planned[0].root}
        return lm_eval_settings(settings, models) if settings else PLAIN

    def _served(self, role: str, model: Path, digests: Digests) -> Served:
        folder = self.folder / "eval" / role

        def make() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            served = serve_model(
                role,
                model,
                folder,
                self.options,
                texts=self._texts,
                settings=self.scenario.evaluate,
                asked=self.asked,
                baseline=self.folder / "eval" / BASELINE if role == CANDIDATE else None,
                repeat=role == BASELINE,
            )
            write_text(folder / SESSION, to_json(served))

        self.stages.once(f"serve {role}", {**digests, **self._served_with(role)}, make)
        return from_json(Served, folder / SESSION)

    def _judged(self, role: str, served: Served, baseline: Served | None) -> LoadReport:
        """The report on a session; its continuations are judged against the baseline's."""
        file = self.folder / ("load.json" if role == CANDIDATE else f"eval/{role}/load.json")

        def make() -> None:
            self.options.on_progress(f"{role}: reference", 0, 1)
            write_text(file, to_json(served.report(baseline)))
            self.options.on_progress(f"{role}: reference", 1, 1)

        others = value_digest(baseline.result.canaries) if baseline else "none"
        inputs = {"session": value_digest(served.result), "baseline session": others}
        self.stages.once("load" if role == CANDIDATE else f"load {role}", inputs, make)
        return from_json(LoadReport, file)

    def _served_with(self, role: str) -> Digests:
        """What a session depends on besides the model."""
        settings = self.scenario.evaluate
        decides = _WARN if self._early else _WARN | {"margin", "alpha", "gate"}
        sides = settings.model_dump(mode="json", exclude=decides) if settings else None
        templates = chat_templates(self.baseline) if self.asked.apply_chat_template else None
        tasks = map(Path, settings.tasks) if settings else ()
        more = (
            (file for folder in settings.include_path for file in sorted(folder.rglob("*")))
            if settings
            else ()
        )
        files = [path_digest(path) for path in (*tasks, *more) if path.is_file()]
        return {
            "evaluation": value_digest([sides, templates, *files]),
            "serve section": value_digest(self.scenario.serve.arguments(is_baseline=role == BASELINE)),
            "prompts": value_digest(list(self._texts)),
        }

    @cached_property
    def _texts(self) -> tuple[str, ...]:
        """The first halves of calibration texts as prompts: the model knows their kind and can go on."""
        settings, evaluate = self.scenario.calibration, self.scenario.evaluate
        most = max(CONTINUED, evaluate.kl_prompts if evaluate else 0)
        rows = parse_rows(settings.data).values() if settings else ()
        texts = [text for row in rows if isinstance(text := row.get("text"), str)][:most]
        return tuple(text[: text.rfind(" ", 0, len(text) // 2 + 1)] for text in texts if " " in text)
