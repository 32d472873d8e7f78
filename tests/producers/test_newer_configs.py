"""Configs as compressed-tensors 0.20 serializes them: without what is null, and of formats no vLLM reads."""

import json
from pathlib import Path

import pytest

from tests.models import Good, problems
from tests.mutations.edits import WHOLE, config, spoiled
from vexport.records import Json

WRITTEN: dict[str, dict[str, Json]] = json.loads(
    (Path(__file__).parent / "configs" / "compressed-tensors-0.20.json").read_text()
)


def rewritten(source: Path, folder: Path, name: str) -> Path:
    return spoiled(source, folder, config(WHOLE, quantization_config=WRITTEN[name]))


@pytest.mark.parametrize("name", ["W8A8", "NVFP4", "W4A16", "FP8_DYNAMIC", "MXFP4", "MXFP8"])
def test_absent_keys_are_read(good: Good, tmp_path: Path, name: str) -> None:
    assert problems(rewritten(good(name), tmp_path / "written", name)) == []


@pytest.mark.parametrize("name", ["MXFP6A16", "MXFP6A8"])
def test_six_bits_are_refused_by_name(good: Good, tmp_path: Path, name: str) -> None:
    found = problems(rewritten(good("MXFP8"), tmp_path / "written", name))
    (refused,) = [one for one in found if one.check == "config"]
    assert refused.got.startswith("format mxfp6-pack-quantized, which vLLM 0.32 does not have")
