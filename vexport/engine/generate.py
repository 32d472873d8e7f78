"""What the worker asks of a loaded engine: greedy continuations and full-vocabulary log-probabilities."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from vexport.engine.messages import SessionRequest
from vexport.files import atomic_path
from vexport.types import Canary

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.logprobs import FlatLogprobs

Report = Callable[[str, int, int], None]


def run_canaries(llm: "LLM", request: SessionRequest, report: Report) -> tuple[Canary, ...]:
    """Continue each prompt greedily for at most `canary_tokens` tokens."""
    from vllm import SamplingParams

    report("canaries", 0, len(request.canaries))
    sampling = SamplingParams(temperature=0.0, max_tokens=request.canary_tokens, seed=request.seed)
    outputs = llm.generate(list(request.canaries), sampling, use_tqdm=False)
    report("canaries", len(outputs), len(outputs))
    return tuple(
        Canary(
            prompt=prompt,
            text=output.outputs[0].text,
            tokens=len(output.outputs[0].token_ids),
            finish_reason=str(output.outputs[0].finish_reason),
        )
        for prompt, output in zip(request.canaries, outputs, strict=True)
    )


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


def dense(flat: "FlatLogprobs") -> torch.Tensor:
    """vLLM's flat lists as a matrix (positions, vocabulary); the first position has none and is left out.

    Each position lists the prompt's own token and then the whole vocabulary, best first.
    """
    rows = []
    for start, end in zip(flat.start_indices[1:], flat.end_indices[1:], strict=True):
        tokens = torch.tensor(flat.token_ids[start:end])
        row = torch.full((int(tokens.max()) + 1,), float("-inf"))
        rows.append(row.scatter_(0, tokens, torch.tensor(flat.logprobs[start:end])))
    return torch.stack(rows)
