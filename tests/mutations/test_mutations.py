"""The check against what the real vLLM was seen to do with spoiled checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from tests.mutations.good import SCHEMES, write_good
from tests.mutations.recorded import Record, read_records
from tests.mutations.table import mutations
from vexport.checks import check_checkpoint

# What the check does not see yet, and what it calls an error though vLLM does not mind: name by scheme.
GAPS = json.loads((Path(__file__).parent / "gaps.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A sound checkpoint of each scheme; read it, never write to it."""
    root = write_good(tmp_path_factory.mktemp("good"))
    return lambda scheme: root / scheme


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sound_checkpoints_have_no_errors(good: Callable[[str], Path], scheme: str) -> None:
    assert check_checkpoint(str(good(scheme))).ok


def test_errors_are_what_vllm_refuses_or_answers_wrongly(
    good: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missed: list[str] = []
    alarms: list[str] = []
    records = read_records()
    for number, record in enumerate(records):
        folder = tmp_path / str(number)
        copytree(good(record.scheme), folder)
        mutations(record.scheme)[record.name](folder)
        found = not check_checkpoint(str(folder)).ok
        if found != (record.outcome != "alike"):
            (alarms if found else missed).append(f"{record.scheme}: {record.name}")
    harmful = sum(record.outcome != "alike" for record in records)
    with capsys.disabled():
        print(
            f"\n{len(records)} mutations: recall {harmful - len(missed)} of {harmful}, "
            f"false alarms {len(alarms)} of {len(records) - harmful}"
        )
    assert sorted(missed) == GAPS["missed"]
    assert sorted(alarms) == GAPS["alarms"]


def test_every_record_is_of_a_mutation_that_is_still_made() -> None:
    records = read_records()
    assert len({(record.scheme, record.name) for record in records}) == len(records)
    assert all(record.name in mutations(record.scheme) for record in records)
    assert {record.outcome for record in records} == {"raises", "wrong", "alike"}
    assert all(isinstance(record, Record) and record.detail for record in records)
