"""The check against what the real vLLM was seen to do with spoiled checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from shutil import copytree, rmtree

import pytest

from tests.models import problems
from tests.mutations.good import GOOD, calibration_of, source_of, write_good
from tests.mutations.limits import AS_GOOD, MINDED, is_as_good
from tests.mutations.recorded import OLDEST_RECORDS, PINNED_RECORDS, Record, read_records
from tests.mutations.table import mutations
from vexport.calibration import read_samples
from vexport.checkpoint.index import read_index
from vexport.checks import Against, check_checkpoint
from vexport.checks.vllm.target import ANY, Target
from vexport.fidelity.activations import Observed, observe
from vexport.fidelity.compare import against
from vexport.quantize.samples import vocab_size
from vexport.types import CalibrationData
from vexport.version import short_version

OLDEST = Target(vllm=(0, 20))
# Of the records those that are looked at each time; the others take minutes.
ONE_IN = 12
OLDEST_ONE_IN = 6


@dataclass(slots=True)
class Tally:
    """Mutations that the check missed, minded for nothing, found only beside the source, and passed."""

    missed: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    with_source: list[str] = field(default_factory=list)
    as_good: list[str] = field(default_factory=list)

    def said(self, records: Sequence[Record]) -> str:
        """Recall and false alarms; what answers otherwise but no worse is harmless too."""
        harmless = sum(record.outcome == "alike" for record in records) + len(self.as_good)
        harmful = len(records) - harmless
        return (
            f"{len(records)} mutations of {len({record.good for record in records})} checkpoints: "
            f"recall {harmful - len(self.missed)} of {harmful} "
            f"({harmful - len(self.missed) - len(self.with_source)} without the source), "
            f"false alarms {len(self.alarms)} of {harmless}"
        )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sound checkpoints; read them, never write to them."""
    return write_good(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("name", GOOD)
def test_sound_checkpoints_are_clean(root: Path, name: str) -> None:
    assert problems(root / name) == []
    beside = check_checkpoint(str(root / name), against=_beside(root, name))
    assert {one.severity for one in beside.findings if one.check != "tokenizer"} == {"info"}


def test_errors_are_what_vllm_refuses_or_answers_wrongly(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _agree(root, tmp_path, read_records()[::ONE_IN], capsys)


def test_errors_are_what_the_oldest_vllm_refuses_or_answers_wrongly(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _agree(root, tmp_path, read_records(OLDEST_RECORDS)[::OLDEST_ONE_IN], capsys, OLDEST)


@pytest.mark.slow
def test_errors_are_what_the_oldest_vllm_refuses_or_answers_wrongly_in_the_other_records(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = read_records(OLDEST_RECORDS)
    others = [record for number, record in enumerate(records) if number % OLDEST_ONE_IN]
    _agree(root, tmp_path, others, capsys, OLDEST)


@pytest.mark.slow
def test_errors_are_what_vllm_refuses_or_answers_wrongly_in_the_other_records(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [record for number, record in enumerate(read_records()) if number % ONE_IN]
    _agree(root, tmp_path, others, capsys)


def _agree(
    root: Path,
    tmp_path: Path,
    records: Sequence[Record],
    capsys: pytest.CaptureFixture[str],
    target: Target = ANY,
) -> None:
    """The check and the records say the same, but for what tests/mutations/limits.py lists."""
    tally = Tally()
    for record in records:
        folder = tmp_path / "spoiled"
        copytree(root / record.good, folder)
        mutations(record.good)[record.name](folder)
        _look(root, folder, record, tally, target)
        rmtree(folder)
    with capsys.disabled():
        print(f"\n{tally.said(records)}")
    assert tally.missed == []
    version = short_version(target.vllm)
    assert [alarm for alarm in tally.alarms if (version, alarm.partition(": ")[2]) not in MINDED] == []


def _look(root: Path, folder: Path, record: Record, tally: Tally, target: Target) -> None:
    """Note what the check says of a mutation, and where it says nothing what it says beside the source."""
    name, harmful = f"{record.good}: {record.name}", record.outcome != "alike"
    found = _finds_an_error(folder, None, target)
    if found and not harmful:
        tally.alarms.append(name)
    elif harmful and not found:
        if _finds_an_error(folder, _beside(root, record.good), target):
            tally.with_source.append(name)
        else:
            (tally.as_good if is_as_good(record) else tally.missed).append(f"{name}: {record.outcome}")


def _beside(root: Path, name: str) -> Against:
    """The comparison with the source, and where scales are static with what that computes."""
    text = calibration_of(root, name)
    source = source_of(root, name)
    observe = (lambda smoothing: _observed(source, text)) if text.exists() else None
    return against(source, on_layer=lambda done, total: None, observe=observe)


@cache
def _observed(source: Path, text: Path) -> Observed:
    index = read_index(source)
    samples = read_samples(
        CalibrationData(name=str(text), samples=128, seq_len=512), source, vocab_size=vocab_size(index)
    )
    return observe(index, samples)


def _finds_an_error(folder: Path, compare: Against | None, target: Target) -> bool:
    """Whether the check fails the folder; one without config.json is refused as no checkpoint."""
    if not (folder / "config.json").exists():
        return True
    return not check_checkpoint(str(folder), target, against=compare).ok


def test_every_limit_is_of_a_recorded_mutation() -> None:
    assert {record.name for record in read_records() if is_as_good(record)} == AS_GOOD.keys()


@pytest.mark.parametrize("file", [PINNED_RECORDS, OLDEST_RECORDS])
def test_every_record_is_of_a_mutation_that_is_still_made(file: Path) -> None:
    records = read_records(file)
    assert len({(record.good, record.name) for record in records}) == len(records)
    assert all(record.name in mutations(record.good) for record in records)
    assert {record.outcome for record in records} == {"raises", "wrong", "alike"}
    assert all(isinstance(record, Record) and record.detail for record in records)
