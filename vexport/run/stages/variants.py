"""Serve one checkpoint in several variants, and compare each variant with the first.

Each variant is a run with a given checkpoint. All these runs share the run directory and the
responses of the first variant, which is the baseline. Each variant's responses are in a separate
folder, so a second call serves only the variants without responses. If vLLM refuses a variant, the
reason is kept in this folder too. A later call with the same version of vLLM does not try the
variant again. Failures of the environment, such as too little memory, are not kept.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vexport.engine.arguments import UNKNOWN, find_problems, require_heads
from vexport.engine.installed import installed_text
from vexport.engine.session import EngineFault
from vexport.errors import (
    CheckpointFailed,
    EnvironmentFault,
    EnvironmentFaults,
    Inconclusive,
    InputError,
    VexportError,
    raise_all,
)
from vexport.files import digest_bytes, from_json, to_json, write_text
from vexport.inference.answers import ServedSession
from vexport.inference.options import BASELINE, CANDIDATE, EngineOptions
from vexport.names import Folder, SourceRef
from vexport.outputs.manifest import is_recorded, record
from vexport.records import ComparedVariant, VariantOutcome
from vexport.records.values import PROGRESS_DETAIL
from vexport.run.comparison import reported_kl, worst_task
from vexport.run.directory import Digests, Run, RunDirectory, Stage
from vexport.run.given import Given, RunModel, variant_name
from vexport.run.stages.order import COMPARISON_STAGES, PREPARATION_STAGES
from vexport.run.stages.serving import (
    SESSION,
    judge,
    measure_drift,
    serve_baseline,
    serve_candidate,
)
from vexport.scenario import Evaluate, Variant

LOG = logging.getLogger(__name__)
# Kinds of engine failures by which vLLM refuses a setting on this machine.
_REFUSALS = ("refused", "unsupported")
# Characters that a folder's name must not contain, the maximum length of the name without its
# digest, and the digits of the digest.
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9._=-]+")
_MAX_NAME_LENGTH = 60
_DIGEST_DIGITS = 8
VARIANTS = "variants"
"""Folder of the variants' responses in the run directory of a scenario."""
REFUSAL = "refusal.json"
"""File with vLLM's reason for refusing a variant, in the folder of the variant's responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """vLLM's reason for refusing a variant.

    `inputs` has the digest of each input of the session that vLLM refused. They include the
    variant's settings, the interpreter and the version of vLLM.
    """

    inputs: Mapping[str, str]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResults:
    """Rows of the compared variants, and the errors of the environment.

    If vLLM refuses the first variant, `rows` contains only the first variant's row.
    """

    rows: tuple[ComparedVariant, ...]
    faults: tuple[EnvironmentFault, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantComparison:
    """A checkpoint, its variants, and the place of their responses.

    `ref` is the checkpoint in the command or scenario, and `root` its folder. The responses
    are in the folder `results_folder` of the run directory `directory`, or in the run directory
    itself if `results_folder` is "".
    """

    ref: SourceRef
    root: Path
    variants: Sequence[Variant]
    settings: Evaluate
    options: EngineOptions
    directory: RunDirectory
    results_folder: str = ""

    def runs(self) -> list[Run]:
        """Return a run for each variant except the first."""
        baseline, *others = self.variants
        folders = folder_names(others)
        return [
            self._run(baseline, each, candidate_folder)
            for each, candidate_folder in zip(others, folders, strict=True)
        ]

    def _run(self, baseline: Variant, variant: Variant, candidate_folder: str) -> Run:
        given = Given(
            name=str(self.ref),
            candidate=self._model(variant, variant_name(variant)),
            baseline=self._model(baseline, BASELINE),
            evaluate=_with_same_rows(self.settings, self.variants),
            candidate_folder=candidate_folder,
            results_folder=self.results_folder,
            prompt_folders={BASELINE: self.root},
        )
        return Run(given, self.directory.root, self.options, directory=self.directory)

    def _model(self, variant: Variant, role: str) -> RunModel:
        return RunModel(ref=self.ref, role=role, checkpoint=self.root, variant=variant)


def _with_same_rows(settings: Evaluate, variants: Sequence[Variant]) -> Evaluate:
    """Return the settings with rows of text that fit into the smallest `max_model_len`.

    All variants then read the same rows. A row has at least 2 tokens.
    """
    lengths = [each.serve.max_model_len for each in variants if each.serve.max_model_len]
    if settings.text is None or not lengths:
        return settings
    tokens = max(2, min(settings.text_tokens, min(lengths) - 1))
    return settings.model_copy(update={"text_tokens": tokens})


def folder_names(variants: Sequence[Variant]) -> list[str]:
    """Return a different folder name for each variant.

    A name does not depend on the order or number of variants, so a later call with more variants
    finds the responses. If a variant is repeated, the later names end with `-copy2`, `-copy3` and
    so on.
    """
    names: list[str] = []
    seen = Counter[str]()
    for variant in variants:
        name = _folder_name(variant)
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-copy{seen[name]}")
    return names


def _folder_name(variant: Variant) -> str:
    """Return a readable folder name for a variant.

    A digest is appended if the name does not show the setting exactly, or if the variant has
    another interpreter. The digest covers the exact setting, the interpreter's path, or both.
    """
    readable = _UNSAFE_CHARACTERS.sub("-", variant.setting).strip("-.")[:_MAX_NAME_LENGTH]
    exact = "" if readable == variant.setting else variant.setting
    if variant.has_other_vllm:
        readable += f"-vllm-{_UNSAFE_CHARACTERS.sub('-', installed_text(variant.vllm_python))}"
        exact += f"\n{variant.vllm_python}"
    digest = f"-{digest_bytes(exact.encode())[:_DIGEST_DIGITS]}" if exact else ""
    return readable + digest


def serve_variants(comparing: VariantComparison) -> VariantResults:
    """Serve the checkpoint in every variant, and compare the responses with the first variant's.

    Finished variants are not served again. A variant that vLLM refuses, or that fails, does not
    stop the others.

    Raises:
        InputError: an earlier call began with other inputs, or vLLM does not have an argument.
        EnvironmentFault: the environment fails for the first variant. A refusal by vLLM is a row.
    """
    runs = comparing.runs()
    for run in runs:
        for stage in PREPARATION_STAGES:
            run.do(stage)
        run.require_same_inputs(serve_baseline)
        run.require_same_inputs(serve_candidate)
    refused = _kept_refusals(runs)
    problems = _find_problems(comparing.variants, _pending(runs) - refused.keys())
    _require_known(comparing.variants, problems)
    first = _serve_first(comparing, runs[0], _first(problems, 0), refused.get(0))
    if first.outcome == "REFUSED":
        return VariantResults(rows=(first,))
    rows = [first]
    faults: list[EnvironmentFault] = []
    for number, run in enumerate(runs, 1):
        variant = comparing.variants[number]
        detail = f"variants{PROGRESS_DETAIL}{variant_name(variant)}"
        comparing.options.on_progress(detail, number, len(comparing.variants))
        row, fault = _compare_with_first(
            run, variant, _first(problems, number), refused.get(number)
        )
        rows.append(row)
        if fault is not None:
            faults.append(fault)
        if row.verdict is None:  # otherwise `judge` has logged it
            LOG.info("%s: %s: %s", row.name, row.outcome, row.reason)
    return VariantResults(rows=tuple(rows), faults=tuple(faults))


def _pending(runs: Sequence[Run]) -> set[int]:
    """Return the numbers of the variants without a finished session. The first variant is 0."""
    pending = {
        number
        for number, run in enumerate(runs, 1)
        if not (run.place(CANDIDATE) / SESSION).is_file()
    }
    if not (runs[0].place(BASELINE) / SESSION).is_file():
        pending.add(0)
    return pending


def _kept_refusals(runs: Sequence[Run]) -> dict[int, str]:
    """Return vLLM's reasons for the variants that it refused in an earlier call, by number."""
    kept = [_kept_refusal(runs[0], BASELINE)]
    kept += [_kept_refusal(run, CANDIDATE) for run in runs]
    return {number: reason for number, reason in enumerate(kept) if reason is not None}


