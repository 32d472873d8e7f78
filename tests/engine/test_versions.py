"""One checkpoint in two versions of vLLM, each in an environment of its own."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command import vexport
from tests.engine.fixtures import quantize_model

OTHER = os.environ.get("VEXPORT_OTHER_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(
        not OTHER, reason="VEXPORT_OTHER_VLLM_PYTHON names no interpreter (scripts/setup-vllm makes one)"
    ),
]


def test_a_dry_load_in_two_versions(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = quantize_model(tiny_llama, tmp_path / "nvfp4", "NVFP4A16")
    reports = loads(checkpoint, "--dry", "--tp", "1,2")
    assert all(report["ok"] for report in reports), reports
    assert all(len(report["cells"]) == 8 and report["rows"] for report in reports)


def test_a_load_in_two_versions(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = quantize_model(tiny_llama, tmp_path / "nvfp4", "NVFP4A16")
    reports = loads(checkpoint)
    assert all(report["ok"] for report in reports), reports
    assert all(0 < report["logprobs"]["mean_kl"] < 0.003 for report in reports)


def loads(checkpoint: Path, *options: object) -> list[dict[str, Any]]:
    """The reports of our own vLLM and the other one, which must be of different versions."""
    pythons = ("--vllm-python", sys.executable, "--vllm-python", OTHER)
    ran = vexport("load", checkpoint, *pythons, *options, "--format", "json", "--quiet")
    assert ran.code == 0, ran.stderr
    reports: list[dict[str, Any]] = json.loads(ran.stdout)
    assert [report["vllm_python"] for report in reports] == [sys.executable, OTHER]
    assert len({report["vllm"] for report in reports}) == 2
    return reports
