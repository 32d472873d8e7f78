"""Compare time and memory of `vexport quantize` and `check` with llm-compressor, `cp` and `cat`.

    .venv/bin/python scripts/bench/quantize.py [--scheme NVFP4A16]... [--repeats 3] [--layers 22]

The peer is llm-compressor's model_free_ptq. The source is a Llama of 1.1 B random weights (2.2 GB
of bf16 in 4 shards), made once in --folder. All commands run in turns with the files in the page
cache, after a sync. The fastest repeat counts, and the largest memory. The copy is synced like the
output. The peer runs once, in .venv-peer (scripts/bench/setup-peer). Without .venv-peer its columns
are empty. For `quantize` and the peer the seconds are of the call without imports, for `check` of
the whole process. On a busy machine compare processor seconds. Linux only.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from measure import OWN, PEER, Ran, spent, timed
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

SCHEMES = ("NVFP4A16", "W4A16", "FP8_BLOCK", "FP8_DYNAMIC")
SHARDS = 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "dtype": "bfloat16",
}
COLUMNS = ("s", "CPU s", "MB")


def make_source(folder: Path, layers: int) -> Path:
    """Write the synthetic checkpoint, unless it exists.

    Each shard has whole layers, as the peer needs.
    """
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, num_hidden_layers=layers)).to(torch.bfloat16)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        words = name.split(".")
        number = (
            int(words[2]) * SHARDS // layers
            if words[1] == "layers"
            else 0
            if "embed" in name
            else SHARDS - 1
        )
        shards.setdefault(f"model-{number + 1:05}-of-{SHARDS:05}.safetensors", {})[name] = tensor
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model.config.save_pretrained(folder)
    return folder


def run_peer(scheme: str, source: str, out: str) -> None:
    """Run the peer's call in its environment, and print its seconds."""
    from llmcompressor import model_free_ptq

    options = {"scheme": scheme, "ignore": ["lm_head", "re:.*embed_tokens.*"]}
    workers = len(os.sched_getaffinity(0))
    print(json.dumps(spent(lambda: model_free_ptq(source, out, max_workers=workers, **options))))


def seconds_of_shell(source: Path, command: str) -> float:
    """Return the seconds of a shell command on the shards.

    `$OUT` is an empty folder next to them.
    """
    with tempfile.TemporaryDirectory(dir=source.parent) as out:
        shards = source.glob("*.safetensors")
        return timed("env", f"OUT={out}", "sh", "-c", command, "sh", *shards).seconds


def figures(runs: Sequence[Ran]) -> list[float]:
    """Return the least time, the least processor time and the most memory, or zeros."""
    if not runs:
        return [0.0] * len(COLUMNS)
    seconds = (run.answer["seconds"] if run.text.endswith("}\n") else run.seconds for run in runs)
    return [min(seconds), min(run.cpu for run in runs), max(run.megabytes for run in runs)]


def measure(scheme: str, source: Path, repeats: int) -> list[float]:
    ours, peers, checks, copies, reads = [], [], [], [], []
    options = ("--scheme", scheme, "--quiet", "--no-verify")
    for repeat in range(repeats):
        copies.append(seconds_of_shell(source, 'cp "$@" $OUT && sync $OUT/*'))
        with tempfile.TemporaryDirectory(dir=source.parent) as folder:
            out = Path(folder) / "ours"
            ours.append(timed(*OWN, "quantize", source, out, *options))
            reads.append(seconds_of_shell(out, 'cat "$@" > /dev/null'))
            checks.append(timed(sys.executable, "-m", "vexport", "check", out, "--quiet"))
            if PEER.is_file() and not repeat:
                peers.append(timed(PEER, __file__, "--peer", scheme, source, Path(folder) / "peer"))
    return [*figures(ours), *figures(peers), min(copies), *figures(checks), min(reads)]


def main() -> None:
    if "--peer" in sys.argv:
        run_peer(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description="Speed of quantize and check against the peer, cp and cat."
    )
    parser.add_argument("--scheme", action="append", help="A scheme; repeatable.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "vexport-bench"
    )
    options = parser.parse_args()
    source = make_source(options.folder / f"llama-{options.layers}", options.layers)
    print(" " * 12 + f"{'quantize':>24}{'peer':>24}{'':8}{'check':>24}")
    print(
        " " * 12 + "".join(f"{name:>8}" for name in (*COLUMNS, *COLUMNS, "cp s", *COLUMNS, "cat s"))
    )
    for scheme in options.scheme or SCHEMES:
        cells = measure(scheme, source, options.repeats)
        print(
            f"{scheme:12}" + "".join(f"{cell:8.2f}" if cell else f"{'-':>8}" for cell in cells),
            flush=True,
        )


if __name__ == "__main__":
    main()
