"""`scripts/test --changed` selects the tests of changed files and of their importers."""

import subprocess
from pathlib import Path

import pytest

from tests.changed import changed_files, select


@pytest.mark.parametrize(
    ("changed", "selected", "left_out"),
    [
        (
            "vexport/reports/renderers/html.py",
            {"tests/reports", "tests/judge/test_verdict.py"},
            {"tests/checks", "tests/judge", "tests/run"},
        ),
        ("vexport/formats/gpus.py", {"tests/formats", "tests/checks"}, {"tests/calibration"}),
        ("vexport/reports/templates/gone.html", {"tests/reports", "tests/cli"}, {"tests/hub"}),
        ("tests/checks/test_layout.py", {"tests/checks"}, {"tests/reports"}),
        (
            "tests/reports/sample.py",
            {"tests/reports", "tests/judge/test_accepted.py"},
            {"tests/checks"},
        ),
        ("vexport/docs/check.md", {"tests/test_documents.py"}, {"tests/checks"}),
        ("tests/conftest.py", {"tests"}, set[str]()),
    ],
)
def test_selection(changed: str, selected: set[str], left_out: set[str]) -> None:
    found = {path.as_posix() for path in select([Path(changed)])}
    assert selected <= found
    assert not left_out & found


def test_base_and_uncommitted_files(tmp_path: Path) -> None:
    """A branch is compared with its merge base, and main with its last commit."""

    def git(*words: str) -> None:
        name = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True)

    def commit(name: str) -> None:
        (tmp_path / name).write_text(name)
        git("add", name)
        git("commit", "-m", name)

    git("init", "-b", "main")
    commit("first")
    (tmp_path / "new").write_text("")
    (tmp_path / "first").unlink()
    assert changed_files(tmp_path) == {Path("new"), Path("first")}
    git("checkout", "first")
    git("checkout", "-b", "work")
    commit("second")
    git("checkout", "main")
    commit("third")
    git("checkout", "work")
    assert changed_files(tmp_path) == {Path("new"), Path("second")}
