"""Quantizes micro models with llm-compressor's calibrated path; `make.py` runs it in its environment."""

import json
import sys

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.transform import QuIPModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

VOCABULARY = 64
HEAD = ["lm_head"]
FP8 = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)


def recipe_of(name: str) -> list[Modifier]:
    """The modifiers of a recipe."""
    if name == "GPTQ-ASYM":
        return [GPTQModifier(targets="Linear", scheme="W4A16_ASYM", ignore=HEAD)]
    if name == "QUIP":
        rotation = QuIPModifier(rotations=["v", "u"], transform_type="hadamard", ignore=HEAD)
        return [rotation, QuantizationModifier(targets="Linear", scheme="W4A16", ignore=HEAD)]
    if name == "KV":
        return [QuantizationModifier(kv_cache_scheme=FP8, ignore=HEAD)]
    attention = QuantizationScheme(targets=["LlamaAttention"], input_activations=FP8)
    groups = {"attention": attention, "linear": preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])}
    return [QuantizationModifier(config_groups=groups, ignore=HEAD)]


def main() -> None:
    """Calibrate on random tokens and write what transformers writes."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (16, 32), generator=generator).tolist()
    rows = Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row)} for row in tokens])
    for source, recipe, name in json.loads(sys.argv[1]):
        model = AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16")
        oneshot(
            model=model,
            tokenizer=AutoTokenizer.from_pretrained(source),
            dataset=rows,
            recipe=recipe_of(recipe),
            num_calibration_samples=len(rows),
            max_seq_length=32,
        )
        model.save_pretrained(name, save_compressed=True)


if __name__ == "__main__":
    main()