def _kept_refusal(run: Run, role: str) -> str | None:
    """Return vLLM's reason if it refused the same session in an earlier call, else None."""
    file = run.place(role) / REFUSAL
    if not file.is_file() or not is_recorded(file):
        return None
    refusal = from_json(Refusal, file)
    return refusal.reason if refusal.inputs == _inputs(run, role) else None


def _keep_refusal(run: Run, role: str, reason: str) -> None:
    file = run.place(role) / REFUSAL
    record(file)
    write_text(file, to_json(Refusal(inputs=_inputs(run, role), reason=reason)))


def _inputs(run: Run, role: str) -> Digests:
    """Return the digests of the inputs of a model's session."""
    digest = _session_of(role).digest
    assert digest is not None
    return digest(run)


def _session_of(role: str) -> Stage[ServedSession]:
    """Return the stage that gets the responses of the model with this role."""
    return serve_baseline if role == BASELINE else serve_candidate


def require_known_arguments(variants: Sequence[Variant]) -> None:
    """Raise InputErrors for arguments that no vLLM has with which their setting is served."""
    _require_known(variants, _find_problems(variants, {*range(len(variants))}))


Problems = Mapping[int, tuple[VexportError, ...]]
"""Number of a variant -> the problems with its arguments."""


def _find_problems(variants: Sequence[Variant], pending: set[int]) -> Problems:
    """Return the problems of each pending variant with arguments that vLLM does not accept.

    vLLM is started once for each interpreter. If vLLM does not start, every pending variant of this
    interpreter gets the error.
    """
    by_python: dict[Path | None, list[int]] = {}
    for number in sorted(pending):
        by_python.setdefault(variants[number].vllm_python, []).append(number)
    found: dict[int, tuple[VexportError, ...]] = {}
    for python, numbers in by_python.items():
        try:
            problems = find_problems([variants[number].serve for number in numbers], python)
        except EnvironmentFault as fault:
            problems = [(fault,)] * len(numbers)
        found |= dict(zip(numbers, problems, strict=True))
    return {number: problems for number, problems in found.items() if problems}


