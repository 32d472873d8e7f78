"""Checkpoints in the formats of AutoRound, AutoAWQ, GPTQModel, ModelOpt and Quark."""

import json
from pathlib import Path

import pytest

from tests.command import vexport
from tests.models import Good, problems
from tests.mutations.edits import WHOLE, config, spoiled, unquantize
from tests.mutations.methods import any_method
from tests.texts import assert_contains
from vexport.records import Json

CHECKPOINTS = Path(__file__).parent / "methods"
NAMES = sorted(path.name for path in CHECKPOINTS.iterdir())
SOURCES = Path(__file__).parent.parent / "peer"
# A checkpoint for each way to store weights.
SPOILED = (
    *(
        "autoround-llama-MXFP4-auto_round",
        "autoround-llama-W4A16-auto_awq",
        "autoround-llama-W4A16-auto_round",
    ),
    *("modelopt-llama-FP8-KV", "modelopt-llama-MIXED", "modelopt-llama-NVFP4-KV"),
    *("quark-llama-fp8-KV", "quark-llama-int4_wo_32", "quark-llama-int8", "quark-llama-mxfp4"),
)
K = "model.layers.0.self_attn.k_proj"


def source_of(name: str) -> Path:
    return SOURCES / name.split("-")[1]


CHANGES = {**any_method("model.layers.0"), "a layer that is not quantized": unquantize(K, 32, 128)}


@pytest.mark.parametrize("name", NAMES)
def test_sound_checkpoints_have_no_error(name: str) -> None:
    """The exception is GPTQ with 3 bits, which vLLM refuses."""
    errors = [each for each in problems(CHECKPOINTS / name) if each.severity == "error"]
    assert ["bits 3" in each.got for each in errors] == ([True] if name.endswith("W3") else [])


@pytest.mark.parametrize("name", SPOILED)
def test_damaged_checkpoints_are_found(name: str, tmp_path: Path) -> None:
    sound = CHECKPOINTS / name
    broken = [
        spoiled(sound, tmp_path / str(number), change)
        for number, change in enumerate(CHANGES.values())
    ]
    ran = vexport(
        "check", sound, *broken, "--source", source_of(name), "--format", "json", "--quiet"
    )
    right, *wrong = (report["ok"] for report in json.loads(ran.stdout))
    passed = [what for what, ok in zip(CHANGES, wrong, strict=True) if ok]
    assert (ran.code, right, passed) == (1, True, [])


CONFIGS: dict[str, dict[str, Json]] = json.loads(
    (Path(__file__).parent / "configs" / "compressed-tensors-0.20.json").read_text()
)


def rewritten(source: Path, folder: Path, name: str) -> Path:
    return spoiled(source, folder, config(WHOLE, quantization_config=CONFIGS[name]))


@pytest.mark.parametrize("name", ["W8A8", "NVFP4", "W4A16", "FP8_DYNAMIC", "MXFP4", "MXFP8"])
def test_absent_keys_are_read(good: Good, tmp_path: Path, name: str) -> None:
    assert problems(rewritten(good(name), tmp_path / "written", name)) == []


@pytest.mark.parametrize("name", ["MXFP6A16", "MXFP6A8"])
def test_six_bits_are_refused_by_name(good: Good, tmp_path: Path, name: str) -> None:
    found = problems(rewritten(good("MXFP8"), tmp_path / "written", name))
    (refused,) = [finding for finding in found if finding.check == "config"]
    assert_contains(refused.got, "format mxfp6-pack-quantized", "vLLM 0.32")
