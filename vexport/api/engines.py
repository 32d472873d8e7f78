"""Functions that run models in vLLM, in other processes."""

from collections.abc import Sequence
from pathlib import Path

from vexport.api.common import (
    ModelName,
    Name,
    OnNote,
    OnProblem,
    model_ref,
    named,
    parsed,
    python_warning,
    source_ref,
)
from vexport.api.engine import Engine
from vexport.architectures.versions import parse_versions
from vexport.engine.environments import find_interpreters, require_interpreters
from vexport.engine.installed import installed_version
from vexport.engine.session import require_engine
from vexport.formats.gpus import Names, parse_capabilities
from vexport.inference.options import EngineOptions
from vexport.judge.accepted_settings import CompletedSettings, with_accepted_settings
from vexport.plan.source import require_trusted_scenario, with_default_text
from vexport.records import (
    ComparedRun,
    ComparedVersions,
    OnProgress,
    Verdict,
    silent,
)
from vexport.reports.run_record import Report
from vexport.run.eval_run import Evaluations, OnJudged, evaluate_checkpoints
from vexport.run.run import ATTRIBUTION_SECONDS, AttributionSettings
from vexport.run.scenario_run import compare_schemes, run_scenario
from vexport.run.variants_run import compare_variants as compare_variants_of
from vexport.run.versions_run import VERSION_TEXT, VersionsJob
from vexport.run.versions_run import compare_versions as compare_versions_of
from vexport.scenario import (
    Evaluate,
    Variants,
    base_scenario,
    problems_at,
    read_scenario,
)
from vexport.scenario.serve import EngineArguments, with_options


def evaluate(
    checkpoint: ModelName,
    settings: Evaluate,
    folder: Name,
    *,
    engine: Engine | None = None,
    against: Name | None = None,
    accept: Name | None = None,
    overwrite: bool = False,
    attribution: bool | None = None,
    attribution_seconds: int = ATTRIBUTION_SECONDS,
    on_progress: OnProgress = silent,
) -> Verdict | None:
    """Compare a checkpoint with `settings.baseline` or with the accepted baseline `against`.

    This is `vexport eval`. `folder` becomes a run directory with lm-eval's results, the logs of
    vLLM and a report. A second call resumes. The checkpoint's scores are written to the file
    `accept` as an accepted baseline, unless the verdict is FAIL. With `accept` and no baseline,
    nothing is compared and None is returned. If `attribution` is True, the cause of the loss is
    searched for. If `attribution` is None, the search runs unless the verdict is PASS. It takes at
    most `attribution_seconds` seconds.

    Settings that are not in `settings` come from the accepted baseline. InputError is raised for
    settings that contradict it.
    """
    evaluations = evaluate_all(
        [checkpoint],
        settings,
        folder,
        engine=engine,
        against=against,
        accept=accept,
        overwrite=overwrite,
        attribution=attribution,
        attribution_seconds=attribution_seconds,
        on_progress=on_progress,
    )
    return evaluations.verdicts[0] if evaluations.verdicts else None


