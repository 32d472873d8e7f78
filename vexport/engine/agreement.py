"""Compares vLLM's log-probabilities with a reference, and holds the limits."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from vexport.checkpoint.quantization import find_quantization
from vexport.numerics.metrics import kl_divergence
from vexport.types import LogprobAgreement

# Limits on the mean KL(reference || vLLM) in nats, by the bits of the quantized activations (16: none are).
# Both sides round to bfloat16 in their own order, and a low-bit rounding turns some of those differences into
# whole steps. Measured on a random two-layer Llama: 2e-4 without, 2e-3 INT8, 7e-3 FP8, 6e-2 FP4. A deep model
# amplifies them: `reference.agreement_limit`.
KL_LIMITS = {16: 0.003, 8: 0.05, 4: 0.1}


def kl_limit(checkpoint: Path, cache: str = "auto") -> float:
    """The limit for a checkpoint: that of its coarsest activations, keys and values among them.

    `cache` is vLLM's kv_cache_dtype, which may store keys and values in FP8 whatever the checkpoint says.
    """
    stated = _stated_limit(checkpoint)
    return max(stated, KL_LIMITS[8]) if cache.startswith("fp8") else stated


def _stated_limit(checkpoint: Path) -> float:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    stored = find_quantization(checkpoint, config)
    if stored is None or not isinstance(groups := stored.values.get("config_groups"), dict):
        return KL_LIMITS[16]
    sides = [group.get("input_activations") for group in groups.values() if isinstance(group, dict)]
    rounded = [args for args in (*sides, stored.values.get("kv_cache_scheme")) if isinstance(args, dict)]
    bits = min((bits for args in rounded if isinstance(bits := args.get("num_bits", 8), int)), default=16)
    return next((limit for least, limit in KL_LIMITS.items() if bits >= least), max(KL_LIMITS.values()))


def read_logprobs(path: Path) -> torch.Tensor:
    """The worker's file as one float32 matrix (positions, vocabulary), the prompts one after another."""
    tensors = load_file(path)
    return torch.cat([tensors[f"prompt.{number}"] for number in range(len(tensors))])


def compare_logprobs(
    reference: torch.Tensor, measured: torch.Tensor, *, name: str, prompts: int, limit: float
) -> LogprobAgreement:
    """Agreement of two matrices (positions, vocabulary) of log-probabilities; `name` is the reference's."""
    kl = kl_divergence(reference, measured)
    same = reference.argmax(dim=-1) == measured.argmax(dim=-1)
    return LogprobAgreement(
        reference=name,
        prompts=prompts,
        positions=kl.numel(),
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        top1_agreement=float(same.to(torch.float64).mean()),
        limit=limit,
    )
