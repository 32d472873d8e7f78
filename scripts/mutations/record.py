"""Records what the real vLLM does with the mutations of tests/mutations: raises, answers otherwise, or alike.

    PYTHONPATH=. .venv/bin/python scripts/mutations/record.py [--good NVFP4 ...] [--only 'name.*'] [--again]
    PYTHONPATH=. .venv/bin/python scripts/mutations/record.py --vllm-python FOLDER/bin/python --one-in 4

Mutations that are recorded already are left out unless asked for again, so that a call goes on where the last
one stopped; each answer is written at once. One that answers otherwise is compared with the unquantized
model too: it may be no further from that than the sound checkpoint is. One process loads one checkpoint
after the other (2 to 12 s each); where it dies, the mutation is recorded as refused and another process goes
on. A sound checkpoint that does not load, or does not answer twice alike, ends the recording with an error.
With `--vllm-python` the vLLM of another environment is asked (scripts/setup-vllm), in a file of its version.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from shutil import copytree, rmtree

import torch

from tests.mutations.edits import Change
from tests.mutations.good import GOOD, source_of, write_good
from tests.mutations.recorded import FOLDER, Record, read_records, write_record
from tests.mutations.table import mutations, worth_recording
from vexport.engine.generate import dense

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # What is freed is filled with this byte, what is allocated with its complement: a parameter that was
    # never loaded is 1.3e7 or -3.4e-7 in bfloat16 and float32, 5.5 or -.08 in e4m3, and shows, also where
    # vLLM takes the largest of several.
    "MALLOC_PERTURB_": "180",
    "TORCHDYNAMO_DISABLE": "1",
    "VEXPORT_CPU_EMULATION": "1",
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# First token of each prompt and the step to the next one, below any micro model's vocabulary.
PROMPTS = ((5, 3), (1, 5), (40, 7))
PROMPT_TOKENS = 20
LEAST_VOCABULARY = 64
KV_CACHE_BYTES = 1 << 24
MOST_MESSAGE = 160
# Folders that are written before the process comes to them.
AHEAD = 10
# vLLM collects garbage a dozen times a checkpoint, which takes longer than all else: done now and then.
COLLECT_EVERY = 10
# In the first round one in so many of the table, in the next their neighbours.
STRIDE = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A mutation's folder to load, the sound checkpoint that it was made from, and the source of that."""

    good: str
    name: str
    change: Change
    sound: Path
    folder: Path
    source: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What vLLM did with a folder, in the words of a Record; "unsound" where the sound one is at fault."""

    outcome: str
    detail: str
    further: float | None = None


def main() -> None:
    """Record what is missing: a few of every sound checkpoint before more of the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--good", action="append", choices=tuple(GOOD), help="a sound checkpoint's name")
    parser.add_argument("--only", default="", help="a pattern that the mutations' names begin with")
    parser.add_argument("--again", action="store_true", help="what is recorded already too")
    parser.add_argument("--one-in", type=int, default=1, help="of each sound checkpoint's mutations")
    parser.add_argument("--vllm-python", default=sys.executable, help="the interpreter of another vLLM")
    parser.add_argument("--worker", nargs="*", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker)
        return
    chosen = arguments.good or list(GOOD)
    with tempfile.TemporaryDirectory() as folder:
        root = write_good(Path(folder), chosen)
        file = _file_of(arguments.vllm_python)
        record(
            in_turns(_missing(root, good, file, arguments) for good in chosen), file, arguments.vllm_python
        )


def in_turns(jobs: Iterable[Sequence[Job]]) -> list[Job]:
    """One of each sound checkpoint, then the next of each."""
    return [job for turn in zip_longest(*jobs) for job in turn if job is not None]


def jobs_of(root: Path, good: str, changes: Mapping[str, Change], source: Path) -> list[Job]:
    """The mutations of a sound checkpoint, each with a folder to write it to."""
    return [
        Job(
            good=good,
            name=name,
            change=change,
            sound=root / good,
            folder=root / f"{good}-{number}",
            source=source,
        )
        for number, (name, change) in enumerate(changes.items())
    ]


def _file_of(python: str) -> Path:
    command = (python, "-c", "from importlib.metadata import version; print(version('vllm-cpu'))")
    version = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return FOLDER / f"vllm-{version}.jsonl"


def _missing(root: Path, good: str, file: Path, arguments: argparse.Namespace) -> list[Job]:
    """The mutations without a record, in an order that takes from all over the table."""
    done = {entry.name for entry in read_records(file) if entry.good == good}
    first = list(GOOD).index(good)
    some = worth_recording(good)[first % arguments.one_in :: arguments.one_in]
    wanted = done if arguments.again else {*some} - done
    changes = {
        name: change
        for name, change in mutations(good).items()
        if name in wanted and re.match(arguments.only, name)
    }
    jobs = jobs_of(root, good, changes, source_of(root, good))
    starts = ((first + turn) % STRIDE for turn in range(STRIDE))
    return list(chain.from_iterable(jobs[start::STRIDE] for start in starts))


