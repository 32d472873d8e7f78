"""Record what vLLM does with the mutations of tests/mutations: an error, wrong or equal answers.

    PYTHONPATH=. .venv/bin/python scripts/mutations/record.py [--good NVFP4 ...] [--only 'name.*']
    PYTHONPATH=. .venv/bin/python scripts/mutations/record.py --methods dry|run [--good gptq ...]

Mutations that are already recorded are skipped, so that a call resumes where the last call stopped.
Each result is written at once. A mutation with different answers is also compared with the
unquantized model, because a mutation that is as close to it as the sound checkpoint does no harm. A
single process loads checkpoints one after the other (2 to 12 s each). If the process dies, the
mutation is recorded as refused, and another process continues. If a sound checkpoint does not load
or does not repeat its answers, the recording ends with an error.

With `--methods` the checkpoints have other quantization methods (tests/mutations/methods.py).
vLLM's CPU build has kernels for some of them: `run` records these in the same way. `dry` loads all
on SM 90 without computing. A mutation that vLLM accepts is judged by whether `check` reads changed
weights from it (tests/checks/test_quant_methods.py compares these with the producers' formulas).
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree, rmtree

import torch

from tests.checks.quant_methods import CHECKPOINTS
from tests.mutations.edits import Change
from tests.mutations.good import GOOD, source_of, write_good
from tests.mutations.kinds import mutations, worth_recording
from tests.mutations.methods import (
    HARMLESS,
    METHOD_RECORDS,
    RUN,
    RUN_RECORDS,
    SOURCE,
    method_mutations,
    write_methods,
)
from tests.mutations.recorded import PINNED_RECORDS, Record, read_records, write_record
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checks.vllm.translated import translate
from vexport.checks.vllm.view import CheckpointView
from vexport.fidelity.dequantize import dequantized
from vexport.inference.engine_model import dense

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # Freed memory is filled with this byte, allocated memory with its complement. A parameter that
    # was never loaded is therefore 1.3e7 or -3.4e-7 in bfloat16 and float32, and 5.5 or -.08 in
    # e4m3. It shows even if vLLM takes the largest of several parameters.
    "MALLOC_PERTURB_": "180",
    "TORCHDYNAMO_DISABLE": "1",
    "VEXPORT_CPU_EMULATION": "1",
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# First token of each prompt, and the step to the next token, below any micro model's vocabulary.
PROMPTS = ((5, 3), (1, 5), (40, 7))
PROMPT_TOKENS = 20
LEAST_VOCABULARY = 64
KV_CACHE_BYTES = 1 << 24
MOST_MESSAGE = 160
# vLLM collects garbage a dozen times per checkpoint, which takes longer than everything else. It is
# collected only after this many checkpoints.
COLLECT_EVERY = 10
FILES = {"": PINNED_RECORDS, "dry": METHOD_RECORDS, "run": RUN_RECORDS}
Answer = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A mutation to load.

    `folder` is its checkpoint, `sound` the sound checkpoint that it is made from, and `source` the
    unquantized model.
    """

    good: str
    name: str
    change: Change
    sound: Path
    folder: Path
    source: Path

    def write(self) -> None:
        copytree(self.sound, self.folder)
        self.change(self.folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--good", action="append", choices=(*GOOD, *CHECKPOINTS), help="a sound checkpoint"
    )
    parser.add_argument("--only", default="", help="a pattern that the mutations' names begin with")
    parser.add_argument(
        "--methods", choices=("dry", "run"), default="", help="other quantization methods"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    file = FILES[options.methods]
    done = {(record.good, record.name) for record in read_records(file)}
    with tempfile.TemporaryDirectory() as folder:
        every = jobs_of(Path(folder), options.methods, options.good)
        jobs = [
            job
            for job in every
            if re.match(options.only, job.name) and (job.good, job.name) not in done
        ]
        records = load_dry(jobs) if options.methods == "dry" else load_and_run(jobs)
        for record in records:
            write_record(record, file)
            print(f"{record.good}: {record.name}: {record.outcome} {record.detail}", flush=True)


def jobs_of(root: Path, methods: str, chosen: Sequence[str] | None) -> Iterator[Job]:
    """Yield the mutations of sound checkpoints, each with a folder.

    The sound checkpoints are written.
    """
    names = chosen or (RUN if methods == "run" else CHECKPOINTS if methods else GOOD)
    (write_methods if methods else write_good)(root, names)
    for good in names:
        known = method_mutations(good) if methods else mutations(good)
        for number, name in enumerate(known if methods else worth_recording(good)):
            source = root / SOURCE if methods else source_of(root, good)
            folder = root / f"{good}-{number}"
            yield Job(
                good=good,
                name=name,
                change=known[name],
                sound=root / good,
                folder=folder,
                source=source,
            )


def load_and_run(jobs: Sequence[Job]) -> Iterator[Record]:
    """Yield the results of real loads. A process that dies is replaced."""
    worker, sound = Worker(), set[Path]()
    for job in jobs:
        if job.sound not in sound:
            answer = worker.ask(job.sound, job.sound, job.source)
            if answer["outcome"] != "alike":
                sys.exit(
                    f"{job.good}: the sound checkpoint {answer['outcome']}: {answer['detail']}"
                )
            sound.add(job.sound)
        job.write()
        answer = worker.ask(job.sound, job.folder, job.source)
        yield Record(good=job.good, name=job.name, **answer)  # type: ignore[arg-type]
        rmtree(job.folder)


class Worker:
    """A process that loads checkpoints one after the other.

    If it dies, the next process replaces it.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )

    def ask(self, *folders: Path) -> Answer:
        """Return vLLM's result: `outcome`, `detail` and possibly `further` of a Record."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(folder) for folder in folders]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"outcome"'):
                return dict(json.loads(line))
        code = self.process.wait()
        self.__init__()  # type: ignore[misc]
        return {"outcome": "raises", "detail": f"made the process die with {code}"}


