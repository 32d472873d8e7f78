"""The dry load in an environment with vLLM's CUDA wheel, on a machine without a GPU.

VEXPORT_CUDA_VLLM_PYTHON names the interpreter of the environment, which `scripts/setup-vllm VERSION
FOLDER --cuda` creates. Without this variable, the tests are skipped.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.command import ROOT, vexport
from tests.models import Good, save_w4a8_in_bytes
from tests.texts import assert_contains

PYTHON = os.environ.get("VEXPORT_CUDA_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.cuda_wheel,
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON,
        reason="VEXPORT_CUDA_VLLM_PYTHON is not set to an interpreter",
    ),
]

IN_BYTES = "W4A8 of llm-compressor"
# Precision and kernel of all quantized layers by capability, equal in vLLM 0.32.0 and 0.33.0.
KERNELS: Mapping[str, Mapping[int, str]] = {
    "NVFP4": {
        80: "W4A16 MarlinNvFp4LinearKernel",
        90: "W4A16 HummingNvFp4LinearKernel",
        100: "W4A4 FlashInferCuteDslNvFp4LinearKernel",
    },
    "FP8_DYNAMIC": {
        80: "W8A16 HummingFP8ScaledMMLinearKernel",
        90: "W8A8 CutlassFP8ScaledMMLinearKernel",
        100: "W8A8 CutlassFP8ScaledMMLinearKernel",
    },
    "W4A16": {
        80: "W4A16 MarlinLinearKernel",
        90: "W4A16 MacheteLinearKernel",
        100: "W4A16 MarlinLinearKernel",
    },
    IN_BYTES: dict.fromkeys((80, 90, 100), "W4A16 HummingLinearKernel"),
}
# Imports everything for a dry load, then checks in a forked process that CUDA was not used.
# torch refuses CUDA in a forked process if the parent has initialised it or counted devices.
FORK_AFTER_IMPORTS = """
import os
from vexport.engine.dry.worker import preload

preload()
child = os.fork()
if child == 0:
    import torch
    from vexport.engine.dry.fake_platform import set_capability

    set_capability(100)
    touched = torch.cuda.is_initialized() or torch._C._cuda_isInBadFork()
    os._exit(1 if touched or torch.cuda.get_device_capability() != (10, 0) else 0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def kernels(
    good: Good, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Mapping[int, set[str]]]:
    """Return the precision and kernel of the layers by checkpoint and capability, from one call."""
    folder = tmp_path_factory.mktemp("wheel")
    paths = {name: good(name) for name in KERNELS if name != IN_BYTES}
    paths[IN_BYTES] = save_w4a8_in_bytes(llama, folder / "in bytes")
    answer = folder / "answer.json"
    where = ("--sm", "80,90,100", "--vllm-python", PYTHON)
    ran = vexport("load", *paths.values(), "--dry", *where, "-o", answer, "--quiet")
    assert ran.code == 0, ran.stderr
    found: dict[str, dict[int, set[str]]] = {}
    for name, report in zip(paths, json.loads(answer.read_text()), strict=True):
        # 3 layers, keys and values of 2 heads of 64, 2 bytes each, 256 tokens.
        (rank,) = report["memory"]
        assert rank["sequences"] == [{"tokens": 256, "kv_bytes": 3 * 2 * 2 * 64 * 2 * 256}]
        by_capability = found.setdefault(name, {})
        for cell in (cell for row in report["rows"] for cell in row["cells"]):
            kernel = f"{cell['precision']} {cell['kernel']}"
            by_capability.setdefault(cell["sm"], set()).add(kernel)
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_by_capability(kernels: Mapping[str, Mapping[int, set[str]]], name: str) -> None:
    assert kernels[name] == {sm: {kernel} for sm, kernel in KERNELS[name].items()}


def test_imports_use_no_cuda() -> None:
    command = [PYTHON, "-c", FORK_AFTER_IMPORTS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.parametrize(
    "line",
    [
        "import a_package_that_is_missing",
        "raise ImportError('libcudart.so.13: cannot open shared object file')",
        "import types; types.no_such_attribute",
    ],
)
def test_broken_package_is_environment_fault(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    broken = tmp_path / "packages"
    broken.mkdir()
    (broken / "msgspec.py").write_text(f"{line}\n")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    monkeypatch.delenv("VEXPORT_NO_VERIFY")
    checkpoint, where = good("W4A16"), ("--sm", "90", "--vllm-python", PYTHON)
    ran = vexport("load", checkpoint, "--dry", *where, "--quiet")
    assert ran.code == 4, ran.stdout
    assert_contains(ran.stderr, "package msgspec", "install the package again")
    checked = vexport("check", checkpoint, *where, "--format", "json", "--quiet")
    (report,) = json.loads(checked.stdout)
    assert (checked.code, report["ok"]) == (0, True)
    assert [each["what"] for each in report["not_judged"]] == ["vLLM's loaders"]
