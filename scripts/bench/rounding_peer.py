"""Quantizes a model with one of llm-compressor's methods; `rounding.py` runs it in the peer's environment.

    .venv-peer/bin/python scripts/bench/rounding_peer.py MODEL OUT SCHEME METHOD ROWS.jsonl COUNT

Prints the seconds of `oneshot`: calibration and rounding, without imports, reading and writing.
"""

import json
import os
import sys
import time
from pathlib import Path

# Triton needs a GPU.
os.environ["LLMCOMPRESSOR_DISABLE_GPTQ_TRITON"] = "1"

import torch
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, AutoTokenizer

SEQ_LEN = 512
IGNORE = ["lm_head"]
# The strength of its W8A8 example.
SMOOTHING = 0.8


def scheme_of(name: str, observer: str | None) -> QuantizationScheme:
    """A preset, `_G64` in its name being the group size."""
    preset, _, group = name.partition("_G")
    scheme = preset_name_to_scheme(preset, ["Linear"])
    changed: dict[str, object] = {"group_size": int(group)} if group else {}
    if observer is not None:
        changed["observer"] = observer
    return scheme.model_copy(update={"weights": scheme.weights.model_copy(update=changed)})


def recipe_of(scheme: str, method: str) -> list[Modifier]:
    words = method.split("-")
    groups = {"group_0": scheme_of(scheme, "memoryless_mse" if "mse" in words else None)}
    recipe: list[Modifier] = []
    if "awq" in words:
        # Pinned memory needs an accelerator.
        IntermediatesCache.pin_memory = lambda self, *names: None
        recipe.append(AWQModifier())
    if "smoothquant" in words:
        recipe.append(SmoothQuantModifier(smoothing_strength=SMOOTHING))
    last = GPTQModifier if "gptq" in words else QuantizationModifier
    return [*recipe, last(config_groups=groups, ignore=IGNORE)]


def main() -> None:
    model_path, out, scheme, method, data, count = sys.argv[1:]
    lines = Path(data).read_text(encoding="utf-8").splitlines()[: int(count)]
    rows = [json.loads(line)["input_ids"][:SEQ_LEN] for line in lines]
    dataset = Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows])
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    start, cpu = time.perf_counter(), time.process_time()
    with torch.compiler.set_stance("force_eager"):
        oneshot(
            model=model,
            tokenizer=tokenizer,
            dataset=dataset,
            recipe=recipe_of(scheme, method),
            num_calibration_samples=len(rows),
            max_seq_length=SEQ_LEN,
        )
    spent = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)
    print(json.dumps(spent))


if __name__ == "__main__":
    main()