def record(jobs: Sequence[Job], file: Path, python: str = sys.executable) -> None:
    while jobs:
        answered = 0
        for job, answer in zip(jobs, answers(python, jobs), strict=False):
            if answer.outcome == "unsound":
                sys.exit(f"{job.good}: the sound checkpoint {answer.detail}")
            write_record(Record(good=job.good, name=job.name, **asdict(answer)), file)
            print(f"{job.good}: {job.name}: {answer.outcome} {answer.detail}", flush=True)
            rmtree(job.folder)
            answered += 1
        jobs = jobs[answered:]


def make_folders(jobs: Iterable[Job]) -> None:
    """Write the mutated folders, unless a process that died left them."""
    for job in jobs:
        if not job.folder.exists():
            copytree(job.sound, job.folder)
            job.change(job.folder)


def answers(python: str, jobs: Sequence[Job]) -> Iterator[Answer]:
    """The answers of one process to the jobs, in order; the one at which it died is the last."""
    waiting = iter(jobs)
    make_folders(islice(waiting, AHEAD))
    folders = [str(path) for job in jobs for path in (job.sound, job.folder, job.source)]
    process = subprocess.Popen(
        [python, __file__, "--worker", *folders],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    assert process.stdout is not None
    answered, sound = 0, True
    for line in process.stdout:
        if line.startswith('{"sound"'):
            sound = json.loads(line)["sound"]
        elif line.startswith('{"outcome"'):
            answered += 1
            make_folders(islice(waiting, 1))
            yield Answer(**json.loads(line))
    code = process.wait()
    if answered < len(jobs):
        yield Answer(outcome="raises" if sound else "unsound", detail=f"made the process die with {code}")


def work(folders: Sequence[str]) -> None:
    """Load of every three folders the second and compare it with the first; a line of JSON for each."""
    import vllm.triton_utils
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if not torch.cuda.is_available():  # an older vLLM asks a torch that has CUDA for it when it stops
        torch.accelerator.synchronize = lambda device=None: None
    collect, gc.collect = gc.collect, lambda generation=2: 0
    right: dict[str, torch.Tensor] = {}
    jobs = zip(folders[::3], folders[1::3], folders[2::3], strict=True)
    for number, (sound, folder, source) in enumerate(jobs):
        if sound not in right:
            _say({"sound": False})
            right[sound] = logprobs(Path(sound))
            if len(right) == 1 and not torch.equal(right[sound], logprobs(Path(sound))):
                _say(asdict(Answer(outcome="unsound", detail="answers otherwise when asked again")))
                return
        # The first load has put these in their places, which takes a look at every name of every module.
        if dispatcher := getattr(vllm.triton_utils, "dispatcher", None):  # from 0.28 or so on
            dispatcher._rebind_kernels = lambda overrides: None
        _say({"sound": True})
        torch.set_default_dtype(torch.float32)  # a load that failed may have left another
        try:
            found = logprobs(Path(folder))
            answer = compared(right[sound], found)
            if answer.outcome == "wrong" and found.shape == right[sound].shape:
                if source not in right:
                    right[source] = logprobs(Path(source))
                answer = replace(answer, further=further(right[source], right[sound], found))
        except Exception as error:
            cleanup_dist_env_and_memory()
            message = " ".join(f"{type(error).__name__}: {error}".split()).replace(folder, "CHECKPOINT")
            answer = Answer(outcome="raises", detail=message[:MOST_MESSAGE])
        _say(asdict(answer))
        if number % COLLECT_EVERY == 0:
            collect()


def _say(content: dict[str, object]) -> None:
    print("\n" + json.dumps(content), flush=True)


def compared(right: torch.Tensor, found: torch.Tensor) -> Answer:
    """Whether the answers are those of the sound checkpoint: vLLM repeats itself to the last bit here."""
    if found.shape != right.shape:
        return Answer(outcome="wrong", detail=f"{list(found.shape)} instead of {list(right.shape)}")
    difference = float((found - right).abs().max())
    if difference != difference:
        return Answer(outcome="wrong", detail="NaN")
    return Answer(outcome="alike" if difference == 0 else "wrong", detail=f"{difference:.3g}")


def further(source: torch.Tensor, sound: torch.Tensor, found: torch.Tensor) -> float | None:
    """The mean KL divergence from the source as a multiple of the sound checkpoint's; None for NaN."""
    exact = source.double()
    loss, least = (float((exact.exp() * (exact - other.double())).sum(-1).mean()) for other in (found, sound))
    return float(f"{loss / least:.3g}") if loss == loss else None


def logprobs(folder: Path) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary at every position of the prompts."""
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=not (folder / "tokenizer.json").exists(),
        enforce_eager=True,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        max_model_len=64,
        max_num_seqs=4,
        max_logprobs=-1,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        # By name older versions take it for "mp" on a CPU, and import vLLM once more for each checkpoint.
        distributed_executor_backend=UniProcExecutor,
    )
    try:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False
        )
        prompts = [
            TokensPrompt(
                prompt_token_ids=[(first + step * n) % LEAST_VOCABULARY for n in range(PROMPT_TOKENS)]
            )
            for first, step in PROMPTS
        ]
        outputs = [llm.generate([prompt], sampling, use_tqdm=False)[0] for prompt in prompts]
        return torch.cat([dense(output.prompt_logprobs) for output in outputs])
    finally:
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
