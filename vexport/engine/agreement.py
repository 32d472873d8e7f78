"""Compare vLLM's log-probabilities with a reference, and find degenerate continuations.

A continuation is degenerate if it is empty, ends early or repeats itself, as in a broken export.
"""

import json
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from vexport.checkpoint.index import find_quantization
from vexport.records import Canary, Finding
from vexport.rules import canary as rules
from vexport.words import plural

# Limits on the mean KL(reference || vLLM) in nats, by the bits of the quantized activations (16 if
# activations are not quantized). vLLM and the reference round to bfloat16 in different orders, and
# low-bit rounding turns some of these differences into whole quantization steps. KL measured on a
# random two-layer Llama: 2e-4 without quantized activations, 2e-3 with INT8, 7e-3 with FP8, 6e-2
# with FP4. A deep model amplifies the differences: see `reference.agreement_limit`.
KL_LIMITS = {16: 0.003, 8: 0.05, 4: 0.1}
# A continuation is a loop if it ends with this many repetitions of at most this many words.
_ROUNDS = 4
_LONGEST_CYCLE = 6
# The script of a text is only determined if the text has at least _MIN_LETTERS letters. A
# continuation is only compared with the baseline's length if the baseline has at least _MIN_TOKENS
# tokens.
_MIN_LETTERS = 20
_MIN_TOKENS = 8
# An end after this many tokens is never early. A broken export ends within its first sentence.
_LATE_END_TOKENS = 48
# Text also loops if a run of _LOOP_WORDS words occurs at least _LOOP_TIMES times anywhere in it.
# Texts of SmolLM2-135M do this.
_LOOP_WORDS, _LOOP_TIMES = 8, 3
_NON_FINITE = "non-finite log-probabilities"


def kl_limit(checkpoint: Path, cache: str = "auto", input_bits: int | None = None) -> float:
    """Return the limit on the mean KL for a checkpoint.

    The limit depends on the smallest number of bits of activations, keys and values. `cache` is
    vLLM's kv_cache_dtype: vLLM may store keys and values in FP8 although the checkpoint's config
    does not request it. `input_bits` is the number of bits to which vLLM's kernels round inputs
    (`EngineInfo.input_bits`). vLLM may use fewer bits than the checkpoint's config requests.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    stored = find_quantization(checkpoint, config)
    rounded: list[object] = [{"num_bits": 8}] if cache.startswith("fp8") else []
    if stored is not None and isinstance(groups := stored.values.get("config_groups"), dict):
        rounded += [
            each.get("input_activations") for each in groups.values() if isinstance(each, dict)
        ]
        rounded.append(stored.values.get("kv_cache_scheme"))
    sizes = [args.get("num_bits", 8) for args in rounded if isinstance(args, dict)]
    sizes.append(16 if input_bits is None else input_bits)
    bits = min(size for size in sizes if isinstance(size, int))
    return next(
        (limit for least, limit in KL_LIMITS.items() if bits >= least), max(KL_LIMITS.values())
    )


def read_logprobs(path: Path) -> torch.Tensor:
    """Return the worker's log-probabilities as a float32 matrix (positions, vocabulary).

    The prompts follow each other along the first dimension.
    """
    tensors = load_file(path)
    return torch.cat([tensors[f"prompt.{number}"] for number in range(len(tensors))])


def canary_findings(
    canaries: Sequence[Canary], baseline: Sequence[Canary] | None = None, *, agrees: bool = False
) -> list[Finding]:
    """Return a finding for each degenerate continuation.

    If there is a baseline, a continuation is not reported if the baseline's continuation of the
    same prompt is degenerate as well. If at least half of all continuations are reported, they are
    errors. Otherwise they are warnings, since a single continuation may change by chance.

    Without a baseline, every finding is a warning, because the unquantized model may behave in the
    same way. Every finding is also a warning if vLLM's log-probabilities agree with the reference
    (`agrees`). In this case vLLM computes correctly, and the quantized weights cause the text. The
    evaluation measures this loss of quality. Numbers that are not finite are always an error.
    """
    others = {canary.prompt: canary for canary in baseline or ()}
    degenerate = [
        (number, canary, fault)
        for number, canary in enumerate(canaries)
        if (fault := symptom(canary, others.get(canary.prompt))) is not None
    ]
    broken = baseline is not None and not agrees and 2 * len(degenerate) >= len(canaries)
    weights_cause_it = agrees and baseline is not None
    found = []
    for number, canary, fault in degenerate:
        if broken or fault == _NON_FINITE:
            rule = rules.DEGENERATE
        elif weights_cause_it:
            rule = rules.DEGENERATE_AS_REFERENCE
        else:
            rule = rules.DEGENERATE.as_warning
        where = f"greedy continuation {number} of {canary.prompt[:40]!r}"
        found.append(
            Finding.at(
                rule,
                where,
                symptom=fault,
                tokens=canary.tokens,
                finish_reason=canary.finish_reason,
                text=canary.text[-80:],
            )
        )
    return found


def symptom(canary: Canary, baseline: Canary | None = None) -> str | None:
    """Return the fault of a continuation.

    Return None if it has no fault. Also return None if it is empty or repeats itself, and the
    baseline's continuation is empty or repeats itself too.
    """
    if canary.non_finite:
        return _NON_FINITE
    if (own_fault := _own_fault(canary)) is not None:
        return (
            own_fault
            if baseline is None or not (_own_fault(baseline) or _loops(baseline))
            else None
        )
    if baseline is not None and _ends_early(canary, baseline):
        return f"an early end after {plural(canary.ended_after or 0, 'token')}"
    before = canary.prompt if baseline is None else baseline.text
    scripts = _script(before), _script(canary.text)
    return (
        f"{scripts[1]} instead of {scripts[0]} letters"
        if all(scripts) and len(set(scripts)) > 1
        else None
    )


def _own_fault(canary: Canary) -> str | None:
    if not canary.text.strip():
        return "no text"
    words = canary.text.split()
    if len(words) < _ROUNDS:
        words = list(canary.text.strip())
    cycles = range(1, _LONGEST_CYCLE + 1)
    return (
        "repetition" if any(words[-n * _ROUNDS :] == words[-n:] * _ROUNDS for n in cycles) else None
    )


def _ends_early(canary: Canary, baseline: Canary) -> bool:
    """Return True if a continuation ends before half of the baseline's tokens.

    Return False if the continuation has at least _LATE_END_TOKENS tokens, or if the baseline is a
    loop.
    """
    whole = baseline.tokens if baseline.ended_after is None else baseline.ended_after
    ended = canary.ended_after
    if ended is None or ended >= _LATE_END_TOKENS or _loops(baseline):
        return False
    return whole >= _MIN_TOKENS and 2 * ended < whole


def _loops(canary: Canary) -> bool:
    words = canary.text.split()
    parts = Counter(tuple(words[i : i + _LOOP_WORDS]) for i in range(len(words) - _LOOP_WORDS + 1))
    return max(parts.values(), default=0) >= _LOOP_TIMES


def _script(text: str) -> str:
    """Return the script of most letters (`LATIN`, `CYRILLIC`, `CJK`), or "" if it is not certain.

    The script is not certain if there are few letters, or if no script has more than half of them.
    """
    scripts = Counter(
        unicodedata.name(letter, "").partition(" ")[0] for letter in text if letter.isalpha()
    )
    script, letters = scripts.most_common(1)[0] if scripts else ("", 0)
    return script if scripts.total() >= _MIN_LETTERS and 2 * letters > scripts.total() else ""
