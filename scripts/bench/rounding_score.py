"""KL to the source and NLL of a checkpoint over held-out text; `rounding.py` runs it.

    .venv/bin/python scripts/bench/rounding_score.py MODEL CHECKPOINT TEXT SCRATCH ROWS

The source's logits are kept in SCRATCH for the next checkpoint, in bfloat16, as the model computes them.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from vexport.engine.reference import load_dequantized

DOMAINS = ("same", "other")


def read_rows(text: Path, domain: str, count: int) -> list[list[int]]:
    lines = (text / f"{domain}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line)["input_ids"] for line in lines]


def logits_of(model: torch.nn.Module, row: Sequence[int]) -> torch.Tensor:
    """(tokens, vocabulary) in the model's dtype."""
    logits: torch.Tensor = model(torch.tensor([row])).logits[0]
    return logits


def source_logits(model: Path, rows: Sequence[Sequence[int]], file: Path) -> dict[str, torch.Tensor]:
    """The source's logits by the row's number, from `file` or into it."""
    if not file.is_file():
        source = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        found = {str(number): logits_of(source, row).contiguous() for number, row in enumerate(rows)}
        save_file(found, file.with_suffix(".partial"))
        file.with_suffix(".partial").replace(file)
    logits: dict[str, torch.Tensor] = load_file(file)
    return logits


def mean_nll(logprobs: torch.Tensor, row: Sequence[int]) -> float:
    return -float(logprobs[:-1].gather(1, torch.tensor(row[1:])[:, None]).mean())


def main() -> None:
    model, checkpoint, text, scratch = (Path(word) for word in sys.argv[1:5])
    count = int(sys.argv[5])
    score: dict[str, dict[str, float]] = {"kl": {}, "kl_error": {}, "nll": {}, "source_nll": {}}
    candidate = load_dequantized(checkpoint)
    # compressed-tensors compiles its FP4 rounding, which would ask for a C++ compiler.
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        for domain in DOMAINS:
            rows = read_rows(text, domain, count)
            source = source_logits(model, rows, scratch / f"source-{domain}-{count}.safetensors")
            divergences, losses, source_losses = [], [], []
            for number, row in enumerate(rows):
                expected = torch.log_softmax(source[str(number)].float(), dim=-1)
                measured = torch.log_softmax(logits_of(candidate, row).float(), dim=-1)
                divergences.append(float((expected.exp() * (expected - measured)).sum(-1).mean()))
                losses.append(mean_nll(measured, row))
                source_losses.append(mean_nll(expected, row))
            score["kl"][domain] = statistics.mean(divergences)
            score["kl_error"][domain] = statistics.stdev(divergences) / len(divergences) ** 0.5
            score["nll"][domain] = statistics.mean(losses)
            score["source_nll"][domain] = statistics.mean(source_losses)
    print(json.dumps(score))


if __name__ == "__main__":
    main()
