"""Read the cells of a dry load's report: which kernel runs each kind of layer on each device."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCell:
    """Result of the dry load for a kind of layer on a device.

    `kind` is the name of the layers with stars for numbers. It is empty for the cells of the whole
    checkpoint. Their precision and kernel are empty too.
    """

    kind: str
    tp: int
    sm: int
    status: str
    precision: str
    kernel: str


def layer_cells(report: Mapping[str, Any]) -> Iterator[LayerCell]:
    """Yield the cells of the whole checkpoint, then the cells of each kind of layer.

    `report` is a report of `vexport load --dry --format json`.
    """
    for kind, row in (("", report), *((row["name"], row) for row in report["rows"])):
        for cell in row["cells"]:
            yield LayerCell(
                kind=kind,
                tp=cell["tp"],
                sm=cell["sm"],
                status=cell["status"],
                precision=cell["precision"],
                kernel=cell["kernel"],
            )
