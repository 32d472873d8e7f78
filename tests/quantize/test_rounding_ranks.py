"""Ranks quantize together, and write what one process writes; one that fails ends all of them."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.calibration.models import expert_configs, save
from tests.models import quantize, save_llama, write_calibration
from tests.quantize.hosts import Hosts, Ranks, hosts, start
from vexport.files import digest_file

# Seconds of silence after which a rank of these tests is given up.
TIMEOUT = 12


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers and its calibration text."""
    root = tmp_path_factory.mktemp("ranks")
    save_llama(root / "model", num_hidden_layers=2, intermediate_size=256)
    write_calibration(root / "text.jsonl", rows=8)
    return root


@pytest.fixture(scope="module")
def refitted(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one process writes with `--rounding refit`."""
    out = tmp_path_factory.mktemp("refitted") / "one"
    return digests(quantize(llama / "model", out, "W4A16", *call(llama, out, "", "--rounding", "refit")[5:]))


@pytest.fixture(scope="module")
def four() -> Iterator[Hosts]:
    try:
        with hosts(4) as found:
            yield found
    except PermissionError:
        pytest.skip("needs the right to make network namespaces")


def digests(folder: Path) -> dict[str, str]:
    """All files; the recipe names others by their place relative to the folder."""
    return {file.name: digest_file(file) for file in folder.iterdir()}


def call(root: Path, out: Path, scheme: str, *options: object) -> list[object]:
    """What each rank is started with; the recipe has what `tests.models.quantize` asks for, too."""
    text = ("--calibration", root / "text.jsonl", "--device", "cpu", "--quiet")
    plain = () if "--smoothing" in options else ("--smoothing", "0")
    return ["quantize", root / "model", out, "--scheme", scheme, *text, *plain, *options]


def finished(ranks: Ranks) -> Ranks:
    """Ranks that must come to a good end."""
    codes = ranks.codes(200)
    assert codes == [0] * len(codes), ranks.errors()
    return ranks


def begun(work: Path, ranks: Ranks) -> None:
    """Wait until the first layer is rounded."""
    deadline = time.monotonic() + 120
    while not list(work.rglob("*.layer-0000.json")) and time.monotonic() < deadline:
        assert all(process.is_alive() for process in ranks.processes), ranks.errors()
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("NVFP4", ("--rounding", "nearest")),
        ("FP8", ("--rounding", "nearest", "--kv-cache", "fp8")),
        ("W4A16", ("--rounding", "gptq")),
        ("NVFP4", ("--rounding", "refit", "--kv-cache", "fp8", "--smoothing", 0.5)),
    ],
)
def test_one_two_and_four_ranks_write_the_same(
    scheme: str, options: tuple[str, ...], llama: Path, four: Hosts, tmp_path: Path
) -> None:
    """On four hosts, each of which writes some of the files."""
    options = (*options, "--max-shard-size", "200KB")
    one = digests(
        quantize(llama / "model", tmp_path / "one", scheme, *call(llama, tmp_path, scheme)[5:], *options)
    )
    for count in (2, 4):
        out = tmp_path / str(count)
        ranks = finished(start(count, tmp_path / f"said-{count}", [call(llama, out, scheme, *options)], four))
        assert [bool(ranks.stdout(rank)) for rank in range(count)] == [True] + [False] * (count - 1)
        assert digests(out) == one
        shards = sorted(out.glob("*.safetensors"))
        assert len(shards) >= 4
        assert {file.stat().st_mode & 0o070 for file in shards} == {0, 0o060}


def test_a_rank_without_rows_adds_up_and_rounds_its_experts(tmp_path: Path) -> None:
    """The cache is calibrated in the quantized stream."""
    save(expert_configs()["qwen3_moe"], tmp_path / "model")
    write_calibration(tmp_path / "text.jsonl", rows=1, vocabulary=64)
    options = ("--rounding", "gptq", "--kv-cache", "fp8", "--smoothing", 0.5)
    one = quantize(tmp_path / "model", tmp_path / "one", "MXFP4", *call(tmp_path, tmp_path, "")[5:], *options)
    ranks = finished(start(2, tmp_path / "said", [call(tmp_path, tmp_path / "two", "MXFP4", *options)]))
    assert "gptq of" in ranks.stdout(0)
    assert digest_file(tmp_path / "two" / "model.safetensors") == digest_file(one / "model.safetensors")


@pytest.mark.parametrize(
    ("number", "victim", "reason"),
    [
        (signal.SIGKILL, 2, "rank 2 of 4: got no sign of life for"),
        (signal.SIGSTOP, 1, "rank 1 of 4: got no sign of life for"),
        (signal.SIGKILL, 0, "rank 0 of 4: got its process has gone"),
        (signal.SIGSTOP, 0, "rank 0 of 4: got no sign of life for"),
    ],
    ids=["killed", "stopped", "first killed", "first stopped"],
)
def test_a_lost_rank_ends_all_and_fewer_continue(
    number: int, victim: int, reason: str, llama: Path, refitted: dict[str, str], four: Hosts, tmp_path: Path
) -> None:
    """Four ranks deal seven rows, and the last has the row by which the strength is chosen."""
    out = tmp_path / "out"
    own = call(llama, out, "W4A16", "--rounding", "refit")
    ranks = start(4, tmp_path / "lost", [own], four, timeout=TIMEOUT)
    begun(tmp_path, ranks)
    os.kill(ranks.processes[victim].pid or 0, number)
    since = time.monotonic()
    others = [process for rank, process in enumerate(ranks.processes) if rank != victim]
    for process in others:
        process.join(4 * TIMEOUT)
    assert [process.exitcode for process in others] == [4, 4, 4]
    assert time.monotonic() - since < 3 * TIMEOUT
    ranks.codes(0)
    errors = ranks.errors()
    assert len(errors) == 1 or (victim == 0 and len(errors) <= 3), errors
    assert all(reason in line and "run the same command again" in line for line in errors)
    assert not out.exists()
    finished(start(2, tmp_path / "again", [own]))
    assert digests(out) == refitted


@pytest.mark.parametrize("change", ["config", "size", "byte"])
def test_a_rank_with_another_source_ends_all(change: str, llama: Path, tmp_path: Path) -> None:
    """The rank is named once, whatever it is that differs."""
    other = tmp_path / "other"
    shutil.copytree(llama / "model", other / "model")
    weights = other / "model" / "model.safetensors"
    if change == "config":
        config = other / "model" / "config.json"
        config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    elif change == "size":
        save_llama(other / "model", num_hidden_layers=2, intermediate_size=512)
    else:
        with weights.open("r+b") as stream:
            stream.seek(-1000, 2)
            stream.write(b"\x01")
    out = tmp_path / "out"
    own = call(llama, out, "FP8")
    calls = [own, [other / "model" if part == llama / "model" else part for part in own]]
    ranks = start(2, tmp_path / "said", calls, timeout=TIMEOUT)
    assert ranks.codes(60) == [2, 2]
    (line,) = ranks.errors()
    assert f"rank 1 of 2: {other / 'model'}: got " in line
    assert ("other bytes in" if change == "byte" else "another") in line
    assert not out.exists()


def test_an_error_of_one_rank_ends_all(llama: Path, tmp_path: Path) -> None:
    """A host has no copy of the model; the other one does not wait for it."""
    out = tmp_path / "out"
    calls = [call(root, out, "FP8") for root in (llama, tmp_path)]
    ranks = start(2, tmp_path / "said", calls, timeout=TIMEOUT)
    assert ranks.codes(60) == [2, 2]
    (line,) = ranks.errors()
    assert f"{tmp_path / 'model'}" in line
    assert "no such folder" in line


def test_a_rank_that_never_comes_is_named(llama: Path, tmp_path: Path) -> None:
    """Two are started of three."""
    ranks = start(3, tmp_path / "said", [call(llama, tmp_path / "out", "FP8")], timeout=1.5)
    ranks.processes[1].kill()
    codes = ranks.codes(60)
    assert (codes[0], codes[2]) == (4, 4)
    assert any("got no rank 1 of 3 after 7.5 s, need all of them" in line for line in ranks.errors())
