"""Verdicts on continuations and log-probabilities, and the prompts for them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.models import Good, quantize
from tests.texts import breaks
from vexport.engine.agreement import KL_LIMITS, canary_findings, kl_limit, symptom
from vexport.engine.reference import (
    BFLOAT16_ROUNDING,
    REFERENCE_FILE,
    agreement_limit,
    cached_reference,
    reference_canaries,
    reference_logprobs,
)
from vexport.inference.prompts import CONTINUED_PROMPTS, fixed_prompts, limited_length
from vexport.numerics.metrics import kl_divergence
from vexport.records import Canary
from vexport.rules.prompts import TOKENIZER

GOOD = Canary(
    prompt="The sky", text=" is blue and the grass is green.", tokens=8, finish_reason="length"
)
REPEATING = replace(GOOD, text=" is the the the the")
EMPTY = replace(GOOD, text="", tokens=1, finish_reason="stop")
LONG = replace(GOOD, text=" one of the many things that a long text may be about", tokens=200)


def test_missing_tokenizer_is_bad_input(llama: Path) -> None:
    with breaks(TOKENIZER, str(llama)):
        fixed_prompts(llama)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, 512),
        ({"max_position_embeddings": 256}, 256),
        ({"n_positions": 128}, 128),
        ({"text_config": {"max_position_embeddings": 64}, "n_positions": 32}, 64),
        ({"llm_config": {"max_position_embeddings": 64}}, 64),
        ({"thinker_config": {"text_config": {"max_position_embeddings": 64}}}, 64),
        ({}, 512),
    ],
)
def test_sequence_length_of_config(config: dict[str, object], length: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert limited_length(tmp_path) == length


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" is blue and the grass is green.", None),
        (" is the the the the", "repetition"),
        (" and so on and so on and so on and so on", "repetition"),
        ("!!!!!!!!!!!!", "repetition"),
        (" \n", "no text"),
        (" 4", None),
    ],
)
def test_symptoms_of_continuations(text: str, expected: str | None) -> None:
    assert symptom(replace(GOOD, text=text)) == expected


def test_symptoms_of_baseline_are_no_damage() -> None:
    """A symptom that the baseline has too is not an error of the checkpoint."""
    assert [finding.severity for finding in canary_findings([GOOD, REPEATING, EMPTY])] == [
        "warning"
    ] * 2
    assert canary_findings([REPEATING], baseline=[EMPTY]) == []
    assert [finding.severity for finding in canary_findings([REPEATING], baseline=[GOOD])] == [
        "error"
    ]
    assert [f.severity for f in canary_findings([REPEATING, GOOD, GOOD], baseline=[GOOD])] == [
        "warning"
    ]
    (stuck,) = canary_findings([REPEATING], baseline=[GOOD], agrees=True)
    assert stuck.severity == "warning"
    assert "if the evaluation passes" in stuck.fix
    (broken,) = canary_findings([replace(GOOD, non_finite=3)], baseline=[GOOD], agrees=True)
    assert broken.severity == "error"
    loop = "The melting point of water is 100 degrees, which is why one says so."
    words = replace(
        LONG, text=f" one hundred degrees. {loop} And again: {loop} In short: {loop} It ends"
    )
    assert canary_findings([replace(LONG, ended_after=20)], baseline=[words]) == []
    assert canary_findings([REPEATING], baseline=[words]) == []


@pytest.mark.parametrize(
    ("canary", "baseline", "severities"),
    [
        (replace(GOOD, non_finite=3), GOOD, ["error"]),
        (replace(GOOD, non_finite=3), None, ["error"]),
        (replace(LONG, ended_after=40), LONG, ["error"]),
        (replace(LONG, ended_after=40), None, []),
        (replace(LONG, ended_after=120), LONG, []),
        (replace(LONG, ended_after=87), LONG, []),
        (replace(GOOD, ended_after=1), replace(GOOD, ended_after=3), []),
        (
            replace(LONG, text="одна из тех вещей, о которых может быть текст"),
            LONG,
            ["error"],
        ),
        (replace(LONG, text="одна из тех вещей"), LONG, []),
    ],
)
def test_findings_of_long_continuations(
    canary: Canary, baseline: Canary | None, severities: list[str]
) -> None:
    others = None if baseline is None else [baseline]
    assert [finding.severity for finding in canary_findings([canary], others)] == severities


def test_reference_continues_greedily(tiny_llama: Path) -> None:
    """Each token has the largest log-probability of the reference."""
    canary = replace(GOOD, prompt="w5 w6 w7", tokens=6)
    (continuation,) = reference_canaries(tiny_llama, [canary])
    ids = [5, 6, 7]
    for _ in range(continuation.tokens):
        ids.append(int(reference_logprobs(tiny_llama, [[*ids, 0]])[-1].argmax()))
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    assert continuation.text == tokenizer.decode(ids[3:], skip_special_tokens=True)
    assert (continuation.tokens, continuation.finish_reason) == (6, "length")


@pytest.mark.parametrize(("preset", "bits"), [("W4A16", 16), ("W8A8", 8), ("NVFP4", 4)])
def test_kl_limit_follows_activations(tiny_llama: Path, good: Good, preset: str, bits: int) -> None:
    assert kl_limit(good(preset)) == KL_LIMITS[bits]
    assert kl_limit(tiny_llama) == KL_LIMITS[16]
    assert kl_limit(tiny_llama, "fp8") == KL_LIMITS[8], "the engine rounds keys and values"
    assert kl_limit(tiny_llama, input_bits=8) == KL_LIMITS[8], "a kernel rounds inputs"


def test_prompts_fit_the_tokenizer(tiny_llama: Path) -> None:
    seeded = fixed_prompts(tiny_llama)
    assert not seeded.natural
    assert seeded == fixed_prompts(tiny_llama)
    assert len(seeded.tokens) <= 8
    assert all(
        tokens[0] == 1 and min(tokens[1:]) > 3 and len(tokens) <= 64 for tokens in seeded.tokens
    )
    more = fixed_prompts(tiny_llama, count=16)
    assert len(more.tokens) == 16
    assert more.tokens[: len(seeded.tokens)] == seeded.tokens
    assert more.texts == seeded.texts
    given = fixed_prompts(tiny_llama, texts=["w5 w6 w7", "what is this"])
    assert given.natural
    assert (given.texts, given.tokens) == (("w5 w6 w7",), ((5, 6, 7),))
    many = fixed_prompts(tiny_llama, texts=[f"w{n} w{n}" for n in range(5, 25)], count=2)
    assert (len(many.texts), many.tokens) == (CONTINUED_PROMPTS, ((5, 5), (6, 6)))


def test_kl_limit_of_unstable_checkpoint(tiny_llama: Path, tmp_path: Path) -> None:
    """The limit is three times the effect of half a unit in the last place of the embeddings."""
    checkpoint, prompts = (
        quantize(tiny_llama, tmp_path / "fp8", "FP8_DYNAMIC"),
        [[5, 7, 11, 13, 17, 19]],
    )
    kept = tmp_path / REFERENCE_FILE
    reference = cached_reference(checkpoint, prompts, kept)
    moved = reference_logprobs(checkpoint, prompts, jitter=BFLOAT16_ROUNDING)
    noise = float(kl_divergence(reference, moved).mean())
    least = 1.01 * KL_LIMITS[16]
    assert least < 3 * noise < KL_LIMITS[8]
    found = [
        agreement_limit(checkpoint, prompts, kept, mean_kl=mean_kl, limit=limit)
        for mean_kl, limit in (
            (1.0, least),
            (1.0, KL_LIMITS[8]),
            (least, least),
            (1.0, KL_LIMITS[16]),
        )
    ]
    assert found == [pytest.approx(3 * noise), KL_LIMITS[8], least, KL_LIMITS[16]]
