"""Asks a loaded engine for greedy continuations and full-vocabulary log-probabilities."""

import math
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from vexport.engine.messages import CANARY_TOKENS, DRAFT_TOKENS, SessionRequest, draft_counts
from vexport.files import atomic_path
from vexport.records import Canary, DraftCounts

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput
    from vllm.tokenizers import TokenizerLike

Report = Callable[[str, int, int], None]
_ROWS_AT_ONCE = 16


def run_canaries(llm: "LLM", request: SessionRequest, report: Report) -> tuple[Canary, ...]:
    """Continue each prompt greedily by CANARY_TOKENS tokens, or as many as the longest sequence leaves.

    The engine does not stop where the model ends the sequence: that place is noted, and what comes after it
    still shows whether the numbers stay finite.
    """
    from vllm import SamplingParams, TokensPrompt

    report("canaries", 0, len(request.canaries))
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer(text)["input_ids"] for text in request.canaries]
    longest = llm.llm_engine.model_config.max_model_len
    samplings = [
        SamplingParams(
            temperature=0.0,
            max_tokens=max(1, min(CANARY_TOKENS, longest - len(prompt))),
            ignore_eos=True,
            logprobs=0,
            seed=request.seed,
        )
        for prompt in prompts
    ]
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], samplings, use_tqdm=False
    )
    report("canaries", len(outputs), len(outputs))
    ends = _end_tokens(llm)
    return tuple(
        _canary(text, output.outputs[0], ends, tokenizer)
        for text, output in zip(request.canaries, outputs, strict=True)
    )


def _canary(
    prompt: str, output: "CompletionOutput", ends: frozenset[int], tokenizer: "TokenizerLike"
) -> Canary:
    """The continuation up to the first end of the sequence, and how far the engine went."""
    tokens = list(output.token_ids)
    ended = next((number for number, token in enumerate(tokens) if token in ends), None)
    chosen = [entry[token].logprob for entry, token in zip(output.logprobs or (), tokens, strict=True)]
    return Canary(
        prompt=prompt,
        text=output.text if ended is None else tokenizer.decode(tokens[:ended], skip_special_tokens=True),
        tokens=len(tokens),
        finish_reason=str(output.finish_reason) if ended is None else "stop",
        ended_after=ended,
        non_finite=sum(not math.isfinite(value) for value in chosen),
    )


def _end_tokens(llm: "LLM") -> frozenset[int]:
    """The tokens at which vLLM would stop: the tokenizer's own and those of generation_config.json."""
    named = [
        llm.get_tokenizer().eos_token_id,
        llm.llm_engine.model_config.try_get_generation_config().get("eos_token_id"),
    ]
    flat = [token for value in named for token in (value if isinstance(value, list) else [value])]
    return frozenset(token for token in flat if token is not None)


def write_logprobs(llm: "LLM", prompts: Sequence[Sequence[int]], path: Path, report: Report) -> None:
    """Write log-probabilities of the next token at every position but the last of each prompt.

    `path` becomes a safetensors file with one float32 tensor (len(prompt) - 1, vocabulary) a prompt, named
    `prompt.0`, `prompt.1`, ... One prompt is asked at a time: vLLM answers in Python lists, some 100 bytes
    a number.
    """
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False
    )
    tensors: dict[str, torch.Tensor] = {}
    for number, prompt in enumerate(prompts):
        report("logprobs", number, len(prompts))
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=list(prompt))], sampling, use_tqdm=False)
        tensors[f"prompt.{number}"] = dense(output.prompt_logprobs)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)
    report("logprobs", len(prompts), len(prompts))


def write_text_scores(llm: "LLM", rows: Sequence[Sequence[int]], path: Path, report: Report) -> None:
    """Write what each token of the rows but the first costs, and the token that was likeliest in its place.

    `path` becomes a safetensors file with `nll.0` (float32, nats) and `likeliest.0` (int64), both of shape
    (len(row) - 1,), and so on for each row.
    """
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    tensors: dict[str, torch.Tensor] = {}
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        report("text", start, len(rows))
        some = rows[start : start + _ROWS_AT_ONCE]
        prompts = [TokensPrompt(prompt_token_ids=list(row)) for row in some]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        for number, (row, output) in enumerate(zip(some, outputs, strict=True), start):
            positions = [position for position in output.prompt_logprobs or () if position is not None]
            costs = [-position[token].logprob for token, position in zip(row[1:], positions, strict=True)]
            best = [max(position, key=lambda token: position[token].logprob) for position in positions]
            tensors[f"nll.{number}"] = torch.tensor(costs, dtype=torch.float32)
            tensors[f"likeliest.{number}"] = torch.tensor(best, dtype=torch.int64)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)
    report("text", len(rows), len(rows))


def count_drafts(llm: "LLM", prompts: Sequence[Sequence[int]], report: Report) -> tuple[DraftCounts, ...]:
    """Continue the prompts greedily, one at a time, and count what was drafted and accepted after each.

    The engine does not stop where the model ends the sequence: each prompt has the same number of tokens.
    """
    from vllm import SamplingParams, TokensPrompt

    longest = llm.llm_engine.model_config.max_model_len
    counts, before = [], _draft_counters(llm)
    for number, prompt in enumerate(prompts):
        report("drafts", number, len(prompts))
        most = max(1, min(DRAFT_TOKENS, longest - len(prompt)))
        sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
        llm.generate([TokensPrompt(prompt_token_ids=list(prompt))], sampling, use_tqdm=False)
        after = _draft_counters(llm)
        counts.append(after - before)
        before = after
    report("drafts", len(prompts), len(prompts))
    return tuple(counts)


def _draft_counters(llm: "LLM") -> DraftCounts:
    return draft_counts({metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()})


def dense(flat: "FlatLogprobs") -> torch.Tensor:
    """vLLM's flat lists as a matrix (positions, vocabulary); the first position has none and is left out.

    Each position lists the prompt's own token and then the whole vocabulary, best first.
    """
    rows = []
    for start, end in zip(flat.start_indices[1:], flat.end_indices[1:], strict=True):
        # An array reads a list some ten times as fast as torch does: a position has the whole vocabulary.
        tokens = torch.frombuffer(array("q", flat.token_ids[start:end]), dtype=torch.int64)
        values = torch.frombuffer(array("f", flat.logprobs[start:end]), dtype=torch.float32)
        row = torch.full((int(tokens.max()) + 1,), float("-inf"))
        rows.append(row.scatter_(0, tokens, values))
    return torch.stack(rows)
