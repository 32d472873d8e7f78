"""Serve one checkpoint in several variants, and compare each variant with the first.

Each variant is a run with two sides. All these runs share the run directory and the responses of
the first variant, which is the baseline. Each variant's responses are in a separate folder, so a
second call serves only the variants without responses. If vLLM refuses a variant, the reason is
kept in this folder too. A later call with the same version of vLLM does not try the variant again.
Failures of the environment, such as too little memory, are not kept.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vexport.engine.arguments import find_problems, require_heads
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
from vexport.inference.options import BASELINE, CANDIDATE
from vexport.outputs.manifest import is_recorded, record
from vexport.records import ComparedVariant, VariantOutcome
from vexport.records.values import PROGRESS_DETAIL
from vexport.rules.engine import UNKNOWN_ARGUMENT
from vexport.run.comparison import reported_kl, worst_task
from vexport.run.directory import Digests
from vexport.run.run import Run
from vexport.run.side import Side, local_side, prepare
from vexport.run.stages.serving import (
    COMPARISON,
    SESSION,
    judge,
    measure_drift,
    serve_baseline,
    serve_candidate,
)
from vexport.run.work import Stage
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


def _runs(run: Run) -> list[Run]:
    root = run.candidate.checkpoint
    assert root is not None
    baseline, *others = run.variants
    without_addresses = {"baseline": None, "endpoint": None, "baseline_endpoint": None}
    settings = run.evaluation.model_copy(update=without_addresses)
    settings = _with_same_rows(settings, run.variants)
    preparation = prepare(settings, {BASELINE: root})
    within = VARIANTS if run.made is not None else ""

    def side(role: str, variant: Variant, part: str) -> Side:
        engine = replace(run.options, serve=variant.serve, vllm_python=variant.vllm_python)
        return local_side(
            role,
            root,
            engine,
            name=f"{run.candidate.name} ({variant_name(variant)})",
            label=role if role == BASELINE else variant_name(variant),
            folder="/".join(filter(None, (within, role, part))),
            part="/".join(filter(None, (within, part))),
        )

    first = side(BASELINE, baseline, "")
    return [
        Run(
            run.directory,
            run.options,
            (first, side(CANDIDATE, variant, part)),
            name=variant_name(variant),
            evaluate=settings,
            preparation=preparation,
        )
        for variant, part in zip(others, folder_names(others), strict=True)
    ]


def _with_same_rows(settings: Evaluate, variants: Sequence[Variant]) -> Evaluate:
    """Return the settings with rows of text that fit into the smallest `max_model_len`.

    All variants then read the same rows. A row has at least 2 tokens.
    """
    lengths = [each.serve.max_model_len for each in variants if each.serve.max_model_len]
    if settings.text is None or not lengths:
        return settings
    tokens = max(2, min(settings.text_tokens, min(lengths) - 1))
    return settings.model_copy(update={"text_tokens": tokens})


def variant_name(variant: Variant) -> str:
    """Return the name of a variant in messages: its setting, and its version of vLLM."""
    if not variant.has_other_vllm:
        return variant.setting
    version = installed_text(variant.vllm_python)
    return f"{variant.setting} with vLLM {version or variant.vllm_python}"


def folder_names(variants: Sequence[Variant]) -> list[str]:
    """Return a different folder name for each variant: its setting, and a digest.

    A name does not depend on other variants, so a later call with more variants finds the
    responses.
    """
    names: list[str] = []
    for number, variant in enumerate(variants):
        readable = _UNSAFE_CHARACTERS.sub("-", variant.setting).strip("-.")[:_MAX_NAME_LENGTH]
        python = variant.vllm_python if variant.has_other_vllm else None
        exact = f"{variant.setting}\n{python}\n{variants[:number].count(variant)}"
        names.append(f"{readable}-{digest_bytes(exact.encode())[:_DIGEST_DIGITS]}")
    return names


def serve_variants(run: Run) -> VariantResults:
    """Serve the checkpoint in every variant, and compare the responses with the first variant's.

    Finished variants are not served again. A variant that vLLM refuses, or that fails, does not
    stop the others.

    Raises:
        InputError: an earlier call began with other inputs, or vLLM does not have an argument.
        EnvironmentFault: the environment fails for the first variant. A refusal by vLLM is a row.
    """
    runs = _runs(run)
    for each in runs:
        each.require_same_inputs(serve_baseline)
        each.require_same_inputs(serve_candidate)
    refused = _kept_refusals(runs)
    problems = _find_problems(run.variants, _pending(runs) - refused.keys())
    _require_known(run.variants, problems)
    first = _serve_first(runs[0], run.variants[0], _first(problems, 0), refused.get(0))
    if first.outcome == "REFUSED":
        return VariantResults(rows=(first,))
    rows = [first]
    faults: list[EnvironmentFault] = []
    for number, each in enumerate(runs, 1):
        variant = run.variants[number]
        detail = f"variants{PROGRESS_DETAIL}{variant_name(variant)}"
        run.options.on_progress(detail, number, len(run.variants))
        row, fault = _compare_with_first(
            each, variant, _first(problems, number), refused.get(number)
        )
        rows.append(row)
        if fault is not None:
            faults.append(fault)
        if row.verdict is None:  # otherwise `judge` has logged it
            LOG.info("%s: %s: %s", row.name, row.outcome, row.reason)
        run.recorded |= {name: name for name in each.recorded.values()}
    return VariantResults(rows=tuple(rows), faults=tuple(faults))


def _pending(runs: Sequence[Run]) -> set[int]:
    """Return the numbers of the variants without a finished session. The first variant is 0."""
    pending = {
        number
        for number, run in enumerate(runs, 1)
        if not (run.places[CANDIDATE].folder / SESSION).is_file()
    }
    if not (runs[0].places[BASELINE].folder / SESSION).is_file():
        pending.add(0)
    return pending


def _kept_refusals(runs: Sequence[Run]) -> dict[int, str]:
    kept = [_kept_refusal(runs[0], BASELINE)]
    kept += [_kept_refusal(run, CANDIDATE) for run in runs]
    return {number: reason for number, reason in enumerate(kept) if reason is not None}


def _kept_refusal(run: Run, role: str) -> str | None:
    file = run.places[role].folder / REFUSAL
    if not file.is_file() or not is_recorded(file):
        return None
    refusal = from_json(Refusal, file)
    return refusal.reason if refusal.inputs == _inputs(run, role) else None


def _keep_refusal(run: Run, role: str, reason: str) -> None:
    file = run.places[role].folder / REFUSAL
    record(file)
    write_text(file, to_json(Refusal(inputs=_inputs(run, role), reason=reason)))


def _inputs(run: Run, role: str) -> Digests:
    digest = _session_of(role).digest
    assert digest is not None
    return digest(run)


def _session_of(role: str) -> Stage[ServedSession]:
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
            {
                error.where: error
                for error in problems.get(number, ())
                if error.rule == UNKNOWN_ARGUMENT.id
            }
            for number in numbers
        ]
        for where, error in unknown[0].items():
            if all(where in each for each in unknown):
                place = f"setting {setting}: {where}"
                got, need, fix = error.got, error.need, error.fix
                errors.append(InputError(place, got=got, need=need, fix=fix, rule=error.rule))
    raise_all(errors)


def _serve_first(
    run: Run, variant: Variant, problem: VexportError | None, refused: str | None
) -> ComparedVariant:
    """Get the responses of the first variant, and return its row.

    `problem` is a problem with the variant's arguments. `refused` is the reason if vLLM refused the
    variant in an earlier call.
    """
    row = partial(_row, run, variant, BASELINE)
    reason = refused or _serve(run, BASELINE, variant, problem)
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
    try:
        run.do(serve_baseline)
        reason = refused or _serve(run, CANDIDATE, variant, problem)
        if reason is not None:
            return row("REFUSED", reason), None
        run.do(*COMPARISON)
    except EnvironmentFault as fault:
        return row("NO ANSWER", str(fault)), fault
    except Inconclusive as error:
        return row("INCONCLUSIVE", str(error)), None
    except CheckpointFailed as error:
        return row("FAIL", str(error)), None
    except InputError as error:
        return row("REFUSED", str(error)), None
    return _row_with_verdict(run, row), None


def _serve(run: Run, role: str, variant: Variant, problem: VexportError | None) -> str | None:
    """Get the responses of a variant. Return the reason if vLLM refuses it, and keep the reason.

    Raises EnvironmentFault if the environment fails. Then a later call tries the variant again.
    """
    stage = _session_of(role)
    try:
        _require_possible(run.sides[role], problem)
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


def _require_possible(side: Side, problem: VexportError | None) -> None:
    if problem is not None:
        raise problem
    assert side.checkpoint is not None
    require_heads(side.checkpoint, side.engine.serve.ranks)


def _row(
    run: Run, variant: Variant, role: str, outcome: VariantOutcome, reason: str
) -> ComparedVariant:
    version = installed_text(variant.vllm_python)
    stage = _session_of(role)
    served = run.find(stage)
    if served is not None and served.result.vllm:
        version = served.result.vllm
    return ComparedVariant(
        setting=variant.setting,
        vllm=version,
        vllm_python=str(variant.vllm_python) if variant.has_other_vllm else "",
        folder=str(run.places[role].folder),
        outcome=outcome,
        reason=reason,
    )


def _row_with_verdict(
    run: Run, row: Callable[[VariantOutcome, str], ComparedVariant]
) -> ComparedVariant:
    verdict = run.result(judge)
    tasks = tuple(task.without_flips for task in verdict.tasks)
    return replace(
        row(verdict.outcome, verdict.reason),
        mean_kl=reported_kl(verdict, run.get(measure_drift)),
        worst=worst_task(verdict),
        verdict=replace(verdict, tasks=tasks),
    )


def _can_serve_variants(run: Run) -> bool:
    served = run.find(serve_candidate)
    is_refused = served is not None and served.result.failure is not None
    return bool(run.variants) and run.is_loadable and not is_refused


@partial(Stage, "variants", VariantResults, when=_can_serve_variants)
def compare_variants(run: Run) -> VariantResults:
    """Compare the variants of the checkpoint.

    If the run made the checkpoint, it raises EnvironmentFaults if the environment failed for a
    variant. Otherwise the report contains the other variants.
    """
    results = serve_variants(run)
    if results.faults and run.made is not None:
        raise EnvironmentFaults(results.faults)
    return results
