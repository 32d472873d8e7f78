"""The real vLLM on broken checkpoints, and in two versions."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.command import vexport
from tests.models import quantize
from tests.mutations.edits import GROUP, change_all, config, spoiled
from tests.texts import assert_contains
from vexport.run.directory import KIND

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_misread_and_refused_checkpoints_fail(tiny_llama: Path, tmp_path: Path) -> None:
    """In one checkpoint, fused layers have different global scales. vLLM refuses the other.

    A second call reuses the results.
    """
    sound = quantize(tiny_llama, tmp_path / "sound", "NVFP4A16")
    misread = spoiled(
        sound, tmp_path / "misread", change_all("k_proj.weight_global_scale", lambda old: 1.5 * old)
    )
    refused = quantize(tiny_llama, tmp_path / "refused", "FP8_DYNAMIC")
    config(GROUP, targets=["Convolution"])(refused)
    folder = tmp_path / "loads"
    call = ("load", misread, refused, "--run-dir", folder, "--format", "json", "--quiet")
    ran = vexport(*call)
    findings = [report["findings"] for report in json.loads(ran.stdout)]
    errors = [
        [finding["check"] for finding in found if finding["severity"] == "error"]
        for found in findings
    ]
    assert (ran.code, errors) == (1, [["logprobs"], ["load"]])
    assert "weight_scale" in findings[1][0]["got"]
    sessions = sorted(folder.glob("*/candidate/session.json"))
    written = [session.stat().st_mtime_ns for session in sessions]
    again = vexport(*call)
    assert (again.code, again.stdout) == (ran.code, ran.stdout)
    assert [session.stat().st_mtime_ns for session in sessions] == written
    runs = sorted(path for path in folder.iterdir())
    assert [path.name for path in runs] == ["1-misread-eager-tp1", "2-refused-eager-tp1"]
    for path, gate in zip(runs, ("logprobs", "load"), strict=True):
        KIND.require_replaceable(path, overwrite=True)
        shown = vexport("report", path, "--format", "json")
        assert shown.code == 1
        assert [finding["check"] for finding in json.loads(shown.stdout)["load"]["findings"]] == [
            gate
        ]


def test_quantizing_again_is_argument_error(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = quantize(tiny_llama, tmp_path / "quantized", "FP8_DYNAMIC")
    given = 'quantization_config={"linear": {"weight": "fp8_per_channel_static"}}'
    ran = vexport("load", checkpoint, "--engine-arg", given, "--quiet")
    assert ran.code == 2
    assert_contains(ran.stderr, "--engine-arg quantization_config:", "already quantized")


OTHER_PYTHON = os.environ.get("VEXPORT_OTHER_VLLM_PYTHON", "")


@pytest.mark.skipif(
    not OTHER_PYTHON,
    reason="VEXPORT_OTHER_VLLM_PYTHON is not set to an interpreter (see scripts/setup-vllm)",
)
def test_loads_in_two_versions(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = quantize(tiny_llama, tmp_path / "nvfp4", "NVFP4A16")
    pythons = ("--vllm-python", sys.executable, "--vllm-python", OTHER_PYTHON)
    ran = vexport("load", checkpoint, *pythons, "--format", "json", "--quiet")
    assert ran.code == 0, ran.stderr
    reports = json.loads(ran.stdout)
    assert [report["vllm_python"] for report in reports] == [sys.executable, OTHER_PYTHON]
    assert len({report["vllm"] for report in reports}) == 2
    assert all(0 < report["logprobs"]["mean_kl"] < 0.003 for report in reports)
