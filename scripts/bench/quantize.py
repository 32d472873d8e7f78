"""Speed and memory of `vexport quantize` against llm-compressor's model_free_ptq and against `cp`.

    .venv/bin/python scripts/bench/quantize.py [--scheme NVFP4A16]... [--repeats 3] [--peer-repeats 1]
                                               [--layers 22] [--folder DIR] [--json]

The source is a synthetic Llama of 1.1 B parameters (2.2 GB of bf16 in 4 shards, random normal weights whose
rows differ in size), made once in DIR, by default a folder of its own under the system's temporary one. All
are run in turns with the source in the page cache, each into a new folder, after a sync; the fastest of the
repeats counts. The copy is synced, as the output is. "span" is the call without imports, from the first read
to the last write; "whole" is the process, "cpu" the processor seconds of that, which say more on a busy
machine. Memory is the largest resident set of the process. The peer runs in
.venv-peer (scripts/bench/setup-peer; without it its columns are empty). Linux only.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
PEER = ROOT / ".venv-peer" / "bin" / "python"
OWN = Path(__file__).resolve().with_name("own.py")
SCHEMES = ("NVFP4A16", "W4A16", "FP8_BLOCK", "FP8_DYNAMIC")
HIDDEN, INTERMEDIATE, LAYERS, KEY_VALUE, VOCABULARY = 2048, 5632, 22, 256, 32000
SHARDS = 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of the span and of the whole command, its processor time, its largest resident set in MB."""

    span: float
    whole: float
    cpu: float
    megabytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One scheme: ours, the peer's (None where it was not run), and cp of the same files."""

    scheme: str
    ours: Measured
    peer: Measured | None
    cp: float


