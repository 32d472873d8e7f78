"""One checkpoint in two CPU builds of vLLM: dry loads, and log-probabilities of text.

VEXPORT_OTHER_VLLM_PYTHON names an interpreter with another version of the CPU build, which
`scripts/setup-vllm VERSION FOLDER` creates. Without this variable, the test is skipped.
"""

import json
import os
from pathlib import Path

import pytest

from tests.command import ROOT, vexport
from vexport.engine.installed import installed_version
from vexport.version import short_version

OTHER_PYTHON = os.environ.get("VEXPORT_OTHER_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(
        not OTHER_PYTHON,
        reason="VEXPORT_OTHER_VLLM_PYTHON is not set to an interpreter",
    ),
]


def test_two_cpu_builds_are_alike(tmp_path: Path) -> None:
    found = (installed_version(None), installed_version(Path(OTHER_PYTHON)))
    versions = ",".join(map(short_version, found))
    model = ROOT / "scenarios" / "demo" / "model"
    options = ("--versions", versions, "--vllm-python", OTHER_PYTHON, "--text-rows", 8)
    run_dir = ("--run-dir", tmp_path / "run", "--format", "json", "--quiet")
    ran = vexport("compare", model, *options, *run_dir)
    assert ran.code == 0, ran.stderr
    rows = json.loads(ran.stdout)["rows"]
    assert [row["outcome"] for row in rows] == ["BASELINE", "SAME"]
    assert rows[1]["mean_kl"] < 1e-3 < rows[1]["kl_limit"]
