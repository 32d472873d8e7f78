"""`vexport eval` in the real vLLM: two checkpoints, one baseline, the scores before what explains them."""

from pathlib import Path

import pytest

from tests.command import vexport
from tests.evaluation.faults import DEMO, quantized, with_swapped_scales

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_scores_come_first_and_the_cause_of_a_loss_after_them(tmp_path: Path) -> None:
    tasks = f"{DEMO}/tasks/addition.yaml,{DEMO}/tasks/facts.yaml"
    out, broken = tmp_path / "out", with_swapped_scales(quantized(tmp_path / "whole"), tmp_path / "broken")
    ran = vexport(
        *("eval", DEMO / "model", broken, "--baseline", DEMO / "model"),
        *("--tasks", tasks, "--limit", "100", "--margin", "0.05", "--output-dir", out, "--quiet"),
    )
    assert ran.code == 1, ran.stderr
    table, _, cause = ran.stdout.partition(f"\n{broken}\n")
    assert f"{DEMO}/model *" in table
    assert "addition loses" in table
    assert cause.startswith("cause         the quantization: the exported weights are")
    # Nothing explains a pass.
    assert not (out / "candidate" / "1-model" / "reference.safetensors").exists()
    assert (out / "candidate" / "2-broken" / "reference.safetensors").exists()
