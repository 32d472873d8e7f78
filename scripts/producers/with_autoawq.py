"""Quantizes micro models with AutoAWQ; `make.py` runs it in its environment."""

import json
import sys
from pathlib import Path

from awq import AutoAWQForCausalLM
from transformers import PreTrainedTokenizerFast

TEXT = "one two three four five six seven eight nine ten eleven twelve"


def main() -> None:
    """Search scales on a text and write what AutoAWQ writes."""
    for source, recipe, name in json.loads(sys.argv[1]):
        model = AutoAWQForCausalLM.from_pretrained(source, device_map="cpu")
        # The tokenizer's class is one of a newer transformers than AutoAWQ takes.
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(source) / "tokenizer.json"))
        config = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": recipe}
        model.quantize(
            tokenizer, quant_config=config, calib_data=[TEXT] * 64, max_calib_seq_len=32, apply_clip=False
        )
        model.save_quantized(name)


if __name__ == "__main__":
    main()
