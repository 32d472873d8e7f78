"""The check against what the real vLLM was seen to do with spoiled checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.models import problems
from tests.mutations.edits import Change
from tests.mutations.good import GOOD, write_good
from tests.mutations.methods import METHOD_RECORDS, RUN_RECORDS, method_mutations, write_methods
from tests.mutations.recorded import (
    AS_GOOD,
    ONLY_LOADERS_SHOW,
    ONLY_RUNNING_SHOWS,
    PINNED_RECORDS,
    Record,
    is_as_good,
    read_records,
)
from tests.mutations.replay import Bench, with_source
from tests.mutations.table import mutations
from vexport.checks import check_checkpoint

# Of so many records one is looked at each time; the others take minutes.
ONE_IN = 30


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sound checkpoints; read them, never write to them."""
    return write_good(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("name", GOOD)
def test_sound_checkpoints_are_clean(root: Path, name: str) -> None:
    assert problems(root / name) == []
    beside = check_checkpoint(str(root / name), against=with_source(root, name))
    assert {one.severity for one in beside.findings if one.check != "tokenizer"} == {"info"}


PARTS = pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.slow)])


@PARTS
def test_errors_are_what_vllm_refuses_or_answers_wrongly(
    others: bool, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _agree(root, tmp_path, read_records(), others, capsys)


@PARTS
def test_other_methods_are_judged_as_vllm_does(
    others: bool,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = write_methods(tmp_path_factory.mktemp("methods"))
    _agree(root, tmp_path, [*read_records(METHOD_RECORDS), *read_records(RUN_RECORDS)], others, capsys)


def _agree(
    root: Path, scratch: Path, every: Sequence[Record], others: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check and the records say the same, but for what tests/mutations/recorded.py lists."""
    records = [record for number, record in enumerate(every) if bool(number % ONE_IN) is others]
    tally = Bench(root=root, scratch=scratch).tally(records)
    with capsys.disabled():
        print(f"\n{tally.summary(records)}")
    named = {f"{record.good}: {record.name}: {record.outcome}" for record in records}
    assert set(tally.missed) == (ONLY_RUNNING_SHOWS | ONLY_LOADERS_SHOW) & named
    assert tally.alarms == []


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
