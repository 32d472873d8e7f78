"""The stages of a quantization in order; `run.py` adds the run directory, `cli.py` the terminal."""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from vexport.architectures.text_config import text_config
from vexport.checkpoint.index import SourceIndex, read_index
from vexport.checkpoint.source import pinned_source, resolve_source, source_headers
from vexport.checkpoint.writer import DEFAULT_SHARD_BYTES
from vexport.errors import InputError, nearest
from vexport.errors.extras import require_extra
from vexport.formats.schemes import KEEP, get_scheme, scheme_name
from vexport.numerics.compiling import watch_compilation
from vexport.outputs import (
    NamedPath,
    refuse_existing,
    require_separate,
    resumable_directory,
    working_folder,
)
from vexport.plan import Settings as PlanSettings
from vexport.plan import build_plan, require_accepted
from vexport.plan.build import hidden_rule_notes
from vexport.plan.needs import needs_search, uses_calibration
from vexport.plan.table import scheme_table
from vexport.quantize.recipe import recipe, write_recipe
from vexport.quantize.stream import (
    Search,
    made_from,
    missing_calibration,
    quantize,
)
from vexport.scenario import Calibration as CalibrationSettings
from vexport.scenario import Rule, Scenario
from vexport.scenario import Sensitivity as SensitivitySettings
from vexport.sensitivity.auto import plan_mixed
from vexport.sensitivity.layer_groups import LayerGroup
from vexport.types import Calibration, OnProgress, Plan, SchemeTable, Sensitivity
from vexport.types.observer_names import OBSERVERS

if TYPE_CHECKING:
    from vexport.calibration import Samples

DEFAULTS = PlanSettings()


def is_first_rank() -> bool:
    """Whether this process is the first of torchrun's, or the only one: it alone writes and speaks."""
    return os.environ.get("RANK", "0") == "0"


def rules_for(scheme: str, *, observer: str, ignore: Sequence[str]) -> tuple[Rule, ...]:
    """The rules of a command line: what to ignore is kept, all other linear layers get the scheme."""
    get_scheme(scheme_name(scheme))
    rule = Rule(match="Linear", scheme=scheme_name(scheme), observer=observer)
    return (*ignored_rules(ignore), rule)


def ignored_rules(ignore: Sequence[str]) -> tuple[Rule, ...]:
    """A rule that keeps for each --ignore."""
    try:
        return tuple(Rule(match=pattern, scheme=KEEP) for pattern in ignore)
    except ValidationError as error:
        first = error.errors()[0]
        need = first["msg"].removeprefix("Value error, ")
        raise InputError("--ignore", got=repr(first["input"]), need=need, fix="correct the pattern") from None


def quiet(stage: str, done: int, total: int) -> None:
    """Report progress to nowhere."""


def plan_source(
    source: str,
    rules: Sequence[Rule],
    settings: PlanSettings = DEFAULTS,
    *,
    on_progress: OnProgress = quiet,
) -> tuple[SourceIndex, Plan]:
    """Read a source's headers and plan. Raises InputError for an unusable source or rule."""
    require_observers({rule.observer for rule in rules})
    index = read_index(resolve_source(source, on_progress))
    plan = build_plan(index, rules, settings)
    return index, replace(plan, notes=(*plan.notes, *hidden_rule_notes(index, rules)))


def plan_headers(source: str, rules: Sequence[Rule], settings: PlanSettings, on_progress: OnProgress) -> Plan:
    """The plan alone: of a model on the hub no weights are fetched. Raises as `plan_source`."""
    return plan_with_headers(source, rules, settings, on_progress)[1]


def plan_with_headers(
    source: str, rules: Sequence[Rule], settings: PlanSettings, on_progress: OnProgress
) -> tuple[SourceIndex, Plan]:
    """As `plan_headers`, with the headers; their files may be gone."""
    with source_headers(source, on_progress) as root:
        index, plan = plan_source(str(root), rules, settings)
        return index, replace(plan, source=pinned_source(source, root))


def table_of_schemes(
    source: str, kept: Sequence[Rule], settings: PlanSettings, on_progress: OnProgress
) -> SchemeTable:
    """What every scheme would give for a model, from its headers; see `vexport.plan.table`."""
    with source_headers(source, on_progress) as root:
        table = scheme_table(read_index(root), kept, settings)
        return replace(table, source=pinned_source(source, root))


