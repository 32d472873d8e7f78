"""Quantizes micro models with AutoRound; `make.py` runs it in AutoRound's environment."""

import json
import sys

import torch
from auto_round import AutoRound

VOCABULARY = 64
# Its own formats, next to that of compressed-tensors.
FORMATS = ("auto_round:auto_awq", "auto_round", "auto_gptq", "auto_awq")


def main() -> None:
    """Round to nearest with AutoRound's own search of scales, in compressed-tensors or as the name ends."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (1, 32), generator=generator) for _ in range(16)]
    for source, recipe, name in json.loads(sys.argv[1]):
        written = next((each for each in FORMATS if recipe.endswith(f"-{each}")), "llm_compressor")
        scheme = recipe.removesuffix("-KV").removesuffix(f"-{written}")
        quantizer = AutoRound(
            source,
            scheme=scheme,
            iters=0,
            dataset=rows,
            nsamples=len(rows),
            seqlen=32,
            device_map="cpu",
            static_kv_dtype="fp8" if recipe.endswith("-KV") else None,
        )
        quantizer.quantize_and_save(name, format=written)


if __name__ == "__main__":
    main()
