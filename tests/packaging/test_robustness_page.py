"""The table of faults in the documents: a row for every fault that a test tries, none was lost."""

import subprocess
import sys
from pathlib import Path
from shutil import copy

from tests.packaging.environment import ROOT

PAGE = ROOT / "vexport" / "docs" / "robustness.md"


def rows(page: Path) -> dict[str, tuple[int, ...]]:
    """Tests, survived, lost and not run, by fault."""
    cells = [line.strip("| ").split(" | ") for line in page.read_text(encoding="utf-8").splitlines()]
    return {each[0]: tuple(map(int, each[1:])) for each in cells if len(each) == 5 and each[1].isdecimal()}


def test_the_page_has_the_faults_that_the_tests_try_and_none_was_lost(tmp_path: Path) -> None:
    """Tests are collected, not run; a row of what nothing tries any more goes, a new one says `not run`."""
    collected = Path(copy(PAGE, tmp_path))
    script = (
        sys.executable,
        ROOT / "scripts" / "robustness.py",
        "--collect-only",
        "-q",
        f"--page={collected}",
    )
    ran = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert collected.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
    assert len(rows(PAGE)) > 20
    assert [fault for fault, (tests, survived, lost, not_run) in rows(PAGE).items() if lost] == []
