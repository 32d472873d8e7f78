"""Two processes over halves of the samples end with what one finds over all of them."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A dense model, a mixture, and the dense one with a token that overflows."""
    root = tmp_path_factory.mktemp("models")
    dense, mixture = configs()["llama"], expert_configs()["qwen3_moe"]
    made = {"dense": save(dense, root / "dense"), "mixture": save(mixture, root / "mixture")}
    tensors = load_file(made["dense"] / "model.safetensors")
    tensors["model.embed_tokens.weight"][overflowing()] = torch.inf
    broken = root / "broken"
    broken.mkdir()
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    (broken / "config.json").write_text((made["dense"] / "config.json").read_text())
    return {**made, "broken": broken}


def overflowing() -> int:
    """A token of a row that only the second rank has."""
    return samples().token_ids[1][3]


@pytest.fixture(scope="module")
def ended(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Path]]:
    """What both ranks end with, of each folder."""
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.calibration.two_ranks", out, *folders.values()]
    ranks = [
        subprocess.Popen(list(map(str, command)), cwd=ROOT, env={**os.environ, **shared, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    return {name: [out / f"{name}-{rank}.json" for rank in range(2)] for name in folders}


def test_two_ranks_are_one(folders: Mapping[str, Path], ended: Mapping[str, list[Path]]) -> None:
    first, second = ended["dense"]
    assert first.read_text() == second.read_text()
    alone = calibrate(*plan_for(folders["dense"], observer="imatrix_mse", kv_cache="fp8"), samples())
    assert from_json(Calibration, first) == alone
    assert len(alone.importance) == len(alone.ranges) == 21
    assert len(alone.kv_ranges) == 3


def test_two_ranks_add_up_what_was_routed(
    folders: Mapping[str, Path], ended: Mapping[str, list[Path]]
) -> None:
    first, second = ended["mixture"]
    assert first.read_text() == second.read_text()
    alone = calibrate(*plan_for(folders["mixture"], observer="imatrix_mse", kv_cache="fp8"), samples())
    assert from_json(Calibration, first) == alone
    assert [sum(counts) for counts in alone.routed.values()] == [2 * alone.tokens] * 2


def test_every_rank_tells_of_the_first_failure(ended: Mapping[str, list[Path]]) -> None:
    rows = [row for row, ids in zip(samples().rows, samples().token_ids, strict=True) if overflowing() in ids]
    texts = [file.read_text() for file in ended["broken"]]
    assert texts[0] == texts[1]
    assert f"model.embed_tokens: got an output that is not finite, from calibration row {rows[0]}" in texts[0]
