"""What lets the host wait for a GPU must not grow with the rows of text or with columns."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.command import vexport
from tests.models import save_llama, write_calibration
from tests.quantize.waits import counted_waits

CASES = {
    "gptq": ("W4A16_G32", "--rounding", "gptq", "--smoothing", "0"),
    "refit": ("W4A16_G32", "--rounding", "refit", "--smoothing", "0"),
    "refit of 4-bit inputs": ("NVFP4", "--rounding", "refit", "--smoothing", "0"),
    "static scales and cache": ("FP8", "--rounding", "nearest", "--kv-cache", "fp8"),
    "dynamic scales": ("W8A8", "--rounding", "gptq", "--smoothing", "0.5"),
    "importance": ("W4A16_G32", "--rounding", "nearest", "--observer", "imatrix_mse"),
}


def waits(folder: Path, case: str, *, rows: int, width: int) -> Counter[str]:
    source = save_llama(
        folder / "source",
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=width // 2,
    )
    text = write_calibration(folder / "text.jsonl", rows=rows, length=16)
    lines = [json.loads(line)["input_ids"] for line in text.read_text().splitlines()]
    shortened = (ids[: 16 - number] for number, ids in enumerate(lines))
    text.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in shortened))
    scheme, *options = CASES[case]
    words = ("--scheme", scheme, "--calibration", text, "--no-verify", *options)
    with counted_waits() as counts:
        ran = vexport("quantize", source, folder / "out", *words)
    assert ran.code == 0, ran.stderr
    return counts


@pytest.mark.parametrize("case", CASES)
def test_waits_do_not_grow(case: str, tmp_path: Path) -> None:
    waits(tmp_path / "first", case, rows=2, width=64)  # fills the caches of this process
    few = waits(tmp_path / "few", case, rows=2, width=64)
    many = waits(tmp_path / "many", case, rows=8, width=64)
    wide = waits(tmp_path / "wide", case, rows=2, width=128)
    assert few.total() > 0
    # Fewer folds may be tried with more text, so that smoothing compares less.
    assert not many - few
    assert not wide - few
