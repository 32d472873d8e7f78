"""Sections of a scenario for calibration text, and for losses that are measured on this text."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, Field, Strict, TypeAdapter, model_validator

from vexport.checkpoint.source import DEFAULT, parse_data
from vexport.records import CalibrationData
from vexport.records.values import Positive
from vexport.scenario.declaring import Key, Option
from vexport.scenario.section import ScenarioSection, located_error

# Difference from 1 that the sum of shares may have.
ROUNDING = 1e-6


class DataSource(ScenarioSection):
    """One of several calibration texts."""

    path: Annotated[
        str,
        Field(min_length=1),
        Key("A file, a folder, a dataset on the hub, or `default`, as in `data`."),
    ]
    share: Annotated[
        float | None,
        Gt(0),
        Le(1),
        Key("Share of the samples.", unset="an equal part of the rest"),
    ] = None
    chat_template: Annotated[
        bool, Key("Render conversations with the chat template, or join their texts.")
    ] = True
    split: Annotated[str | None, Key("Split of this data set.", unset="as in `split`")] = None
    subset: Annotated[str | None, Key("Subset of this data set.", unset="as in `subset`")] = None
    column: Annotated[str | None, Key("Column of the text.", unset="as in `column`")] = None


def _one_or_several(value: object) -> object:
    """Return a single plain source as its name, and several sources as objects."""
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, Mapping | DataSource):
        value = [value]
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("a path, or a list of paths or of objects with path and share")
    items = [str(item) if isinstance(item, Path) else item for item in value]
    if len(items) == 1 and isinstance(items[0], str):
        return items[0]
    return _SOURCES.validate_python(
        [{"path": item} if isinstance(item, str) else item for item in items]
    )


DataInput = Annotated[str, Field(min_length=1)] | DataSource | list[str | DataSource]
_SOURCES = TypeAdapter(tuple[DataSource, ...])


class Calibration(ScenarioSection):
    """Calibration text, and how to read it. The model runs on the text to record layer inputs."""

    data: Annotated[
        Annotated[str, Field(min_length=1)] | tuple[DataSource, ...],
        BeforeValidator(_one_or_several, json_schema_input_type=DataInput),
        Option(
            "Calibration text: a file, a folder, a dataset on the hub (ORG/NAME:SPLIT:COLUMN), or "
            "`default` for the text that ships with vexport.",
            "Calibration",
            names="--calibration",
            metavar="DATA",
            more="Or a list of texts; see [the data](calibration-data.md).",
        ),
    ]
    split: Annotated[
        str | None,
        Key("Split of a dataset.", unset="`train`, else the first `train_...`, else the first"),
    ] = None
    subset: Annotated[str | None, Key("Subset (configuration) of a dataset on the hub.")] = None
    column: Annotated[
        str | None,
        Key("Column with the text or the turns.", unset="the first column with a usual name"),
    ] = None
    samples: Annotated[Positive, Strict(), Option("Number of samples to use.", "Calibration")] = 128
    seq_len: Annotated[
        Positive, Strict(), Option("Maximum number of tokens per sample.", "Calibration")
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
    calibrate_on: Annotated[
        Literal["answers"] | None,
        Option(
            "Count only the tokens of `answers`, except for ranges; all tokens run through the "
            "model.",
            "Calibration",
            unset="count all tokens",
            more="See [answers only](calibration.md#answers-only).",
        ),
    ] = None
    all_experts: Annotated[
        bool,
        Option(
            "For static scales, count every token for all experts, or only tokens routed to them.",
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

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        # Assigning a single field validates an object that may have no other fields.
        data = getattr(self, "data", "")
        if isinstance(data, str):
            return self
        given = [each.share for each in data if each.share is not None]
        is_complete = len(given) == len(data)
        total = sum(given)
        if (is_complete and abs(total - 1) > ROUNDING) or (not is_complete and total >= 1):
            need = "shares that add up to 1"
            raise located_error("data", [*given], need, "correct the shares, or leave them out")
        if self.samples < len(data):
            need = f"at least {len(data)}: a sample of each of the texts"
            raise located_error("samples", self.samples, need, "use more samples")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all calibration texts."""
        return tuple(each.path for each in self._data_sources)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Local paths of the calibration texts."""
        parsed = map(parse_data, self.names)
        return tuple(name.path for name in parsed if name.kind == "path")

    def with_paths(self, convert: Callable[[str], str]) -> Self:
        """Return these settings with converted names of the calibration texts."""
        if isinstance(self.data, str):
            return self.model_copy(update={"data": convert(self.data)})
        data = tuple(each.model_copy(update={"path": convert(each.path)}) for each in self.data)
        return self.model_copy(update={"data": data})

    @property
    def _data_sources(self) -> tuple[DataSource, ...]:
        return (DataSource(path=self.data),) if isinstance(self.data, str) else self.data

    def sources(self, samples: int | None = None) -> tuple[CalibrationData, ...]:
        """Return these settings as `CalibrationData`, for each calibration text.

        `samples` replaces the number of all samples.
        """
        numbers = _split(samples or self.samples, [each.share for each in self._data_sources])
        return tuple(
            CalibrationData(
                name=each.path,
                samples=number,
                seq_len=self.seq_len,
                split=each.split or self.split,
                subset=each.subset or self.subset,
                column=each.column or self.column or parse_data(each.path).column,
                seed=self.seed,
                pack=self.pack,
                chat_template=each.chat_template,
                answers_only=self.calibrate_on == "answers",
            )
            for each, number in zip(self._data_sources, numbers, strict=True)
            if number
        )


def _split(samples: int, shares: Sequence[float | None]) -> list[int]:
    """Split a number of samples by shares. A share that is None is an equal part of the rest.

    The parts are rounded so that they add up to the number of samples. If there are enough
    samples, every part has at least one.
    """
    rest = 1 - sum(share or 0 for share in shares)
    equal = rest / max(1, sum(share is None for share in shares))
    exact = [samples * (equal if share is None else share) for share in shares]
    least = int(samples >= len(shares))
    parts = [max(least, math.floor(part)) for part in exact]
    while sum(parts) != samples:
        step = 1 if sum(parts) < samples else -1
        movable = [place for place, part in enumerate(parts) if part + step >= least]
        place = min(movable, key=lambda each: step * (parts[each] - exact[each]))
        parts[place] += step
    return parts


def default_calibration() -> Calibration:
    """Return the calibration with the text that ships with vexport."""
    return Calibration(data=DEFAULT)


class Sensitivity(ScenarioSection):
    """Settings for measuring the loss from quantizing a single layer group."""

    samples: Annotated[Positive, Key("Number of calibration rows to measure on.")] = 16