def _first(problems: Problems, number: int) -> VexportError | None:
    return next(iter(problems.get(number, ())), None)


def _require_known(variants: Sequence[Variant], problems: Problems) -> None:
    """Raise InputErrors for the arguments of a setting that every vLLM refuses as unknown.

    An argument that only some of the compared versions have is no error: these variants are rows.
    """
    by_setting: dict[str, list[int]] = {}
    for number, variant in enumerate(variants):
        by_setting.setdefault(variant.setting, []).append(number)
    errors: list[InputError] = []
    for setting, numbers in by_setting.items():
        unknown = [
            {error.where: error for error in problems.get(number, ()) if error.got == UNKNOWN}
            for number in numbers
        ]
        for where, error in unknown[0].items():
            if all(where in each for each in unknown):
                place = f"setting {setting}: {where}"
                errors.append(InputError(place, got=error.got, need=error.need, fix=error.fix))
    raise_all(errors)


def _serve_first(
    comparing: VariantComparison, run: Run, problem: VexportError | None, refused: str | None
) -> ComparedVariant:
    """Get the responses of the first variant, and return its row.

    `problem` is a problem with the variant's arguments. `refused` is the reason if vLLM refused the
    variant in an earlier call.
    """
    variant = comparing.variants[0]
    row = partial(_row, run, variant, BASELINE)
    reason = refused or _serve(run, BASELINE, variant, comparing.root, problem)
    if reason is not None:
        return row("REFUSED", reason)
    return row("BASELINE", "the other variants are compared with it")


