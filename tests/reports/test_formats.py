"""All formats of all reports: complete, deterministic, and safe from injection."""

import json
import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from markdown_it import MarkdownIt

from tests.reports import sample
from tests.texts import assert_contains
from vexport.cli.options import FORMATS
from vexport.cli.scenario import REPORT_FORMATS
from vexport.files import from_json
from vexport.records import CheckReport, GivenCheckpoint, Outcome
from vexport.records.scale import percent
from vexport.reports import render, render_checks, render_loads, render_verdicts
from vexport.reports.formatting import (
    bits_per_weight,
    count,
    duration,
    size,
    small,
)
from vexport.reports.run_record import Report

OUTCOMES: tuple[Outcome, ...] = ("PASS", "FAIL", "INCONCLUSIVE")
SAMPLES: dict[str, Callable[[], Report]] = {
    "pass": lambda: sample.report("PASS"),
    "fail": lambda: sample.report("FAIL"),
    "inconclusive": lambda: sample.report("INCONCLUSIVE"),
    "unloaded": sample.unloaded,
    "hostile": sample.hostile,
}
# Characters that no format may contain: terminal escapes, controls that XML forbids, and marks
# that reverse text.
FORBIDDEN = ("\x1b", "\x00", "\x9b", "\u202e", "\ud800", "\ufffe")


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("format", REPORT_FORMATS)
def test_rendering_is_deterministic(name: str, format: str) -> None:
    text = render(SAMPLES[name](), format)
    assert text == render(SAMPLES[name](), format)
    assert text.endswith("\n")
    text.encode()
    assert [repr(raw) for raw in FORBIDDEN if raw in text] == []


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("format", REPORT_FORMATS)
def test_formats_show_outcome_and_reason(outcome: Outcome, format: str) -> None:
    report = sample.report(outcome)
    text = " ".join(render(report, format).split())
    escapes = {"%25": "%", "&gt;": ">", "&#43;": "+"}
    for escaped, plain in escapes.items():
        text = text.replace(escaped, plain)
    assert report.reason in text or report.reason[0].upper() + report.reason[1:] in text
    assert outcome in text


@pytest.mark.parametrize("format", ["html", "markdown", "text"])
def test_readable_formats_show_numbers(format: str) -> None:
    report = sample.report("FAIL")
    text = " ".join(render(report, format).split())
    assert report.verdict is not None
    plan, logprobs = sample.made_of(report).plan, sample.load_of(report).logprobs
    assert logprobs is not None
    numbers = [size(plan.source_bytes), size(plan.output_bytes)]
    numbers += [bits_per_weight(plan.output_bytes, plan.parameters)]
    numbers += [small(logprobs.mean_kl), small(logprobs.max_kl)]
    numbers += [
        percent(logprobs.top1_agreement),
        duration(sum(report.call.seconds.values())),
    ]
    for task in report.verdict.tasks:
        scale = task.scale
        numbers += [
            scale.change(task.difference),
            scale.changes(task.low, task.high),
            count(task.documents),
        ]
        numbers += [scale.value(side.value) for side in (task.baseline, task.candidate)]
        assert task.recovery is not None
        numbers += [percent(task.recovery.value)]
        numbers += [str(task.changes.right_to_wrong), str(task.changes.wrong_to_right)]
    assert [number for number in numbers if number not in text] == []


@pytest.mark.parametrize("format", ["html", "markdown", "text"])
def test_other_metrics_and_warnings_are_shown(format: str) -> None:
    text = " ".join(render(sample.report("PASS"), format).split()).replace("\\_", "_")
    assert_contains(text, "not part of the verdict")
    assert_contains(text, "addition (f1, strict)", "all tasks (exact_match)", "-0.33")
    (warning,) = sample.verdict("PASS").warnings
    assert warning in text


@pytest.mark.parametrize("format", ["html", "markdown", "text", "junit", "github"])
def test_metric_without_percentage(format: str) -> None:
    report = sample.report("FAIL")
    assert report.verdict is not None
    shares, other = report.verdict.tasks
    old = replace(other.baseline, value=27.31, low=26.1, high=28.4)
    new = replace(other.candidate, value=25.06, low=24.0, high=26.2)
    other = replace(other, baseline=old, candidate=new, difference=-2.25, low=-3.5, high=-1.0)
    other = replace(other, metric="bleu", unit="metric", recovery=None)
    other = replace(other, margin=0.27, relative_margin=0.01)
    text = render(replace(report, verdict=replace(report.verdict, tasks=(shares, other))), format)
    assert "-2.25" in text
    assert "2731" not in text
    assert "-225" not in text
    assert "27.31" in text or format in ("junit", "github", "card")
    assert "n/a" in text or format in ("junit", "github", "card")


