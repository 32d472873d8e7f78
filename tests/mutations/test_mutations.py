"""The check against what the real vLLM was seen to do with spoiled checkpoints."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.models import problems
from tests.mutations.good import GOOD, write_good
from tests.mutations.methods import METHOD_RECORDS, RUN_RECORDS, method_mutations, write_methods
from tests.mutations.recorded import (
    AS_GOOD,
    ONLY_LOADERS_SHOW, ONLY_RUNNING_SHOWS,
    PINNED_RECORDS,
    Record,
    is_as_good,
    read_records,
)
from tests.mutations.replay import Bench, with_source
from tests.mutations.table import mutations
from vexport.checks import check_checkpoint

# Of the records those that are looked at each time; the others take minutes.
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


def test_errors_are_what_vllm_refuses_or_answers_wrongly(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _agree(root, tmp_path, read_records()[::ONE_IN], capsys)


@pytest.mark.slow
def test_errors_are_what_vllm_refuses_or_answers_wrongly_in_the_other_records(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [record for number, record in enumerate(read_records()) if number % ONE_IN]
    _agree(root, tmp_path, others, capsys)


def _agree(root: Path, tmp_path: Path, records: Sequence[Record], capsys: pytest.CaptureFixture[str]) -> None:
    """The check and the records say the same, but for what tests/mutations/recorded.py lists."""
    tally = Bench(root=root, scratch=tmp_path).tally(records)
    with capsys.disabled():
        print(f"\n{tally.summary(records)}")
    named = {f"{record.good}: {record.name}: {record.outcome}" for record in records}
    assert set(tally.missed) == (ONLY_RUNNING_SHOWS | ONLY_LOADERS_SHOW) & named
    assert tally.alarms == []


def test_other_methods_are_judged_as_vllm_does(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_methods(tmp_path_factory.mktemp("methods"))
    _agree(root, tmp_path, _of_methods()[::ONE_IN], capsys)


@pytest.mark.slow
def test_other_methods_are_judged_as_vllm_does_in_the_other_records(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_methods(tmp_path_factory.mktemp("methods"))
    others = [record for number, record in enumerate(_of_methods()) if number % ONE_IN]
    _agree(root, tmp_path, others, capsys)


def _of_methods() -> list[Record]:
    return [*read_records(METHOD_RECORDS), *read_records(RUN_RECORDS)]


def test_every_limit_is_of_a_recorded_mutation() -> None:
    assert {record.name for record in read_records() if is_as_good(record)} == AS_GOOD.keys()


@pytest.mark.parametrize("file", [PINNED_RECORDS])
def test_every_record_is_of_a_mutation_that_is_still_made(file: Path) -> None:
    records = read_records(file)
    assert len({(record.good, record.name) for record in records}) == len(records)
    assert all(record.name in mutations(record.good) for record in records)
    assert {record.outcome for record in records} == {"raises", "wrong", "alike"}
    assert all(isinstance(record, Record) and record.detail for record in records)


@pytest.mark.parametrize("file", [METHOD_RECORDS, RUN_RECORDS])
def test_every_record_of_another_method_is_of_a_mutation_that_is_still_made(file: Path) -> None:
    records = read_records(file)
    assert len({(record.good, record.name) for record in records}) == len(records) > 0
    assert all(record.name in method_mutations(record.good) for record in records)
