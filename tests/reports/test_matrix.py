"""Loads and dry loads of several checkpoints in several versions of vLLM, in all formats."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

import vexport.reports
from tests.reports.sample import load
from vexport.cli.base import require_loaded
from vexport.errors import CheckpointFailed, EnvironmentFault
from vexport.records import ENGINE_CHECK, DryLoadReport, Finding, LoadReport, MatrixCell, MatrixRow
from vexport.reports import render_loads

SCHEMA = Path(vexport.reports.__file__).parent / "dry-load.schema.json"
COLUMNS = [(tp, sm) for tp in (1, 2, 4, 8) for sm in (80, 89, 90, 100)]


def cells(precision: str, kernel: str) -> tuple[MatrixCell, ...]:
    """Return cells that load, except with tp 8."""
    return tuple(
        MatrixCell(tp=tp, sm=sm, status="refused", reason="ValueError: heads")
        if tp == 8
        else MatrixCell(tp=tp, sm=sm, status="loads", precision=precision, kernel=kernel)
        for tp, sm in COLUMNS
    )


def finding(check: str) -> Finding:
    return Finding(check=check, severity="error", where="x", expected="e", got="g", fix="f")


REPORT = DryLoadReport(
    checkpoint="out/model",
    ok=False,
    findings=(finding("dry-load"),),
    vllm="0.32.0",
    cells=cells("", ""),
    rows=tuple(
        MatrixRow(name=f"model.layers.*.{name}", count=3, scheme="WNA16", stored="W4A16", cells=row)
        for name, row in (
            ("self_attn.qkv_proj", cells("W4A16", "MarlinLinearKernel")),
            ("mlp.down_proj", cells("W4A16", "MarlinLinearKernel")),
            ("mlp.experts", cells("W4A16", "MarlinExperts")),
        )
    ),
    blind_spots=("no kernel ran",),
)


def test_text_joins_equal_rows() -> None:
    text = render_loads([REPORT], "text")
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("FAIL  out/model")
    ranks = [line for line in text.splitlines() if line.startswith("tensor")]
    assert ranks == ["tensor parallel 1, 2, 4", "tensor parallel 8"]
    assert text.count("qkv_proj") == text.count("down_proj") == text.count("(6)") == 1
    assert text.count("REFUSED") == 4
    assert "not verified: no kernel ran" in text


def test_dry_load_json() -> None:
    listed = json.loads(render_loads([REPORT, replace(REPORT, checkpoint="b")], "json"))
    jsonschema.validate(listed, json.loads(SCHEMA.read_text()))
    assert [report["checkpoint"] for report in listed] == ["out/model", "b"]
    cell = {
        "tp": 1,
        "sm": 80,
        "status": "loads",
        "precision": "W4A16",
        "kernel": "MarlinLinearKernel",
    }
    assert listed[0]["rows"][0]["cells"][0] == {**cell, "reason": "", "needed": True}


def test_dry_load_junit_and_github() -> None:
    optional = replace(REPORT.cells[-1], needed=False)
    report = replace(REPORT, cells=(*REPORT.cells[:-1], optional))
    (suite,) = ElementTree.fromstring(render_loads([report], "junit").encode())
    assert suite.get("name") == "out/model"
    results = {case.get("name"): [element.tag for element in case] for case in suite}
    assert len(results) == len(COLUMNS) + 1
    assert results["tp 1, sm 80"] == ["system-out"]
    assert results["tp 8, sm 80"] == ["failure"]
    assert results["tp 8, sm 100"] == ["skipped"]
    assert results["dry load"] == ["failure"]
    suites = ElementTree.fromstring(render_loads([REPORT], "junit"))
    assert [case.get("type") for case in suites.iter("failure")] == ["FAIL"] * 5
    assert render_loads([REPORT], "github").startswith("::error title=load")


def test_versions_are_columns() -> None:
    other = replace(REPORT, vllm="0.31.0", vllm_python="/venv/bin/python", ok=True, findings=())
    lines = render_loads([REPORT, other], "text").splitlines()
    assert lines[0].split() == ["checkpoint", "0.32.0", "0.31.0"]
    assert re.match(r"out/model +FAILS \(12 of 16 .* loads \(12 of 16 ", lines[2])
    suites = ElementTree.fromstring(render_loads([REPORT, other], "junit").encode())
    assert [suite.get("name") for suite in suites] == ["out/model 0.32.0", "out/model 0.31.0"]


LOAD_SCHEMA = Path(vexport.reports.__file__).parent / "load.schema.json"
OTHER_PYTHON = "/venv/bin/python"


LOADS = replace(load("out/model"), vllm="0.32.0", findings=(), ok=True)
REFUSED = LoadReport(
    checkpoint="out/model",
    ok=False,
    findings=(finding("load"),),
    vllm="0.31.0",
    vllm_python=OTHER_PYTHON,
)
DIED = replace(
    REFUSED,
    checkpoint="out/other",
    findings=(finding(ENGINE_CHECK),),
    vllm="",
    log_tail="last words",
)
MATRIX = [LOADS, REFUSED, replace(LOADS, checkpoint="out/other"), DIED]


def test_load_matrix() -> None:
    text = render_loads(MATRIX, "text")
    lines = text.splitlines()
    assert lines[0].split() == ["checkpoint", "0.32.0", "0.31.0"]
    assert lines[2].split() == ["out/model", "loads", "REFUSED"]
    assert lines[3].split() == ["out/other", "loads", "NO", "ANSWER"]
    assert "out/other (0.31.0)" in text
    assert "last words" in text
    assert render_loads([LOADS], "text").startswith("PASS on CPU, emulated  out/model\n")
    first, *_ = render_loads([LOADS, replace(LOADS, mode="default")], "text").splitlines()
    assert first.split() == ["checkpoint", "eager", "default"]


def test_load_junit_and_json() -> None:
    suites = ElementTree.fromstring(render_loads(MATRIX, "junit").encode())
    failures = {suite.get("name"): suite.get("failures") for suite in suites}
    assert failures == {"out/model": "1", "out/other": "1"}
    assert [case.get("name") for case in suites[0]] == ["load 0.32.0", "load 0.31.0"]
    assert render_loads(MATRIX, "github").count("::error") == 2
    found = json.loads(render_loads(MATRIX, "json"))
    jsonschema.validate(found, json.loads(LOAD_SCHEMA.read_text()))
    assert [report["vllm_python"] for report in found] == ["", OTHER_PYTHON, "", OTHER_PYTHON]


def test_dead_engine_is_environment_fault() -> None:
    with pytest.raises(EnvironmentFault):
        require_loaded([LOADS, DIED])
    with pytest.raises(CheckpointFailed):
        require_loaded([DIED, REFUSED])
    require_loaded([LOADS])
