"""What `quantize` answers."""

from dataclasses import dataclass

from vexport.types.calibration import ExpertCoverage
from vexport.types.rounding import RoundingReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A checkpoint that was written: what it is made of and what to type next.

    `layers` of `of_layers` linear layers are quantized, `quantized_parameters` of `parameters`. `smoothing`
    is the strength, for which `smoothed_tensors` were scaled.
    """

    checkpoint: str
    source: str
    schemes: tuple[str, ...]
    layers: int
    of_layers: int
    quantized_parameters: int
    parameters: int
    source_bytes: int
    output_bytes: int
    bits: float
    calibration_rows: int
    calibration_data: str = ""
    calibration_digest: str | None
    smoothing: float = 0.0
    smoothed_tensors: int = 0
    experts: tuple[ExpertCoverage, ...]
    rounding: RoundingReport | None
    warnings: tuple[str, ...]
    next_commands: tuple[str, ...]
