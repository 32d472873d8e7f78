"""Run a quantization: plan, calibrate, and write weights and side files.

The recipe vexport.json is written into the output. It is a scenario that reproduces the output,
with digests of the inputs. Nothing in it depends on time or machine, so that equal calls write
equal bytes. Paths are relative to the checkpoint's folder.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vexport.architectures.fusion import is_head
from vexport.checkpoint.chat_template import copy_named_templates, named_template_files
from vexport.checkpoint.index import INDEX_NAME, SourceIndex, headers_digest, require_unchanged
from vexport.checkpoint.smoothed import SMOOTHING, write_smoothing
from vexport.checkpoint.source import parse_data, pinned_source
from vexport.checkpoint.writer import (
    DEFAULT_SHARD_BYTES,
    Shard,
    progress_file,
    write_index,
    written_digest,
)
from vexport.errors import CheckpointFailed, InputError
from vexport.files import digest_bytes, write_text
from vexport.formats.config import quantization_config
from vexport.formats.packing.base import Array
from vexport.formats.plan import Plan
from vexport.names import Folder, Server, SourceRef
from vexport.numerics.jit import announce_compilation
from vexport.numerics.ranks import gather, on_first, process_group, rank_and_size
from vexport.outputs import RECIPE
from vexport.outputs.digests import HEADERS, HEADERS_DIGEST, record_digests
from vexport.outputs.manifest import record
from vexport.outputs.replaceable import NamedPath, refuse_existing, require_separate
from vexport.outputs.resumable import (
    aside_folder,
    failed_folder,
    keep_as_failed,
    resumable_directory,
    working_folder,
)
from vexport.plan.blocks import Block
from vexport.plan.build import PlanSettings, require_accepted
from vexport.plan.rules import calibration_need, rounds_with_text
from vexport.plan.source import DEFAULT_SETTINGS, plan_source
from vexport.quantize.plan_calibration import PlanCalibration
from vexport.quantize.samples import require_calibration
from vexport.quantize.stream import input_digest, planned_shards, shards_of_this_rank, write_shards
from vexport.records import CalibrationRecord, Json, OnProgress, silent
from vexport.records.calibration import RoundingReport
from vexport.rules.quantize import OTHER_PLAN
from vexport.scenario import Calibration, Rule
from vexport.version import __version__

SNAPSHOTS, CONFIG = "snapshots", "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeJob:
    """Request to quantize `source` into the folder `out`.

    `source` is a folder or a hub id, as the user wrote it.
    """

    source: SourceRef
    out: Path
    rules: tuple[Rule, ...]
    planning: PlanSettings = DEFAULT_SETTINGS
    calibration: Calibration | None = None
    overwrite: bool = False
    trust_remote_code: bool = False
    shard_bytes: int = DEFAULT_SHARD_BYTES
    # Checks the finished folder before it is renamed to `out`. Returns the error to raise, or None.
    prove: Callable[["QuantizeJob", Path, Plan], CheckpointFailed | None] = (
        lambda job, folder, plan: None
    )
    on_progress: OnProgress = silent


def quantize_source(
    job: QuantizeJob, accepted: Callable[[], None] = lambda: None
) -> tuple[Plan, CalibrationRecord | None, RoundingReport | None]:
    """Quantize a checkpoint.

    `accepted` is called after vexport has accepted the plan and the first calibration rows. Returns
    the plan, the calibration record if samples were run, and the report of rounding if weights were
    rounded by text. The ranks of torchrun share the calibration, rounding and writing. They need a
    common output folder.
    """
    _require_separate(job, None if isinstance(job.source, Server) else job.source.path)
    with process_group():
        if rank_and_size()[0] == 0:
            refuse_existing(job.out, overwrite=job.overwrite)
        index, plan = plan_source(
            job.source,
            job.rules,
            job.planning,
            on_progress=job.on_progress,
            trust_remote_code=job.trust_remote_code,
        )
        _require_separate(job, index.root)
        require_accepted(plan)
        require_calibration(plan, job.calibration)
        _require_same_on_all_ranks(plan)
        accepted()
        calibration, rounding = write_checkpoint(job, index, plan)
    return plan, calibration, rounding


def _require_same_on_all_ranks(plan: Plan) -> None:
    """Raise InputError if this rank's plan differs from the first rank's plan.

    Ranks with different plans would deadlock.
    """
    rank, size = rank_and_size()
    digest = digest_bytes(repr((plan.groups, plan.attention)).encode()) if size > 1 else ""
    if on_first(lambda: digest) != digest:
        raise InputError.of(OTHER_PLAN, f"rank {rank} of {size}")


def write_checkpoint(
    job: QuantizeJob, index: SourceIndex, plan: Plan, known: CalibrationRecord | None = None
) -> tuple[CalibrationRecord | None, RoundingReport | None]:
    """Calibrate, round and write the quantized checkpoint with its recipe.

    The checkpoint appears completely or not at all. If a call is interrupted, the next call with
    the same arguments resumes it. Returns the calibration record, or None if no samples were run,
    and the report of rounding. If `known` is given, `known` is used instead of calibrating.

    Raises InputError if a file of the source has changed since `index` was read. If `job.prove`
    returns a CheckpointFailed, raises this error and leaves OUT.failed instead of OUT.
    """
    text: PlanCalibration | None = None
    finished: Mapping[str, Array] | None = None
    rounding: RoundingReport | None = None
    shards = planned_shards(index, plan, job.shard_bytes)
    with announce_compilation(job.on_progress):
        if calibration_need(plan) and (known is None or rounds_with_text(plan)):
            trust = job.trust_remote_code
            text = PlanCalibration(
                index,
                plan,
                job.calibration,
                on_progress=job.on_progress,
                trust_remote_code=trust,
            )
        inputs = input_digest(
            index, plan, known, text.digest if text else "", shard_bytes=job.shard_bytes
        )
        working = resumable_directory(
            job.out,
            input_digest=inputs,
            overwrite=job.overwrite,
            note=lambda text: job.on_progress(f"quantize {text}", 1, 1),
        )
        with working as folder, require_unchanged(index):
            calibration, aside = known, aside_folder(folder)
            if text is not None:
                if known is None:
                    is_resumed = aside.is_dir() and any(aside.iterdir())
                    if not is_resumed:
                        text.note_duration()
                calibration = known or text.calibrated(aside)
                if rounds_with_text(plan):
                    finished, rounding = text.round(calibration, aside)
                    calibration = rounding.completed(calibration)
            for shard in shards:
                record(folder / shard.name)
                record(progress_file(folder / shard.name))
            write_shards(
                index,
                plan,
                calibration,
                folder,
                shards_of_this_rank(shards),
                finished=finished,
                on_progress=job.on_progress,
            )
            gather(None)  # wait until all ranks have written their files
            if rank_and_size()[0] == 0:
                finish(job, index, plan, calibration, folder, shards)
    return calibration, rounding


def _require_separate(job: QuantizeJob, source: Path | None) -> None:
    inputs = [NamedPath(label="SOURCE", path=source)] if source else []
    for path in job.calibration.paths if job.calibration else ():
        inputs.append(NamedPath(label="--calibration", path=path))
    folders = (job.out, working_folder(job.out), failed_folder(job.out))
    require_separate([NamedPath(label="OUT", path=path) for path in folders], inputs)


def finish(
    job: "QuantizeJob",
    index: SourceIndex,
    plan: Plan,
    calibration: CalibrationRecord | None,
    folder: Path,
    shards: Sequence[Shard[Block]],
) -> None:
    """Write the index of all `shards` and the side files, and config.json last.

    Progress files are removed, because all shards are complete. If `job.prove` returns an error,
    raises this error and leaves OUT.failed instead of OUT.
    """
    for name in (RECIPE, INDEX_NAME, SMOOTHING, CONFIG):
        record(folder / name)
    (folder / RECIPE).write_text(recipe(job, index, plan, calibration), encoding="utf-8")
    write_index(folder, shards)
    _copy_side_files(index, folder)
    write_smoothing(calibration.smoothing if calibration else {}, folder)
    record_digests(folder, {shard.name: written_digest(folder / shard.name) for shard in shards})
    write_config(index, plan, folder, calibration)
    failure = job.prove(job, folder, plan)
    for shard in shards:
        progress_file(folder / shard.name).unlink(missing_ok=True)
    if failure is not None:
        raise keep_as_failed(folder, job.out, failure)


def write_config(
    index: SourceIndex, plan: Plan, folder: Path, calibration: CalibrationRecord | None = None
) -> None:
    """Write config.json: the source's config with the quantization config that vLLM reads.

    A quantized output head differs from the embeddings. The config therefore no longer ties them.
    """
    has_head = any(is_head(group.name) for group in plan.groups)
    config = _untied(index.config) if has_head else dict(index.config)
    if plan.groups or plan.attention:
        ranges = calibration.kv_ranges if calibration is not None else {}
        config["quantization_config"] = quantization_config(plan, ranges)
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def _untied(config: Mapping[str, Json]) -> dict[str, Json]:
    """Return a config, and the configs in it, without tied embeddings."""
    changed = {
        key: _untied(part) if isinstance(part, dict) else part for key, part in config.items()
    }
    if changed.get("tie_word_embeddings") is True:
        changed["tie_word_embeddings"] = False
    return changed


def _copy_side_files(index: SourceIndex, folder: Path) -> None:
    """Copy the tokenizer, templates and other side files.

    Skip the recipe and the smoothing file that vexport wrote into the source.
    """
    for file in index.side_files:
        if file.name not in (RECIPE, SMOOTHING):
            record(folder / file.name)
            shutil.copyfile(file, folder / file.name)
    for name in named_template_files(index.root):
        record(folder / name)
    copy_named_templates(index.root, folder)


def recipe(
    job: "QuantizeJob", index: SourceIndex, plan: Plan, calibration: CalibrationRecord | None
) -> str:
    """Return the text of OUT/vexport.json. `vexport plan` and `vexport run` read its `scenario`."""
    folder = job.out.resolve()
    settings = job.calibration
    scenario: dict[str, Json] = {
        "name": _name(job.source, plan),
        "source": _relative(job.source.path, folder)
        if isinstance(job.source, Folder)
        else pinned_source(job.source, index.root),
        "rules": [rule.model_dump(mode="json") for rule in job.rules],
        "on_unsupported_shape": job.planning.on_unsupported_shape,
        "serve": {"dry_tensor_parallel": list(job.planning.ranks)},
    }
    if plan.kv_cache:
        scenario["kv_cache"] = plan.kv_cache
    if job.planning.smoothing is not None:
        scenario["smoothing"] = job.planning.smoothing
    if job.planning.include_vision:
        scenario["include_vision"] = True
    if settings is not None and calibration is not None:
        scenario["calibration"] = _recorded(settings, folder)
    content: dict[str, Json] = {
        "vexport": __version__,
        "source": scenario["source"],
        HEADERS: dict(_source(index)),
        "scenario": scenario,
    }
    if calibration is not None:
        content["calibration"] = {
            "token_ids_sha256": calibration.digest,
            "tokens": calibration.tokens,
            "rows": _ranges(tuple(dict.fromkeys(calibration.rows))),
        }
    return json.dumps(content, indent=2) + "\n"


def _recorded(settings: Calibration, folder: Path) -> dict[str, Json]:
    """Return the settings of calibration with local paths relative to `folder`.

    The column of a path PATH:COLUMN becomes a setting.
    """
    if not isinstance(settings.data, str):
        sources = [
            each.model_copy(update=_relative_data(each.path, each.column, folder, "path"))
            for each in settings.data
        ]
        settings = settings.model_copy(update={"data": tuple(sources)})
        return settings.model_dump(mode="json", exclude_none=True)
    update = _relative_data(settings.data, settings.column, folder, "data")
    return settings.model_copy(update=update).model_dump(mode="json", exclude_none=True)


def _relative_data(name: str, column: str | None, folder: Path, key: str) -> dict[str, object]:
    parsed = parse_data(name)
    if parsed.kind != "path":
        return {}
    return {key: _relative(parsed.path, folder), "column": column or parsed.column}


def _source(index: SourceIndex) -> Iterator[tuple[str, Json]]:
    if index.root.parent.name == SNAPSHOTS:
        yield "revision", index.root.name
    yield HEADERS_DIGEST, headers_digest(index)
    yield "bytes", index.num_bytes


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder)).as_posix()


def _name(source: SourceRef, plan: Plan) -> str:
    name = "-".join((source.file_name, *plan.schemes))
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("-._") or "model"


def _ranges(rows: Sequence[int]) -> str:
    """Return line numbers as ranges: `1-128` or `1-3,7`."""
    ranges: list[list[int]] = []
    for row in rows:
        if ranges and row == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], row]
        else:
            ranges.append([row])
    return ",".join("-".join(map(str, bounds)) for bounds in ranges)