def evaluate_all(
    checkpoints: Sequence[ModelName],
    settings: Evaluate,
    folder: Name,
    *,
    engine: Engine | None = None,
    against: Name | CompletedSettings | None = None,
    accept: Name | None = None,
    overwrite: bool = False,
    attribution: bool | None = None,
    attribution_seconds: int = ATTRIBUTION_SECONDS,
    on_judged: OnJudged | None = None,
    on_progress: OnProgress = silent,
) -> Evaluations:
    """Compare several checkpoints with the same baseline, which runs once.

    Takes the arguments of `evaluate`. `accept` is possible only for a single checkpoint. `against`
    may also be the result of `with_accepted_settings`. `settings` and `engine` must then already
    contain the settings of the accepted baseline.

    `on_judged` is called when the verdicts are known, before the search for the causes of losses.
    """
    if (settings.baseline and against) or not (settings.baseline or against or accept):
        raise ValueError(
            "evaluate: got no baseline or two, need settings.baseline or against, or only accept"
        )
    if accept is not None and len(checkpoints) != 1:
        raise ValueError(f"evaluate: got accept with {len(checkpoints)} checkpoints, need one")
    engine_settings = engine or Engine()
    serve = engine_settings.serve
    file: Path | None = None
    if isinstance(against, CompletedSettings):
        file = against.file
    elif against is not None:
        file = Path(against)
        given = {key: getattr(settings, key) for key in settings.model_fields_set}
        completed = with_accepted_settings(given, serve, file, command="evaluate")
        with problems_at("evaluate"):
            settings = Evaluate.model_validate(completed.keys)
        serve = completed.serve
    return evaluate_checkpoints(
        [model_ref("evaluate: checkpoint", checkpoint) for checkpoint in checkpoints],
        settings,
        Path(named("evaluate: folder", folder)),
        engine_settings.options(on_progress, serve),
        against=file,
        accept=None if accept is None else Path(accept),
        overwrite=overwrite,
        attribution_settings=AttributionSettings(wanted=attribution, seconds=attribution_seconds),
        on_judged=on_judged,
    )


def run(
    scenario: Name,
    *,
    run_dir: Name | None = None,
    overwrite: bool = False,
    tp: int | None = None,
    engine_args: EngineArguments | None = None,
    engine: Engine | None = None,
    attribution: bool | None = None,
    attribution_seconds: int = ATTRIBUTION_SECONDS,
    on_note: OnNote = python_warning,
    on_progress: OnProgress = silent,
) -> Report:
    """Run every stage of a scenario that is not done yet, as `vexport run` does.

    Use the scenario's `serve` section, overridden by `tp` and `engine_args`.
    """
    scenario = named("run: scenario", scenario)
    (parsed,) = with_default_text([read_scenario(Path(scenario))], on_note)
    trusted = engine is not None and engine.trust_remote_code
    vllm = installed_version(engine.vllm_python if engine else None)
    require_trusted_scenario(parsed, Path(scenario), trusted=trusted, vllm=vllm)
    serve = with_options(parsed.serve, {"tensor_parallel_size": tp}, engine_args or {})
    parsed = parsed.model_copy(update={"serve": serve})
    options = (engine or Engine()).options(on_progress, parsed.serve)
    folder = parsed.run_dir if run_dir is None else Path(run_dir)
    return run_scenario(
        parsed,
        folder,
        options,
        overwrite=overwrite,
        file=Path(scenario),
        attribution_settings=AttributionSettings(wanted=attribution, seconds=attribution_seconds),
    )


def compare(
    source: ModelName,
    schemes: Sequence[str],
    *,
    scenario: Name | None = None,
    run_dir: Name | None = None,
    overwrite: bool = False,
    engine: Engine | None = None,
    on_note: OnNote = python_warning,
    on_problem: OnProblem | None = None,
    on_progress: OnProgress = silent,
) -> tuple[ComparedRun, ...]:
    """Run each scheme with one baseline, as `vexport compare` does.

    `on_problem` is called for each run during which the environment failed. Without it, the first
    of these errors is raised. Any other error of a run is the reason in its row. If every run ends
    with an error, the first error is raised.
    """
    if not schemes:
        raise ValueError("compare: got no scheme, need one or more")
    file = None if scenario is None else Path(scenario)
    base = base_scenario(source_ref("compare: source", source), schemes[0], file)
    if scenario is not None:
        trusted = engine is not None and engine.trust_remote_code
        vllm = installed_version(engine.vllm_python if engine else None)
        require_trusted_scenario(base, Path(scenario), trusted=trusted, vllm=vllm)
    options = (engine or Engine()).options(on_progress, base.serve)
    folder = None if run_dir is None else Path(run_dir)
    rows, faults = compare_schemes(
        base, schemes, folder, options, overwrite=overwrite, note=on_note
    )
    for fault in faults:
        if on_problem is None:
            raise fault
        on_problem(fault)
    return rows


