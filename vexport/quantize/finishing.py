"""The files of a quantized checkpoint besides its weights: index, side files, config.json, which comes last.

Its recipe, vexport.json, is a scenario that makes it again, with digests of its inputs. Nothing in it depends
on time or machine, so that equal calls leave equal bytes. Paths are relative to the checkpoint's folder.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.checkpoint.chat_template import copy_named_templates
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.smoothed import SMOOTHING, write_smoothing
from vexport.checkpoint.source import pinned_source
from vexport.checkpoint.writer import Shard, progress_file, write_index, written_digest
from vexport.files import digest_bytes, write_text
from vexport.formats.config import quantization_config
from vexport.outputs import kept_as_failed
from vexport.outputs.digests import record_digests
from vexport.outputs.replaceable import RECIPE
from vexport.records import CalibrationRecord, Json, Plan
from vexport.version import __version__

if TYPE_CHECKING:
    from vexport.quantize.job import QuantizeJob


def finish(
    job: "QuantizeJob",
    index: SourceIndex,
    plan: Plan,
    calibration: CalibrationRecord | None,
    folder: Path,
    shards: Sequence[Shard],
) -> None:
    """Write what a checkpoint has besides weights: index of all `shards`, side files, config.json last.

    What tells how far shards are written is removed: they are whole. Raises what `job.prove` finds, with
    OUT.failed in the place of OUT.
    """
    (folder / RECIPE).write_text(recipe(job, index, plan, calibration), encoding="utf-8")
    write_index(folder, shards)
    _copy_side_files(index, folder)
    write_smoothing(calibration.smoothing if calibration else {}, folder)
    record_digests(folder, {shard.name: written_digest(folder / shard.name) for shard in shards})
    write_config(index, plan, folder)
    failure = job.prove(folder, plan)
    for shard in shards:
        progress_file(folder / shard.name).unlink(missing_ok=True)
    if failure is not None:
        raise kept_as_failed(folder, job.out, failure)


def write_config(index: SourceIndex, plan: Plan, folder: Path) -> None:
    """Write config.json: the source's, with the quantization that vLLM has to know."""
    config: dict[str, Json] = dict(index.config)
    if plan.groups or plan.attention:
        config["quantization_config"] = quantization_config(plan)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _copy_side_files(index: SourceIndex, folder: Path) -> None:
    """Tokenizer, templates and the like; not what vexport left in a source that is its own."""
    for file in index.side_files:
        if file.name not in (RECIPE, SMOOTHING):
            shutil.copyfile(file, folder / file.name)
    copy_named_templates(index.root, folder)


SNAPSHOTS = "snapshots"


def recipe(job: "QuantizeJob", index: SourceIndex, plan: Plan, calibration: CalibrationRecord | None) -> str:
    """The text of OUT/vexport.json, whose `scenario` is what `vexport plan` and `vexport run` read of it."""
    path, folder, settings = Path(job.source).expanduser(), job.out.resolve(), job.calibration
    scenario: dict[str, Json] = {
        "name": _name(job.source, plan),
        "source": _relative(path, folder) if path.exists() else pinned_source(job.source, index.root),
        "rules": [rule.model_dump(mode="json") for rule in job.rules],
        "on_unsupported_shape": job.planning.on_unsupported_shape,
        "serve": {"dry_tensor_parallel": list(job.planning.ranks)},
    }
    if plan.kv_cache:
        scenario["kv_cache"] = plan.kv_cache
    if job.planning.smoothing is not None:
        scenario["smoothing"] = job.planning.smoothing
    if settings is not None and calibration is not None:
        data = settings.model_dump(mode="json", exclude_none=True)
        local = settings.path
        scenario["calibration"] = {**data, "data": _relative(local, folder) if local else settings.data}
    content: dict[str, Json] = {
        "vexport": __version__,
        "source": scenario["source"],
        "headers": dict(_source(index)),
        "scenario": scenario,
    }
    if calibration is not None:
        content["calibration"] = {
            "token_ids_sha256": calibration.digest,
            "tokens": calibration.tokens,
            "rows": _ranges(tuple(dict.fromkeys(calibration.rows))),
        }
    return json.dumps(content, indent=2) + "\n"


def _source(index: SourceIndex) -> Iterator[tuple[str, Json]]:
    """The revision of a model of the hub, and a digest of config.json and of all tensors' names and shapes.

    The weights' bytes are not read for it: of a folder they may have changed since.
    """
    if index.root.parent.name == SNAPSHOTS:
        yield "revision", index.root.name
    tensors = [(tensor.name, tensor.dtype, list(tensor.shape)) for tensor in index.tensors.values()]
    parts = json.dumps([index.config, tensors], sort_keys=True)
    yield "config_and_headers_sha256", digest_bytes(parts.encode())
    yield "bytes", index.num_bytes


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder)).as_posix()


def _name(source: str, plan: Plan) -> str:
    """The source's last name and the schemes, in the letters of a scenario's name."""
    path = Path(source).expanduser()
    name = path.resolve().name if path.exists() else source.rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join((name, *plan.schemes))).lstrip("-._") or "model"


def _ranges(rows: Sequence[int]) -> str:
    """Line numbers as ranges: `1-128` or `1-3,7`."""
    ranges: list[list[int]] = []
    for row in rows:
        if ranges and row == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], row]
        else:
            ranges.append([row])
    return ",".join("-".join(map(str, bounds)) for bounds in ranges)
