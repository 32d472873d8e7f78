"""The schemes that `vexport check` grants to routed experts are those that vLLM has for them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import copytree

import pytest

from tests.command import vexport
from tests.models import write_calibration
from vexport.checks import check_checkpoint
from vexport.engine.dry.load import dry_loads
from vexport.types import Json

PEER = Path(__file__).parent.parent / "peer"
SCHEMES = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W4A16", "W8A16", "NVFP4A16", "MXFP8")
BY_TOKEN: Mapping[str, Json] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
FLOATS_BY_TOKEN: Mapping[str, Json] = {**BY_TOKEN, "type": "float"}
# What becomes of a scheme, so that vLLM has it for linear layers alone, or not at all.
CHANGES: Mapping[str, tuple[str, Mapping[str, Json]]] = {
    "FP8 without inputs": ("FP8_DYNAMIC", {"input_activations": None}),
    "FP8 blocks without inputs": ("FP8_BLOCK", {"input_activations": None}),
    "packed integers with integer inputs": ("W4A16", {"input_activations": {**BY_TOKEN}}),
    "FP8 channels with one input scale": (
        "FP8_DYNAMIC",
        {"input_activations": {**FLOATS_BY_TOKEN, "strategy": "tensor"}},
    ),
    "FP8 tensors with input scales by token": ("FP8", {"input_activations": {**FLOATS_BY_TOKEN}}),
    "INT8 with one input scale": (
        "W8A8",
        {"input_activations": {**BY_TOKEN, "strategy": "tensor", "dynamic": False}},
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The mixture of tests/peer in a scheme."""
    root = tmp_path_factory.mktemp("experts")
    text = write_calibration(root / "text.jsonl", vocabulary=64)

    def make(scheme: str) -> Path:
        out = root / scheme
        if not out.exists():
            given = ("--scheme", scheme, "--calibration", text, "--ignore", "re:.*self_attn.*", "--quiet")
            ran = vexport("quantize", PEER / "moe", out, *given)
            assert ran.code == 0, ran.stderr
        return out

    return make


def changed(checkpoint: Path, folder: Path, group: Mapping[str, Json]) -> Path:
    """A copy whose config group says otherwise."""
    copytree(checkpoint, folder)
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["quantization_config"]["config_groups"]["group_0"] |= group
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def refuses_experts(checkpoint: Path) -> bool:
    """Whether the check says that vLLM has no such scheme for experts."""
    findings = check_checkpoint(str(checkpoint)).findings
    return any("for routed experts" in finding.expected for finding in findings)


@pytest.mark.vllm
def test_schemes_of_experts_are_those_of_vllm(made: Callable[[str], Path], tmp_path: Path) -> None:
    sound = [made(scheme) for scheme in SCHEMES]
    spoiled = [changed(made(scheme), tmp_path / name, group) for name, (scheme, group) in CHANGES.items()]
    loads = {
        Path(report.checkpoint).name: any(cell.status != "refused" for cell in report.cells)
        for report in dry_loads([*sound, *spoiled], tp=(1,), sm=(80, 90, 100))
    }
    known = {**dict.fromkeys(SCHEMES, True), **dict.fromkeys(CHANGES, False)}
    assert {folder.name: not refuses_experts(folder) for folder in (*sound, *spoiled)} == known
    assert loads == known
