"""Two ranks of torchrun calibrate, round and write together. If one rank dies, the other ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.command import ROOT
from tests.forked import command, finish, start
from tests.models import save_llama, write_calibration
from tests.quantize.test_streaming import digests

pytestmark = pytest.mark.slow
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of two layers, and text with an odd number of rows."""
    root = tmp_path_factory.mktemp("ranks")
    save_llama(root / "model", num_hidden_layers=2, intermediate_size=256)
    write_calibration(root / "text.jsonl", rows=7)
    return root


def call(folder: Path, out: Path, scheme: str, *options: str) -> list[object]:
    words = ["quantize", folder / "model", out, "--scheme", scheme, "--device", "cpu", *options]
    return [
        *words,
        "--calibration",
        folder / "text.jsonl",
        "--smoothing",
        "0",
        "--max-shard-size",
        "200KB",
    ]


def run_two_ranks(words: list[object], folder: Path, environment: Mapping[str, str]) -> str:
    """Run two ranks, and return the output of the first. The second rank prints nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        at = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "WORLD_SIZE": "2",
        }
    logs = [folder / f"rank-{rank}.log" for rank in "01"]
    ranks = [
        start(
            log,
            command,
            *words,
            environment={**environment, **at, "RANK": rank, "LOCAL_RANK": rank},
        )
        for log, rank in zip(logs, "01", strict=True)
    ]
    first, second = map(finish, ranks, logs)
    assert len([line for line in first.splitlines() if line.startswith(f"{words[2]}: ")]) == 1
    assert second == ""
    return first


def tensors(out: Path) -> dict[str, torch.Tensor]:
    return {
        name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()
    }


def codes(packed: torch.Tensor) -> torch.Tensor:
    """Unpack eight codes of 4 bits from each int32."""
    return torch.stack([(packed >> shift) & 15 for shift in range(0, 32, 4)])


def test_two_ranks_write_same_bytes(folder: Path, tmp_path: Path) -> None:
    """Each rank writes some files, and one rank verifies all files by a dry load."""
    by_one_rank, by_two_ranks = tmp_path / "one", tmp_path / "two"
    nearest = ("NVFP4", "--rounding", "nearest", "--kv-cache", "fp8")
    finish(start(tmp_path / "log", command, *call(folder, by_one_rank, *nearest)), tmp_path / "log")
    output = run_two_ranks(
        call(folder, by_two_ranks, *nearest), tmp_path, {"VEXPORT_NO_VERIFY": "0"}
    )
    assert "dry load" in output
    assert digests(by_one_rank) == digests(by_two_ranks)
    assert len(list(by_two_ranks.glob("*.safetensors"))) >= 2


def test_second_call_resumes_after_dead_rank(folder: Path, tmp_path: Path) -> None:
    """The codes differ from those of one rank only because of the order of sums."""
    out = tmp_path / "two" / "out"
    words = call(folder, out, "W4A16", "--rounding", "gptq")
    process = subprocess.Popen(
        [sys.executable, *TORCHRUN, "-m", "vexport", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
    )
    rounded = out.parent / ".out.partial" / "aside"
    deadline = time.monotonic() + 120
    while not list(rounded.glob("layer-0000.json")) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    os.kill(rank_of(process, 1), signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert not out.exists()
    assert list(rounded.glob("layer-0000.*"))
    run_two_ranks(words, tmp_path, {})
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    log = tmp_path / "log"
    finish(start(log, command, *call(folder, tmp_path / "one", "W4A16", "--rounding", "gptq")), log)
    by_one_rank, by_two_ranks = tensors(tmp_path / "one"), tensors(out)
    assert by_one_rank.keys() == by_two_ranks.keys()
    packed = [name for name in by_one_rank if name.endswith("weight_packed")]
    assert len(packed) == 14
    equal = {
        name: float((codes(by_one_rank[name]) == codes(by_two_ranks[name])).float().mean())
        for name in packed
    }
    # A code that differs because of a sum changes later codes in its row, and slightly all later
    # layers.
    assert min(equal[name] for name in packed if ".layers.0.self_attn." in name) > 0.999, equal
    assert sum(equal.values()) / len(equal) > 0.7, equal


def rank_of(process: "subprocess.Popen[str]", rank: int) -> int:
    """Return the process that torchrun started for this rank."""
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if f"RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"no rank {rank}")