def _compare_with_first(
    run: Run, variant: Variant, problem: VexportError | None, refused: str | None
) -> tuple[ComparedVariant, EnvironmentFault | None]:
    """Compare a variant with the first.

    Return its row, and the error if the environment failed. See `_serve_first` for `problem` and
    `refused`.
    """
    row = partial(_row, run, variant, CANDIDATE)
    model = run.model(CANDIDATE)
    assert model is not None
    assert model.checkpoint is not None
    try:
        run.do(serve_baseline)
        reason = refused or _serve(run, CANDIDATE, variant, model.checkpoint, problem)
        if reason is not None:
            return row("REFUSED", reason), None
        for stage in COMPARISON_STAGES:
            run.do(stage)
    except EnvironmentFault as fault:
        return row("NO ANSWER", str(fault)), fault
    except Inconclusive as error:
        return row("INCONCLUSIVE", str(error)), None
    except CheckpointFailed as error:
        return row("FAIL", str(error)), None
    except InputError as error:
        return row("REFUSED", str(error)), None
    return _row_with_verdict(run, row), None


def _serve(
    run: Run, role: str, variant: Variant, root: Path, problem: VexportError | None
) -> str | None:
    """Get the responses of a variant. Return the reason if vLLM refuses it, and keep the reason.

    Raises EnvironmentFault if the environment fails. Then a later call tries the variant again.
    """
    stage = _session_of(role)
    try:
        _require_possible(root, variant, problem)
        run.do(stage)
    except EngineFault as fault:
        if fault.failure.kind not in _REFUSALS:
            raise
        reason = fault.failure.message
    except InputError as error:
        reason = str(error)
    else:
        failure = run.result(stage).result.failure
        return None if failure is None else failure.message
    _keep_refusal(run, role, reason)
    return reason


def _require_possible(root: Path, variant: Variant, problem: VexportError | None) -> None:
    """Raise the problem with a variant's arguments, or InputError if its heads cannot be split."""
    if problem is not None:
        raise problem
    require_heads(root, variant.serve.ranks)


def _row(
    run: Run, variant: Variant, role: str, outcome: VariantOutcome, reason: str
) -> ComparedVariant:
    """Return the row of a variant without its verdict and its measured values."""
    version = installed_text(variant.vllm_python)
    stage = _session_of(role)
    served = run.get(stage) if run.is_reached(stage) else None
    if served is not None and served.result.vllm:
        version = served.result.vllm
    return ComparedVariant(
        setting=variant.setting,
        vllm=version,
        vllm_python=str(variant.vllm_python) if variant.has_other_vllm else "",
        folder=str(run.place(role)),
        outcome=outcome,
        reason=reason,
    )


def _row_with_verdict(
    run: Run, row: Callable[[VariantOutcome, str], ComparedVariant]
) -> ComparedVariant:
    """Return the row of a variant with its verdict."""
    verdict = run.result(judge)
    tasks = tuple(replace(task, flips=()) for task in verdict.tasks)
    return replace(
        row(verdict.outcome, verdict.reason),
        mean_kl=reported_kl(verdict, run.get(measure_drift)),
        worst=worst_task(verdict),
        verdict=replace(verdict, tasks=tasks),
    )


def _can_serve_variants(run: Run) -> bool:
    """Return True if the scenario has variants, and vLLM did not refuse the checkpoint."""
    if run.given is not None or run.scenario.variants is None:
        return False
    served = run.get(serve_candidate)
    return served is not None and served.result.failure is None


@partial(Stage, "variants", VariantResults, when=_can_serve_variants)
def compare_variants_of_run(run: Run) -> VariantResults:
    """Compare the variants of the checkpoint that the run made.

    Raises EnvironmentFaults if the environment failed for a variant.
    """
    variants = run.scenario.variants
    assert variants is not None
    without_addresses = {"baseline": None, "endpoint": None, "baseline_endpoint": None}
    comparing = VariantComparison(
        ref=Folder.at(run.checkpoint),
        root=run.checkpoint,
        variants=variants.matrix(run.options.serve, run.options.vllm_python),
        settings=run.evaluation.model_copy(update=without_addresses),
        options=run.options,
        directory=run.directory,
        results_folder=VARIANTS,
    )
    results = serve_variants(comparing)
    if results.faults:
        raise EnvironmentFaults(results.faults)
    return results
