"""What docs/observers.md says: its examples run, its table is that of the code."""

import re
from pathlib import Path

import pytest

from tests.models import write_calibration
from vexport.types.observer_names import OBSERVERS, SearchOptions

PAGE = (Path(__file__).parents[2] / "vexport" / "docs" / "observers.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_run(number: int, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names MODEL, TEXT and OUT are those of folders and files here."""
    (tmp_path / "MODEL").symlink_to(llama)
    write_calibration(tmp_path / "TEXT.jsonl")
    monkeypatch.chdir(tmp_path)
    exec(EXAMPLES[number].replace('data="TEXT"', 'data="TEXT.jsonl"'), {"__name__": "example"})


def test_the_table_has_every_observer_with_its_defaults() -> None:
    rows = {
        cells[0].strip(" `"): cells
        for line in PAGE.splitlines()
        if line.startswith("| `") and len(cells := line.strip("|").split("|")) == 4
    }
    assert rows.keys() == OBSERVERS.keys()
    for name, known in OBSERVERS.items():
        if isinstance(known.options, SearchOptions):
            for value in (known.options.maxshrink, known.options.norm, known.options.expand):
                found = [float(each) for each in re.findall(r"\d+(?:\.\d+)?", rows[name][3])]
                assert name == "mse" or any(abs(each - value) < 1e-3 for each in found), (name, value)
