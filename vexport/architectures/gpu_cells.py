"""The kernels that vLLM selects for schemes, by version and GPU.

scripts/gpu_cells.py records them in `generated/gpu_cells.json` with dry loads of vLLM's CUDA
wheels. The layers of the recorded checkpoints have usual sizes: vLLM may select another kernel for
a layer whose sides are no multiples of 128.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from vexport.architectures.tables import FOLDER
from vexport.version import Version, short_version

Part = Literal["layers", "experts", "ungated experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCell:
    """What vLLM does with a scheme on a GPU.

    `status` is the status of the dry load, such as "loads" or "refused". `precision` (W4A16) and
    `kernel` are those of the quantized layers. They are empty if vLLM refuses the scheme.
    """

    status: str
    precision: str = ""
    kernel: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedScheme:
    """Cells of a checkpoint by compute capability.

    `args` is the canonical name of the scheme, empty for other quantization methods. The cells are
    those of one `part` of the model: linear layers, or routed experts with or without a gate.
    """

    name: str
    args: str
    part: Part
    cells: Mapping[int, RecordedCell]


@cache
def recorded_schemes(version: Version) -> tuple[RecordedScheme, ...]:
    """Return the recorded checkpoints of a known version, or none of another version."""
    table = json.loads(FOLDER.joinpath("gpu_cells.json").read_text(encoding="utf-8"))
    return tuple(
        RecordedScheme(
            name=name,
            args=entry["args"],
            part=_part(name),
            cells=_cells(entry["cells"]),
        )
        for name, entry in table.get(short_version(version), {}).items()
    )


def _part(name: str) -> Part:
    parts: tuple[Part, ...] = ("ungated experts", "experts")
    return next((part for part in parts if name.endswith(f" {part}")), "layers")


def _cells(statuses: Mapping[str, Mapping[str, list[int]]]) -> dict[int, RecordedCell]:
    cells = {}
    for status, kernels in statuses.items():
        for text, capabilities in kernels.items():
            precision, _, kernel = text.partition(" ")
            cell = RecordedCell(status=status, precision=precision, kernel=kernel)
            cells.update(dict.fromkeys(capabilities, cell))
    return dict(sorted(cells.items()))
