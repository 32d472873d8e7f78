"""Scripts that measure on a real model, run on the demo model and on documents made here."""

import json
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path
from unittest.mock import patch

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS, DEMO = ROOT / "scripts", ROOT / "scenarios" / "demo"
SENTENCE = (
    "The tool of taruna is a lever, says :ref:`its page <tools>`; the ``tool`` of *another*\none is not said."
)
CODE = "    tool = lever\n    the code of this page is long enough to be counted as a paragraph of it."
TITLE = "The title of a page, which is long enough to be counted as a paragraph as well as another\n====="


def make_text(*arguments: Path) -> None:
    """Run scripts/real_model/text.py in this process."""
    script = str(SCRIPTS / "real_model" / "text.py")
    with patch.object(sys, "argv", [script, *map(str, arguments)]):
        runpy.run_path(script, run_name="__main__")


def bench(*arguments: object) -> str:
    """What scripts/bench/rounding.py prints."""
    command = [sys.executable, str(SCRIPTS / "bench" / "rounding.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def write_sdist(folder: Path, package: str, name: str, *, documents: int) -> None:
    """An sdist of documents of 600 sentences, each with some code and a title."""
    page = folder / "page"
    page.write_text("\n\n".join([TITLE, *[SENTENCE] * 600, CODE]), encoding="utf-8")
    with tarfile.open(folder / f"{package}-1.tar.gz", "w:gz") as archive:
        for number in range(documents):
            archive.add(page, f"{package}-1/{name.format(number)}")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_sdist(folder, "django", "docs/topics/{}.txt", documents=20)
    write_sdist(folder, "sympy", "doc/src/{}.rst", documents=4)
    make_text(DEMO / "model", folder, folder / "out")
    return folder / "out"


def test_text_is_rows_of_prose(text: Path) -> None:
    rows = {
        name: [json.loads(line)["input_ids"] for line in (text / f"{name}.jsonl").read_text().splitlines()]
        for name in ("calibration", "same", "other")
    }
    assert {name: len(found) for name, found in rows.items()} == {"calibration": 256, "same": 64, "other": 64}
    assert {len(row) for found in rows.values() for row in found} == {512}
    assert "BSD" in (text / "SOURCES").read_text()


@pytest.mark.slow
def test_a_cell_of_the_bench_is_kept(tmp_path: Path) -> None:
    for name in ("calibration", "same", "other"):
        row = json.dumps({"input_ids": list(range(3, 90))})
        (tmp_path / f"{name}.jsonl").write_text("\n".join([row] * 4), encoding="utf-8")
    options = ["--model", DEMO / "model", "--text", tmp_path, "--folder", tmp_path / "cells", "--rows", 4]
    chosen = ["--scheme", "W3A16_G64", "--method", "nearest", "--held-out", 2]
    (cell,) = json.loads(bench(*options, *chosen, "--json"))
    assert cell["kl"]["same"] == cell["kl"]["other"] > 0.001
    assert cell["nll"] != cell["source_nll"]
    kept = {file.name for file in (tmp_path / "cells" / "4" / "W3A16_G64-nearest").iterdir()}
    assert kept == {"made.json", "score.json"}
    assert json.loads(bench(*options, *chosen, "--json")) == [cell]
