"""The check on mutations that a vLLM has answered: recall and false alarms.

    PYTHONPATH=. .venv/bin/python -m tests.mutations.replay [gptq ...]

prints them for every version and every quant_method that there are records of, or those that are named; no
vLLM is needed. It takes minutes: each mutation is made and checked again, and with its source where the check
alone says nothing.
"""

import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree, rmtree

from tests.mutations.edits import Change, forget_digests
from tests.mutations.good import GOOD, source_of, write_good
from tests.mutations.methods import (
    METHOD_RECORDS,
    RUN_RECORDS,
    SOURCE,
    method_mutations,
    quant_method,
    write_methods,
)
from tests.mutations.recorded import PINNED_RECORDS, Record, is_as_good, is_counted, read_records
from tests.mutations.table import mutations
from vexport.checks import Against, check_checkpoint
from vexport.fidelity.compare import against

COMPRESSED_TENSORS = "compressed-tensors"


@dataclass(slots=True)
class Tally:
    """Mutations that the check missed, reported without cause, found only with the source, and passed.

    What only a dry load has accepted is not counted: it computes nothing. Nor is what vLLM does not read.
    """

    missed: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    with_source: list[str] = field(default_factory=list)
    as_good: list[str] = field(default_factory=list)

    def summary(self, records: Sequence[Record]) -> str:
        """Recall and false alarms; what answers otherwise but no worse is harmless too."""
        counted = list(filter(is_counted, records))
        harmless = sum(record.outcome == "alike" for record in counted) + len(self.as_good)
        unknown, harmful = len(records) - len(counted), len(counted) - harmless
        return (
            f"{len(records)} mutations of {len({record.good for record in records})} checkpoints: "
            f"recall {harmful - len(self.missed)} of {harmful} "
            f"({harmful - len(self.missed) - len(self.with_source)} without the source), "
            f"false alarms {len(self.alarms)} of {harmless}"
            + (f"; {unknown} are not counted" if unknown else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The sound checkpoints below `root` and a folder for one that is spoiled."""

    root: Path
    scratch: Path

    def tally(self, records: Sequence[Record]) -> Tally:
        """Make each mutation, check it, and count."""
        found = Tally()
        for record in records:
            folder = self.scratch / "spoiled"
            copytree(self.root / record.good, folder)
            _change_of(record)(folder)
            forget_digests(folder)
            self._look(folder, record, found)
            rmtree(folder)
        return found

    def _look(self, folder: Path, record: Record, tally: Tally) -> None:
        """Note what the check says of a mutation; where it says nothing, what it says with the source."""
        name, harmful = f"{record.good}: {record.name}", record.outcome in ("raises", "wrong")
        if not is_counted(record):
            return
        found = _finds_an_error(folder, None)
        if found and not harmful:
            tally.alarms.append(name)
        elif harmful and not found:
            if _finds_an_error(folder, with_source(self.root, record.good)):
                tally.with_source.append(name)
            else:
                (tally.as_good if is_as_good(record) else tally.missed).append(f"{name}: {record.outcome}")


def _change_of(record: Record) -> Change:
    table = mutations if is_compressed_tensors(record) else method_mutations
    return table(record.good)[record.name]


def is_compressed_tensors(record: Record) -> bool:
    """Whether a record is of a checkpoint of vexport's own tables, not of another method's."""
    return record.good in GOOD


def with_source(root: Path, name: str) -> Against:
    if (root / SOURCE).exists():
        return against(root / SOURCE, on_layer=lambda done, total: None)
    return against(source_of(root, name), on_layer=lambda done, total: None)


def _finds_an_error(folder: Path, compare: Against | None) -> bool:
    """Whether the check fails the folder; one without config.json is refused as no checkpoint."""
    if not (folder / "config.json").exists():
        return True
    return not check_checkpoint(str(folder), against=compare).ok


def main() -> None:
    """A line for each version and quant_method, and below it what was missed or reported without cause."""
    with tempfile.TemporaryDirectory() as folder:
        root, scratch = Path(folder), Path(folder) / "scratch"
        scratch.mkdir()
        write_methods(root / "methods")
        for file, how in ((METHOD_RECORDS, "dry load"), (RUN_RECORDS, "running")):
            by_method = defaultdict[str, list[Record]](list)
            for record in read_records(file):
                by_method[quant_method(record.good)].append(record)
            for method, records in sorted(by_method.items()):
                _print(f"0.32  {method}, {how}", records, Bench(root=root / "methods", scratch=scratch))
        if _wants(COMPRESSED_TENSORS):
            write_good(root / "good")
        bench = Bench(root=root / "good", scratch=scratch)
        _print(f"0.32  {COMPRESSED_TENSORS}", read_records(PINNED_RECORDS), bench)


def _print(name: str, records: Sequence[Record], bench: Bench) -> None:
    if not _wants(name.split()[1].rstrip(",")):
        return
    tally = bench.tally(records)
    sys.stdout.write(f"{name}: {tally.summary(records)}\n")
    for kind, names in (("missed", tally.missed), ("false alarm", tally.alarms)):
        sys.stdout.writelines(f"    {kind}: {each}\n" for each in names)
    sys.stdout.flush()


def _wants(method: str) -> bool:
    return method in (sys.argv[1:] or [method])


if __name__ == "__main__":
    main()