FINDING_KEYS = {"rule", "check", "claim", "severity", "where", "expected", "got", "fix", "places"}


def test_check_json() -> None:
    reports = [
        sample.made_of(sample.unloaded()).check,
        CheckReport(checkpoint="other", ok=True, findings=()),
    ]
    answer = json.loads(render_checks(reports, "json"))
    assert [entry["checkpoint"] for entry in answer] == ["runs/demo-nvfp4/checkpoint", "other"]
    assert set(answer[0]) == {
        "schema",
        "checkpoint",
        "ok",
        "judged_by",
        "findings",
        "ignored",
        "not_judged",
        "vllm",
        "tp",
        "sm",
    }
    assert set(answer[0]["findings"][0]) == FINDING_KEYS
    assert json.loads(render_checks([], "json")) == []
    schema = json.loads((FOLDER / "check.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(
        json.loads(render_checks([sample.made_of(sample.unloaded()).check], "json")), schema
    )
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"checkpoint": "a", "ok": True}], schema)


@pytest.mark.parametrize("format", ["text", "markdown", "html", "junit", "github"])
def test_warnings_precede_numbers(format: str) -> None:
    """Reasons to doubt a verdict follow its sentence, and every format has them."""
    verdict = replace(sample.verdict("PASS"), warnings=("first doubt", "second doubt"))
    text = render_verdicts([verdict], format)
    first, second = text.index("first doubt"), text.index("second doubt")
    assert first < second
    if format in ("text", "markdown", "html"):
        assert text.lower().index(verdict.reason.lower()) < first
        assert second < text.index("Recovery")


def test_junit_cases_of_gates() -> None:
    suite = ElementTree.fromstring(render(sample.report("FAIL"), "junit"))[0]
    names = [case.get("name") for case in suite.iter("testcase")]
    tasks = ["facts (exact_match)", "addition (exact_match)"]
    assert names == ["plan", "check", "load baseline", "load", *tasks, "overall"]
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == ["addition (exact_match)", "overall"]
    assert suite.get("failures") == "2"
    suite = ElementTree.fromstring(render(sample.unloaded(), "junit"))[0]
    assert [case.get("name") for case in suite if case.find("skipped") is not None] == [
        "load",
        "evaluate",
    ]
    assert [case.get("name") for case in suite if case.find("failure") is not None] == [
        "check",
        "overall",
    ]
    root = ElementTree.fromstring(render(sample.hostile(), "junit"))
    assert {element.tag for element in root.iter()} <= {
        "testsuites", "testsuite", "testcase", "failure", "system-out", "skipped"
    }  # fmt: skip
    assert "<script>alert(1)</script> ]]>" in str(root[0].get("name"))


def test_github_annotations_are_limited() -> None:
    findings = tuple(replace(sample.finding("error"), check=f"family {n}") for n in range(30))
    check = CheckReport(checkpoint="a", ok=False, findings=findings)
    lines = render(sample.with_made(sample.unloaded(), check=check), "github").splitlines()
    assert [line.startswith("::error title=") for line in lines] == [True] * 10 + [False]
    assert_contains(lines[-1], "21 more", "--format json")
    for line in render(sample.hostile(), "github").splitlines():
        _, command, message = line.split("::", 2)
        assert command.startswith(("error title=", "warning title=", "notice title="))
        assert "," not in command
        assert ":" not in command
        assert "%0A##" not in message


def test_markdown_escapes_hostile_text() -> None:
    text = render(sample.hostile(), "markdown")
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    harmless = {"text", "text_special", "strong_open", "strong_close", "html_inline"}
    assert {token.type for token in inline} <= harmless
    assert {token.content for token in inline if token.type == "html_inline"} == {"<sub>", "</sub>"}
    blocks = [token.content.strip() for token in tokens if token.type == "html_block"]
    opened, closed = blocks
    assert re.fullmatch(r"<details><summary>[\w, ]+</summary>", opened)
    assert closed == "</details>"
    assert not [token.type for token in tokens if token.type in ("fence", "code_block")]
    assert [pattern for pattern in ("://", " @team", "www.") if pattern in text] == []
    for table in (block for block in text.split("\n\n") if block.startswith("|")):
        assert len({row.replace(r"\|", "").count("|") for row in table.splitlines()}) == 1


