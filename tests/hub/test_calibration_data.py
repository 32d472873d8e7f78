"""Calibration text of a data set on the hub: read as far as it is needed, refused with a remedy."""

import json
from pathlib import Path

import pytest

from tests.hub.conftest import Machine
from tests.hub.server import Hub, Repository

pytestmark = pytest.mark.slow
CHATS = "acme/chats"


@pytest.fixture
def chats(hub: Hub, tmp_path: Path) -> Hub:
    """A data set with a split of training and one of test rows."""
    folder = tmp_path / "chats"
    folder.mkdir()
    for split, first in (("train", 3), ("test", 50)):
        rows = [{"ids": [first + number] * 4, "id": number} for number in range(20)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hub.repositories[CHATS] = Repository(folder=folder, kind="datasets")
    return hub


def quantize(
    machine: Machine, llama: Path, data: str, **variables: str
) -> tuple[int, str, dict[str, object]]:
    """Exit code, stderr and what the recipe says of the calibration."""
    out = machine.folder / "out"
    call = ("quantize", llama, out, "--scheme", "FP8", "--calibration", data, "--samples", "5", "--quiet")
    ran = machine.run(*call, **variables)
    recipe = json.loads((out / "vexport.json").read_text()) if ran.code == 0 else {}
    return ran.code, ran.stderr, recipe


def test_a_data_set_is_read_by_split_and_column(machine: Machine, chats: Hub, llama: Path) -> None:
    code, stderr, recipe = quantize(machine, llama, f"{CHATS}:test:ids")
    assert code == 0, stderr
    assert isinstance(recipe["scenario"], dict)
    assert recipe["scenario"]["calibration"]["data"] == f"{CHATS}:test:ids"
    assert recipe["calibration"] == {**recipe["calibration"], "rows": "1-5", "tokens": 20}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("data", "variables", "words"),
    [
        (f"{CHATS}:train:text", {}, "no column text, but ids, id"),
        (f"{CHATS}:valid", {}, "name them: ORG/NAME:SPLIT:COLUMN"),
    ],
)
def test_what_cannot_be_had_is_one_error_with_a_remedy(
    machine: Machine, chats: Hub, llama: Path, data: str, variables: dict[str, str], words: str
) -> None:
    code, stderr, _ = quantize(machine, llama, data, **variables)
    assert code in (2, 4)
    assert words in stderr
    assert "Traceback" not in stderr
    assert not (machine.folder / "out").exists()
