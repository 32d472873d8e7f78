"""Several loads of a checkpoint: in several vLLMs, in both modes."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

import vexport.reports
from tests.reports.sample import load
from vexport.cli.base import require_loaded
from vexport.errors import CheckpointFailed, EnvironmentFault
from vexport.records import ENGINE_CHECK, Finding, LoadReport
from vexport.reports import render_loads

SCHEMA = Path(vexport.reports.__file__).parent / "load.schema.json"
OTHER = "/venv/bin/python"


def finding(check: str) -> Finding:
    return Finding(check=check, severity="error", where="x", expected="e", got="g", fix="f")


LOADS = replace(load("out/model"), vllm="0.32.0", findings=(), ok=True)
REFUSED = LoadReport(
    checkpoint="out/model", ok=False, findings=(finding("load"),), vllm="0.31.0", vllm_python=OTHER
)
DIED = replace(
    REFUSED, checkpoint="out/other", findings=(finding(ENGINE_CHECK),), vllm="", log_tail="last words"
)
MATRIX = [LOADS, REFUSED, replace(LOADS, checkpoint="out/other"), DIED]


def test_checkpoints_are_rows_and_versions_columns() -> None:
    text = render_loads(MATRIX, "text")
    lines = text.splitlines()
    assert lines[0].split() == ["checkpoint", "0.32.0", "0.31.0"]
    assert lines[2].split() == ["out/model", "loads", "REFUSED"]
    assert lines[3].split() == ["out/other", "loads", "NO", "ANSWER"]
    assert "out/other (0.31.0)" in text
    assert "last words" in text


def test_one_load_has_no_matrix() -> None:
    assert render_loads([LOADS], "text").startswith("PASS on CPU, emulated  out/model\n")


def test_modes_are_columns() -> None:
    lines = render_loads([LOADS, replace(LOADS, mode="default")], "text").splitlines()
    assert lines[0].split() == ["checkpoint", "eager", "default"]


def test_junit_has_a_case_per_load() -> None:
    suites = ElementTree.fromstring(render_loads(MATRIX, "junit").encode())
    assert [(suite.get("name"), suite.get("failures")) for suite in suites] == [
        ("out/model", "1"),
        ("out/other", "1"),
    ]
    assert [case.get("name") for case in suites[0]] == ["load 0.32.0", "load 0.31.0"]
    assert render_loads(MATRIX, "github").count("::error") == 2


def test_json_is_as_its_schema_says() -> None:
    found = json.loads(render_loads(MATRIX, "json"))
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    assert [report["vllm_python"] for report in found] == ["", OTHER, "", OTHER]


def test_an_engine_that_died_is_no_fault_of_the_checkpoint() -> None:
    with pytest.raises(EnvironmentFault):
        require_loaded([LOADS, DIED])
    with pytest.raises(CheckpointFailed):
        require_loaded([DIED, REFUSED])
    require_loaded([LOADS])