def compare_versions(
    checkpoint: ModelName,
    versions: str | Sequence[str],
    folder: Name,
    *,
    settings: Evaluate | None = None,
    vllm_python: Sequence[Name] = (),
    install: bool = False,
    bisect: bool = False,
    sm: Names | None = None,
    engine: Engine | None = None,
    overwrite: bool = False,
    on_problem: OnProblem | None = None,
    on_progress: OnProgress = silent,
) -> ComparedVersions:
    """Find the first version of vLLM that refuses a checkpoint or differs.

    This is `vexport compare --versions`. `versions` is a range such as "0.30..0.33", or a list. The
    interpreter of a version is in `vllm_python`, or is `engine.vllm_python`, or is in the cache of
    environments. With `install`, missing environments are made in the cache. With `bisect`, only
    the versions that a binary search needs are tried. `settings` has the text to read; by default,
    it is the text that ships with vexport. `sm` accepts the same values as in `load`. `folder`
    becomes a run directory, and a second call resumes. `on_problem` is called for each version for
    which the environment failed. Without it, the first of these errors is raised.

    Raises:
        EnvironmentFault: an environment is missing without `install`.
    """
    given = engine or Engine()
    wanted = parsed("compare_versions: versions", parse_versions, versions)
    capabilities = None if sm is None else parsed("compare_versions: sm", parse_capabilities, sm)
    ref = source_ref("compare_versions: checkpoint", checkpoint)
    pythons = [Path(python) for python in vllm_python]
    interpreters = find_interpreters(wanted, pythons, given.vllm_python)
    if not install:
        require_interpreters(wanted, interpreters, str(ref), pythons)
    require_engine(())
    job = VersionsJob(
        versions=wanted,
        interpreters=interpreters,
        text=settings or Evaluate.model_validate(VERSION_TEXT),
        sm=capabilities,
        bisect=bisect,
    )
    options = EngineOptions(
        serve=given.serve.model_copy(update={"canaries": False}),
        vllm_python=None,
        trust_remote_code=given.trust_remote_code,
        on_progress=on_progress,
    )
    compared = compare_versions_of(ref, job, Path(folder), options, overwrite=overwrite)
    for fault in compared.faults:
        if on_problem is None:
            raise fault
        on_problem(fault)
    return compared.report


def compare_variants(
    checkpoint: ModelName,
    settings: Evaluate,
    folder: Name,
    *,
    serve: Sequence[EngineArguments] = (),
    vllm_python: Sequence[Name] = (),
    engine: Engine | None = None,
    overwrite: bool = False,
    on_problem: OnProblem | None = None,
    on_progress: OnProgress = silent,
) -> Report:
    """Compare settings and versions of vLLM for one checkpoint, as `vexport compare --serve` does.

    Each item of `serve` is a setting: arguments of vLLM. `vllm_python` contains interpreters
    besides `engine.vllm_python`. Each setting is tried with each interpreter, beginning with
    `engine.vllm_python`. The first setting with the first interpreter is the baseline.
    `engine.serve` has the settings that all variants share. `folder` becomes a run directory, and a
    second call resumes. The report's `variants` are the rows of the table. `on_problem` is called
    for each variant for which the environment failed. Without it, the first of these errors is
    raised.
    """
    given = engine or Engine()
    with problems_at("compare_variants"):
        variants = Variants(
            serve=tuple(dict(setting) for setting in serve),
            vllm_python=tuple(Path(python) for python in vllm_python),
        )
    compared = compare_variants_of(
        source_ref("compare_variants: checkpoint", checkpoint),
        variants,
        settings,
        Path(folder),
        given.options(on_progress),
        overwrite=overwrite,
    )
    for fault in compared.faults:
        if on_problem is None:
            raise fault
        on_problem(fault)
    return compared.report
