"""What becomes of every micro family in the usual schemes: `python -m tests.architectures.matrix` prints it.

A cell is an output that `check` and vLLM's loaders accept, or a refusal whose advice leads to one.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.architectures.families import FAMILIES, save_family
from tests.command import vexport
from vexport.engine.dry.load import DryLoad

# Groups of 64 fit the sizes of the micro models.
SCHEMES: Mapping[str, tuple[str, ...]] = {
    "FP8_DYNAMIC": (),
    "NVFP4A16": (),
    "W4A16": ("--group-size", "64"),
    "FP8_BLOCK": (),
}
# What a refusal says that helps, the first that it says: other options in the place of those that were given.
ADVICE = re.compile(
    r"--scheme (?P<scheme>\w+)|--group-size (?P<size>\d+)|(?P<keep>--on-unsupported-shape keep)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A call of `quantize`: what was advised, empty for what was asked for, and what came of it."""

    family: str
    scheme: str
    advised: tuple[str, ...]
    out: Path
    code: int
    message: str

    @property
    def wrote(self) -> bool:
        """Whether there is an output to load."""
        return self.code == 0 and (self.out / "config.json").is_file()


def attempts(families: Iterable[str], folder: Path) -> Iterator[list[Attempt]]:
    """For each cell the calls that were made, the last of which is to end well."""
    for family in families:
        source = save_family(family, folder / family)
        for scheme, options in SCHEMES.items():
            first = attempt(family, scheme, source, ("--scheme", scheme, *options), ())
            tried = [first]
            if first.code and (advised := advice(first.message, scheme)):
                tried.append(attempt(family, scheme, source, advised, advised))
            yield tried


def attempt(
    family: str, scheme: str, source: Path, options: tuple[str, ...], advised: tuple[str, ...]
) -> Attempt:
    """Call `quantize` on a source, next to which the output comes."""
    out = source.with_name(f"{family}-{scheme}-{len(advised)}")
    # All outputs are loaded at once, by one worker.
    ran = vexport("quantize", source, out, *options, "--rounding", "nearest", "--no-verify", "--quiet")
    return Attempt(
        family=family, scheme=scheme, advised=advised, out=out, code=ran.code, message=" ".join(ran.errors)
    )


def advice(message: str, scheme: str) -> tuple[str, ...]:
    """The options that a refusal says to use instead."""
    found = ADVICE.search(message)
    if found is None:
        return ()
    if found["scheme"]:
        return ("--scheme", found["scheme"])
    same = ("--scheme", scheme)
    return (*same, "--group-size", found["size"]) if found["size"] else (*same, *found["keep"].split())


def cells(families: Iterable[str], folder: Path) -> dict[tuple[str, str], str]:
    """What came of each cell: "loads", "loads with OPTIONS" after a refusal, or what is wrong."""
    tried = list(attempts(families, folder))
    written = [last[-1].out for last in tried if last[-1].wrote]
    checked = {out: vexport("check", out) for out in written}
    reports = (
        {Path(report.checkpoint).name: report for report in DryLoad(checkpoints=written).reports()}
        if written
        else {}
    )
    found: dict[tuple[str, str], str] = {}
    for cell in tried:
        first, last = cell[0], cell[-1]
        key = (first.family, first.scheme)
        if last.code or any(one.code and one.out.exists() for one in cell):
            found[key] = f"WRONG: {last.message or 'a refusal left an output'}"
        elif checked[last.out].code:
            found[key] = f"WRONG: check: {first_line(checked[last.out].stdout)}"
        elif errors := [each for each in reports[last.out.name].findings if each.severity == "error"]:
            found[key] = f"WRONG: vLLM: {errors[0].where}: {errors[0].got}"
        else:
            found[key] = " ".join(("loads with", *last.advised)) if last.advised else "loads"
    return found


def first_line(text: str) -> str:
    """The first error of a report."""
    return next((line.strip() for line in text.splitlines() if line.lstrip().startswith("error")), text[:200])


def table(found: Mapping[tuple[str, str], str]) -> str:
    """One row a family."""
    rows = [("family", *SCHEMES)]
    rows += [
        (family, *(found[family, scheme] for scheme in SCHEMES)) for family, _ in list(found)[:: len(SCHEMES)]
    ]
    widths = [max(min(len(row[column]), 44) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def main(names: list[str]) -> int:
    """Print the matrix of the families that are named, or of all; 1 where a cell is wrong."""
    with TemporaryDirectory() as folder:
        found = cells(names or FAMILIES, Path(folder))
    print(table(found))
    return int(any(cell.startswith("WRONG") for cell in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
