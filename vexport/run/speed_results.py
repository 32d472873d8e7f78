"""Speeds measured by other tools: the JSON of `vllm bench serve --save-result` and of guidellm."""

from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from vexport.errors import InputError
from vexport.types import SpeedPoint, SpeedReport

_MS = 1000.0


class _Serve(BaseModel):
    """What vLLM writes (vllm/benchmarks/serve.py); `max_concurrency` is the limit that was set."""

    model_id: str = ""
    output_throughput: float
    completed: int = Field(gt=0)
    total_input_tokens: int
    total_output_tokens: int
    max_concurrency: int | None = None
    max_concurrent_requests: int = 0
    median_ttft_ms: float | None = None
    median_itl_ms: float | None = None

    @property
    def point(self) -> SpeedPoint:
        """As a point."""
        return SpeedPoint(
            concurrency=self.max_concurrency or self.max_concurrent_requests,
            input_len=self.total_input_tokens / self.completed,
            output_len=self.total_output_tokens / self.completed,
            tokens_per_second=self.output_throughput,
            ttft=_seconds(self.median_ttft_ms),
            itl=_seconds(self.median_itl_ms),
        )


class _Summary(BaseModel):
    mean: float
    median: float


class _ByStatus(BaseModel):
    successful: _Summary


class _Metrics(BaseModel):
    request_concurrency: _ByStatus
    prompt_token_count: _ByStatus
    output_token_count: _ByStatus
    output_tokens_per_second: _ByStatus
    time_to_first_token_ms: _ByStatus
    inter_token_latency_ms: _ByStatus


class _Benchmark(BaseModel):
    metrics: _Metrics

    @property
    def point(self) -> SpeedPoint:
        """As a point."""
        metrics = self.metrics
        return SpeedPoint(
            concurrency=round(metrics.request_concurrency.successful.mean),
            input_len=metrics.prompt_token_count.successful.mean,
            output_len=metrics.output_token_count.successful.mean,
            tokens_per_second=metrics.output_tokens_per_second.successful.mean,
            ttft=_seconds(metrics.time_to_first_token_ms.successful.median),
            itl=_seconds(metrics.inter_token_latency_ms.successful.median),
        )


class _Guidellm(BaseModel):
    """What guidellm writes (guidellm.benchmark.schemas, 0.8): rates are means over time."""

    benchmarks: list[_Benchmark] = Field(min_length=1)


def read_speed_results(file: Path) -> SpeedReport:
    """The points of a file; InputError where it is of neither tool.

    `--append-result` of vLLM writes one object a line: each is a point. guidellm's are named by their file.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(file, getattr(error, "strerror", None) or "no text") from None
    if (report := _guidellm(text)) is not None:
        points = tuple(one.point for one in report.benchmarks)
        return SpeedReport(checkpoint=file.stem, ok=True, findings=(), tool="guidellm", points=points)
    served = _served(text)
    if not served:
        raise _unusable(file, "something else")
    name, points = served[0].model_id or file.stem, tuple(one.point for one in served)
    return SpeedReport(checkpoint=name, ok=True, findings=(), tool="vllm bench serve", points=points)


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
    return None if milliseconds is None else milliseconds / _MS


def _unusable(file: Path, got: str) -> InputError:
    need = "what `vllm bench serve --save-result` or guidellm writes as JSON"
    return InputError(f"--results {file}", got=got, need=need, fix="give a file of one of these")
