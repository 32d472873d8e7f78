#!/usr/bin/env python
"""Run the tests that try faults, and write what they tried and what was lost into vexport/docs/robustness.md.

    scripts/robustness.py [--page FILE] [OPTIONS OF PYTEST]
    scripts/robustness.py -m "not vllm"     # what needs no engine
    scripts/robustness.py -k test_signals   # one room
    scripts/robustness.py --collect-only    # rows of new faults, nothing is run

A test tries a fault if it has the marker `fault`, whose text is its row. Rows of which nothing is run stay as
they are; the page is written after every test, so that what was run before an interruption is kept. It needs
one process (no `-n`). With VEXPORT_EVERY_FAULT=1 every fault meets vLLM in every phase.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "vexport" / "docs" / "robustness.md"
BEGIN, END = "<!-- written by scripts/robustness.py -->\n", "<!-- end -->\n"
HEAD = "| Fault, and what is to happen | Tests | Survived | Lost | Not run |\n|---|---|---|---|---|\n"
ROW = re.compile(
    r"^\| (?P<fault>.+) \| (?P<tests>\d+) \| (?P<survived>\d+) \| (?P<lost>\d+) \| \d+ \|$", re.M
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The tests of one fault and what came of them; those that are neither were not run."""

    tests: int
    survived: int = 0
    lost: int = 0

    def line(self, fault: str) -> str:
        """As it stands in the table."""
        not_run = self.tests - self.survived - self.lost
        return f"| {fault} | {self.tests} | {self.survived} | {self.lost} | {not_run} |\n"


@dataclass(slots=True, eq=False)  # pytest needs a hash
class Faults:
    """A plugin of pytest: deselects what tries no fault, and writes the page after every test."""

    page: Path
    tests: Counter[str] = field(default_factory=Counter)
    fault_of: dict[str, str] = field(default_factory=dict)
    passed: dict[str, bool] = field(default_factory=dict)

    @pytest.hookimpl(tryfirst=True)  # before -m and -k, whose choice is of what is run
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep and count the tests with the marker."""
        self.fault_of = {
            item.nodeid: str(mark.args[0]) for item in items if (mark := item.get_closest_marker("fault"))
        }
        self.tests = Counter(self.fault_of.values())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self.fault_of])
        items[:] = [item for item in items if item.nodeid in self.fault_of]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Passed is what passed in all its phases; what was skipped was not run."""
        if not report.skipped:
            self.passed[report.nodeid] = report.passed and self.passed.get(report.nodeid, True)
        else:
            self.passed.pop(report.nodeid, None)
        if report.when == "teardown":
            write(self.page, self.rows())

    def pytest_collection_finish(self) -> None:
        """So that a new fault has its row before it was ever run."""
        write(self.page, self.rows())

    def rows(self) -> dict[str, Row]:
        """What was run so far, by fault."""
        survived = Counter(self.fault_of[name] for name, passed in self.passed.items() if passed)
        lost = Counter(self.fault_of[name] for name, passed in self.passed.items() if not passed)
        return {
            fault: Row(tests=tests, survived=survived[fault], lost=lost[fault])
            for fault, tests in self.tests.items()
        }


def read(page: Path) -> dict[str, Row]:
    """The rows of the table of a page, by fault."""
    table = page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    return {
        row["fault"]: Row(tests=int(row["tests"]), survived=int(row["survived"]), lost=int(row["lost"]))
        for row in ROW.finditer(table)
    }


def write(page: Path, rows: Mapping[str, Row]) -> None:
    """Replace the table: a row of which nothing was run stays as it was, one that no test has goes."""
    earlier = read(page)
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    merged = {
        fault: row if row.survived or row.lost else earlier.get(fault, row) for fault, row in rows.items()
    }
    table = "".join(row.line(fault) for fault, row in sorted(merged.items()))
    page.write_text(f"{before}{BEGIN}{HEAD}{table}{END}{after}", encoding="utf-8")


def main() -> int:
    """The exit code of pytest."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--page", type=Path, default=PAGE)
    options, arguments = parser.parse_known_args()
    marked = (
        file
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.fault(" in file.read_text(encoding="utf-8")
    )
    return pytest.main([*map(str, marked), *arguments], plugins=[Faults(options.page)])


if __name__ == "__main__":
    sys.exit(main())
