"""Functions that read a source and make a checkpoint."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vexport.checkpoint.source import with_revision
from vexport.engine.gate import Prover
from vexport.formats.plan import Plan
from vexport.plan.build import PlanSettings
from vexport.plan.source import (
    ignored_rules,
    plan_headers,
    requested,
    require_trusted_scenario,
    table_of_schemes,
    with_needed_text,
)
from vexport.quantize.answer import quantized_answer
from vexport.quantize.auto import plan_scenario
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.records import (
    GroupSize,
    KvCache,
    OnProgress,
    OnUnsupportedShape,
    PlanRequest,
    Quantized,
    RepairReport,
    SchemeTable,
    silent,
)
from vexport.records.calibration import Rounding
from vexport.scenario import Calibration, Rule, default_calibration, is_scenario, read_scenario

Name = str | Path


def plan(
    source: Name,
    *,
    scheme: str | None = None,
    recipe: Name | None = None,
    rules: Sequence[Rule] = (),
    revision: str | None = None,
    run_dir: Name | None = None,
    group_size: GroupSize | None = None,
    observer: str | None = None,
    input_observer: str | None = None,
    rounding: Rounding | None = None,
    ignore: Sequence[str] = (),
    kv_cache: KvCache | None = None,
    smoothing: float | None = None,
    on_unsupported_shape: OnUnsupportedShape = "refuse",
    tp: Sequence[int] = (1,),
    has_text: bool = False,
    trust_remote_code: bool = False,
    on_progress: OnProgress = silent,
) -> Plan:
    """Plan from headers alone, as `vexport plan` does; its `refusals` are not raised.

    One of `scheme`, `recipe` and `rules` says how; `has_text` says whether there will be
    calibration text. Or `source` is the file of a scenario, which says all; `run_dir` has what its
    `scheme: auto` chooses by. Observers from any folder are imported only with `trust_remote_code`.
    """
    request = PlanRequest(
        scheme=scheme,
        recipe=None if recipe is None else Path(recipe),
        group_size=group_size,
        observer=observer,
        input_observer=input_observer,
        rounding=rounding,
        ignore=tuple(ignore),
        kv_cache=kv_cache,
        smoothing=smoothing,
        on_unsupported_shape=on_unsupported_shape,
        tp=tuple(tp),
    )
    if is_scenario(str(source)):
        plain = PlanRequest(on_unsupported_shape=on_unsupported_shape, tp=request.tp)
        if rules or revision is not None or request != plain:
            raise ValueError(f"plan: got arguments next to {source}, need them in the scenario")
        folder = None if run_dir is None else Path(run_dir)
        scenario = read_scenario(Path(source))
        require_trusted_scenario(scenario, Path(source), trusted=trust_remote_code)
        return plan_scenario(scenario, folder, on_progress, trust_remote_code=trust_remote_code)[1]
    wanted, settings = requested(request, rules, _warn, trust_remote_code=trust_remote_code)
    settings = replace(settings, has_text=has_text)
    name = with_revision(str(source), revision)
    return plan_headers(name, wanted, settings, on_progress, trust_remote_code=trust_remote_code)[1]


def plan_schemes(
    source: Name,
    *,
    revision: str | None = None,
    group_size: GroupSize | None = None,
    ignore: Sequence[str] = (),
    kv_cache: KvCache | None = None,
    tp: Sequence[int] = (1,),
    on_progress: OnProgress = silent,
) -> SchemeTable:
    """Compare all schemes, as `vexport plan` does where none is named."""
    settings = PlanSettings(ranks=tuple(tp), kv_cache=kv_cache)
    name = with_revision(str(source), revision)
    return table_of_schemes(name, ignored_rules(ignore), settings, on_progress, group_size)


def quantize(
    source: Name,
    out: Name,
    *,
    scheme: str | None = None,
    recipe: Name | None = None,
    rules: Sequence[Rule] = (),
    revision: str | None = None,
    group_size: GroupSize | None = None,
    observer: str | None = None,
    input_observer: str | None = None,
    rounding: Rounding | None = None,
    ignore: Sequence[str] = (),
    kv_cache: KvCache | None = None,
    smoothing: float | None = None,
    on_unsupported_shape: OnUnsupportedShape = "refuse",
    tp: Sequence[int] = (1,),
    calibration: Calibration | Name | None = None,
    max_shard_size: int = 5_000_000_000,
    verify: bool = True,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    on_progress: OnProgress = silent,
) -> Quantized:
    """Quantize a folder or a model of the hub into the folder `out`, as `vexport quantize` does.

    `scheme` is for all linear layers but those to `ignore`; `rules` say the same layer by layer,
    `recipe` is a file of llm-compressor. `calibration` may be the name of the data alone; without
    any a scheme that needs samples takes the text that ships with vexport. What was written is
    checked before it becomes `out`; with `verify`, where vLLM is installed and VEXPORT_NO_VERIFY
    not set, by a dry load too: CheckpointFailed, and OUT.failed, where it fails.
    """
    data = (
        Calibration(data=str(calibration)) if isinstance(calibration, str | Path) else calibration
    )
    request = PlanRequest(
        scheme=scheme,
        recipe=None if recipe is None else Path(recipe),
        group_size=group_size,
        observer=observer,
        input_observer=input_observer,
        rounding=rounding,
        ignore=tuple(ignore),
        kv_cache=kv_cache,
        smoothing=smoothing,
        on_unsupported_shape=on_unsupported_shape,
        tp=tuple(tp),
    )
    wanted, settings = requested(request, rules, _warn, trust_remote_code=trust_remote_code)
    wanted, settings, text = with_needed_text(wanted, settings, data, default_calibration(), _warn)
    job = QuantizeJob(
        source=with_revision(str(source), revision),
        out=Path(out),
        rules=wanted,
        planning=settings,
        calibration=text,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        shard_bytes=max_shard_size,
        prove=Prover(
            note=warnings.warn,
            keeping=lambda patterns: f"ignore={[*ignore, *patterns]}",
            dry=verify and not os.environ.get("VEXPORT_NO_VERIFY"),
        ).failure,
        on_progress=on_progress,
    )
    return quantized_answer(str(out), *quantize_source(job))


def repair(
    checkpoint: Name,
    out: Name,
    *,
    source: Name | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = silent,
) -> RepairReport:
    """Repair what can be repaired into the folder `out`, as `vexport repair` does."""
    from vexport.repair import repair_checkpoint

    origin = None if source is None else Path(source)
    return repair_checkpoint(
        Path(checkpoint), Path(out), origin, overwrite=overwrite, on_progress=on_progress
    )


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)
