"""Streaming: broken off and continued, parts of stored tensors, memory that does not grow with the model."""

import contextlib
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.command import vexport
from tests.forked import command, finish, start
from vexport.checkpoint.index import read_index
from vexport.checkpoint.writer import header_bytes
from vexport.outputs.directory import resumable_directory
from vexport.plan.source import rules_for
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.records import PlanRequest, TensorSpec

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096}


def write_model(folder: Path, *, hidden: int, layers: int) -> Path:
    """A Llama of random bf16 weights in two shards, large enough to be killed in the middle."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    names: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (4096, hidden)}
    for layer in range(layers):
        for name, rows in (("q", hidden), ("k", hidden // 4), ("v", hidden // 4), ("o", hidden)):
            names[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = (rows, hidden)
        for name in ("gate", "up"):
            names[f"model.layers.{layer}.mlp.{name}_proj.weight"] = (3 * hidden, hidden)
        names[f"model.layers.{layer}.mlp.down_proj.weight"] = (hidden, 3 * hidden)
        for name in ("input", "post_attention"):
            names[f"model.layers.{layer}.{name}_layernorm.weight"] = (hidden,)
    names["model.norm.weight"] = (hidden,)
    names["lm_head.weight"] = (4096, hidden)
    weight_map = {}
    for shard, part in enumerate(np.array_split(np.array(list(names)), 2)):
        tensors = {}
        for name in part.tolist():
            bits = generator.integers(0x3C00, 0x3D80, names[name], np.uint16)
            signs = generator.integers(0, 2, names[name], np.uint16) << np.uint16(15)
            tensors[name] = torch.from_numpy(bits | signs).view(torch.bfloat16)
            weight_map[name] = f"model-{shard}.safetensors"
        save_file(tensors, folder / f"model-{shard}.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "head_dim": hidden // 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 4096}
    config = {**CONFIG, **sizes, **heads, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def digests(folder: Path) -> Mapping[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.slow
def test_killed_twice_it_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    source, log = write_model(tmp_path / "source", hidden=1024, layers=4), tmp_path / "log"
    whole, out = tmp_path / "whole", tmp_path / "out"
    options = ("--scheme", "NVFP4A16", "--max-shard-size", "10MB")
    finish(start(log, command, "quantize", source, whole, *options), log)
    for least in (1, 20_000_000):
        process, written = start(log, command, "quantize", source, out, *options), 0
        while written < least and process.is_alive():
            time.sleep(0.002)
            written = sum(file.stat().st_size for file in tmp_path.glob(".out.partial/new/*.safetensors"))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not out.exists()
    finish(start(log, command, "quantize", source, out, *options), log)
    assert digests(out) == digests(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "out", "source", "whole"]


def test_what_is_written_is_not_written_again(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", hidden=256, layers=2)
    out, stop_at = tmp_path / "out", 2_000_000

    def quantize(*, interrupt: bool) -> list[int]:
        seen = []

        def on_progress(stage: str, done: int, total: int) -> None:
            if stage == "quantize (bytes)":
                seen.append(done)
            if interrupt and done >= stop_at:
                raise KeyboardInterrupt

        rules = rules_for(PlanRequest(scheme="W8A8", observer="memoryless_minmax"))
        job = QuantizeJob(
            source=str(source), out=out, rules=rules, on_progress=on_progress, shard_bytes=1_000_000
        )
        quantize_source(job)
        return seen

    with pytest.raises(KeyboardInterrupt):
        quantize(interrupt=True)
    (first,) = (tmp_path / ".out.partial" / "new").glob("model-00001-of-*.safetensors")
    before = first.stat().st_mtime_ns
    assert quantize(interrupt=False)[0] > stop_at
    assert (out / first.name).stat().st_mtime_ns == before


def break_off(out: Path, input_digest: str) -> list[str]:
    """What an unfinished call is told and finds; it leaves half a shard and half a config."""
    found: list[str] = []
    with (
        contextlib.suppress(KeyboardInterrupt),
        resumable_directory(out, input_digest=input_digest, overwrite=False, note=found.append) as folder,
    ):
        found += sorted(path.name for path in folder.iterdir())
        (folder / "model.safetensors").write_text("half")
        (folder / ".config.json.tmp").write_text("half")
        raise KeyboardInterrupt
    return found


def test_another_input_begins_anew(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert break_off(out, "a") == []
    assert break_off(out, "a") == ["resumes where it was interrupted", "model.safetensors"]
    assert break_off(out, "b") == ["starts again: its inputs have changed"]
    with resumable_directory(out, input_digest="c", overwrite=False) as folder:
        (folder / "config.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name for path in out.iterdir()} == {"config.json", "vexport.json"}


def test_two_writers_of_one_output_are_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", hidden=128, layers=1)
    with resumable_directory(tmp_path / "out", input_digest="x", overwrite=False) as folder:
        ran = vexport("quantize", source, tmp_path / "out", "--scheme", "W8A8", "--quiet")
        (folder / "config.json").write_text("{}")
    assert ran.code == 2
    assert "another process" in ran.errors[0]


def test_a_refusal_leaves_nothing(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", hidden=128, layers=1)
    file = source / "model-1.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][100, 100] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    for scheme in ("NVFP4A16", "W4A16", "FP8_DYNAMIC"):
        ran = vexport("quantize", source, tmp_path / "out", "--scheme", scheme, "--quiet")
        assert ran.code == 2
        assert name in ran.errors[0]
        assert [path.name for path in tmp_path.iterdir()] == ["source"]


SPARSE = """
import json, os, sys
from pathlib import Path
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.plan.source import rules_for
from vexport.records import PlanRequest
rules = rules_for(PlanRequest(scheme="NVFP4A16", observer="memoryless_minmax"))
quantize_source(QuantizeJob(source=sys.argv[1], out=Path(sys.argv[2]), rules=rules))
# ru_maxrss would count what the process that started this one had in memory.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def sparse_model(folder: Path, rows: int, columns: int) -> Path:
    """A checkpoint of zeros that takes no room on the disk: one gate/up group and an embedding."""
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
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    return folder


@pytest.mark.slow
def test_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    peaks = []
    for name, rows in (("small", 2048), ("large", 28672)):
        source = sparse_model(tmp_path / name, rows, 4096)
        ran = subprocess.run(
            [sys.executable, "-c", SPARSE, source, tmp_path / f"{name}-out"],
            check=True,
            capture_output=True,
            text=True,
        )
        peaks.append(int(ran.stdout) / 1000)
        assert read_index(tmp_path / f"{name}-out").num_parameters > 0
    small, large = peaks
    assert large - small < 64
