"""Times the engine on random prompts, as vLLM's own latency benchmark (vllm/benchmarks/latency.py) does.

That one starts an engine for each size of a batch and times whole batches. Here one engine has them all, and
every token is timed, as vllm/benchmarks/serve.py does for TTFT and ITL. Used in the worker process only.
"""

import random
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from vexport.types import OnProgress, SpeedPoint, Throughput, Workload

if TYPE_CHECKING:
    from vllm import LLM

RUNS = 3
# Of the median: where runs deviate by more, one more is made.
DEVIATION = 0.01
SEED = 0
# As vLLM's benchmark: the ids above belong to special tokens in some vocabularies.
_HIGHEST_TOKEN = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timing:
    """One run: output tokens a second, seconds to each request's first token, and between its tokens."""

    tokens_per_second: float
    first: list[float]
    between: list[float]


def measure_throughput(llm: "LLM", workload: Workload, report: OnProgress) -> Throughput:
    """Time the workload at each concurrency; the same prompts in every run, after one that is not timed."""
    prompts = _prompts(llm, workload)
    points = []
    for number, concurrency in enumerate(workload.concurrency):
        report("speed", number, len(workload.concurrency))
        points.append(_point(llm, prompts[:concurrency], workload))
    report("speed", len(points), len(points))
    # The CPU's kernels pack weights into buffers of their own: what is left is not what they hold.
    on_cpu = llm.llm_engine.vllm_config.device_config.device_type == "cpu"
    weights = None if on_cpu else max(llm.collective_rpc("vexport_weight_bytes"))
    return Throughput(points=tuple(points), kv_tokens=_kv_tokens(llm), weight_bytes=weights)


def _prompts(llm: "LLM", workload: Workload) -> list[list[int]]:
    generator = random.Random(SEED)
    above = min(_HIGHEST_TOKEN, llm.llm_engine.model_config.get_vocab_size())
    most = max(workload.concurrency)
    return [[generator.randrange(above) for _ in range(workload.input_len)] for _ in range(most)]


def _point(llm: "LLM", prompts: list[list[int]], workload: Workload) -> SpeedPoint:
    _timed(llm, prompts, workload.output_len)  # warm-up
    timings = [_timed(llm, prompts, workload.output_len) for _ in range(RUNS)]
    if deviation(rates := [timing.tokens_per_second for timing in timings]) > DEVIATION * median(rates):
        timings.append(_timed(llm, prompts, workload.output_len))
    rates = [timing.tokens_per_second for timing in timings]
    between = [seconds for timing in timings for seconds in timing.between]
    return SpeedPoint(
        concurrency=len(prompts),
        input_len=workload.input_len,
        output_len=workload.output_len,
        tokens_per_second=median(rates),
        ttft=median(seconds for timing in timings for seconds in timing.first),
        itl=median(between) if between else None,
        runs=tuple(rates),
        mad=deviation(rates),
    )


def deviation(values: list[float]) -> float:
    """The median absolute deviation from the median."""
    middle = median(values)
    return median(abs(value - middle) for value in values)


def _timed(llm: "LLM", prompts: list[list[int]], output_len: int) -> _Timing:
    """All prompts at once, greedily, to the last token, whatever the model says of an end."""
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    engine = llm.llm_engine
    arrivals: dict[str, list[float]] = {}
    tokens: dict[str, int] = {}
    start = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), sampling)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            arrivals.setdefault(output.request_id, []).append(now)
            tokens[output.request_id] = len(output.outputs[0].token_ids)
    seconds = time.perf_counter() - start
    return _Timing(
        tokens_per_second=sum(tokens.values()) / seconds,
        first=[times[0] for times in arrivals.values()],
        between=[after - before for times in arrivals.values() for before, after in pairwise(times)],
    )


def _kv_tokens(llm: "LLM") -> int | None:
    """The tokens that the KV cache holds by vLLM's own count; of versions without one, its blocks."""
    cache = llm.llm_engine.vllm_config.cache_config
    tokens: int | None = getattr(cache, "kv_cache_size_tokens", None)
    if tokens is None and cache.num_gpu_blocks:
        tokens = cache.num_gpu_blocks * cache.block_size
    return tokens