@pytest.mark.parametrize("format", FORMATS)
def test_checks_loads_and_verdicts_share_formats(format: str) -> None:
    hostile = sample.hostile()
    assert hostile.verdict is not None
    for text in (
        render_checks(
            [sample.made_of(hostile).check, sample.made_of(sample.report()).check], format
        ),
        render_loads([sample.load_of(hostile), sample.load()], format),
        render_verdicts([hostile.verdict], format),
    ):
        assert text.endswith("\n")
        assert [repr(raw) for raw in FORBIDDEN if raw in text] == []


@pytest.mark.parametrize("format", [name for name in REPORT_FORMATS if name != "json"])
def test_outcome_names_device(format: str) -> None:
    text = re.sub(r"<[^>]*>", "", render(sample.report("PASS"), format)).replace("%2C", ",")
    assert "PASS on CPU, emulated" in text
    loaded = sample.load_of(sample.report("FAIL"))
    assert loaded.engine is not None
    gpu = replace(
        loaded.engine, platform="cuda", processor="NVIDIA H100", emulated=False, compilation="3"
    )
    on_gpu = replace(sample.report("FAIL"), load=replace(loaded, engine=gpu))
    text = re.sub(r"<[^>]*>", "", render(on_gpu, format)).replace("%2C", ",")
    assert "FAIL on NVIDIA H100, compiled" in text


@pytest.mark.parametrize("format", ["text", "markdown", "html", "card"])
def test_engine_settings_are_shown(format: str) -> None:
    text = render(sample.report("PASS"), format).replace("&#34;", '"').replace("\\", "")
    assert_contains(text, "tensor_parallel_size 2", "kv_cache_dtype fp8")
    assert_contains(text, 'engine_args {"block_size": 32}')
    assert "distributed_executor_backend" not in text


@pytest.mark.parametrize("format", ["text", "github", "junit"])
def test_single_verdict_names_device(format: str) -> None:
    judged = sample.verdict("PASS")
    assert "PASS on CPU, emulated" in render_verdicts([judged], format).replace("%2C", ",")
    without_device = render_verdicts([replace(judged, device="")], format)
    assert "PASS" in without_device
    assert " on " not in without_device.lower().split("accuracy")[0]


SCRIPT = Path(__file__).parents[2] / "scripts" / "generate_schemas.py"
GENERATOR = runpy.run_path(str(SCRIPT))
FOLDER: Path = GENERATOR["FOLDER"]
SCHEMAS: dict[str, str] = GENERATOR["SCHEMAS"]


@pytest.mark.parametrize(
    "report", [sample.report("INCONCLUSIVE"), sample.unloaded(), sample.hostile()]
)
def test_json_is_valid_and_reads_back(report: Report, tmp_path: Path) -> None:
    schema, text = (
        json.loads((FOLDER / "report.schema.json").read_text(encoding="utf-8")),
        render(report, "json"),
    )
    jsonschema.validate(json.loads(text), schema)
    assert text.isascii()
    if report != sample.hostile():  # pydantic refuses a lone surrogate
        (tmp_path / "report.json").write_text(text, encoding="utf-8")
        assert from_json(Report, tmp_path / "report.json") == report


@pytest.mark.parametrize("name", SCHEMAS)
def test_committed_schemas_are_current(name: str) -> None:
    """While the version in a schema's name stays, fields may be added but not changed."""
    assert (FOLDER / name).read_text(encoding="utf-8") == SCHEMAS[name], (
        "run scripts/generate_schemas.py"
    )
    schema = json.loads(SCHEMAS[name])
    record = schema.get("items", schema)
    if "properties" not in record:
        record = schema["$defs"][record["$ref"].split("/")[-1]]
    fields = record["properties"]
    assert fields["schema"]["const"] == f"vexport.{name.removesuffix('.schema.json')}/1"


def test_given_checkpoint_has_scheme_and_format() -> None:
    given = GivenCheckpoint(name="model", schemes=("W4A16_G64",), format="pack-quantized")
    made = replace(sample.report(), made=None, given=given)
    text = render(made, "text")
    assert re.search(r"^schemes +W4A16_G64$", text, re.MULTILINE)
    assert re.search(r"^format +pack-quantized$", text, re.MULTILINE)
    assert_contains(render(made, "html"), "W4A16_G64", "pack-quantized")
