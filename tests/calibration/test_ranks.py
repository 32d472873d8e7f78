"""Two processes over halves of the samples end with what one finds over all of them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.calibration.make import plan_for, samples
from tests.calibration.models import configs, expert_configs, save
from vexport.calibration import calibrate
from vexport.files import from_json
from vexport.types import Calibration

ROOT = Path(__file__).parent.parent.parent


def run_two(folder: Path, out: Path) -> list[str]:
    """What both ranks end with."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.calibration.two_ranks", str(folder), str(out)]
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env={**os.environ, **shared, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    return [(out / f"{rank}.json").read_text() for rank in range(2)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(configs()["llama"], tmp_path_factory.mktemp("llama") / "model")


def test_two_ranks_are_one(llama: Path, tmp_path: Path) -> None:
    first, second = run_two(llama, tmp_path)
    assert first == second
    alone = calibrate(*plan_for(llama, observer="imatrix_mse", kv_cache="fp8"), samples())
    assert from_json(Calibration, tmp_path / "0.json") == alone
    assert len(alone.importance) == len(alone.ranges) == 21
    assert len(alone.kv_ranges) == 3


def test_two_ranks_add_up_what_was_routed(tmp_path: Path) -> None:
    folder = save(expert_configs()["qwen3_moe"], tmp_path / "model")
    first, second = run_two(folder, tmp_path)
    assert first == second
    alone = calibrate(*plan_for(folder, observer="imatrix_mse", kv_cache="fp8"), samples())
    assert from_json(Calibration, tmp_path / "0.json") == alone
    assert [sum(counts) for counts in alone.routed.values()] == [2 * alone.tokens] * 2


def test_every_rank_tells_of_the_first_failure(llama: Path, tmp_path: Path) -> None:
    """Only the second rank has the row whose token overflows."""
    tensors = load_file(llama / "model.safetensors")
    token = samples().token_ids[1][3]
    rows = [row for row, ids in zip(samples().rows, samples().token_ids, strict=True) if token in ids]
    tensors["model.embed_tokens.weight"][token] = torch.inf
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((llama / "config.json").read_text())
    texts = run_two(folder, tmp_path)
    assert texts[0] == texts[1]
    assert f"model.embed_tokens: got an output that is not finite, from calibration row {rows[0]}" in texts[0]
