"""Which scheme for which GPU: what fits, a bound on its speed, and what is recommended."""

from dataclasses import dataclass
from typing import Literal

# How a GPU runs what is stored: with inputs of as many bits as are stored, with 16-bit inputs instead, with
# fewer bits than are stored, with a package that vLLM does not bring, not at all, or in a way that is not
# known.
Runs = Literal["in full", "weights only", "coarser inputs", "with a package", "no", "not known"]


# Tokens of a sequence where none are named: of its prompt, and in its KV cache.
DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBound:
    """Tokens a second that `batch` sequences get together: 50 and 90 % of the bound.

    Both are None where that many sequences do not fit in the memory at once.
    """

    batch: int
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedBound:
    """What memory and tensor cores allow at most, by data sheet: no measurement.

    `decode` is by batch; prefill is one prompt of the context's length, in its tokens a second.
    """

    decode: tuple[DecodeBound, ...]
    prefill_low: float
    prefill_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One scheme for all linear layers, on one GPU of those that share a model.

    `reason` says why it does not run, or not in full; `explain` is the command that tells more.
    `weight_bytes` are those of a rank, 0 where shapes do not fit; `kv_tokens` and `sequences` (of the
    context's length) are what fits next to them, None where headers do not tell the KV cache. `kernels` are
    vLLM's classes for its layers but routed experts, empty where that is not known. `seconds` are
    about what quantizing takes on two CPU cores, with calibration where it is needed, `refit_seconds` that
    with weights rounded by calibration text, None from 8 bits on. `speed` is None for what does not run or
    fit, and for kernels of another package.
    """

    scheme: str
    runs: Runs
    reason: str = ""
    explain: str = ""
    weight_bytes: int = 0
    kv_tokens: int | None = 0
    sequences: int | None = 0
    needs_calibration: bool = False
    seconds: float = 0.0
    refit_seconds: float | None = None
    speed: SpeedBound | None = None
    kernels: tuple[str, ...] = ()

    @property
    def runs_by_itself(self) -> bool:
        """Whether the GPU runs it with vLLM alone."""
        return self.runs not in ("no", "with a package", "not known")

    @property
    def fits(self) -> bool:
        """Whether it runs and its weights leave room for at least one sequence."""
        return self.runs_by_itself and self.sequences != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Every scheme for one model on `tp` GPUs of a name, and which to start with.

    `sm` is 0 for a GPU of AMD. `source_row` is the model as it is.

    `kv_bytes` is what the KV cache of a rank takes for a sequence of
    `context` tokens. `crossover` is the batch from which W4A16 is no longer ahead of FP8_DYNAMIC, None where
    one does not run, or W4A16 stays ahead. `recommended` is empty where nothing fits; `alternative` is the
    scheme that only a measured accuracy decides about, empty where memory and GPU decide. `notes` say what
    was assumed.
    """

    source: str
    architecture: str
    parameters: int
    gpu: str
    sm: int
    gpu_architecture: str
    tp: int
    vllm: str
    context: int
    usable_bytes: int
    kv_bytes: int | None
    source_row: Candidate
    schemes: tuple[Candidate, ...]
    crossover: int | None
    recommended: str
    alternative: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
