"""Sections of a scenario for calibration text, and for losses that are measured on this text."""

from pathlib import Path
from typing import Annotated

from annotated_types import Ge
from pydantic import Field, Strict, field_validator

from vexport.checkpoint.source import DEFAULT, parse_data
from vexport.records import CalibrationData
from vexport.records.values import Positive
from vexport.scenario.declaring import Key, Option
from vexport.scenario.section import ScenarioSection


class Calibration(ScenarioSection):
    """Calibration text, and how to read it. The model runs on the text to record layer inputs."""

    data: Annotated[
        str,
        Field(min_length=1),
        Option(
            "Calibration text: a file, a folder, a dataset on the hub (ORG/NAME:SPLIT:COLUMN), or "
            "`default` for the text that ships with vexport.",
            "Calibration",
            names="--calibration",
            metavar="DATA",
            more="See [calibration data](calibration.md#calibration-data).",
        ),
    ]
    split: Annotated[
        str | None, Key("Split of a dataset on the hub.", unset="`train`, else the first split")
    ] = None
    subset: Annotated[str | None, Key("Subset (configuration) of a dataset on the hub.")] = None
    column: Annotated[
        str | None,
        Key("Column with the text or the turns.", unset="the first column with a usual name"),
    ] = None
    samples: Annotated[Positive, Strict(), Option("Number of samples to use.", "Calibration")] = 128
    seq_len: Annotated[
        Positive, Strict(), Option("Number of tokens per sample.", "Calibration")
    ] = 512
    seed: Annotated[
        int | None,
        Ge(0),
        Option("Select rows at random with this seed.", "Calibration", unset="the first rows"),
    ] = None
    pack: Annotated[
        bool | None,
        Option(
            "Concatenate rows into samples of `seq_len` tokens, or use each row as a sample.",
            "Calibration",
            unset="concatenate rows of plain text only",
        ),
    ] = None
    all_experts: Annotated[
        bool,
        Option(
            "Run every token through all experts, or only through those that the router selects.",
            "Calibration",
            names="--calibrate-all-experts",
        ),
    ] = True
    device: Annotated[
        str | None,
        Option(
            "Device for calibration, by torch's name: `cpu`, `cuda`, `cuda:1`.",
            "Calibration",
            metavar="D",
            unset="`cuda` if there is a GPU",
        ),
    ] = None

    @field_validator("data", mode="before")
    @classmethod
    def _path_as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, Path) else value

    @property
    def path(self) -> Path | None:
        """Return the local path of the data, or None if `data` names a data set of the hub."""
        name = parse_data(self.data)
        return name.path if name.kind == "path" else None

    def source(self, samples: int | None = None) -> CalibrationData:
        """Return these settings as `CalibrationData`. `samples` replaces the number of samples."""
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
    """Return the calibration with the text that ships with vexport."""
    return Calibration(data=DEFAULT)


class Sensitivity(ScenarioSection):
    """Settings for measuring the loss from quantizing a single layer group."""

    samples: Annotated[Positive, Key("Number of calibration rows to measure on.")] = 16
