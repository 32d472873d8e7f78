"""A scenario: its sections, the calibration text among them, and what they need of each other."""

from pathlib import Path
from typing import Annotated, Self

from annotated_types import Ge
from pydantic import Field, Strict, field_validator, model_validator

from vexport.checkpoint.source import DEFAULT, parse_data
from vexport.records import CalibrationData, KvCache, OnUnsupportedShape
from vexport.records.values import Positive
from vexport.scenario.evaluate import Evaluate
from vexport.scenario.rules import AUTO, Auto, Rule
from vexport.scenario.section import ScenarioSection
from vexport.scenario.serve import Serve

# llm-compressor's usual calibration: 512 samples suffice for min-max of inputs; 128 on small
# models.
DEFAULT_SAMPLES = 128
DEFAULT_SEQ_LEN = 512


class Calibration(ScenarioSection):
    """Text that shows the inputs of the layers.

    `data` is a file or folder, ORG/NAME[@REVISION][:SPLIT[:COLUMN]] of a data set on the hub, or
    `default`, the text that ships with vexport. `split`, `subset` and `column` choose of a data
    set, `seed` shuffles its rows. `pack` joins rows into samples of `seq_len` tokens; without it
    only plain text is joined.

    With `all_experts` the statistics of every expert see all tokens. `device` is torch's name of
    where the layers run; without one it is a GPU where there is one.
    """

    data: Annotated[str, Field(min_length=1)]
    split: str | None = None
    subset: str | None = None
    column: str | None = None
    samples: Annotated[Positive, Strict()] = DEFAULT_SAMPLES
    seq_len: Annotated[Positive, Strict()] = DEFAULT_SEQ_LEN
    seed: Annotated[int, Ge(0)] | None = None
    pack: bool | None = None
    all_experts: bool = True
    device: str | None = None

    @field_validator("data", mode="before")
    @classmethod
    def _path_as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, Path) else value

    @property
    def path(self) -> Path | None:
        """The file or folder of the data; None of a data set that is none."""
        name = parse_data(self.data)
        return name.path if name.kind == "path" else None

    def source(self, samples: int | None = None) -> CalibrationData:
        """The path or hub id of the model."""
        return CalibrationData(
            name=self.data,
            samples=samples or self.samples,
            seq_len=self.seq_len,
            split=self.split,
            subset=self.subset,
            column=self.column or parse_data(self.data).column,
            seed=self.seed,
            pack=self.pack,
        )


def default_calibration() -> Calibration:
    """The text that ships with vexport, where none was named."""
    return Calibration(data=DEFAULT)


class Sensitivity(ScenarioSection):
    """The loss of each group of layers: the first `samples` rows of the calibration are run with
    that group alone quantized.
    """

    samples: Positive = 16


class Scenario(ScenarioSection):
    """One complete run.

    `source` is a folder or a model of the hub, `revision` its branch, tag or commit (or
    ORG/NAME@REVISION). `on_unsupported_shape` says what becomes of layers whose shapes vLLM could
    not run; `kv_cache` how keys and values are stored, in the model's dtype where it is not given;
    `smoothing` how far inputs are smoothed, as far as the schemes need where it is not given. With
    `sensitivity` the report says what quantizing each group of layers costs; a rule with scheme
    `auto` needs `auto` and implies it.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    source: str
    revision: str | None = None
    rules: Annotated[tuple[Rule, ...], Field(min_length=1)]
    on_unsupported_shape: OnUnsupportedShape = "refuse"
    kv_cache: KvCache | None = None
    smoothing: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    calibration: Calibration | None = None
    auto: Auto | None = None
    sensitivity: Sensitivity | None = None
    serve: Serve = Serve()
    evaluate: Evaluate | None = None

    @model_validator(mode="after")
    def _check_sections_for_auto(self) -> Self:
        if self.is_mixed != (self.auto is not None):
            raise ValueError(
                "a rule with scheme: auto and the section `auto` with its budget, or neither"
            )
        if self.calibration is None and (self.is_mixed or self.sensitivity):
            raise ValueError(
                "`calibration`, whose first samples show what each group of layers costs"
            )
        return self

    @property
    def run_dir(self) -> Path:
        """The folder of everything unless a command names another."""
        return Path("runs") / self.name

    @property
    def is_mixed(self) -> bool:
        """Return whether a rule leaves the choice of schemes to a budget."""
        return any(rule.scheme == AUTO for rule in self.rules)
