"""Ranks round weights together, and write what one process writes."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.calibration.models import expert_configs, save
from tests.models import quantize, save_llama, write_calibration
from vexport.files import digest_file

ROOT = Path(__file__).parents[2]


def start(ranks: int, source: Path, out: Path, *options: object) -> Sequence[subprocess.Popen[str]]:
    """The processes that torchrun would start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    call = (sys.executable, "-m", "vexport", "quantize", source, out, "--device", "cpu", *options, "--quiet")
    return [
        subprocess.Popen(
            [str(part) for part in call],
            text=True,
            cwd=ROOT,
            env={**shared, "OMP_NUM_THREADS": "1", "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What each said when all have come to a good end."""
    said = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said
    return [stdout for stdout, _ in said]


def test_a_rank_without_rows_adds_up_and_rounds_its_experts(tmp_path: Path) -> None:
    """The cache is calibrated in the quantized stream."""
    source = save(expert_configs()["qwen3_moe"], tmp_path / "model")
    text = write_calibration(tmp_path / "text.jsonl", rows=1, vocabulary=64)
    options = ("--rounding", "gptq", "--calibration", text, "--kv-cache", "fp8")
    one = quantize(source, tmp_path / "one", "MXFP4", *options)
    first, second = ended(start(2, source, tmp_path / "two", "--scheme", "MXFP4", *options))
    assert "gptq of" in first
    assert not second
    assert digest_file(tmp_path / "two" / "model.safetensors") == digest_file(one / "model.safetensors")


def test_killed_ranks_are_continued_by_fewer(tmp_path: Path) -> None:
    """Four ranks deal seven rows, and the last has the row by which the strength is chosen."""
    source = save_llama(tmp_path / "llama", num_hidden_layers=2, intermediate_size=256)
    text = write_calibration(tmp_path / "text.jsonl", rows=8)
    options = ("--rounding", "refit", "--calibration", text)
    one = quantize(source, tmp_path / "one", "W4A16", *options)
    out = tmp_path / "out"
    processes = start(4, source, out, "--scheme", "W4A16", *options)
    deadline = time.monotonic() + 120
    while not list(tmp_path.rglob("*.layer-0000.json")) and time.monotonic() < deadline:
        assert [process.poll() for process in processes] == [None] * 4
        time.sleep(0.005)
    for process in processes:
        process.kill()
        process.communicate()
    assert not out.exists()
    ended(start(2, source, out, "--scheme", "W4A16", *options))
    assert digest_file(out / "model.safetensors") == digest_file(one / "model.safetensors")
