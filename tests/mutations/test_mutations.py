"""The check against what the real vLLM was seen to do with spoiled checkpoints."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from tests.mutations.good import GOOD, write_good
from tests.mutations.recorded import Record, read_records
from tests.mutations.table import ONLY_WITH_SOURCE, mutations
from vexport.checks import check_checkpoint


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A sound checkpoint by its name; read it, never write to it."""
    root = write_good(tmp_path_factory.mktemp("good"))
    return lambda name: root / name


@pytest.mark.parametrize("name", GOOD)
def test_sound_checkpoints_are_clean(good: Callable[[str], Path], name: str) -> None:
    assert check_checkpoint(str(good(name))).findings == ()


def test_errors_are_what_vllm_refuses_or_answers_wrongly(
    good: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missed: list[str] = []
    alarms: list[str] = []
    records = [record for record in read_records() if record.name not in ONLY_WITH_SOURCE]
    for number, record in enumerate(records):
        folder = tmp_path / str(number)
        copytree(good(record.good), folder)
        mutations(record.good)[record.name](folder)
        found = _finds_an_error(folder)
        if found != (record.outcome != "alike"):
            (alarms if found else missed).append(f"{record.good}: {record.name}")
    harmful = sum(record.outcome != "alike" for record in records)
    with capsys.disabled():
        print(
            f"\n{len(records)} mutations of {len({record.good for record in records})} checkpoints: "
            f"recall {harmful - len(missed)} of {harmful}, "
            f"false alarms {len(alarms)} of {len(records) - harmful}"
        )
    assert (missed, alarms) == ([], [])


def _finds_an_error(folder: Path) -> bool:
    """Whether the check fails the folder; one without config.json is refused as no checkpoint."""
    return not (folder / "config.json").exists() or not check_checkpoint(str(folder)).ok


def test_every_record_is_of_a_mutation_that_is_still_made() -> None:
    records = read_records()
    assert len({(record.good, record.name) for record in records}) == len(records)
    assert all(record.name in mutations(record.good) for record in records)
    assert {record.outcome for record in records} == {"raises", "wrong", "alike"}
    assert all(isinstance(record, Record) and record.detail for record in records)
