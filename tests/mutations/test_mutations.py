"""The check against what the real vLLM was seen to do with spoiled checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree, rmtree

import pytest

from tests.models import problems
from tests.mutations.edits import Change, forget_digests
from tests.mutations.good import GOOD, source_of, write_good
from tests.mutations.methods import METHOD_RECORDS, RUN_RECORDS, SOURCE, method_mutations, write_methods
from tests.mutations.recorded import (
    AS_GOOD,
    ONLY_LOADERS_SHOW,
    ONLY_RUNNING_SHOWS,
    PINNED_RECORDS,
    Record,
    is_as_good,
    is_counted,
    read_records,
)
from tests.mutations.table import PARTS, mutations
from vexport.checks import Against, check_checkpoint
from vexport.fidelity.compare import against

Sampling = Callable[[Path, Sequence[Record], Callable[[Record], object]], None]


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
    table = mutations if record.good in GOOD else method_mutations
    return table(record.good)[record.name]


def with_source(root: Path, name: str) -> Against:
    if (root / SOURCE).exists():
        return against(root / SOURCE, on_layer=lambda done, total: None)
    return against(source_of(root, name), on_layer=lambda done, total: None)


def _finds_an_error(folder: Path, compare: Against | None) -> bool:
    """Whether the check fails the folder; one without config.json is refused as no checkpoint."""
    if not (folder / "config.json").exists():
        return True
    return not check_checkpoint(str(folder), against=compare).ok


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sound checkpoints; read them, never write to them."""
    return write_good(tmp_path_factory.mktemp("good"))


@pytest.fixture
def agree(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Sampling:
    """Compare the check with a sample of records (all with --whole), but for what recorded.py lists."""

    def compare(root: Path, every: Sequence[Record], kind: Callable[[Record], object]) -> None:
        sampled: dict[object, Record] = {}
        for record in every:
            for key in (record.name, (kind(record), record.outcome)):
                sampled.setdefault(key, record)
        records = every if request.config.getoption("whole") else list(dict.fromkeys(sampled.values()))
        tally = Bench(root=root, scratch=tmp_path).tally(records)
        with capsys.disabled():
            print(f"\n{tally.summary(records)}")
        named = {f"{record.good}: {record.name}: {record.outcome}" for record in records}
        assert set(tally.missed) == (ONLY_RUNNING_SHOWS | ONLY_LOADERS_SHOW) & named
        assert tally.alarms == []

    return compare


@pytest.mark.parametrize("name", GOOD)
def test_sound_checkpoints_are_clean(root: Path, name: str) -> None:
    assert problems(root / name) == []
    beside = check_checkpoint(str(root / name), against=with_source(root, name))
    assert {one.severity for one in beside.findings if one.check != "tokenizer"} == {"info"}


@pytest.mark.slow
def test_errors_are_what_vllm_refuses_or_answers_wrongly(root: Path, agree: Sampling) -> None:
    """Of each mutation one record, and of each kind in each scheme one of every answer."""
    made = {
        (good, name): (part, GOOD[good].scheme)
        for good in GOOD
        for part in PARTS
        for name, _ in part(GOOD[good])
    }
    agree(root, read_records(), lambda record: made[record.good, record.name])


@pytest.mark.slow
def test_other_methods_are_judged_as_vllm_does(
    tmp_path_factory: pytest.TempPathFactory, agree: Sampling
) -> None:
    root = write_methods(tmp_path_factory.mktemp("methods"))
    for file in (METHOD_RECORDS, RUN_RECORDS):
        agree(root, read_records(file), lambda record: record.good)


def test_every_limit_is_of_a_recorded_mutation() -> None:
    assert {record.name for record in read_records() if is_as_good(record)} == AS_GOOD.keys()


@pytest.mark.parametrize(
    ("file", "made"),
    [(PINNED_RECORDS, mutations), (METHOD_RECORDS, method_mutations), (RUN_RECORDS, method_mutations)],
)
def test_every_record_is_of_a_mutation_that_is_still_made(
    file: Path, made: Callable[[str], Mapping[str, Change]]
) -> None:
    records = read_records(file)
    assert len({(record.good, record.name) for record in records}) == len(records) > 0
    assert all(record.name in made(record.good) for record in records)
    if file == PINNED_RECORDS:
        assert {record.outcome for record in records} == {"raises", "wrong", "alike"}
        assert all(record.detail for record in records)
