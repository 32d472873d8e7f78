"""The static answers of `vexport check --tp --sm` are those of vLLM's own loaders."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.engine.sketches import LLAMA, QWEN3_MOE, sketch
from tests.models import Good
from tests.mutations.edits import QUANTIZATION, config
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checks import devices
from vexport.checks.vllm.view import CheckpointView, Target
from vexport.engine.dry.load import DryLoad
from vexport.records import Json

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TP = (1, 4)
SM = (75, 80, 89, 90, 100)
SCHEMES = ("NVFP4", "MXFP4XFP8", "MXFP8", "FP8_BLOCK", "W4AFP8", "W4A16_ASYM")
# test_dry_load.py has groups and heads that ranks cut.
SKETCHES: Mapping[str, tuple[Mapping[str, object], str]] = {
    "few key heads": ({**LLAMA, "num_key_value_heads": 2}, "FP8_DYNAMIC"),
    "experts": (QWEN3_MOE, "W4A16"),
}
# An FP8 cache runs in FlashInfer from SM 80 on, with heads of 64, 128, 256 or 512 numbers; else from SM 89.
CACHES = {"cache, heads of 32": LLAMA, "cache, heads of 64": {**LLAMA, "head_dim": 64}}
CACHE_SCHEME: Json = {
    "type": "float",
    "num_bits": 8,
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": False,
}


def static(checkpoint: Path, tp: int, sm: int) -> str:
    with Reader() as reader:
        view = CheckpointView(read_index(checkpoint), reader, Target(tp=(tp,), sm=(sm,)))
        found = list(devices.run(view))
    severities = {finding.severity for finding in found}
    return "refused" if "error" in severities else "other precision" if "warning" in severities else "loads"


def with_cache(folder: Path, model: Mapping[str, object]) -> Path:
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(2) for kind in "kv"]
    made = sketch(folder, model, "FP8_DYNAMIC", dict.fromkeys(names, ("F32", (1,))))
    config(QUANTIZATION, kv_cache_scheme=CACHE_SCHEME)(made)
    return made


def test_check_and_dry_load_agree(good: Good, tmp_path: Path) -> None:
    made = [sketch(tmp_path / name, model, preset, {}) for name, (model, preset) in SKETCHES.items()]
    made += [with_cache(tmp_path / name, model) for name, model in CACHES.items()]
    checkpoints = [*(good(scheme) for scheme in SCHEMES), *made]
    reports = DryLoad(checkpoints=checkpoints, tp=TP, sm=SM).reports()
    differ: list[tuple[object, ...]] = []
    for checkpoint, report in zip(checkpoints, reports, strict=True):
        for cell in report.cells:
            status = static(checkpoint, cell.tp, cell.sm)
            if status != ("refused" if cell.status == "faulty" else cell.status):
                differ.append((checkpoint.name, cell.tp, cell.sm, cell.status, status))
    # Ranks' parts of fewer than 128 rows: only the dry load knows that no kernel quantizes their inputs.
    assert differ == [("MXFP8", 4, 100, "other precision", "loads")]
