"""What a quantized checkpoint has besides its weights: index, side files, config.json, which comes last."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from vexport.checkpoint.chat_template import copy_named_templates
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.progress import progress_file, written_digest
from vexport.checkpoint.smoothed import SMOOTHING, write_smoothing
from vexport.checkpoint.writer import Shard, write_index
from vexport.files import write_text
from vexport.formats.config import quantization_config
from vexport.outputs.digests import record_digests
from vexport.outputs.replaceable import RECIPE
from vexport.types import Calibration, Json, Plan


def finish(
    index: SourceIndex,
    plan: Plan,
    calibration: Calibration | None,
    folder: Path,
    shards: Sequence[Shard],
) -> None:
    """Write what a checkpoint has besides weights: index of all `shards`, side files, config.json last."""
    write_index(folder, shards)
    _copy_side_files(index, folder)
    write_smoothing(calibration.smoothing if calibration else {}, folder)
    record_digests(folder, {shard.name: written_digest(folder / shard.name) for shard in shards})
    write_config(index, plan, folder)


def forget_progress(folder: Path, shards: Sequence[Shard]) -> None:
    """Remove what tells how far shards are written: they are whole."""
    for shard in shards:
        progress_file(folder / shard.name).unlink(missing_ok=True)


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
