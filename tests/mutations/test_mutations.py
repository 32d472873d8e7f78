"""Compare `check` with the recorded behaviour of the real vLLM on spoiled checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree, rmtree

import pytest

from tests.models import problems
from tests.mutations.edits import Change, forget_digests
from tests.mutations.good import GOOD, source_of, write_good
from tests.mutations.kinds import ALL_PARTS, mutations
from tests.mutations.methods import (
    METHOD_RECORDS,
    RUN_RECORDS,
    SOURCE,
    method_mutations,
    write_methods,
)
from tests.mutations.recorded import (
    FOUND_BY_LOADERS,
    FOUND_BY_RUNNING,
    FOUND_WITH_WARNING,
    HARMLESS_REASONS,
    PINNED_RECORDS,
    Record,
    is_as_good,
    is_counted,
    read_records,
)
from vexport.checks import SourceComparison, check_checkpoint
from vexport.fidelity.compare import source_comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Sound checkpoints, a folder for damaged copies, and whether to compare all records."""

    root: Path
    scratch: Path
    whole: bool

    def agree(self, every: Sequence[Record], kind: Callable[[Record], object]) -> None:
        """Compare the check with a sample of the records, or with all records (--whole).

        Differences listed in recorded.py are expected. Records are not counted if only a dry load
        accepted the mutation, or if vLLM does not read the changed part.
        """
        sampled: dict[object, Record] = {}
        for record in every:
            for key in (record.name, (kind(record), record.outcome)):
                sampled.setdefault(key, record)
        records = every if self.whole else list(dict.fromkeys(sampled.values()))
        named = {f"{record.good}: {record.name}: {record.outcome}": record for record in records}
        counted = {name: record for name, record in named.items() if is_counted(record)}
        answers = {name: self._answer(record) for name, record in counted.items()}
        harmful = {
            name for name, record in counted.items() if record.outcome in ("raises", "wrong")
        }
        as_good = {name for name, record in counted.items() if is_as_good(record)}
        missed = {name for name in harmful - as_good if answers[name] == "passes"}
        print(
            f"{len(records)} mutations, {len(counted)} counted, {len(harmful)} harmful, "
            f"{len(missed)} missed"
        )
        expected = FOUND_BY_RUNNING | FOUND_BY_LOADERS | FOUND_WITH_WARNING
        assert missed == expected & named.keys()
        assert [
            name for name, answer in answers.items() if answer == "fails" and name not in harmful
        ] == []

    def _answer(self, record: Record) -> str:
        """Make a mutation. Return "fails", "fails with the source" or "passes" for its check."""
        folder = copytree(self.root / record.good, self.scratch / "spoiled")
        (mutations if record.good in GOOD else method_mutations)(record.good)[record.name](folder)
        forget_digests(folder)
        try:
            if not (folder / "config.json").exists() or not is_ok(folder):
                return "fails"
            if record.outcome == "alike" or is_ok(folder, self.source(record.good)):
                return "passes"
            return "fails with the source"
        finally:
            rmtree(folder)

    def source(self, name: str) -> SourceComparison:
        source = self.root / SOURCE if (self.root / SOURCE).exists() else source_of(self.root, name)
        return source_comparison(source, on_layer=lambda done, total: None)


def is_ok(folder: Path, against: SourceComparison | None = None) -> bool:
    """Return True if a checkpoint passes. Each finding has a rule."""
    report = check_checkpoint(str(folder), against=against)
    assert [finding for finding in report.findings if not finding.rule] == []
    return report.ok


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_good(tmp_path_factory.mktemp("good"))


@pytest.fixture
def bench(request: pytest.FixtureRequest, good: Path, tmp_path: Path) -> Bench:
    return Bench(root=good, scratch=tmp_path, whole=request.config.getoption("whole"))


@pytest.mark.parametrize("name", GOOD)
def test_sound_checkpoints_are_clean(bench: Bench, name: str) -> None:
    assert problems(bench.root / name) == []
    report = check_checkpoint(str(bench.root / name), against=bench.source(name))
    assert {finding.severity for finding in report.findings if finding.check != "tokenizer"} == {
        "info"
    }


@pytest.mark.slow
def test_check_agrees_with_vllm(bench: Bench) -> None:
    """A sample has each mutation, and each outcome per kind and scheme. --whole compares all."""
    made = {
        (good, name): part for good in GOOD for part in ALL_PARTS for name, _ in part(GOOD[good])
    }
    bench.agree(
        read_records(), lambda record: (made[record.good, record.name], GOOD[record.good].scheme)
    )


@pytest.mark.slow
def test_check_agrees_on_other_methods(
    tmp_path_factory: pytest.TempPathFactory, bench: Bench
) -> None:
    methods = replace(bench, root=write_methods(tmp_path_factory.mktemp("methods")))
    for file in (METHOD_RECORDS, RUN_RECORDS):
        methods.agree(read_records(file), lambda record: record.good)


def test_harmless_reasons_are_recorded() -> None:
    assert {
        record.name for record in read_records() if is_as_good(record)
    } == HARMLESS_REASONS.keys()


@pytest.mark.parametrize(
    ("file", "made"),
    [
        (PINNED_RECORDS, mutations),
        (METHOD_RECORDS, method_mutations),
        (RUN_RECORDS, method_mutations),
    ],
)
def test_recorded_mutations_exist(file: Path, made: Callable[[str], Mapping[str, Change]]) -> None:
    records = read_records(file)
    assert len({(record.good, record.name) for record in records}) == len(records) > 0
    assert all(record.name in made(record.good) for record in records)
    if file == PINNED_RECORDS:
        assert {record.outcome for record in records} == {"raises", "wrong", "alike"}
        assert all(record.detail for record in records)