def require_observers(names: Collection[str]) -> None:
    """InputError for a name that no observer has."""
    for name in names:
        if name not in OBSERVERS:
            raise InputError(
                f"observer {name!r}",
                got="an unknown name",
                need=f"one of {', '.join(OBSERVERS)}",
                fix=f"see `vexport list observers`{nearest(name, list(OBSERVERS))}",
            )


def plan_scenario(
    scenario: Scenario, run_dir: Path | None = None, *, on_progress: OnProgress = quiet
) -> Plan:
    """Plan what a scenario asks for; what `auto` comes to depends on `run_dir`, see `plan_mixed`."""
    return plan_scenario_with_headers(scenario, run_dir, on_progress=on_progress)[1]


def plan_scenario_with_headers(
    scenario: Scenario, run_dir: Path | None = None, *, on_progress: OnProgress = quiet
) -> tuple[SourceIndex, Plan]:
    """As `plan_scenario`, with the source's headers; their files may be gone."""
    settings = plan_settings(scenario)
    if scenario.auto is None:
        return plan_with_headers(scenario.source, scenario.rules, settings, on_progress)
    index = scenario_index(scenario, on_progress=on_progress)
    return index, plan_mixed(index, scenario.rules, scenario.auto, settings, run_dir or scenario.run_dir)


def scenario_index(scenario: Scenario, *, on_progress: OnProgress = quiet) -> SourceIndex:
    """The headers of a scenario's source; InputError for unusable ones, and for unknown observers."""
    require_observers({rule.observer for rule in scenario.rules})
    return read_index(resolve_source(scenario.source, on_progress))


def plan_settings(scenario: Scenario) -> PlanSettings:
    """What a scenario's plan depends on besides its rules."""
    return PlanSettings(
        ranks=scenario.serve.planned_ranks,
        on_unsupported_shape=scenario.on_unsupported_shape,
        kv_cache=scenario.kv_cache,
        origin="scenario",
    )


def will_calibrate(plan: Plan, settings: CalibrationSettings | None) -> bool:
    """Whether samples are to be run; InputError where a plan needs them and there are none, or no file."""
    if settings is None and uses_calibration(plan):
        raise missing_calibration(plan)
    if settings is not None:
        require_data(settings.data)
    return settings is not None and uses_calibration(plan)


def require_data(path: Path) -> None:
    """InputError where there is no calibration file, whether or not it would be read."""
    if not path.is_file():
        got = "a folder" if path.is_dir() else "no such file"
        raise InputError(str(path), got=got, need="a JSONL file", fix="check the path")


def calibrate_plan(
    index: SourceIndex,
    plan: Plan,
    settings: CalibrationSettings | None,
    *,
    on_progress: OnProgress,
    trust_remote_code: bool,
) -> Calibration | None:
    """Run the calibration that a plan needs; None where it needs none."""
    if settings is None or not will_calibrate(plan, settings):
        return None
    require_extra("torch", "calibrating")
    from vexport.calibration import calibrate, default_device

    samples = calibration_samples(index, settings, settings.samples, trust_remote_code=trust_remote_code)
    return calibrate(
        index,
        plan,
        samples,
        on_layer=partial(on_progress, "calibrate (layers)"),
        trust_remote_code=trust_remote_code,
        all_experts=settings.all_experts,
        device=settings.device or default_device(),
    )


def unit_losses(
    index: SourceIndex,
    units: Sequence[LayerGroup],
    calibration: Calibration | None,
    scenario: Scenario,
    *,
    file: Path,
    on_progress: OnProgress,
    trust_remote_code: bool,
) -> Sensitivity:
    """The loss of every unit in each of its schemes; see `vexport.sensitivity.measure`."""
    require_extra("torch", "measuring what each scheme costs")
    from vexport.calibration import default_device
    from vexport.sensitivity.measure import measure

    settings, how = scenario.calibration, scenario.sensitivity or SensitivitySettings()
    if settings is None:
        raise InputError(
            scenario.name,
            got="no calibration data",
            need="samples that show what each group of layers costs",
            fix="add `calibration:` to the scenario",
        )
    return measure(
        index,
        units,
        calibration or Calibration(rows=(), digest="", tokens=0, ranges={}),
        calibration_samples(index, settings, how.samples, trust_remote_code=trust_remote_code),
        method=how.method,
        file=file,
        on_progress=on_progress,
        trust_remote_code=trust_remote_code,
        device=settings.device or default_device(),
    )


