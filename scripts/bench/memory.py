"""Print the time and memory that quantization needs by its formulas, and measure the memory.

    .venv/bin/python scripts/bench/memory.py [--scheme W4A16] [--tokens 65536]
    .venv/bin/python scripts/bench/memory.py --measure 16384,65536

Without `--measure`, the sizes of well-known models are used, without their weights. The columns:

- layer: the largest decoder layer, in 16 bits
- around: embeddings and output head, in 16 bits
- rows: the rows of text that wait in front of a module (`waiting_bytes` of
  vexport/quantize/waiting_rows.py)
- moments: two matrices of the size of the second moments of the widest input, in float32
- hours: calibration on 16 CPUs (`calibration_seconds` of vexport/plan/duration.py)

With `--measure`, two layers of random weights with the sizes of Qwen3-0.6B are quantized with text,
and the largest resident set is compared with `rows`. It includes 0.9 GB of libraries.
"""

import argparse
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from measure import OWN, random_llama, timed

from vexport.formats.plan import Plan
from vexport.names import Folder
from vexport.plan import duration
from vexport.plan.build import PlanSettings
from vexport.plan.source import plan_source, scheme_rules
from vexport.quantize.waiting_rows import waiting_bytes
from vexport.scenario import Planning

SEQ_LEN = 512
CPUS = 16
# Configs of Qwen3-0.6B, Llama-3.1-8B, Llama-3.1-70B and Qwen3-30B-A3B.
MODELS: Mapping[str, Mapping[str, object]] = {
    "0.6B": {
        **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936},
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        "tie_word_embeddings": True,
    },
    "8B": {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256},
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    },
    "70B": {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256},
        **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
    },
    "30B-A3B": {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        **{"vocab_size": 151936, "decoder_sparse_step": 1, "mlp_only_layers": []},
    },
}


def tensors(config: Mapping[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of a checkpoint's tensors."""
    size = {name: value for name, value in config.items() if isinstance(value, int)}
    hidden, heads = size["hidden_size"], size["num_attention_heads"] * size["head_dim"]
    keys = size["num_key_value_heads"] * size["head_dim"]
    yield "model.embed_tokens.weight", (size["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (size["vocab_size"], hidden)
    for number in range(size["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield f"{layer}.self_attn.q_proj.weight", (heads, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, heads)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        if str(config["model_type"]).startswith("qwen3"):
            yield f"{layer}.self_attn.q_norm.weight", (size["head_dim"],)
            yield f"{layer}.self_attn.k_norm.weight", (size["head_dim"],)
        experts = range(size.get("num_experts", 0))
        if experts:
            yield f"{layer}.mlp.gate.weight", (len(experts), hidden)
        width = size["moe_intermediate_size"] if experts else size["intermediate_size"]
        for mlp in [f"{layer}.mlp.experts.{expert}" for expert in experts] or [f"{layer}.mlp"]:
            yield f"{mlp}.gate_proj.weight", (width, hidden)
            yield f"{mlp}.up_proj.weight", (width, hidden)
            yield f"{mlp}.down_proj.weight", (hidden, width)


def write_headers(folder: Path, config: Mapping[str, object]) -> None:
    """Write a checkpoint with holes in the place of weights. It takes no space on the disk."""
    header, end = {}, 0
    for name, shape in tensors(config):
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (end, end + 2 * count)}
        end += 2 * count
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))


def planned(folder: Path, scheme: str) -> Plan:
    rules = scheme_rules(Planning(scheme=scheme))
    _, plan = plan_source(Folder.at(folder), rules, PlanSettings(has_text=True))
    return plan


def largest_layer(plan: Plan) -> int:
    """Return the bytes of the linear layers of the largest decoder layer."""
    sizes: Counter[str] = Counter()
    for group in plan.groups:
        number = re.search(r"layers\.\d+", group.name)
        for member in group.members if number else ():
            sizes[number[0] if number else ""] += 2 * member.out_features * member.in_features
    return max(sizes.values())


def around(config: Mapping[str, object]) -> int:
    """Return the bytes of embeddings and output head."""
    return sum(
        2 * shape[0] * shape[1]
        for name, shape in tensors(config)
        if not name.startswith("model.layers.") and len(shape) == 2
    )


def print_forecasts(scheme: str, tokens: int) -> None:
    print(
        f"{'':10}{'layer':>9}{'around':>9}{'rows':>9}{'moments':>9}{'hours':>8}"
        f"   ({scheme}, {tokens:,} tokens)"
    )
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_headers(Path(folder), config)
            plan = planned(Path(folder), scheme)
        widest = max(group.members[0].in_features for group in plan.groups)
        operations = duration.calibration_operations(
            plan, samples=tokens // SEQ_LEN, seq_len=SEQ_LEN
        )
        rows = waiting_bytes(plan.groups, tokens)
        cells = [largest_layer(plan), around(config), rows, 2 * 4 * widest**2]
        hours = operations / duration.CORE_SPEED / CPUS / 3600
        print(f"{name:10}" + "".join(f"{cell / 1e9:6.2f} GB" for cell in cells) + f"{hours:8.1f}")


def measure(scheme: str, tokens: list[int], folder: Path) -> None:
    """Quantize two layers of the sizes of Qwen3-0.6B, and print the largest resident set."""
    sizes = {
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        **{"vocab_size": 384, "max_position_embeddings": 1024},
    }
    model = random_llama(folder / "model", **sizes)
    text = folder / "rows.jsonl"
    draw = random.Random(0)
    with text.open("w") as file:
        for _ in range(max(tokens) // SEQ_LEN):
            row = {"input_ids": [draw.randrange(300) for _ in range(SEQ_LEN)]}
            print(json.dumps(row), file=file)
    plan = planned(model, scheme)
    for count in tokens:
        out = folder / f"out-{count}"
        samples = ("--samples", count // SEQ_LEN, "--seq-len", SEQ_LEN, "--device", "cpu")
        options = ("--scheme", scheme, "--calibration", text, *samples, "--no-verify", "--quiet")
        ran = timed(*OWN, "quantize", model, out, *options)
        estimate = waiting_bytes(plan.groups, count)
        print(
            f"{count:,} tokens: rows {estimate / 1e9:.2f} GB by the formula, "
            f"largest resident set {ran.megabytes / 1e3:.2f} GB, {ran.cpu:.0f} s of processor time",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scheme", default="W4A16")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--measure", metavar="N,...", help="Numbers of tokens.")
    options = parser.parse_args()
    if options.measure is None:
        print_forecasts(options.scheme, options.tokens)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(options.scheme, [int(count) for count in options.measure.split(",")], Path(folder))


if __name__ == "__main__":
    main()
