"""One model over two ranks: vLLM's CPU build cuts the layers as a GPU's does, in two processes."""

import json
from pathlib import Path

import pytest

from tests.command import vexport
from tests.engine.fixtures import quantize_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
# Seconds. The ranks wait for each other by spinning: on two busy cores that takes minutes, not seconds.
RANKS = ("--tp", 2, "--timeout", 1200)


def test_two_ranks_answer_as_the_reference(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = quantize_model(tiny_llama, tmp_path / "nvfp4", "NVFP4A16")
    ran = vexport("load", checkpoint, *RANKS, "--format", "json", "--quiet")
    assert ran.code == 0, ran.stderr
    (report,) = json.loads(ran.stdout)
    assert (report["tp"], report["engine"]["settings"]["tensor_parallel_size"]) == (2, "2")
    assert report["logprobs"]["mean_kl"] < 0.003
    assert len(report["engine"]["kernels"]) == 4
