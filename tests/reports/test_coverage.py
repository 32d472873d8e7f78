"""The coverage of experts is summed up by calibration and stands in every format for people."""

from dataclasses import replace

import pytest

from tests.reports import sample
from vexport.records import CalibrationRecord, ExpertCoverage
from vexport.records.calibration import expert_coverage
from vexport.reports import render
from vexport.reports.formatting import coverage_lines

ROUTED = {
    "layers.0.experts": (5, 0, 9, 2),
    "layers.1.experts": (0, 0, 0, 1000),
    "layers.2.experts": (1, 1, 1, 3),
}
COVERAGE = expert_coverage(CalibrationRecord(rows=(1,), digest="", tokens=8, ranges={}, routed=ROUTED))
LINES = (
    "12 experts in 3 layers: 0 to 1,000 calibration tokens routed to each, median 1",
    "no token was routed to 4 experts: layers.0.experts 1; layers.1.experts 0, 1, 2",
)


def test_counts_are_summed_up() -> None:
    assert COVERAGE[0] == ExpertCoverage(
        name="layers.0.experts", experts=4, fewest=0, median=3.5, most=9, none=(1,)
    )
    assert [layer.none for layer in COVERAGE] == [(1,), (0, 1, 2), ()]


def test_lines_say_what_was_reached_and_name_what_was_not() -> None:
    assert tuple(coverage_lines(COVERAGE)) == LINES
    assert tuple(coverage_lines(COVERAGE[2:])) == (
        "4 experts in 1 layer: 1 to 3 calibration tokens routed to each, median 1",
    )
    assert not [*coverage_lines(())]


def test_many_experts_without_tokens_are_not_all_named() -> None:
    many = tuple(replace(COVERAGE[1], name=str(number), none=tuple(range(9))) for number in range(10))
    (_, line) = coverage_lines(many)
    assert line.startswith("no token was routed to 90 experts: 0 0, 1, 2, 3; 1 0, 1, 2, 3;")
    assert line.endswith(" and 74 more")


@pytest.mark.parametrize("format", ["text", "markdown", "html"])
def test_reports_show_them(format: str) -> None:
    text = " ".join(render(replace(sample.report(), experts=COVERAGE), format).split())
    assert [line for line in LINES if line not in text] == []
    assert "routed" not in render(sample.report(), format)
