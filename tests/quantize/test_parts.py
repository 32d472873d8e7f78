"""A quantization in parts that need not know of each other: the merged bytes are those of a single run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.command import vexport
from tests.models import save_llama, write_calibration
from tests.quantize.test_streaming import digests, started, write_model
from vexport.outputs import resumable_directory

OPTIONS = ("--scheme", "NVFP4A16", "--max-shard-size", "300KB", "--quiet")
PAGE = Path(__file__).parents[2] / "vexport" / "docs" / "large.md"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("parts") / "source")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calibration(tmp_path_factory.mktemp("parts") / "text.jsonl")


def whole(source: Path, folder: Path, options: Sequence[object] = OPTIONS) -> dict[str, str]:
    """What a single run writes to folder/out, which is not left there."""
    assert vexport("quantize", source, folder / "out", *options).code == 0
    found = dict(digests(folder / "out"))
    shutil.rmtree(folder / "out")
    return found


def write_parts(source: Path, folder: Path, numbers: Sequence[int], of: int, *options: object) -> None:
    for number in numbers:
        ran = vexport("quantize", source, folder / "out", *OPTIONS, *options, "--part", f"{number}/{of}")
        assert ran.code == 0, ran.stderr


def test_the_example_for_xargs_gives_the_bytes_of_a_single_run(source: Path, tmp_path: Path) -> None:
    (example,) = re.findall(r"^    (seq .* xargs .*)$", PAGE.read_text(encoding="utf-8"), re.M)
    expected = whole(source, tmp_path)
    command = example.replace("vexport", f"{sys.executable} -m vexport").replace("MODEL", str(source))
    # The example has eight parts; the model has files for at least as many.
    for options in (("--scheme W4A16", " ".join(OPTIONS)), ("seq 8", "seq 3"), ("/8", "/3")):
        assert options[0] in command
        command = command.replace(*options)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, capture_output=True)
    assert not (tmp_path / "out" / "config.json").exists()
    merged = vexport("merge", tmp_path / "OUT", "--format", "json")
    assert merged.code == 0, merged.stderr
    assert json.loads(merged.stdout)["parts"] == 3
    assert digests(tmp_path / "OUT") == expected
    assert [entry.name for entry in tmp_path.iterdir()] == ["OUT"]


@pytest.mark.fault("SIGKILL of one part of several, the part repeated and run twice at once: the same bytes")
def test_parts_are_killed_repeated_and_run_twice_at_once(tmp_path: Path) -> None:
    source, out = write_model(tmp_path / "source", hidden=1024, layers=4), tmp_path / "out"
    options = ("--scheme", "NVFP4A16", "--max-shard-size", "10MB", "--quiet")
    expected = whole(source, tmp_path, options)
    work = tmp_path / "out.parts" / ".part-00002-of-00002.partial"
    process = started(("quantize", source, out, *options, "--part", "2/2"))
    while not list(work.glob("new/*.safetensors")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)
    twice = vexport("quantize", source, out, *options, "--part", "2/2")
    early = vexport("merge", out)
    process.kill()
    process.wait()
    assert twice.code == 2
    assert "another process that writes it" in twice.errors[0]
    assert early.code == 2
    assert "0 of 2 parts (being written: 2; missing or unfinished: 1)" in early.errors[0]
    for part in ("1/2", "2/2", "2/2"):
        assert vexport("quantize", source, out, *options, "--part", part).code == 0
    assert vexport("merge", out).code == 0
    assert digests(out) == expected


def test_what_calibration_shows_is_found_out_once(source: Path, calibration: Path, tmp_path: Path) -> None:
    options = ("--scheme", "NVFP4", "--calibration", calibration, "--rounding", "nearest")
    expected = whole(source, tmp_path, (*OPTIONS[2:], *options))
    write_parts(source, tmp_path, [2], 2, *options)
    statistics = tmp_path / "out.parts" / "calibration.json"
    before = statistics.stat().st_mtime_ns
    write_parts(source, tmp_path, [1], 2, *options)
    assert statistics.stat().st_mtime_ns == before
    assert vexport("merge", tmp_path / "out").code == 0
    assert digests(tmp_path / "out") == expected
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("place", ["shutil.copyfile", "vexport.quantize.merge._remove_parts"])
@pytest.mark.fault(
    "`merge` interrupted while it moves files, and after OUT is whole: the next call ends the work"
)
def test_a_merge_that_was_broken_off_is_continued(
    source: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(source, tmp_path)
    write_parts(source, tmp_path, [2, 1], 2)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(place, interrupted)
        assert vexport("merge", tmp_path / "out").code == 130
    assert vexport("merge", tmp_path / "out").code == 0
    assert digests(tmp_path / "out") == expected
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def cut_shard(folder: Path) -> None:
    next((folder / "out.parts" / "part-00002-of-00002").glob("*.safetensors")).write_bytes(b"cut")


def lose_shard(folder: Path) -> None:
    next((folder / "out.parts" / "part-00001-of-00002").glob("*.safetensors")).unlink()


def lose_part(folder: Path) -> None:
    shutil.rmtree(folder / "out.parts" / "part-00002-of-00002")


def mix_counts(folder: Path) -> None:
    parts = folder / "out.parts"
    shutil.copytree(parts / "part-00002-of-00002", parts / "part-00002-of-00003")


def change_source(folder: Path) -> None:
    manifest = folder / "out.parts" / "part-00002-of-00002" / "part.json"
    content = json.loads(manifest.read_text())
    content["made_from"]["source"] = "0"
    manifest.write_text(json.dumps(content))


def lose_all(folder: Path) -> None:
    shutil.rmtree(folder / "out.parts")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut_shard, r"3 bytes, need the [\d,]+ bytes of part 2 of 2; run --part 2/2 again, with --overwrite"),
        (lose_shard, "no such file, need .* of part 1 of 2; run --part 1/2 again"),
        (lose_part, "1 of 2 parts .missing or unfinished: 2., need all .*; run --part 2/2"),
        (mix_counts, "parts of 2 and of 3"),
        (change_source, "part-00002-of-00002: got another source than in part 1"),
        (lose_all, "got no parts in"),
    ],
)
def test_parts_that_do_not_make_a_whole_are_not_merged(
    source: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    write_parts(source, tmp_path, [1, 2], 2)
    spoil(tmp_path)
    ran = vexport("merge", tmp_path / "out")
    assert ran.code == 2
    assert len(ran.errors) == 1
    assert re.search(said, ran.errors[0]), ran.errors
    assert not (tmp_path / "out").exists()


def test_a_part_that_is_written_again_takes_the_place_of_a_broken_one(source: Path, tmp_path: Path) -> None:
    expected = whole(source, tmp_path)
    write_parts(source, tmp_path, [1, 2], 2)
    cut_shard(tmp_path)
    write_parts(source, tmp_path, [2], 2, "--overwrite")
    assert vexport("merge", tmp_path / "out").code == 0
    assert digests(tmp_path / "out") == expected


def change_files(tmp_path: Path, number: int, change: Callable[[dict[str, int]], object]) -> None:
    file = tmp_path / "out.parts" / f"part-{number:05}-of-00002" / "part.json"
    manifest = json.loads(file.read_text())
    change(manifest["files"])
    file.write_text(json.dumps(manifest))


def name_anothers_file(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    change_files(tmp_path, 2, lambda files: files.update({"../../precious": 4}))


def name_the_config(tmp_path: Path) -> None:
    file = tmp_path / "out.parts" / "part-00001-of-00002" / "config.json.part"
    change_files(tmp_path, 1, lambda files: files.update({file.name: file.stat().st_size}))


def name_nothing(tmp_path: Path) -> None:
    change_files(tmp_path, 2, lambda files: files.clear())


def blank_shard(tmp_path: Path) -> None:
    shard = next((tmp_path / "out.parts" / "part-00002-of-00002").glob("*.safetensors"))
    shard.write_bytes(bytes(shard.stat().st_size))


def lay_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out.parts" / "part-00001-of-00002" / "pipe.json")


def link_a_secret(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out.parts" / "part-00001-of-00002" / "secret.json").symlink_to(tmp_path / "precious")


def lose_config(tmp_path: Path) -> None:
    (tmp_path / "out.parts" / "part-00001-of-00002" / "config.json.part").unlink()


@pytest.mark.fault("parts that are spoiled or meant to harm: not merged, every file stays")
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (name_anothers_file, "part.json: files: got '../../precious', need names of files of weights"),
        (name_the_config, "part.json: files: got 'config.json.part'"),
        (name_nothing, "safetensors, which no part has"),
        (blank_shard, "header"),
        (lay_a_pipe, "pipe.json: got a link, a folder or a pipe, need"),
        (link_a_secret, "secret.json: got a link"),
        (lose_config, "config.json.part: got no such file"),
    ],
)
def test_spoiled_parts_are_refused_and_left_as_they_are(
    source: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    write_parts(source, tmp_path, [1, 2], 2)
    spoil(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    ran = vexport("merge", tmp_path / "out")
    assert ran.code == 2
    assert said in ran.errors[0], ran.errors
    assert not (tmp_path / "out").exists()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--part", "3/2"), "parts count from 1"),
        (("--part", "0/2"), "parts count from 1"),
        (("--part", "2"), "write 3/8"),
        (("--part", "1/9999"), "at least one file for each part; use at most"),
        (("--part", "1/3"), "parts of 2, need parts of 3 alone"),
        (("--part", "2/2", "--ignore", "re:.*layers.0.*"), "another plan"),
        (("--part", "2/2", "--max-shard-size", "400KB"), "another settings"),
    ],
)
def test_contradictory_parts_are_refused(
    source: Path, tmp_path: Path, options: Sequence[str], said: str
) -> None:
    write_parts(source, tmp_path, [1], 2)
    ran = vexport("quantize", source, tmp_path / "out", *OPTIONS, *options)
    assert ran.code == 2
    assert said in ran.stderr, ran.stderr


def test_another_source_is_refused_wherever_it_lies(source: Path, tmp_path: Path) -> None:
    write_parts(source, tmp_path, [1], 3)
    copy = shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copyfile)
    write_parts(copy, tmp_path, [2], 3)
    shard = copy / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2 :] = bytes(byte ^ 1 for byte in data[len(data) // 2 :])
    shard.write_bytes(data)
    ran = vexport("quantize", copy, tmp_path / "out", *OPTIONS, "--part", "3/3")
    assert ran.code == 2
    assert "part-00001-of-00003: got another source, need the one of this part" in ran.errors[0]


def test_what_runs_all_layers_in_order_has_no_parts(source: Path, calibration: Path, tmp_path: Path) -> None:
    options = ("--scheme", "W4A16", "--calibration", calibration, "--part", "1/2")
    ran = vexport("quantize", source, tmp_path / "out", *OPTIONS[2:], *options)
    assert ran.code == 2
    assert "torchrun" in ran.errors[0]
    assert "--rounding nearest" in ran.errors[0]
    assert not list(tmp_path.iterdir())


def test_a_merge_waits_for_nobody(source: Path, tmp_path: Path) -> None:
    write_parts(source, tmp_path, [1, 2], 2)
    part = tmp_path / "out.parts" / "part-00002-of-00002"
    with resumable_directory(part, input_digest="again", overwrite=True) as folder:
        ran = vexport("merge", tmp_path / "out")
        (folder / "part.json").write_text("{}")
    assert ran.code == 2
    assert "being written: 2" in ran.errors[0]
    assert "wait, then merge" in ran.errors[0]


def test_parts_of_a_check_find_together_what_one_check_finds(source: Path, tmp_path: Path) -> None:
    assert vexport("quantize", source, tmp_path / "out", *OPTIONS[:2], "--quiet").code == 0
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight_scale"].view(torch.uint8)[:] = 0x7F
    tensors["model.layers.2.input_layernorm.weight"][:] = 2.0
    save_file(tensors, file, metadata={"format": "pt"})

    def findings(*options: object) -> tuple[int, set[str]]:
        ran = vexport("check", tmp_path / "out", "--source", source, "--format", "json", *options)
        (report,) = json.loads(ran.stdout)
        own = (each for each in report["findings"] if each["severity"] != "info")
        return ran.code, {f"{each['check']} {each['where']}" for each in own}

    code, expected = findings()
    parts = [findings("--part", f"{number}/4") for number in (1, 2, 3, 4)]
    assert code == 1
    assert {finding for _, found in parts for finding in found} == expected
    # Three decoder layers are dealt to four parts; what was spoiled is in the second and in the third.
    assert [code for code, _ in parts] == [0, 1, 1, 0]
    assert any("down_proj" in finding for finding in parts[1][1])
