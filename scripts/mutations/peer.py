"""Makes the checkpoints in tests/peer: a micro MoE and a micro Llama, and what llm-compressor makes of them.

    .venv/bin/python scripts/mutations/peer.py

Needs the peer's environment in .venv-peer (scripts/bench/setup-peer). Its path without a model
(`model_free_ptq`) is used, which knows no experts: their gate and up get global scales of their own.
"""

import json
import shutil
import subprocess
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

ROOT = Path(__file__).resolve().parent.parent.parent
PEER = ROOT / ".venv-peer" / "bin" / "python"
OUT = ROOT / "tests" / "peer"
HIDDEN, WIDE, HEAD, VOCABULARY, LAYERS, EXPERTS = 128, 128, 32, 64, 1, 2
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HIDDEN // HEAD,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}
JOBS = (
    ("moe", "NVFP4A16"),
    ("llama", "NVFP4A16"),
    ("llama", "W4A16"),
    ("llama", "FP8_DYNAMIC"),
)
PEER_CODE = """
import json, sys
from compressed_tensors.quantization import preset_name_to_scheme
from llmcompressor import model_free_ptq

IGNORE = ["lm_head", "re:.*embed.*", "re:.*norm.*", "re:.*mlp.gate$"]
for source, scheme, out in json.loads(sys.argv[1]):
    model_free_ptq(source, out, scheme=preset_name_to_scheme(scheme, ["Linear"]), ignore=IGNORE)
"""


def main() -> None:
    """Write the sources, then let the peer quantize them."""
    shutil.rmtree(OUT, ignore_errors=True)
    save("llama", LlamaConfig(**SIZES), "LlamaForCausalLM", mlp("mlp"))
    moe = Qwen3MoeConfig(**SIZES, moe_intermediate_size=WIDE, num_experts=EXPERTS, num_experts_per_tok=1)
    experts = [shape for expert in range(EXPERTS) for shape in mlp(f"mlp.experts.{expert}").items()]
    norms = {"self_attn.q_norm": (HEAD,), "self_attn.k_norm": (HEAD,)}
    save("moe", moe, "Qwen3MoeForCausalLM", {"mlp.gate": (EXPERTS, HIDDEN), **norms, **dict(experts)})
    jobs = [[str(OUT / model), scheme, str(OUT / f"{model}-{scheme}")] for model, scheme in JOBS]
    subprocess.run([PEER, "-c", PEER_CODE, json.dumps(jobs)], check=True, cwd=OUT)


def mlp(prefix: str) -> dict[str, tuple[int, ...]]:
    """The weights of one MLP."""
    return {
        f"{prefix}.gate_proj": (WIDE, HIDDEN),
        f"{prefix}.up_proj": (WIDE, HIDDEN),
        f"{prefix}.down_proj": (HIDDEN, WIDE),
    }


def save(name: str, config: PretrainedConfig, architecture: str, own: dict[str, tuple[int, ...]]) -> None:
    """A checkpoint of random weights; `own` are a layer's modules beside attention and its norms."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCABULARY, HIDDEN),
        "model.norm": (HIDDEN,),
        "lm_head": (VOCABULARY, HIDDEN),
    }
    layer = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HEAD, HIDDEN),
        "self_attn.v_proj": (HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        **own,
    }
    for number in range(LAYERS):
        shapes |= {f"model.layers.{number}.{module}": shape for module, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    values = {
        module: torch.randn(shape, generator=generator) * 0.1 if len(shape) > 1 else torch.ones(shape)
        for module, shape in shapes.items()
    }
    tensors = {f"{module}.weight": value.to(torch.bfloat16) for module, value in values.items()}
    folder = OUT / name
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [architecture]
    config.save_pretrained(folder)


if __name__ == "__main__":
    main()
