"""Reports of experts that calibration reached, and of the rounding of weights."""

from dataclasses import replace

import pytest

from tests.reports import sample
from tests.texts import assert_contains
from vexport.records import CalibrationRecord, ExpertCoverage
from vexport.records.calibration import (
    GroupRounding,
    LayerRounding,
    RoundingReport,
    expert_coverage,
)
from vexport.reports import render
from vexport.reports.formatting import coverage_lines
from vexport.reports.layers import rounding_lines
from vexport.reports.run_record import Report

ROUTED = {
    "layers.0.experts": (5, 0, 9, 2),
    "layers.1.experts": (0, 0, 0, 1000),
    "layers.2.experts": (1, 1, 1, 3),
}
COVERAGE = expert_coverage(
    CalibrationRecord(rows=(1,), digest="", tokens=8, ranges={}, routed=ROUTED)
)


def test_coverage_lines_name_unreached_experts() -> None:
    tokens, unreached = coverage_lines(COVERAGE)
    assert_contains(tokens, "12 experts", "3 layers", "0 to 1,000", "median 1")
    assert_contains(unreached, "4 experts", "layers.0.experts 1;")
    assert unreached.endswith("layers.1.experts 0, 1, 2")
    (tokens,) = coverage_lines(COVERAGE[2:])
    assert_contains(tokens, "4 experts", "1 layer", "1 to 3", "median 1")
    assert not [*coverage_lines(())]
    many = tuple(
        replace(COVERAGE[1], name=str(number), none=tuple(range(9))) for number in range(10)
    )
    (_, line) = coverage_lines(many)
    assert_contains(line, "90 experts", "0 0, 1, 2, 3; 1 0, 1, 2, 3;", "74 more")
    assert COVERAGE[0] == ExpertCoverage(
        name="layers.0.experts", experts=4, fewest=0, median=3.5, most=9, none=(1,)
    )
    assert [layer.none for layer in COVERAGE] == [(1,), (0, 1, 2), ()]


def with_coverage(report: Report) -> Report:
    calibration = sample.made_of(report).calibration
    assert calibration is not None
    return sample.with_made(report, calibration=replace(calibration, experts=COVERAGE))


@pytest.mark.parametrize("format", ["text", "markdown", "html"])
def test_reports_show_coverage(format: str) -> None:
    text = " ".join(render(with_coverage(sample.report()), format).split())
    assert [line for line in coverage_lines(COVERAGE) if line not in text] == []
    assert "routed" not in render(sample.report(), format)


QKV = GroupRounding(
    name="model.layers.0.self_attn.qkv_proj",
    rounding="refit",
    strength=0.25,
    damping=0.1,
    tokens=1024,
    columns=256,
    nearest_error=0.04,
    error=0.01,
)
FALLEN_BACK = GroupRounding(
    name="model.layers.0.mlp.down_proj", fallback="H is not positive definite"
)
ROUNDING = RoundingReport(layers=(LayerRounding(groups=(QKV, FALLEN_BACK), state_error=0.02),))


def test_rounding_lines_show_strength_and_gain() -> None:
    kinds, strength, gain = rounding_lines(ROUNDING)
    assert_contains(kinds, "refit of 1 group", "nearest of 1 group")
    assert_contains(strength, "strength 0.25", "ridge 0.1")
    assert "tokens" not in strength
    weighed = RoundingReport(
        layers=(LayerRounding(groups=(replace(QKV, weighs_tokens=True),), state_error=0),)
    )
    assert_contains([*rounding_lines(weighed)][1], "strength 0.25", "ridge 0.1", "tokens weighted")
    assert_contains(gain, "median", "error", "1.00%", "4.00% with nearest")
    assert not [*rounding_lines(None)]


def test_reports_show_rounding() -> None:
    report = sample.with_made(sample.report(), rounding=ROUNDING)
    page, card, text = (render(report, format_) for format_ in ("html", "card", "text"))
    assert FALLEN_BACK.fallback
    for words in (QKV.name, "4.0%", "2.0%", FALLEN_BACK.fallback):
        assert words in page
    assert_contains(card, "refit of 1 group", "nearest of 1 group", FALLEN_BACK.fallback)
    assert_contains(text, "strength 0.25", "ridge 0.1")
