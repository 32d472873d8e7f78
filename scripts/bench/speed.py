"""What vLLM does on this CPU next to what `vexport recommend` says: decode speed, and the KV cache.

    .venv/bin/python scripts/bench/speed.py MODEL [--scheme W4A16]... [--concurrency 1,8] [--folder DIR]

Bandwidth and the peak of bf16 are measured first, in this process, on as many threads as vLLM takes; for
8-bit inputs the peak is taken as twice that of bf16. MODEL is timed as it is and in each scheme whose CPU
kernels are native, by `vexport bench`; a sequence is one block of the KV cache of vLLM's CPU build (128
tokens). A step is compared with the bound on a card of that bandwidth and peak, of which GPUs are expected
to reach a part; the KV cache with what vLLM counts. Groups that do not fit are smaller ones. Linux only.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from vexport.checkpoint.index import SourceIndex, read_index
from vexport.cli.entry import cli
from vexport.engine.session import engines_share_imports
from vexport.formats.gpus import Arithmetic, Card
from vexport.plan import Settings, build_plan
from vexport.plan.bound import HIGH, LOW, Rank
from vexport.plan.kv_tokens import kv_cache_of
from vexport.plan.rank_weights import rank_weights
from vexport.plan.table import PROBE
from vexport.run.serving import EngineOptions
from vexport.run.timing import time_checkpoints
from vexport.scenario import Rule
from vexport.scenario.serve import Serve
from vexport.types import SpeedReport, Workload, silent

SCHEMES = ("W8A8", "FP8_DYNAMIC", "W4A16")
UNQUANTIZED = "bf16"
# What is read and multiplied to find the machine's limits: several times its caches.
READ_BYTES, SIDE, REPEATS = 1 << 30, 4096, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One scheme: a step as it was and by the bound, in milliseconds; KV cache of a token in bytes."""

    scheme: str
    concurrency: int
    step_ms: float
    bound_ms: float
    kv_token_bytes: float
    predicted_kv_token_bytes: float

    @property
    def reached(self) -> float:
        """Share of the bound's speed."""
        return self.bound_ms / self.step_ms


def fastest(work: "torch.Tensor", other: "torch.Tensor | None" = None) -> float:
    """Seconds of the fastest of some reads of a tensor, or products of two."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work.sum() if other is None else torch.matmul(work, other)
        times.append(time.perf_counter() - start)
    return min(times)


def this_machine() -> Card:
    """Its bandwidth of reading, and its peak in bf16."""
    bandwidth = READ_BYTES / fastest(torch.ones(READ_BYTES // 4, dtype=torch.float32))
    square = torch.ones(SIDE, SIDE, dtype=torch.bfloat16)
    peak = 2.0 * SIDE**3 / fastest(square, square)
    peaks: dict[Arithmetic, float] = {"bf16": peak, "fp8": 2 * peak, "int8": 2 * peak, "fp4": 2 * peak}
    return Card(name="this CPU", memory_bytes=0, sm=89, bandwidth=bandwidth, peak=peaks)


def quantized(model: Path, schemes: Sequence[str], folder: Path) -> dict[str, Path]:
    """The model in each scheme, made where it is not there yet."""
    outs = {scheme: folder / scheme for scheme in schemes}
    for scheme, out in outs.items():
        if not (out / "config.json").is_file():
            arguments = ["quantize", str(model), str(out), "--scheme", scheme, "--rounding", "nearest", "-q"]
            cli.main([*arguments, "--on-unsupported-shape", "smaller-group"], standalone_mode=False)
    return outs


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A model on this machine, with half of an answer in its cache on average."""

    rank: Rank

    @classmethod
    def of(cls, index: SourceIndex, workload: Workload, card: Card) -> "Prediction":
        """From the model's headers."""
        plan = build_plan(index, (Rule(match="Linear", scheme=PROBE),), Settings().lenient)
        kv_cache = kv_cache_of(index, 1)
        assert kv_cache is not None, "headers tell the KV cache of this model"
        context = workload.input_len + workload.output_len // 2
        weights = rank_weights(index, plan, 1)
        return cls(rank=Rank(card=card, weights=weights, kv_cache=kv_cache, context=context))

    def rows(self, name: str, report: SpeedReport) -> Iterator[Row]:
        """What was measured next to it, for each number of requests; nothing of emulated kernels."""
        scheme = None if name == UNQUANTIZED else name
        cache_bytes = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * 2**30
        for point in report.points:
            assert point.itl is not None
            assert report.kv_tokens is not None
            yield Row(
                scheme=name,
                concurrency=point.concurrency,
                step_ms=1000 * point.itl,
                bound_ms=1000 * self.rank.decode_seconds(scheme, point.concurrency),
                kv_token_bytes=cache_bytes / report.kv_tokens,
                predicted_kv_token_bytes=self.rank.kv_cache.read_bytes(self.rank.context) / self.rank.context,
            )


def shown(row: Row) -> str:
    """A row as a line."""
    interval = "within" if LOW <= row.reached <= HIGH else "outside of"
    return (
        f"{row.scheme:12} {row.concurrency:3} at once: step {row.step_ms:.2f}, bound {row.bound_ms:.2f} ms"
        f" ({row.reached:.0%}, {interval} what is expected of a GPU); KV {row.kv_token_bytes:.0f}, predicted"
        f" {row.predicted_kv_token_bytes:.0f}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--scheme", action="append", default=[])
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--input-len", type=int, default=96)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    card = this_machine()
    concurrency = tuple(int(number) for number in options.concurrency.split(","))
    workload = Workload(concurrency=concurrency, input_len=options.input_len, output_len=options.output_len)
    engine = EngineOptions(
        serve=Serve(timeout=600), vllm_python=None, trust_remote_code=False, on_progress=silent
    )
    print(f"read {card.bandwidth / 1e9:.1f} GB/s, bf16 {card.peak['bf16'] / 1e12:.2f} TFLOPS")
    print(f"expected of a GPU: {LOW:.0%} to {HIGH:.0%} of the bound", flush=True)
    predicted = Prediction.of(read_index(options.model), workload, card)
    where = nullcontext(str(options.folder)) if options.folder else tempfile.TemporaryDirectory()
    with where as folder, engines_share_imports():
        schemes = options.scheme or SCHEMES
        outs = {UNQUANTIZED: options.model, **quantized(options.model, schemes, Path(folder))}
        for name, out in outs.items():
            (report,) = time_checkpoints({str(out): "checkpoint"}, workload, engine)
            lines = [shown(row) for row in predicted.rows(name, report)]
            print("\n".join(lines) or f"{name:12} {report.unmeasured}", flush=True)


if __name__ == "__main__":
    main()
