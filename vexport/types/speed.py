"""How fast a checkpoint was: what was asked of it, and what was measured."""

from dataclasses import dataclass
from typing import Literal

from vexport.types.findings import Finding
from vexport.types.loading import EngineInfo

SpeedTool = Literal["vexport bench", "vllm bench serve", "guidellm"]
NOT_MEASURED_HERE = (
    "its kernels are emulated on this machine: the numbers are the format's, the time is not; measure it on "
    "a GPU, or see the bound of `vexport recommend`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of `input_len` random tokens, each answered by `output_len`, so many at once."""

    concurrency: tuple[int, ...] = (1, 8, 64)
    input_len: int = 256
    output_len: int = 128

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.input_len + self.output_len


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedPoint:
    """`concurrency` requests at once: their output tokens a second together, and latencies in seconds.

    `tokens_per_second` is the median of the timed `runs`, `mad` their median absolute deviation. `ttft` is
    the median time to the first token, `itl` the median between two tokens of a request. Another tool's
    results have no `runs`; of its requests so many `failed`.
    """

    concurrency: int
    input_len: float
    output_len: float
    tokens_per_second: float
    ttft: float | None
    itl: float | None
    runs: tuple[float, ...] = ()
    mad: float | None = None
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What an engine did: its points, the tokens that its KV cache holds, the weights of a rank."""

    points: tuple[SpeedPoint, ...]
    kv_tokens: int | None
    weight_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedReport:
    """The speed of one checkpoint; `unmeasured` says why there is none.

    `start_seconds` is the start of the engine with its weights, without the imports; `weight_bytes` are
    those of a rank as its kernels hold them, None on a CPU; `log_tail` is the log of one that died
    """

    checkpoint: str
    ok: bool
    findings: tuple[Finding, ...]
    role: Literal["baseline", "checkpoint"] = "checkpoint"
    tool: SpeedTool = "vexport bench"
    vllm: str = ""
    engine: EngineInfo | None = None
    start_seconds: float | None = None
    kv_tokens: int | None = None
    weight_bytes: int | None = None
    points: tuple[SpeedPoint, ...] = ()
    unmeasured: str = ""
    log_tail: str = ""
