"""A worker that runs prompts with pictures in vLLM and writes the log-probabilities of all tokens.

It needs nothing but vLLM, so that it also runs in another interpreter.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import PIL.Image
from safetensors.torch import save_file

from vexport.engine.messages import SessionRequest
from vexport.engine.worker import CPU, build_engine, model_arguments, run_worker
from vexport.inference.engine_model import dense


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturePrompt:
    """A text with the tokens of a processor, and the files of its pictures."""

    text: str
    pictures: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturePrompts:
    """Prompts for a checkpoint. `file` gets a tensor `prompt.N` for each prompt."""

    checkpoint: Path
    prompts: tuple[PicturePrompt, ...]
    file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """The token ids of each prompt, with the tokens of the pictures."""

    ids: tuple[tuple[int, ...], ...]


def answer(asked: PicturePrompts) -> PromptTokens:
    from vllm import SamplingParams

    request = SessionRequest(
        checkpoint=asked.checkpoint, max_model_len=256, logprob_prompts=((0,),)
    )
    llm = build_engine(model_arguments(request, CPU), CPU)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False
    )
    ids, tensors = [], {}
    for number, prompt in enumerate(asked.prompts):
        images = [PIL.Image.open(file).convert("RGB") for file in prompt.pictures]
        given = {"prompt": prompt.text, "multi_modal_data": {"image": images}}
        (output,) = llm.generate([given], sampling, use_tqdm=False)
        ids.append(tuple(output.prompt_token_ids))
        tensors[f"prompt.{number}"] = dense(output.prompt_logprobs)
    save_file(tensors, asked.file)
    llm.llm_engine.engine_core.shutdown()
    return PromptTokens(ids=tuple(ids))


def main(arguments: list[str]) -> int:
    return run_worker(arguments, PicturePrompts, answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
