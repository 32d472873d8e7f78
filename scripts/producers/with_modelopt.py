"""Quantizes micro models with NVIDIA ModelOpt; `make.py` runs it in its environment."""

import copy
import json
import sys

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM

VOCABULARY = 64
PRESETS = {
    "FP8": mtq.FP8_DEFAULT_CFG,
    "FP8-PC-PT": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "NVFP4": mtq.NVFP4_DEFAULT_CFG,
    "NVFP4-AWQ": mtq.NVFP4_AWQ_LITE_CFG,
    "W4A16_NVFP4": mtq.W4A16_NVFP4_CFG,
    "MXFP8": mtq.MXFP8_DEFAULT_CFG,
    "MIXED": mtq.NVFP4_MLP_ONLY_CFG,
}
KV = "-KV"


def recipe_of(name: str) -> dict[str, object]:
    """A preset, with an FP8 KV cache where the name asks for one; MIXED has attention in FP8."""
    preset = copy.deepcopy(PRESETS[name.removesuffix(KV)])
    rules = preset["quant_cfg"]
    if name == "MIXED":
        rules += [
            {**rule, "quantizer_name": rule["quantizer_name"].replace("*", "*self_attn*", 1)}
            for rule in mtq.FP8_DEFAULT_CFG["quant_cfg"]
            if rule["quantizer_name"] in ("*weight_quantizer", "*input_quantizer")
        ]
    return {**preset, "quant_cfg": [*rules, *(mtq.FP8_KV_CFG["quant_cfg"] if name.endswith(KV) else ())]}


def main() -> None:
    """Calibrate on random tokens and export for Hugging Face."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (1, 32), generator=generator) for _ in range(16)]
    for source, recipe, name in json.loads(sys.argv[1]):
        model = AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16")
        mtq.quantize(model, recipe_of(recipe), lambda model: [model(row) for row in rows])
        export_hf_checkpoint(model, export_dir=name)


if __name__ == "__main__":
    main()
