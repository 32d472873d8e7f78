"""Calibration and rounding on another device than the CPU, and the script that measures a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.architectures.families import save_family
from tests.command import vexport
from tests.forked import finish, start
from tests.models import write_calibration
from tests.quantize.second_device import on_second_device

ROOT = Path(__file__).parent.parent.parent
STAGES = ("device", "kernels", "pipeline", "rounding")
CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
)


@pytest.mark.slow
def test_codes_equal_cpus(tmp_path: Path) -> None:
    """Compare codes of the first layer's inputs. After this layer, attention rounds differently."""
    source = save_family(
        "qwen3-moe",
        tmp_path / "source",
        num_hidden_layers=1,
        hidden_size=128,
        num_attention_heads=2,
    )
    text = write_calibration(tmp_path / "text.jsonl", length=16)
    # Smoothing sets `data` of parameters, which the second device does not support.
    options = [
        "--scheme",
        "W4A16_G32",
        "--rounding",
        "refit",
        "--calibration",
        text,
        "--smoothing",
        "0",
    ]
    words = ("quantize", source, tmp_path / "second", *options, "--device", "second")
    log = tmp_path / "log"
    finish(start(log, on_second_device, *words), log)
    assert vexport("quantize", source, tmp_path / "cpu", *options, "--device", "cpu").code == 0
    stored, expected = (
        load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("second", "cpu")
    )
    assert stored.keys() == expected.keys()
    for name in (f"model.layers.0.self_attn.{part}_proj.weight_packed" for part in "qkv"):
        equal = stored[name].view(torch.uint8) == expected[name].view(torch.uint8)
        assert equal.float().mean() >= 0.999


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_gpu_script_completes(device: str, tmp_path: Path) -> None:
    """The stage `vllm` needs a GPU. On the CPU, other tests cover `vexport load` and `eval`."""
    stages = STAGES if device == "cpu" else (*STAGES, "vllm")
    names = [word for stage in stages for word in ("--stage", stage)]
    command = [
        sys.executable,
        ROOT / "scripts" / "gpu",
        "--device",
        device,
        "--out",
        tmp_path,
        *names,
    ]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["stage"] for row in rows} == set(stages)
    assert (tmp_path / "gpu.md").read_text() == ran.stdout