def work() -> None:
    """Read lines of three folders, load the second and compare it with the first.

    Print a line of JSON for each.
    """
    import vllm.triton_utils
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    collect, gc.collect = gc.collect, lambda generation=2: 0
    known: dict[str, torch.Tensor] = {}
    for number, line in enumerate(sys.stdin):
        sound, folder, source = json.loads(line)
        torch.set_default_dtype(torch.float32)  # a load that failed may have left another
        try:
            right = known[sound] = known[sound] if sound in known else logprobs(sound)
            # The first load has rebound the kernels. Doing it again would look at every name of
            # every module.
            vllm.triton_utils.dispatcher._rebind_kernels = lambda overrides: None
            found = logprobs(folder)
            answer = compared(right, found)
            if answer["outcome"] == "wrong" and found.shape == right.shape:
                known[source] = known[source] if source in known else logprobs(source)
                answer["further"] = further(known[source], right, found)
        except Exception as error:
            cleanup_dist_env_and_memory()
            message = " ".join(f"{type(error).__name__}: {error}".split()).replace(
                folder, "CHECKPOINT"
            )
            answer = {"outcome": "raises", "detail": message[:MOST_MESSAGE]}
        print("\n" + json.dumps(answer), flush=True)
        if number % COLLECT_EVERY == 0:
            collect()


def compared(right: torch.Tensor, found: torch.Tensor) -> Answer:
    """Compare answers with the sound checkpoint's answers. vLLM repeats itself exactly here."""
    if found.shape != right.shape:
        return {"outcome": "wrong", "detail": f"{list(found.shape)} instead of {list(right.shape)}"}
    difference = float((found - right).abs().max())
    detail = f"{difference:.3g}" if difference == difference else "NaN"
    return {"outcome": "alike" if difference == 0 else "wrong", "detail": detail}


def further(source: torch.Tensor, sound: torch.Tensor, found: torch.Tensor) -> float | None:
    """Return the mean KL divergence from the source, divided by the sound checkpoint's divergence.

    Returns None for NaN.
    """
    exact = source.double()
    loss, least = (
        float((exact.exp() * (exact - other.double())).sum(-1).mean()) for other in (found, sound)
    )
    return float(f"{loss / least:.3g}") if loss == loss else None


def logprobs(folder: str) -> torch.Tensor:
    """Return log-probabilities of the whole vocabulary at every position of the prompts."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=folder,
        skip_tokenizer_init=not (Path(folder) / "tokenizer.json").exists(),
        enforce_eager=True,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
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
        rows = [
            [(first + step * n) % LEAST_VOCABULARY for n in range(PROMPT_TOKENS)]
            for first, step in PROMPTS
        ]
        prompts = [TokensPrompt(prompt_token_ids=row) for row in rows]
        outputs = [llm.generate([prompt], sampling, use_tqdm=False)[0] for prompt in prompts]
        return torch.cat([dense(output.prompt_logprobs) for output in outputs])
    finally:
        llm.llm_engine.engine_core.shutdown()


def load_dry(jobs: Sequence[Job]) -> Iterator[Record]:
    """Pass all mutations to vLLM's classes and loaders in a single call.

    Ends the recording if a sound checkpoint is refused.
    """
    for job in jobs:
        job.write()
    folders = [*dict.fromkeys(job.sound for job in jobs), *(job.folder for job in jobs)]
    command = (sys.executable, "-m", "vexport", "load", "--dry", *map(str, folders), "--sm", "90")
    ran = subprocess.run((*command, "--format", "json", "--quiet"), capture_output=True, text=True)
    reports = {report["checkpoint"]: report for report in json.loads(ran.stdout or "[]")}
    for job in jobs:
        if not reports[str(job.sound)]["ok"]:
            sys.exit(f"{job.good}: {reports[str(job.sound)]['findings']}")
        errors = [
            each["got"]
            for each in reports[str(job.folder)]["findings"]
            if each["severity"] == "error"
        ]
        if errors:
            outcome, detail = "raises", " ".join(errors[0].split())[:MOST_MESSAGE]
        else:
            outcome, detail = accepted(job)
        yield Record(good=job.good, name=job.name, outcome=outcome, detail=detail)


def accepted(job: Job) -> tuple[str, str]:
    if job.name in HARMLESS:
        return "alike", "a dry load"
    old, new = weights(job.sound), weights(job.folder)
    others = [
        name for name, weight in old.items() if name in new and not torch.equal(weight, new[name])
    ]
    if old.keys() != new.keys() or not others:
        return "loads", "a dry load"
    return "wrong", f"{others[0]} is another weight"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of quantized layers.

    Layers with tensors that do not fit together are left out.
    """
    found = {}
    with Reader() as reader:
        view = translate(CheckpointView(read_index(folder), reader))
        for fused in view.model.fused_layers:
            for name in fused.members:
                with suppress(ValueError, RuntimeError, IndexError, KeyError):
                    if (weight := dequantized(view, name)) is not None:
                        found[name] = weight
    return found


if __name__ == "__main__":
    main()
