"""Time of `vexport check` next to the time it takes to read the same files: a dense model and a mixture.

    .venv/bin/python scripts/bench/check.py [--scheme NVFP4A16]... [--experts 128] [--layers 3] [--repeats 3]
                                            [--folder DIR] [--json]

One decoder layer of random weights is quantized by vexport, with two experts for the mixture, and repeated
under new names: a Llama of 1.1 B in four shards, and `--layers` layers of a mixture of Qwen3-235B's sides
(1.2 GB a layer in four bits), made once in DIR. Files are in the page cache; the limit is `cat` of all
shards. The fastest of the repeats counts, memory is the largest resident set. Linux only.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quantize import CONFIG, HIDDEN, INTERMEDIATE, KEY_VALUE, SHARDS, VOCABULARY, timed, write_shard

SCHEMES = ("NVFP4A16", "W4A16", "FP8_BLOCK")
DENSE_LAYERS, QUANTIZED_EXPERTS = 22, 2
WIDE, EXPERT, HEADS, HEAD = 4096, 1536, 32, 128
SMALL_VOCABULARY = 4096
MIXTURE_CONFIG = {
    **CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": WIDE,
    "intermediate_size": 3 * WIDE,
    "moe_intermediate_size": EXPERT,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 4,
    "head_dim": HEAD,
    "vocab_size": SMALL_VOCABULARY,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
PLACE = re.compile(r"(?P<layer>model\.layers\.)0(?P<inner>\..*?experts\.|\.)(?P<expert>\d+)?(?P<leaf>.*)")
ROUTER = "model.layers.0.mlp.gate.weight"
Tensors = Mapping[str, tuple[str, list[int], bytes]]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One checkpoint: its size in GB and tensors, seconds (by the clock, of the processor) and MB of the
    check, seconds of reading it."""

    checkpoint: str
    gigabytes: float
    tensors: int
    seconds: float
    cpu: float
    megabytes: float
    read: float


def dense_layer() -> Mapping[str, Shape]:
    """Shapes of the dense model with one layer."""
    sides = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    return {
        **outside(HIDDEN, VOCABULARY),
        **attention(HIDDEN, HIDDEN, KEY_VALUE),
        **{f"model.layers.0.mlp.{name}_proj.weight": shape for name, shape in sides.items()},
    }


def mixture_layer() -> Mapping[str, Shape]:
    """Shapes of the mixture with one layer of few experts."""
    sides = {"gate": (EXPERT, WIDE), "up": (EXPERT, WIDE), "down": (WIDE, EXPERT)}
    return {
        **outside(WIDE, SMALL_VOCABULARY),
        **attention(WIDE, HEADS * HEAD, 4 * HEAD),
        "model.layers.0.self_attn.q_norm.weight": (HEAD,),
        "model.layers.0.self_attn.k_norm.weight": (HEAD,),
        ROUTER: (QUANTIZED_EXPERTS, WIDE),
        **{
            f"model.layers.0.mlp.experts.{number}.{name}_proj.weight": shape
            for number in range(QUANTIZED_EXPERTS)
            for name, shape in sides.items()
        },
    }


def outside(hidden: int, vocabulary: int) -> dict[str, Shape]:
    """What is not in the decoder layers."""
    return {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }


def attention(hidden: int, query: int, key: int) -> dict[str, Shape]:
    """Attention and norms of a layer."""
    sides = {"q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "o": (hidden, query)}
    norms = {f"model.layers.0.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return {**norms, **{f"model.layers.0.self_attn.{name}_proj.weight": side for name, side in sides.items()}}


def make(folder: Path, scheme: str, *, mixture: bool, layers: int, experts: int) -> Path:
    """The checkpoint, written unless it is there."""
    name = f"mixture-{layers}-{experts}" if mixture else "dense"
    out = folder / f"check-{name}-{scheme}"
    if (out / "config.json").is_file():
        return out
    config = MIXTURE_CONFIG if mixture else CONFIG
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source, small = Path(scratch) / "source", Path(scratch) / "small"
        source.mkdir()
        write_shard(source / "model.safetensors", mixture_layer() if mixture else dense_layer(), seed=1)
        few = {"num_experts": QUANTIZED_EXPERTS} if mixture else {}
        (source / "config.json").write_text(json.dumps({**config, **few, "num_hidden_layers": 1}))
        command = [sys.executable, "-m", "vexport", "quantize", source, small, "--scheme", scheme, "--quiet"]
        timed(command)
        many = {"num_experts": experts} if mixture else {}
        repeat(small, out, layers, experts, {**many, "num_hidden_layers": layers})
    return out


def repeat(small: Path, out: Path, layers: int, experts: int, sizes: Mapping[str, int]) -> None:
    """Write a checkpoint of many layers and experts that are all those of a small one."""
    tensors = read_tensors(small / "model.safetensors")
    if ROUTER in tensors:
        dtype, (rows, columns), data = tensors[ROUTER]
        tensors[ROUTER] = (dtype, [experts, columns], data * (experts // rows))
    out.mkdir(parents=True)
    weight_map = {}
    for number in range(SHARDS):
        file = out / f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        here = range(layers * number // SHARDS, layers * (number + 1) // SHARDS)
        names = dict(copies(tensors, here, experts, first=number == 0))
        write_tensors(file, names, tensors)
        weight_map.update(dict.fromkeys(names, file.name))
    total = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((small / "config.json").read_text(encoding="utf-8"))
    quantization = config["quantization_config"]
    quantization["ignore"] = [
        name
        for kept in quantization["ignore"]
        for name in dict.fromkeys(kept.replace("layers.0.", f"layers.{layer}.") for layer in range(layers))
    ]
    (out / "config.json").write_text(json.dumps({**config, **sizes}))


def copies(tensors: Tensors, layers: range, experts: int, *, first: bool) -> Iterator[tuple[str, str]]:
    """(name, the small checkpoint's name of the same tensor) of a shard."""
    for name in tensors:
        place = PLACE.fullmatch(name)
        if place is None:
            if first:
                yield name, name
            continue
        for layer in layers:
            numbers = [""] if place["expert"] is None else range(int(place["expert"]), experts, 2)
            for number in numbers:
                yield f"{place['layer']}{layer}{place['inner']}{number}{place['leaf']}", name


def read_tensors(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """dtype, shape and bytes of every tensor of a safetensors file."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    return {
        name: (entry["dtype"], entry["shape"], content[start + begin : start + end])
        for name, entry in header.items()
        if name != "__metadata__"
        for begin, end in [entry["data_offsets"]]
    }


def write_tensors(file: Path, names: Mapping[str, str], tensors: Tensors) -> None:
    """A safetensors file whose tensors are copies."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, original in names.items():
        dtype, shape, data = tensors[original]
        end = position + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.writelines(tensors[original][2] for original in names.values())


def measure(checkpoint: Path, repeats: int) -> Row:
    """The check and the reading in turns; a checkpoint that does not pass ends it all."""
    shards = sorted(checkpoint.glob("*.safetensors"))
    ran, read = [], []
    for _ in range(repeats):
        read.append(reading(shards))
        ran.append(timed([sys.executable, "-m", "vexport", "check", checkpoint, "--quiet"]))
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text(encoding="utf-8"))
    return Row(
        checkpoint=checkpoint.name.removeprefix("check-"),
        gigabytes=sum(shard.stat().st_size for shard in shards) / 1e9,
        tensors=len(index["weight_map"]),
        seconds=min(run.seconds for run in ran),
        cpu=min(run.cpu for run in ran),
        megabytes=max(run.megabytes for run in ran),
        read=min(read),
    )


def reading(shards: Sequence[Path]) -> float:
    """Seconds that cat takes for all shards."""
    start = time.perf_counter()
    subprocess.run(["cat", *shards], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def table(rows: Sequence[Row]) -> str:
    """The rows as text; the last column is the check as a multiple of the reading."""
    head = "".join(f"{name:>9}" for name in ("GB", "tensors", "check s", "CPU s", "MB", "cat s", "of cat"))
    lines = [f"{'':28}{head}"]
    for row in rows:
        times = (row.seconds, row.cpu, row.megabytes, row.read, row.seconds / row.read)
        cells = (row.gigabytes, row.tensors, *times)
        lines.append(f"{row.checkpoint:28}" + "".join(f"{cell:9.2f}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Measure every scheme and print the table."""
    parser = argparse.ArgumentParser(description="Time of vexport check beside that of reading the files.")
    parser.add_argument("--scheme", action="append", help="A scheme; repeatable.")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3, help="Layers of the mixture.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "vexport-bench")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for scheme in options.scheme or SCHEMES:
        for mixture, layers in ((False, DENSE_LAYERS), (True, options.layers)):
            made = make(options.folder, scheme, mixture=mixture, layers=layers, experts=options.experts)
            rows.append(measure(made, options.repeats))
            print(table(rows[-1:]), file=sys.stderr)
    print(json.dumps([asdict(row) for row in rows]) if options.json else table(rows))


if __name__ == "__main__":
    main()
