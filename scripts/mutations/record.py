"""Records what the real vLLM does with the mutations of tests/mutations: raises, answers otherwise, or alike.

    PYTHONPATH=. .venv/bin/python scripts/mutations/record.py [--scheme NVFP4 ...] [--every 3]

Mutations that are recorded already are left out, so that a call goes on where the last one stopped. One
process loads one checkpoint after the other (2 to 12 s each); where it dies, the mutation is recorded as
refused and another process goes on. `--every` takes only each n-th mutation.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import copytree, rmtree

import torch

from tests.mutations.good import SCHEMES, write_good
from tests.mutations.recorded import Record, read_records, write_records
from tests.mutations.table import mutations
from vexport.engine.generate import dense

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # What is freed or allocated is filled with this byte: a parameter that was never loaded shows.
    "MALLOC_PERTURB_": "90",
    "TORCHDYNAMO_DISABLE": "1",
    "VEXPORT_CPU_EMULATION": "1",
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
PROMPTS = tuple(tuple(range(start, start + 160, 8)) for start in (5, 90, 170))
MOST_MESSAGE = 160


def main() -> None:
    """Record what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scheme", action="append", choices=SCHEMES)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--worker", nargs="*", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work([Path(folder) for folder in arguments.worker])
        return
    with tempfile.TemporaryDirectory() as folder:
        root = write_good(Path(folder))
        for scheme in arguments.scheme or SCHEMES:
            record(root / scheme, scheme, arguments.every)


def record(good: Path, scheme: str, every: int) -> None:
    """Load the missing mutations of one scheme, in as many processes as it takes."""
    done = {entry.name for entry in read_records() if entry.scheme == scheme}
    missing = [name for name in list(mutations(scheme))[::every] if name not in done]
    folders = {str(good): ""}
    for number, name in enumerate(missing):
        folder = good.with_name(f"{scheme}-{number}")
        copytree(good, folder)
        mutations(scheme)[name](folder)
        folders[str(folder)] = name
    while len(folders) > 1:
        for path, outcome, detail in answers(list(folders)):
            name = folders.pop(path)
            if name:
                entry = Record(scheme=scheme, name=name, outcome=outcome, detail=detail)
                write_records([*read_records(), entry])
                rmtree(path)
                print(f"{scheme}: {name}: {outcome} {detail}", flush=True)
        folders = {str(good): "", **folders}


def answers(folders: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(folder, outcome, detail) of one process; the one at which it died is the last."""
    command = [sys.executable, __file__, "--worker", *folders]
    environment = {**os.environ, **ENVIRONMENT}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert process.stdout is not None
    answered = 0
    for line in process.stdout:
        if line.startswith("{"):
            answer = json.loads(line)
            answered += 1
            yield answer["folder"], answer["outcome"], answer["detail"]
    code = process.wait()
    if answered < len(folders):
        yield folders[answered], "raises", f"the process died with {code}"


def work(folders: Sequence[Path]) -> None:
    """Load every folder, the good one first; a line of JSON for each."""
    right: torch.Tensor | None = None
    for folder in folders:
        try:
            found = logprobs(folder)
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            outcome, detail = "raises", message[:MOST_MESSAGE]
        else:
            right = found if right is None else right
            outcome, detail = compared(right, found)
        print("\n" + json.dumps({"folder": str(folder), "outcome": outcome, "detail": detail}), flush=True)


def compared(right: torch.Tensor, found: torch.Tensor) -> tuple[str, str]:
    """Whether the answers are those of the good checkpoint."""
    if found.shape != right.shape:
        return "wrong", f"{list(found.shape)} instead of {list(right.shape)}"
    difference = float((found - right).abs().max())
    if difference != difference:
        return "wrong", "NaN"
    return ("alike" if difference == 0 else "wrong"), f"{difference:.3g}"


def logprobs(folder: Path) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary at every position of the prompts."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        max_logprobs=-1,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
    )
    try:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False
        )
        prompts = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in PROMPTS]
        outputs = [llm.generate([prompt], sampling, use_tqdm=False)[0] for prompt in prompts]
        return torch.cat([dense(output.prompt_logprobs) for output in outputs])
    finally:
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
