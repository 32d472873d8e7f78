"""The committed schemas are those of the types, and real output is valid against them."""

import json
import runpy
from pathlib import Path

import jsonschema
import pytest

from tests.reports import sample
from vexport.records import Report
from vexport.reports import render, render_checks

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate_schemas.py"
MADE = runpy.run_path(str(SCRIPT))
FOLDER: Path = MADE["FOLDER"]
SCHEMAS: dict[str, str] = MADE["SCHEMAS"]


@pytest.mark.parametrize("name", SCHEMAS)
def test_committed_schemas_are_not_stale(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == SCHEMAS[name], "run scripts/generate_schemas.py"


@pytest.mark.parametrize("report", [sample.report("INCONCLUSIVE"), sample.unloaded(), sample.hostile()])
def test_reports_are_valid(report: Report) -> None:
    schema = json.loads((FOLDER / "report.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(render(report, "json")), schema)


def test_check_reports_are_valid() -> None:
    schema = json.loads((FOLDER / "check.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(render_checks([sample.unloaded().check], "json")), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"checkpoint": "a", "ok": True}], schema)


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_name_their_schema(name: str) -> None:
    """Within its number fields are added, not changed."""
    schema = json.loads(SCHEMAS[name])
    record = schema.get("items", schema)
    fields = (
        record["properties"]
        if "properties" in record
        else schema["$defs"][record["$ref"].split("/")[-1]]["properties"]
    )
    assert fields["schema"]["const"] == f"vexport.{name.removesuffix('.schema.json')}/1"
