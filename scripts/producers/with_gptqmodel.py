"""Quantizes micro models with GPTQModel; `make.py` runs it in its environment."""

import json
import os
import sys

# GPTQModel starts no threads, and fails, where half of the cores is one.
os.cpu_count = lambda: 8

import torch  # noqa: E402
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig  # noqa: E402

VOCABULARY = 64
# Bits, group size and symmetry of a recipe.
RECIPES = {"W4": (4, 32, True), "W3": (3, 32, True)}


def main() -> None:
    """Calibrate on random tokens and write what GPTQModel writes."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (32,), generator=generator).tolist() for _ in range(16)]
    for source, recipe, name in json.loads(sys.argv[1]):
        bits, size, symmetric = RECIPES[recipe]
        config = QuantizeConfig(bits=bits, group_size=size, sym=symmetric, desc_act=False, device="cpu")
        model = GPTQModel.load(source, config)
        calibration = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
        model.quantize(calibration, backend=BACKEND.TORCH)
        model.save(name)


if __name__ == "__main__":
    main()
