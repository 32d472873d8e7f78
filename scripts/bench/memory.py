"""What `plan` predicts of a rank's memory next to what real vLLM holds on this CPU: weights and KV cache.

    .venv/bin/python scripts/bench/memory.py [MODEL...] [--schemes FP8_DYNAMIC,W8A8,W4A16_G64,NVFP4A16]

Each model, and a small Gemma 3 with windows that is made here, is quantized without data and loaded in vLLM.
The weights are the bytes of its parameters and buffers but for the table of rotary angles when all are
loaded: before kernels of the CPU build pack them again, and after (with the table). The KV cache has 1 GiB:
vLLM says how many tokens that is, whole blocks.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SCHEMES = ("FP8_DYNAMIC", "W8A8", "W4A16_G64", "NVFP4A16")
KV_BYTES = 2**30
LENGTH = 256
# Tokens of a block of the KV cache of vLLM's CPU build.
CPU_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of weights as loaded and as packed by the CPU's kernels, and the tokens of the KV cache."""

    loaded: int
    packed: int
    tokens: int


def main() -> None:
    """Print a row for each model and scheme."""
    if sys.argv[1:2] == ["--gemma"]:
        gemma(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    arguments = parser.parse_args()
    prepare()
    print("| model | scheme | weights: plan | vLLM | | after packing | tokens in 1 GiB: plan | vLLM | |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        windowed = Path(folder) / "gemma3-windows"
        subprocess.run([sys.executable, __file__, "--gemma", str(windowed)], check=True, capture_output=True)
        for model in (*arguments.models, windowed):
            for scheme in arguments.schemes.split(","):
                print(row(model.resolve(), scheme, Path(folder) / f"{model.name}-{scheme}"), flush=True)


def row(model: Path, scheme: str, out: Path) -> str:
    """One model in one scheme."""
    command = [sys.executable, "-m", "vexport", "quantize", str(model), str(out), "--scheme", scheme, "-q"]
    unsupported = ["--on-unsupported-shape", "smaller-group"]
    subprocess.run([*command, *unsupported], check=True, stdout=subprocess.DEVNULL)
    weights, tokens = predicted(model, scheme)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        held = pool.submit(hold, out).result()
    cells = [model.name, scheme, f"{weights:,}", f"{held.loaded:,}", share(weights, held.loaded)]
    cells += [f"{held.packed:,}", f"{tokens:,}", f"{held.tokens:,}", share(tokens, held.tokens)]
    return f"| {' | '.join(cells)} |"


def share(plan: int, vllm: int) -> str:
    """How far the prediction is off."""
    return f"{100 * (plan / vllm - 1):+.2f} %"


def predicted(model: Path, scheme: str) -> tuple[int, int]:
    """Bytes of a rank's weights by the plan, and tokens of sequences of LENGTH in the KV cache."""
    from vexport.checkpoint.index import read_index
    from vexport.plan.build import Settings, build_plan
    from vexport.plan.kv_tokens import kv_cache_of
    from vexport.plan.room import weights_held
    from vexport.scenario import Rule

    index = read_index(model)
    settings = Settings(ranks=(1,), on_unsupported_shape="smaller-group")
    plan = build_plan(
        index, (Rule(match="lm_head", scheme="keep"), Rule(match="Linear", scheme=scheme)), settings
    )
    cache = kv_cache_of(index, 1)
    assert cache is not None
    return weights_held(index, plan, 1)[0], KV_BYTES * LENGTH // cache.held_bytes(LENGTH, LENGTH, CPU_BLOCK)


def prepare() -> None:
    """Import vLLM once, for the processes that load in it."""
    from vexport.engine.session import worker_environment

    os.environ.update(worker_environment() | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"})
    from vexport.engine.worker import preload

    preload()


def hold(checkpoint: Path) -> Held:
    """Load it in vLLM, in this process."""
    from vllm.model_executor.model_loader import base_loader

    from vexport.engine.messages import SessionRequest
    from vexport.engine.worker import CPU, build_engine, model_arguments

    loaded: list[int] = []
    process = base_loader.process_weights_after_loading

    def counted(model, *arguments):  # type: ignore[no-untyped-def]
        loaded.append(num_bytes(model))
        process(model, *arguments)

    base_loader.process_weights_after_loading = counted
    request = SessionRequest(checkpoint=checkpoint, name="memory", max_model_len=LENGTH)
    llm = build_engine(dict(model_arguments(request, CPU)) | {"skip_tokenizer_init": True}, CPU)
    config = llm.llm_engine.vllm_config.cache_config
    (packed,) = llm.collective_rpc("vexport_weight_bytes")
    return Held(loaded=loaded[0], packed=packed, tokens=config.kv_cache_size_tokens)


def num_bytes(model) -> int:  # type: ignore[no-untyped-def]
    """Of parameters and buffers, each storage once; a table of rotary angles is left out."""
    buffers = [one for name, one in model.named_buffers() if not name.endswith("cos_sin_cache")]
    tensors = (*model.parameters(), *buffers)
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def gemma(folder: Path) -> None:
    """Six layers of random weights, five of which see a window of 128 tokens."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=128,
        max_position_embeddings=2048,
        architectures=["Gemma3ForCausalLM"],
    )
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main()
