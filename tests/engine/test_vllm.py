"""What the real vLLM does with a wrong and a broken checkpoint, and in two versions."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.command import vexport
from tests.engine.fixtures import quantize_model
from vexport.engine.load import fixed_prompts, load_report, load_request
from vexport.engine.messages import SessionResult
from vexport.engine.session import EngineFault, run_session
from vexport.records import silent

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def serve(checkpoint: Path, folder: Path, timeout: float = 300) -> SessionResult:
    request = load_request(checkpoint, fixed_prompts(checkpoint), logprobs_file=folder / "logprobs")
    return run_session(request, log=folder / "vllm.log", timeout=timeout, on_progress=silent)


def test_unshared_global_scales_are_found(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = quantize_model(tiny_llama, tmp_path / "bad", "NVFP4A16", share_scales=False)
    report = load_report(serve(checkpoint, tmp_path), fixed_prompts(checkpoint))
    assert not report.ok
    assert [finding.check for finding in report.findings if finding.severity == "error"] == ["logprobs"]


def test_refused_checkpoint_is_a_result(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = quantize_model(tiny_llama, tmp_path / "refused", "FP8_DYNAMIC")
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["Convolution"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    result = serve(checkpoint, tmp_path)
    assert result.failure is not None
    assert result.failure.kind == "refused"
    assert "weight_scale" in result.failure.message
    report = load_report(result, fixed_prompts(checkpoint))
    assert (report.ok, [finding.check for finding in report.findings]) == (False, ["load"])


def test_timeout_leaves_no_process(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="took too long") as caught:
        serve(tiny_llama, tmp_path, timeout=1)
    assert caught.value.exit_code == 4
    assert not processes_of(tmp_path / "vllm.log")


def processes_of(log: Path) -> list[Path]:
    """The processes that hold the log open, as every process of a session does."""
    return [process for process in Path("/proc").glob("[0-9]*") if _writes(process, log)]


def _writes(process: Path, log: Path) -> bool:
    try:
        return any(link.readlink() == log for link in (process / "fd").iterdir())
    except OSError:
        return False


OTHER = os.environ.get("VEXPORT_OTHER_VLLM_PYTHON", "")


@pytest.mark.skipif(
    not OTHER, reason="VEXPORT_OTHER_VLLM_PYTHON names no interpreter (scripts/setup-vllm makes one)"
)
def test_loads_in_two_versions(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = quantize_model(tiny_llama, tmp_path / "nvfp4", "NVFP4A16")
    pythons = ("--vllm-python", sys.executable, "--vllm-python", OTHER)
    ran = vexport("load", checkpoint, *pythons, "--format", "json", "--quiet")
    assert ran.code == 0, ran.stderr
    reports = json.loads(ran.stdout)
    assert [report["vllm_python"] for report in reports] == [sys.executable, OTHER]
    assert len({report["vllm"] for report in reports}) == 2
    assert all(0 < report["logprobs"]["mean_kl"] < 0.003 for report in reports)