def shapes(layers: int) -> Mapping[str, tuple[int, ...]]:
    """The tensors of the model in the order of its layers."""
    table: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", HIDDEN), ("k", KEY_VALUE), ("v", KEY_VALUE), ("o", HIDDEN)):
            table[f"{prefix}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        for name in ("gate", "up"):
            table[f"{prefix}mlp.{name}_proj.weight"] = (INTERMEDIATE, HIDDEN)
        table[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        for name in ("input", "post_attention"):
            table[f"{prefix}{name}_layernorm.weight"] = (HIDDEN,)
    table["model.norm.weight"] = (HIDDEN,)
    table["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return table


def weight_rows(shape: tuple[int, ...], generator: np.random.Generator) -> Iterator[bytes]:
    """bf16 rows of normal values, a standard deviation for each row; ones for a norm."""
    if len(shape) == 1:
        yield np.full(shape, 0x3F80, np.uint16).tobytes()
        return
    for start in range(0, shape[0], 256):
        rows = min(256, shape[0] - start)
        spread = np.exp(generator.standard_normal((rows, 1), np.float32) * 0.5) * 0.02
        values = generator.standard_normal((rows, shape[1]), np.float32) * spread.astype(np.float32)
        yield ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16).tobytes()


def make_source(folder: Path, layers: int) -> Path:
    """Write the synthetic checkpoint unless it is there."""
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    table, weight_map = shapes(layers), {}
    for number in range(1, SHARDS + 1):
        file = folder / f"model-{number:05}-of-{SHARDS:05}.safetensors"
        here = {name: shape for name, shape in table.items() if shard_of(name, layers) == number}
        weight_map.update(dict.fromkeys(here, file.name))
        write_shard(file, here, seed=number)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    return folder


def shard_of(name: str, layers: int) -> int:
    """The shard of a tensor, from 1: whole layers, since the peer refuses some that are cut."""
    words = name.split(".")
    if words[1] == "layers":
        return 1 + int(words[2]) * SHARDS // layers
    return 1 if "embed" in name else SHARDS


def write_shard(file: Path, table: Mapping[str, tuple[int, ...]], *, seed: int) -> None:
    """One safetensors file of random weights."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in table.items():
        end = position + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    generator = np.random.default_rng(seed)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for shape in table.values():
            stream.writelines(weight_rows(shape, generator))


def run_peer(scheme: str, source: str, out: str) -> None:
    """The peer's own call in its environment; prints the seconds of it, after the imports."""
    from llmcompressor import model_free_ptq

    ignore = ["lm_head", "re:.*embed_tokens.*"]
    start = time.perf_counter()
    model_free_ptq(source, out, scheme=scheme, ignore=ignore, max_workers=len(os.sched_getaffinity(0)))
    print(json.dumps({"seconds": time.perf_counter() - start}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a command took: seconds, processor seconds, largest resident set in MB; and its stdout."""

    seconds: float
    cpu: float
    megabytes: float
    text: str


def timed(command: Sequence[object]) -> Ran:
    """Run a command that must succeed."""
    os.sync()
    start = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        with ThreadPoolExecutor(1) as other:
            peak = other.submit(largest_resident, process.pid)
            text = process.stdout.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{command[0]}: exit {process.returncode}\n{log.read().decode()[-2000:]}")
    return Ran(
        seconds=time.perf_counter() - start,
        cpu=usage.ru_utime + usage.ru_stime,
        megabytes=peak.result(),
        text=text,
    )


def largest_resident(pid: int) -> float:
    """The largest resident set of a process, MB, once it has ended; that of wait4 counts its parent's too."""
    found = 0.0
    while True:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        peak = [float(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:")]
        if not peak:
            return found
        found = max(found, *peak)
        time.sleep(0.005)


def copied(source: Path, scratch: Path) -> float:
    """Seconds that cp takes for the weights until the disk holds them, as it holds what is quantized."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        words = " ".join(map(shlex.quote, map(str, source.glob("*.safetensors"))))
        return timed(["sh", "-c", f"cp {words} {folder} && sync {folder}/*"]).seconds


def measured(command: Sequence[object], scratch: Path) -> Measured:
    """A command that ends with its output folder and prints the seconds of its span."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        ran = timed([*command, Path(folder) / "out"])
    span = json.loads(ran.text.splitlines()[-1])["seconds"]
    return Measured(span=span, whole=ran.seconds, cpu=ran.cpu, megabytes=ran.megabytes)


def ours(scheme: str, source: Path, scratch: Path) -> Measured:
    """`vexport quantize` as its users call it, without loading the result in vLLM."""
    command = [sys.executable, OWN, "quantize", "--scheme", scheme, "--quiet", "--no-verify", source]
    return measured(command, scratch)


def peer(scheme: str, source: Path, scratch: Path) -> Measured:
    """The peer's call in a process of its own."""
    return measured([PEER, __file__, "--peer", scheme, source], scratch)


def fastest(runs: Sequence[Measured]) -> Measured:
    """The best of each figure; the worst of the memory."""
    return Measured(
        span=min(run.span for run in runs),
        whole=min(run.whole for run in runs),
        cpu=min(run.cpu for run in runs),
        megabytes=max(run.megabytes for run in runs),
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as text: seconds and MB, then how many times ours the peer takes, and what ours is of cp."""
    columns = ("span", "whole", "cpu", "MB")
    head = "".join(f"{name:>8}" for name in (*columns, *columns, "cp", *columns[:3], "of cp"))
    lines = [f"{'':12}{'vexport':>32}{'peer':>32}{'':8}{'peer / vexport':>24}", f"{'':12}{head}"]
    for row in rows:
        ours = figures(row.ours)
        theirs = figures(row.peer) if row.peer else [None] * len(ours)
        ratios = [b / a if a and b else None for a, b in zip(ours, theirs, strict=True)][:3]
        cells = [*ours, *theirs, row.cp, *ratios, row.ours.span / row.cp]
        lines.append(f"{row.scheme:12}" + "".join(f"{'-':>8}" if x is None else f"{x:8.2f}" for x in cells))
    return "\n".join(lines)


def figures(measured: Measured) -> list[float | None]:
    """The figures in the order of the columns."""
    return [measured.span, measured.whole, measured.cpu, measured.megabytes]


def main() -> None:
    """Measure every scheme and print the table."""
    if "--peer" in sys.argv:
        run_peer(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description="Speed of vexport quantize against the peer and cp.")
    parser.add_argument("--scheme", action="append", help="A scheme; repeatable.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-repeats", type=int, default=1)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "vexport-bench")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    source = make_source(options.folder / f"llama-{options.layers}", options.layers)
    rows = []
    for scheme in options.scheme or SCHEMES:
        runs, copies, others = [], [], []
        for repeat in range(options.repeats):
            copies.append(copied(source, options.folder))
            runs.append(ours(scheme, source, options.folder))
            if PEER.is_file() and repeat < options.peer_repeats:
                others.append(peer(scheme, source, options.folder))
        best = fastest(others) if others else None
        rows.append(Row(scheme=scheme, ours=fastest(runs), peer=best, cp=min(copies)))
        print(table(rows[-1:]), file=sys.stderr)
    print(json.dumps([asdict(row) for row in rows]) if options.json else table(rows))


if __name__ == "__main__":
    main()
