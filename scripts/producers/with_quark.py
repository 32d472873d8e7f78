"""Quantizes micro models with AMD Quark; `make.py` runs it in its environment."""

import json
import sys

import torch
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from transformers import AutoModelForCausalLM

VOCABULARY = 64
KV = "-KV"


def main() -> None:
    """Calibrate on random tokens and export for Hugging Face."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (1, 32), generator=generator) for _ in range(16)]
    for source, recipe, name in json.loads(sys.argv[1]):
        model = AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16")
        template = LLMTemplate.get(model.config.model_type)
        cache = "fp8" if recipe.endswith(KV) else None
        config = template.get_config(scheme=recipe.removesuffix(KV), kv_cache_scheme=cache)
        quantizer = ModelQuantizer(config)
        quantized = quantizer.freeze(quantizer.quantize_model(model, rows))
        export_safetensors(model=quantized, output_dir=name)


if __name__ == "__main__":
    main()
