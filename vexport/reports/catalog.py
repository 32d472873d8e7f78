"""What vexport knows, as tables: schemes, observers, roundings, calibration data, checks, architectures."""

import json
from collections.abc import Callable, Mapping, Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

from vexport.formats.arguments import QuantArgs
from vexport.formats.base import GpuSupport
from vexport.formats.schemes import all_schemes
from vexport.types.observer_names import OBSERVERS
from vexport.types.rounding import SUMMARIES

Rows = Sequence[Mapping[str, str]]
WIDTH = 130


def render_catalog(what: str, format_: str) -> str:
    """The table `what` as text or as a JSON list of objects."""
    rows = CATALOGS[what]()
    if format_ == "json":
        return json.dumps(list(rows), indent=2) + "\n"
    return _table(list(rows[0]), [list(row.values()) for row in rows])


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under their columns, cells wrapped."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    console = Console(width=WIDTH, file=StringIO())
    with console.capture() as capture:
        console.print(table, markup=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def schemes() -> Rows:
    """Bits, formats and where each scheme runs."""
    return [
        {
            "scheme": scheme.name,
            "weights": _args(scheme.args.weights),
            "inputs": _args(scheme.args.input_activations),
            "calibration": "needed" if scheme.args.calibrated else "none",
            "format": scheme.format.name,
            **_gpus(scheme.format.gpu_support(scheme.args)),
            "vLLM on CPU": scheme.format.cpu(scheme.args),
        }
        for scheme in all_schemes()
    ]


def observers() -> Rows:
    """Names and first sentences."""
    return [
        {"observer": name, "class": known.kind, "what it does": known.summary}
        for name, known in OBSERVERS.items()
    ]


def roundings() -> Rows:
    """Names, and what each knows of a layer's inputs."""
    return [{"rounding": name, "what it does": summary} for name, summary in SUMMARIES.items()]


def checks() -> Rows:
    """Names and what each looks at."""
    from vexport.checks import CHECKS, COMPARED, FILES, SOURCE

    files = {
        "check": FILES,
        "what is looked at": "folder, config.json, index and safetensors headers can be read",
    }
    return [
        files,
        *({"check": name, "what is looked at": check.description} for name, check in CHECKS.items()),
        {"check": SOURCE, "what is looked at": COMPARED},
    ]


def architectures() -> Rows:
    """Model classes, whether vLLM runs them with its own code or transformers', and what it fuses."""
    from vexport.architectures import architecture_table

    return [
        {
            "architecture": name,
            "code": entry.backend or "vLLM",
            "fused": "; ".join(f"{fused} = {' + '.join(members)}" for fused, members in entry.fused.items())
            or "nothing",
        }
        for name, entry in architecture_table().architectures.items()
    ]


def _gpus(support: GpuSupport) -> dict[str, str]:
    """Compute capabilities that load a scheme, and those that multiply inputs of as many bits as stored."""
    package = f" with {support.package}" if support.package else ""
    return {
        "loads from SM": _span(support.loads_from, support.below) + package,
        "in full from SM": _span(support.full_from, support.full_below),
    }


def _span(least: int | None, below: int | None) -> str:
    if least is None:
        return "none"
    return f"{least}, below {below}" if below else str(least)


def _args(args: QuantArgs | None) -> str:
    if args is None:
        return "16 bit"
    kind = "FP" if args.is_float else "INT"
    size = f" {args.group_size}" if args.group_size else ""
    if args.block:
        size = " {} x {}".format(*args.block)
    zero = "" if args.symmetric else ", zero points"
    dynamic = {True: ", dynamic", "local": ", groups dynamic"}.get(args.dynamic, "")
    return f"{kind}{args.num_bits} {args.strategy}{size}{zero}{dynamic}"


CATALOGS: Mapping[str, Callable[[], Rows]] = {
    "schemes": schemes,
    "observers": observers,
    "roundings": roundings,
    "checks": checks,
    "architectures": architectures,
}
