"""One model over two ranks: vLLM's CPU build cuts the layers as a GPU's does, in two processes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command import vexport
from tests.engine.test_vllm import processes_of
from vexport.engine.load import load_request
from vexport.engine.prompts import fixed_prompts
from vexport.engine.session import run_session

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
DEMO = Path(__file__).parents[2] / "scenarios" / "demo"
SHARED = Path("/dev/shm")
# Seconds. The ranks wait for each other by spinning: on two busy cores that takes minutes, not seconds.
TIMEOUT = 1200


def segments() -> set[str]:
    """What stands in shared memory of vLLM's."""
    return {path.name for path in SHARED.iterdir() if path.name.startswith(("psm_", "vllm_dist_"))}


def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    checkpoint = tmp_path / "nvfp4"
    assert vexport("quantize", DEMO / "model", checkpoint, "--scheme", "NVFP4A16").code == 0
    ran = vexport("load", checkpoint, "--tp", "1,2", "--timeout", TIMEOUT, "--format", "json", "--quiet")
    assert ran.code == 0, ran.stderr
    one, two = json.loads(ran.stdout)
    assert [
        (report["tp"], report["engine"]["settings"]["tensor_parallel_size"]) for report in (one, two)
    ] == [
        (1, "1"),
        (2, "2"),
    ]
    # Both against the same reference, transformers with dequantized weights.
    assert all(report["logprobs"]["mean_kl"] < 0.003 for report in (one, two))
    assert one["engine"]["kernels"] == two["engine"]["kernels"]


def test_lm_eval_asks_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")  # of no kernel here
    checkpoint, out = tmp_path / "w8a8", tmp_path / "out"
    assert vexport("quantize", DEMO / "model", checkpoint, "--scheme", "W8A8").code == 0
    engine = (
        "--tp",
        "2",
        "--timeout",
        TIMEOUT,
        "--engine-arg",
        "max-num-seqs=16",
        "--engine-arg",
        "block_size=32",
    )
    asked = (
        "--accept",
        tmp_path / "accepted.json",
        "--task",
        DEMO / "tasks" / "addition.yaml",
        "--limit",
        "16",
    )
    ran = vexport("eval", checkpoint, *asked, *engine, "--output-dir", out, "--quiet")
    assert ran.code == 0, ran.stderr
    (samples,) = (out / "candidate").rglob("samples_*.jsonl")
    assert len(samples.read_text().splitlines()) == 16
    told = json.loads((out / "candidate" / "fingerprint.json").read_text())
    assert told["tensor_parallel_size"] == "2"
    assert told["max_num_seqs"] == "16"
    assert told["engine_args"] == '{"block_size": 32}'
    assert told["environment"] == "VLLM_MARLIN_INPUT_DTYPE=int8"


class Enough(Exception):
    """The session is ended from outside."""


def test_an_end_from_outside_leaves_no_rank(tiny_llama: Path, tmp_path: Path) -> None:
    known, log = segments(), tmp_path / "vllm.log"
    request = load_request(tiny_llama, fixed_prompts(tiny_llama), logprobs_file=tmp_path / "logprobs")
    arguments = {"tensor_parallel_size": 2, "enforce_eager": True}

    def end(stage: str, done: int, total: int) -> None:
        if stage == "canaries":
            assert segments() - known, "the ranks share memory"
            raise Enough

    with pytest.raises(Enough):
        run_session(replace(request, arguments=arguments), log=log, timeout=TIMEOUT, on_progress=end)
    assert not processes_of(log)
