"""Settings of a plan without a scenario: a scheme for all linear layers, or a recipe."""

from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le
from pydantic import BeforeValidator, Field, field_validator

from vexport.formats.gpus import Names, parse_sizes
from vexport.records import KvCache, OnUnsupportedShape
from vexport.records.values import Positive
from vexport.scenario.declaring import Option
from vexport.scenario.rules import (
    ROUNDING_OPTION,
    GroupSizeSetting,
    InputObserverSetting,
    ObserverSetting,
    RoundingName,
    known_rounding,
)
from vexport.scenario.section import ScenarioSection

RevisionSetting = Annotated[
    str | None,
    Option("Branch, tag or commit of a model on the hub.", "Scheme", metavar="REV"),
]
UnsupportedShapeSetting = Annotated[
    OnUnsupportedShape,
    Option(
        "What to do with layers whose shape vLLM cannot run: `refuse` the model, `keep` the layers "
        "unquantized, or use the largest group size that fits (`smaller-group`).",
        "Scheme",
    ),
]
KvCacheSetting = Annotated[
    KvCache | None,
    Option(
        "Calibrate scales for an FP8 KV cache: `fp8` (per layer), `fp8_per_head` (per KV head), or "
        "`fp8_attention` (with queries).",
        "Scheme",
        metavar="KIND",
    ),
]
SmoothingSetting = Annotated[
    float | None,
    Ge(0),
    Le(1),
    Option(
        "Strength of smoothing, which scales large input channels down and their weights up.",
        "Scheme",
        metavar="S",
        unset="0.5 with calibration text for INT8 inputs, and for 4-bit inputs of layers rounded "
        "with text; else 0",
        more="See [smoothing](smoothing.md).",
    ),
]
IncludeVisionSetting = Annotated[
    bool,
    Option(
        "Also quantize the tower of pictures and its projector.",
        "Scheme",
        more="See [pictures](vision-tower.md).",
    ),
]


def _ranks(value: Names) -> tuple[int, ...]:
    """Parse tensor parallel sizes like the command line, with an error that states the need."""
    try:
        return parse_sizes(value)
    except ValueError:
        raise ValueError("whole numbers of GPUs, such as 1,2,4") from None


IgnoreSetting = Annotated[
    tuple[str, ...],
    Option(
        "Keep these layers unquantized: a module's name, its last parts (`down_proj`), or "
        "`re:REGEX`.",
        "Scheme",
        metavar="PATTERN",
    ),
]
RanksSetting = Annotated[
    tuple[Positive, ...],
    BeforeValidator(_ranks),
    Field(min_length=1),
    Option("Tensor parallel sizes to support, such as `1,2,4`.", "vLLM", metavar="N,..."),
]


class Planning(ScenarioSection):
    """Settings of a call of `plan` or `quantize` without a scenario.

    `observer`, `input_observer`, `rounding` and `group_size` are only for `scheme`. A recipe
    already contains these settings.
    """

    scheme: Annotated[
        str | None,
        Option(
            "Scheme for linear layers; see `vexport list schemes`.",
            "Scheme",
            metavar="S",
        ),
    ] = None
    recipe: Annotated[
        Path | None,
        Option("Recipe of llm-compressor, instead of a scheme.", "Scheme", metavar="FILE.yaml"),
    ] = None
    observer: ObserverSetting = None
    input_observer: InputObserverSetting = None
    rounding: Annotated[RoundingName | None, ROUNDING_OPTION] = None
    group_size: GroupSizeSetting = None
    ignore: IgnoreSetting = ()
    kv_cache: KvCacheSetting = None
    on_unsupported_shape: UnsupportedShapeSetting = "refuse"
    smoothing: SmoothingSetting = None
    include_vision: IncludeVisionSetting = False
    revision: RevisionSetting = None
    tp: RanksSetting = (1,)

    @field_validator("rounding")
    @classmethod
    def _check_rounding(cls, value: str | None) -> str | None:
        return None if value is None else known_rounding(value)