def calibration_samples(
    index: SourceIndex, settings: CalibrationSettings, number: int, *, trust_remote_code: bool
) -> "Samples":
    """The first rows of a calibration file as token ids of the checkpoint; InputError for bad ones."""
    require_extra("transformers", "calibrating")
    from vexport.calibration import read_samples

    return read_samples(
        settings.data,
        index.root,
        samples=number,
        seq_len=settings.seq_len,
        vocab_size=vocab_size(index),
        trust_remote_code=trust_remote_code,
    )


def vocab_size(index: SourceIndex) -> int:
    """The number of token ids that the model knows, from its config."""
    size = text_config(index.config).get("vocab_size")
    if isinstance(size, int):
        return size
    place = str(index.root / "config.json")
    raise InputError(
        place, got="no vocab_size", need="the number of tokens", fix="restore the model's config.json"
    )


def write_checkpoint(
    index: SourceIndex,
    plan: Plan,
    calibration: Calibration | None,
    out: Path,
    *,
    overwrite: bool,
    on_progress: OnProgress,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    recipe: str,
) -> None:
    """Write the quantized checkpoint `out` with its `recipe`, which appears whole or not at all.

    A call that was broken off is continued by the next one with the same arguments.
    """
    search = _search() if needs_search(plan) else None
    digest = made_from(index, plan, calibration, shard_bytes=shard_bytes)

    def note(text: str) -> None:
        on_progress(f"quantize {text}", 1, 1)

    with (
        resumable_directory(out, made_from=digest, overwrite=overwrite, note=note) as folder,
        watch_compilation(partial(on_progress, "compile kernels, once")) as compilation,
    ):
        write_recipe(recipe, folder)

        def on_bytes(done: int, total: int) -> None:
            compilation.end()
            on_progress("quantize (bytes)", done, total)

        quantize(
            index,
            plan,
            calibration,
            folder,
            search=search,
            shard_bytes=shard_bytes,
            on_bytes=on_bytes,
        )


def _search() -> Search:
    require_extra("torch", "an observer that searches for scales")
    from vexport.quantize.weight_scales import search_scales

    return search_scales


def quantize_source(
    source: str,
    out: Path,
    rules: Sequence[Rule],
    settings: CalibrationSettings | None,
    *,
    planning: PlanSettings = DEFAULTS,
    overwrite: bool,
    trust_remote_code: bool,
    on_progress: OnProgress,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_plan: Callable[[Plan], None] = lambda plan: None,
) -> tuple[Plan, Calibration | None]:
    """Quantize a checkpoint into the folder `out`; see `write_checkpoint`. `on_plan` sees the plan first.

    The answer is what was done, and what the samples showed where they were run. Under torchrun all ranks
    calibrate and the first one writes.
    """
    _require_separate(out, Path(source).expanduser(), settings)
    if is_first_rank():
        refuse_existing(out, overwrite=overwrite)
    index, plan = plan_source(source, rules, planning, on_progress=on_progress)
    _require_separate(out, index.root, settings)
    require_accepted(plan)
    will_calibrate(plan, settings)
    on_plan(plan)
    calibration = calibrate_plan(
        index, plan, settings, on_progress=on_progress, trust_remote_code=trust_remote_code
    )
    if is_first_rank():
        write_checkpoint(
            index,
            plan,
            calibration,
            out,
            overwrite=overwrite,
            on_progress=on_progress,
            shard_bytes=shard_bytes,
            recipe=recipe(
                index,
                plan,
                rules,
                settings,
                calibration,
                out,
                planning=planning,
                source=source,
            ),
        )
    return plan, calibration


def _require_separate(out: Path, source: Path, settings: CalibrationSettings | None) -> None:
    """InputError where `out`, or its working folder, overlaps what `quantize` reads."""
    inputs = [NamedPath(label="SOURCE", path=source)]
    if settings:
        inputs.append(NamedPath(label="--calibration", path=settings.data))
    require_separate([NamedPath(label="OUT", path=path) for path in (out, working_folder(out))], inputs)
