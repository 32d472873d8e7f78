"""What a plan says before anything is quantized: shares, estimates, and what each scheme would give."""

from dataclasses import dataclass
from typing import Literal

Stage = Literal["calibrate", "quantize", "check"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptShare:
    """Parameters that stay in the source's dtype for one reason; `kinds` name tensors, `*` for numbers."""

    reason: str
    parameters: int
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """About how long a stage takes on two CPU cores with a disk that keeps up, and its peak memory."""

    stage: Stage
    seconds: float
    memory_bytes: int
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What comes of a plan.

    `bits_quantized` are bits per quantized weight, scales included, `bits` those over all parameters;
    `least_sm` is the least compute capability on which vLLM loads every scheme, 0 for any; `full_sm` the
    least on which it multiplies inputs of as many bits as are stored, None where no GPU does; `samples` is
    the text that calibrates, empty where none is needed; `disk_bytes` is what OUT takes. `next_command` is
    empty where the plan is refused. `package` is what vLLM needs next to it to run the schemes, empty for its
    own kernels.
    """

    quantized_parameters: int
    kept: tuple[KeptShare, ...]
    bits_quantized: float
    bits: float
    least_sm: int
    full_sm: int | None
    generation: str
    needs_calibration: bool
    samples: str
    disk_bytes: int
    estimates: tuple[Estimate, ...]
    next_command: str
    package: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeOutlook:
    """One scheme for all linear layers of a model.

    `reason` says why it does not fit, empty where it does; `layers` is how many linear layers fit it and
    `output_bytes` the size with the others kept. `group_sizes` are smaller ones with which all layers fit,
    largest first, where those of the scheme's own do not. `least_sm` and `full_sm` are those of `Outlook`.
    """

    scheme: str
    fits: bool
    reason: str
    layers: int
    output_bytes: int
    bits: float
    needs_calibration: bool
    least_sm: int
    full_sm: int | None
    generation: str
    group_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeTable:
    """Every scheme for one model (`vexport plan SOURCE --format json`)."""

    source: str
    architecture: str
    parameters: int
    source_bytes: int
    layers: int
    schemes: tuple[SchemeOutlook, ...]
