"""Speeds measured by other tools: the JSON of `vllm bench serve --save-result` and of guidellm."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from vexport.errors import InputError
from vexport.files import require_no_device
from vexport.types import SpeedPoint, SpeedReport, SpeedTool

_MS = 1000.0


class _Serve(BaseModel):
    """What vLLM writes (vllm/benchmarks/serve.py); `max_concurrency` is the limit that was set.

    `max_concurrent_requests` counts all requests of one second: with a rate the mean is taken instead. The
    times of what did not happen, such as between the tokens of answers of one, are 0.
    """

    model_id: str = ""
    output_throughput: float
    completed: int = Field(ge=0)
    failed: int = Field(default=0, ge=0)
    total_input_tokens: int
    total_output_tokens: int
    request_rate: float | Literal["inf"] = "inf"
    request_throughput: float = 0.0
    max_concurrency: int | None = None
    max_concurrent_requests: int = 0
    median_ttft_ms: float | None = None
    median_itl_ms: float | None = None

    @property
    def point(self) -> SpeedPoint:
        """As a point."""
        return SpeedPoint(
            concurrency=self.max_concurrency or self._at_once,
            input_len=self.total_input_tokens / max(1, self.completed),
            output_len=self._output_len,
            tokens_per_second=self.output_throughput,
            ttft=_seconds(self.median_ttft_ms),
            itl=_seconds(self.median_itl_ms),
            failed=self.failed,
        )

    @property
    def _output_len(self) -> float:
        return self.total_output_tokens / max(1, self.completed)

    @property
    def _at_once(self) -> int:
        if self.request_rate == "inf":
            return self.max_concurrent_requests
        between = (self.median_itl_ms or 0.0) * (self._output_len - 1)
        seconds = ((self.median_ttft_ms or 0.0) + between) / _MS
        return max(1, round(self.request_throughput * seconds))


class _Summary(BaseModel):
    mean: float
    median: float


class _ByStatus(BaseModel):
    successful: _Summary


class _Totals(BaseModel):
    successful: int
    errored: int = 0


class _Metrics(BaseModel):
    request_totals: _Totals
    request_concurrency: _ByStatus
    prompt_token_count: _ByStatus
    output_token_count: _ByStatus
    output_tokens_per_second: _ByStatus
    time_to_first_token_ms: _ByStatus
    inter_token_latency_ms: _ByStatus


class _Strategy(BaseModel):
    """`streams` are the requests at once that were asked for; a rate has none."""

    streams: int | None = None


class _Config(BaseModel):
    strategy: _Strategy = _Strategy()


class _Benchmark(BaseModel):
    config: _Config = _Config()
    metrics: _Metrics

    @property
    def completed(self) -> int:
        """Requests that were answered."""
        return self.metrics.request_totals.successful

    @property
    def point(self) -> SpeedPoint:
        """As a point."""
        metrics = self.metrics
        return SpeedPoint(
            concurrency=self.config.strategy.streams
            or max(1, round(metrics.request_concurrency.successful.mean)),
            input_len=metrics.prompt_token_count.successful.mean,
            output_len=metrics.output_token_count.successful.mean,
            tokens_per_second=metrics.output_tokens_per_second.successful.mean,
            ttft=_seconds(metrics.time_to_first_token_ms.successful.median),
            itl=_seconds(metrics.inter_token_latency_ms.successful.median),
            failed=metrics.request_totals.errored,
        )


class _Guidellm(BaseModel):
    """What guidellm writes (guidellm.benchmark.schemas, 0.8): rates are means over time."""

    benchmarks: list[_Benchmark] = Field(min_length=1)


def read_speed_results(file: Path) -> SpeedReport:
    """The points of a file; InputError where it is of neither tool.

    `--append-result` of vLLM writes one object a line: each is a point. guidellm's are named by their file.
    """
    require_no_device(file)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(file, getattr(error, "strerror", None) or "no text") from None
    if (report := _guidellm(text)) is not None:
        return _report(file, file.stem, "guidellm", report.benchmarks)
    served = _served(text)
    if not served:
        raise _unusable(file, "something else")
    return _report(file, served[0].model_id or file.stem, "vllm bench serve", served)


def _report(file: Path, name: str, tool: SpeedTool, results: Sequence[_Serve | _Benchmark]) -> SpeedReport:
    """The results as points; without any that was answered there is no speed."""
    points = tuple(one.point for one in results if one.completed)
    if not points:
        failed = sum(one.point.failed for one in results)
        raise InputError(
            f"--results {file}",
            got=f"no request that was answered ({failed} failed)",
            need="answers, whose tokens can be counted",
            fix="see the server's log, and measure again",
        )
    return SpeedReport(checkpoint=name, ok=True, findings=(), tool=tool, points=points)


def _guidellm(text: str) -> _Guidellm | None:
    try:
        return _Guidellm.model_validate_json(text)
    except ValidationError:
        return None


def _served(text: str) -> list[_Serve]:
    """The result that a file is, or those of its lines; none where it is something else."""
    for parts in ([text], [line for line in text.splitlines() if line.strip()]):
        try:
            return [_Serve.model_validate_json(part) for part in parts]
        except ValidationError:
            continue
    return []


def _seconds(milliseconds: float | None) -> float | None:
    return milliseconds / _MS if milliseconds else None


def _unusable(file: Path, got: str) -> InputError:
    need = "what `vllm bench serve --save-result` or guidellm writes as JSON"
    return InputError(f"--results {file}", got=got, need=need, fix="give a file of one of these")
