"""Several runs beside each other: order, what they share, what one lacks."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command import vexport
from tests.reports import parts, sample
from vexport.errors import InputError
from vexport.evaluation.scheme_points import scheme_points
from vexport.files import to_json
from vexport.reports import render, render_history
from vexport.reports.charts.plane import looks_charts, scheme_chart, tradeoff_chart
from vexport.reports.charts.trend import Trend, trend
from vexport.types import Report, SpeedPoint, SpeedReport


def runs() -> list[Report]:
    """Three runs, the newest named first; the last one ended at the check."""
    base = sample.full()
    assert base.drift is not None
    return [
        replace(sample.unloaded(), name="third", created="2025-03-16T00:00:00Z"),
        replace(base, name="first", created="2025-03-14T00:00:00Z"),
        replace(
            base,
            name="second",
            created="2025-03-15T00:00:00Z",
            plan=replace(base.plan, output_bytes=2_000_000),
            drift=replace(base.drift, mean_kl=0.001),
        ),
    ]


def test_text_has_the_oldest_first_and_a_gap_where_nothing_was_measured() -> None:
    lines = render_history(runs(), "text").splitlines()
    rows = [line.split()[:4] for line in lines if "2025-03" in line]
    assert rows == [
        ["1", "first", "2025-03-14", "00:00"],
        ["2", "second", "2025-03-15", "00:00"],
        ["3", "third", "2025-03-16", "00:00"],
    ]
    (addition,) = [line for line in lines if "addition" in line]
    assert addition.split()[-4:] == ["98.9%", "98.9%", "(0.00)", "n/a"]


def test_speed_is_a_column_and_a_trend_of_the_same_work() -> None:
    def timed(report: Report, rate: float) -> Report:
        point = SpeedPoint(
            concurrency=8,
            input_len=256,
            output_len=128,
            tokens_per_second=rate,
            ttft=0.1,
            itl=0.01,
            runs=(rate - 5, rate, rate + 5),
            mad=5,
        )
        speed = SpeedReport(checkpoint="out", ok=True, findings=(), points=(point,))
        return replace(report, speeds=(replace(speed, role="baseline"), speed))

    third, first, second = runs()
    timed_runs = [third, timed(first, 400), timed(second, 123.4)]
    rows = [line for line in render_history(timed_runs, "text").splitlines() if "8 at once)" in line]
    assert [row.split("(8 at once)")[0].split()[-1] for row in rows] == ["400", "123"]
    page = render_history(timed_runs, "html")
    assert "8 at once: 256 tokens in, 128 out" in page
    assert "8 at once: 256 tokens in" not in render_history([third, first, second], "html")
    page = render(timed_runs[1], "html")
    assert 'id="speed"' in page
    assert "±1.2%" in page


def test_json_has_every_report_in_order() -> None:
    assert [one["name"] for one in json.loads(render_history(runs(), "json"))] == ["first", "second", "third"]


@pytest.mark.parametrize("format_", ["html", "markdown"])
def test_hostile_names_are_text(format_: str) -> None:
    text = render_history([sample.hostile(), *runs()], format_)
    assert "<script>alert" not in text


def test_a_format_of_one_run_is_refused() -> None:
    with pytest.raises(InputError, match="junit"):
        render_history(runs(), "junit")


def test_the_chart_of_schemes_has_a_point_for_each_run_with_a_kl() -> None:
    chart = scheme_chart(scheme_points(runs()))
    assert chart is not None
    larger, smaller = chart.points
    assert larger.x > smaller.x
    assert larger.y > smaller.y  # less loss stands lower, and `y` counts from the top
    assert [point.label[:8] for point in chart.points] == ["3 second", "2 first:"]
    assert [point.mark for point in chart.points] == ["3", "2"]
    assert [line.count(",") for line in chart.lines] == [2]  # both are of one source
    assert scheme_chart(scheme_points(runs()[:2])) is None


def test_runs_that_lie_on_each_other_share_a_mark() -> None:
    _, first, second = runs()
    other = replace(first, name="a twin", source="elsewhere")
    chart = scheme_chart(scheme_points([first, second, other]))
    assert chart is not None
    assert [point.label[0] for point in chart.points] == ["2", "3", "1"]
    assert [point.mark for point in chart.points] == ["2", "1, 3", ""]
    assert len(chart.lines) == 1


def test_the_chart_of_schemes_says_where_the_prompts_differ() -> None:
    _, first, second = runs()
    assert second.drift is not None
    other = replace(second, drift=replace(second.drift, digest="other tokens"))
    alike, differing = (
        scheme_chart(scheme_points([first, second])),
        scheme_chart(scheme_points([first, other])),
    )
    assert alike is not None
    assert differing is not None
    assert (alike.title, len(alike.lines)) == ("KL against bits per weight", 1)
    assert differing.title.endswith("not all on the same prompts")
    assert differing.lines == ()


def test_the_interval_narrows_to_the_decision() -> None:
    judged = replace(sample.verdict("FAIL"), looks=parts.looks())
    (chart,) = looks_charts(judged)
    assert "FAIL after 600 of 2,000 documents" in chart.title
    corners = [tuple(map(float, pair.split(","))) for pair in chart.area.split()]
    heights = [low[1] - high[1] for high, low in zip(corners[:6], reversed(corners[6:]), strict=True)]
    assert heights == sorted(heights, reverse=True)
    assert corners[5][0] == 30
    assert chart.zero is not None
    assert chart.margin is not None
    assert chart.zero < chart.margin < corners[5][1]


def test_the_chosen_mixture_lies_on_the_axes() -> None:
    chart = tradeoff_chart(parts.mixed())
    assert chart is not None
    (chosen,) = chart.points
    assert 0 < chosen.x < 100
    assert 0 < chosen.y < 100
    assert tradeoff_chart(replace(parts.mixed(), frontier=())) is None


def test_a_trend_leaves_out_what_a_run_lacks() -> None:
    drawn = Trend(
        title="KL",
        unit="nats",
        names=["a", "b", "c"],
        outcomes=["PASS", "FAIL", "PASS"],
        values=[0.1, None, 0.3],
    )
    chart = trend(drawn, "{:.1f}".format)
    assert chart is not None
    assert [point.label for point in chart.points] == ["a: 0.1", "c: 0.3"]
    assert trend(replace(drawn, values=[0.1, None, None]), "{:.1f}".format) is None


def scored(name: str, created: str, value: float, *, baseline: float = 0.99) -> Report:
    """A run of one task with this score, 0.005 either way."""
    base = sample.report()
    assert base.verdict is not None
    task = base.verdict.tasks[1]
    task = replace(
        task,
        baseline=replace(task.baseline, value=baseline),
        candidate=replace(task.candidate, value=value, low=value - 0.005, high=value + 0.005),
        difference=value - baseline,
    )
    verdict = replace(base.verdict, tasks=(task,), pooled=None)
    return replace(base, name=name, created=created, verdict=verdict)


def test_a_score_stands_with_its_interval_the_baseline_and_the_accepted_loss() -> None:
    runs = [
        scored("a", "2025-03-14T00:00:00Z", 0.985),
        scored("b", "2025-03-15T00:00:00Z", 0.955),
    ]
    page = render_history(runs, "html")
    assert page.count('class="whisker pass"') == 2
    assert '<polygon class="funnel"' not in page
    heights = dict(re.findall(r'<polyline class="(zero|margin)" points="[\d.]+,([\d.]+) ', page))
    first, second = (
        float(y) for y in re.findall(r'<circle class="point pass" cx="[\d.]+%" cy="([\d.]+)%"', page)[:2]
    )
    # From the top: baseline 0.99, first run 0.985, accepted loss 0.97, second run 0.955.
    assert float(heights["zero"]) < first < float(heights["margin"]) < second


def test_the_change_since_the_run_before_is_told_in_points() -> None:
    runs = [
        scored("a", "2025-03-14T00:00:00Z", 0.985),
        scored("b", "2025-03-15T00:00:00Z", 0.983),
        replace(sample.unloaded(), name="c", created="2025-03-16T00:00:00Z"),
    ]
    text = " ".join(render_history(runs, "markdown").split())
    assert "| first run | NVFP4 |" in text
    assert "| addition -0.20 points | NVFP4 |" in text
    assert "| n/a | NVFP4 |" in text
    assert "| 98.5% | 98.3% (-0.20) | n/a |" in text
    assert "PASS on CPU, emulated" in text


def test_where_lower_is_better_a_rise_is_a_loss() -> None:
    runs = [
        scored("a", "2025-03-14T00:00:00Z", 27.2, baseline=27.0),
        scored("b", "2025-03-15T00:00:00Z", 27.5, baseline=27.0),
    ]
    runs = [
        replace(run, verdict=replace(run.verdict, tasks=(replace(task, difference=-task.difference),)))
        for run in runs
        if run.verdict
        for task in run.verdict.tasks
    ]
    assert "addition -0.30 of the metric" in render_history(runs, "markdown")


def test_runs_of_one_name_are_told_apart_and_linked(tmp_path: Path) -> None:
    twins = [scored("nightly", f"2025-03-1{day}T00:00:00Z", 0.98) for day in (4, 5)]
    folders = [tmp_path / "runs" / day for day in ("monday", "tuesday & more")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "report.html").write_text("", encoding="utf-8")
    page = render_history(twins, "html", folders=folders, page=tmp_path)
    assert re.findall(r'<a href="([^"]*)">([^<]*)</a>', page) == [
        ("runs/monday/report.html", "1 nightly (monday)"),
        ("runs/tuesday%20%26%20more/report.html", "2 nightly (tuesday &amp; more)"),
    ]
    assert "<a " not in render_history(twins, "html", folders=[tmp_path, tmp_path], page=tmp_path)
    text = render_history(twins, "markdown")
    assert "1 nightly (2025-03-14 00:00)" in text
    assert "2 nightly (2025-03-15 00:00)" in text


@pytest.mark.fault("a broken report among several: named; the answer of the others is whole")
def test_a_report_that_cannot_be_read_leaves_the_others(tmp_path: Path) -> None:
    """In the middle of three; its line names the file, and the answer is whole."""
    for run in runs():
        (tmp_path / run.name).mkdir()
        (tmp_path / run.name / "report.json").write_text(to_json(run))
    (tmp_path / "second" / "report.json").write_text('{"name": ')
    ran = vexport("report", *(tmp_path / run.name for run in runs()), "--format", "json")
    assert [one["name"] for one in json.loads(ran.stdout)] == ["first", "third"]
    assert (ran.code, len(ran.errors)) == (2, 1)
    assert f"{tmp_path / 'second' / 'report.json'}:1" in ran.errors[0]
    alone = vexport("report", tmp_path / "second", tmp_path / "none")
    assert (alone.code, alone.stdout, len(alone.errors)) == (2, "", 2)


def test_a_folder_of_runs_is_answered_by_how_to_name_them(tmp_path: Path) -> None:
    (tmp_path / "monday").mkdir()
    ran = vexport("report", tmp_path)
    assert ran.code == 2
    assert "call `vexport run` first" in ran.stderr
    (tmp_path / "monday" / "report.json").write_text("{}")
    assert f"name the runs in it: `vexport report {tmp_path}/*`" in vexport("report", tmp_path).stderr
