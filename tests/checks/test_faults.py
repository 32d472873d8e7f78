"""Findings on known faults of vLLM, by the recorded kernels."""

from pathlib import Path

import pytest

from tests.command import vexport
from tests.models import Good, quantize, save_llama
from vexport.checks import check_checkpoint
from vexport.checks.vllm.view import Target
from vexport.records import Finding
from vexport.version import Version


def found(checkpoint: Path, version: Version, sm: tuple[int, ...], *tp: int) -> list[Finding]:
    target = Target(vllm=version, sm=sm, tp=tp)
    findings = check_checkpoint(str(checkpoint), target).findings
    return [each for each in findings if each.check in ("faults", "devices")]


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return FP8 with an intermediate size of 16 * 33, which two ranks divide into halves of 8."""
    root = tmp_path_factory.mktemp("odd")
    return quantize(save_llama(root / "source", intermediate_size=528), root / "out", "FP8_DYNAMIC")


def test_sides_on_a_rank_decide(odd: Path) -> None:
    assert found(odd, (0, 32), (89,)) == []
    (crash,) = found(odd, (0, 32), (89,), 2)
    assert (crash.rule, crash.where) == ("faults/crash", "model.layers.*.mlp.down_proj")
    assert "vLLM 0.33 repairs it" in str(crash)
    assert found(odd, (0, 33), (89,), 2) == []


def test_gpu_decides(good: Good) -> None:
    """DeepGEMM in 0.27 has no kernels for SM 120. 0.28 has them."""
    checkpoint = good("FP8_BLOCK")
    for sm, rules in ((90, []), (120, ["faults/crash"]), (121, ["faults/crash"])):
        assert [each.rule for each in found(checkpoint, (0, 27), (sm,))] == rules
        assert found(checkpoint, (0, 28), (sm,)) == []


def test_rounded_inputs_are_one_finding(good: Good) -> None:
    for sm in (90, 100):
        (finding,) = found(good("MXFP4A16"), (0, 33), (sm,))
        assert (finding.rule, finding.severity) == ("faults/fewer-bits", "warning")
        assert "not repaired" in finding.expected
    assert found(good("MXFP4A16"), (0, 33), (89,)) == []


def test_plan_shows_faults_on_a_gpu(llama: Path) -> None:
    ran = vexport("plan", llama, "--sm", 90)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("fault")]
    assert len(lines) == 1
    assert "MXFP4A16: " in lines[0]
    assert "fault" not in vexport("plan", llama, "--sm", 89).stdout
    assert "fault" not in vexport("plan", llama).stdout
    ran = vexport("plan", llama, "--scheme", "MXFP4A16", "--sm", 100)
    assert "[faults/fewer-bits]" in ran.stdout
