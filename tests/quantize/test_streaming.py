"""Streaming of tensors: interruption and resumption, parts of tensors, and constant memory."""

import contextlib
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.architectures.families import split
from tests.command import vexport
from tests.forked import command, finish, start
from tests.models import save_llama
from tests.texts import assert_contains
from vexport.checkpoint.index import read_index
from vexport.checkpoint.writer import header_bytes
from vexport.outputs.manifest import record
from vexport.outputs.resumable import resumable_directory
from vexport.records import TensorSpec


def write_model(folder: Path, *, hidden: int, layers: int) -> Path:
    """Save a Llama in two shards, large enough to be killed in the middle."""
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "head_dim": hidden // 4}
    save_llama(folder, **sizes, num_hidden_layers=layers, num_key_value_heads=1, vocab_size=4096)
    (folder / "tokenizer.json").write_text("{}")
    return split(folder, 2)


def digests(folder: Path) -> Mapping[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


@pytest.mark.slow
def test_killed_twice_resumes_to_same_bytes(tmp_path: Path) -> None:
    source, log = write_model(tmp_path / "source", hidden=1024, layers=4), tmp_path / "log"
    whole, out = tmp_path / "whole", tmp_path / "out"
    options = ("--scheme", "NVFP4A16", "--max-shard-size", "10MB")
    finish(start(log, command, "quantize", source, whole, *options), log)
    for least in (1, 20_000_000):
        process, written = start(log, command, "quantize", source, out, *options), 0
        while written < least and process.is_alive():
            time.sleep(0.002)
            written = sum(
                file.stat().st_size for file in tmp_path.glob(".out.partial/new/*.safetensors")
            )
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not out.exists()
    finish(start(log, command, "quantize", source, out, *options), log)
    assert digests(out) == digests(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "out", "source", "whole"]


def interrupt_directory(out: Path, input_digest: str) -> list[str]:
    """Write half a shard and half a config, then interrupt.

    Return the notes, and the files found.
    """
    found: list[str] = []
    with (
        contextlib.suppress(KeyboardInterrupt),
        resumable_directory(
            out, input_digest=input_digest, overwrite=False, note=found.append
        ) as folder,
    ):
        found += sorted(path.name for path in folder.iterdir())
        for name in ("model.safetensors", "config.json"):
            record(folder / name)
        (folder / "model.safetensors").write_text("half")
        (folder / ".config.json.0123abcd").write_text("half")
        raise KeyboardInterrupt
    return found


def test_changed_input_starts_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert interrupt_directory(out, "a") == []
    note, file = interrupt_directory(out, "a")
    assert_contains(note, "resumes")
    assert file == "model.safetensors"
    (note,) = interrupt_directory(out, "b")
    assert_contains(note, "starts again", "inputs")
    with resumable_directory(out, input_digest="c", overwrite=False) as folder:
        record(folder / "config.json")
        (folder / "config.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name for path in out.iterdir()} == {"config.json", "vexport.json"}


def test_two_writers_of_one_output_are_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", hidden=128, layers=1)
    with resumable_directory(tmp_path / "out", input_digest="x", overwrite=False) as folder:
        ran = vexport("quantize", source, tmp_path / "out", "--scheme", "W8A8", "--quiet")
        record(folder / "config.json")
        (folder / "config.json").write_text("{}")
    assert ran.code == 2
    assert "another process" in ran.errors[0]


def test_refusal_leaves_no_files(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", hidden=128, layers=1)
    name = "model.layers.0.mlp.down_proj.weight"
    file = read_index(source).tensors[name].file
    tensors = load_file(file)
    tensors[name][100, 100] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    for scheme in ("NVFP4A16", "W4A16", "FP8_DYNAMIC"):
        ran = vexport("quantize", source, tmp_path / "out", "--scheme", scheme, "--quiet")
        assert ran.code == 2
        assert name in ran.errors[0]
        assert [path.name for path in tmp_path.iterdir()] == ["source"]


PEAK_OF_QUANTIZE = """
import json, os, sys
from pathlib import Path
from vexport.names import Folder
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.plan.source import scheme_rules
from vexport.scenario import Planning
rules = scheme_rules(Planning(scheme="NVFP4A16", observer="memoryless_minmax"))
source = Folder.at(Path(sys.argv[1]))
quantize_source(QuantizeJob(source=source, out=Path(sys.argv[2]), rules=rules))
# ru_maxrss would include the memory of the parent process.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def sparse_model(folder: Path, rows: int, columns: int) -> Path:
    """Write a checkpoint of zeros as a sparse file: a gate/up group and an embedding."""
    folder.mkdir()
    specs = [
        TensorSpec(name=name, dtype="BF16", shape=(rows, columns))
        for name in (
            "model.embed_tokens.weight",
            *(f"model.layers.0.mlp.{leaf}_proj.weight" for leaf in ("gate", "up")),
        )
    ]
    header = header_bytes(specs)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 6 * rows * columns)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
    return folder


@pytest.mark.slow
def test_memory_is_constant(tmp_path: Path) -> None:
    peaks = []
    for name, rows in (("small", 2048), ("large", 28672)):
        source = sparse_model(tmp_path / name, rows, 4096)
        ran = subprocess.run(
            [sys.executable, "-c", PEAK_OF_QUANTIZE, source, tmp_path / f"{name}-out"],
            check=True,
            capture_output=True,
            text=True,
        )
        peaks.append(int(ran.stdout) / 1000)
        assert read_index(tmp_path / f"{name}-out").num_parameters > 0
    small, large = peaks
    assert large - small < 64
