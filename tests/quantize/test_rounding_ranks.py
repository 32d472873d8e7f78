"""Ranks round weights together, and write what one process writes."""

import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.calibration.models import expert_configs, save
from tests.command import vexport
from tests.models import quantize, save_llama, write_calibration
from vexport.files import digest_file


def run_rank(rank: int, said: Path, shared: dict[str, str], call: Sequence[str]) -> None:
    """What torchrun starts."""
    os.environ.update(shared, RANK=str(rank))
    ran = vexport(*call)
    (said / f"{rank}.txt").write_text(ran.stdout if ran.code == 0 else f"{ran.code}: {ran.stderr}")


def start(ranks: int, said: Path, source: Path, out: Path, *options: object) -> Sequence[BaseProcess]:
    """As many processes, which leave in `said` what they said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    call = [str(part) for part in ("quantize", source, out, "--device", "cpu", *options, "--quiet")]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.calibration.models", "vexport.quantize.rounding"])
    said.mkdir()
    processes = [context.Process(target=run_rank, args=(rank, said, shared, call)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def ended(processes: Sequence[BaseProcess], said: Path) -> list[str]:
    """What each said when all have come to a good end."""
    for process in processes:
        process.join(200)
    texts = [(said / f"{rank}.txt").read_text() for rank in range(len(processes))]
    assert [process.exitcode for process in processes] == [0] * len(processes), texts
    return texts


def test_a_rank_without_rows_adds_up_and_rounds_its_experts(tmp_path: Path) -> None:
    """The cache is calibrated in the quantized stream."""
    source = save(expert_configs()["qwen3_moe"], tmp_path / "model")
    text = write_calibration(tmp_path / "text.jsonl", rows=1, vocabulary=64)
    options = ("--rounding", "gptq", "--calibration", text, "--kv-cache", "fp8")
    one = quantize(source, tmp_path / "one", "MXFP4", *options)
    first, second = ended(
        start(2, tmp_path / "said", source, tmp_path / "two", "--scheme", "MXFP4", *options),
        tmp_path / "said",
    )
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
    processes = start(4, tmp_path / "four", source, out, "--scheme", "W4A16", *options)
    deadline = time.monotonic() + 120
    while not list(tmp_path.rglob("*.layer-0000.json")) and time.monotonic() < deadline:
        assert all(process.is_alive() for process in processes)
        time.sleep(0.005)
    for process in processes:
        process.kill()
        process.join()
    assert not out.exists()
    ended(start(2, tmp_path / "said", source, out, "--scheme", "W4A16", *options), tmp_path / "said")
    assert digest_file(out / "model.safetensors") == digest_file(one / "model.safetensors")
