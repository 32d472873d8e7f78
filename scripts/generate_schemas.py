#!/usr/bin/env python3
"""Write the JSON schemas of results and of scenarios from their types.

Run it after a change of a type that a command prints as JSON, or of a setting.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaValue

from vexport.files import write_text
from vexport.formats.plan import Plan
from vexport.records import (
    CheckReport,
    ComparedRun,
    ComparedVariant,
    ComparedVersions,
    DryLoadReport,
    HistoryRow,
    LoadReport,
    Quantized,
    RepairReport,
    SchemeTable,
    Verdict,
)
from vexport.records.serving import StartupLog
from vexport.reports.run_record import Report
from vexport.scenario import Scenario

PACKAGE = Path(__file__).parent.parent / "vexport"
FOLDER = PACKAGE / "reports"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
# The name of each file, with the title of its schema and the type.
KINDS: dict[str, tuple[str, Any]] = {
    "report": ("vexport report", Report),
    "check": ("vexport check --format json", list[CheckReport]),
    "plan": ("vexport plan --format json", Plan),
    "plan-schemes": ("vexport plan SOURCE --format json", SchemeTable),
    "quantize": ("vexport quantize --format json", Quantized),
    "load": ("vexport load --format json", list[LoadReport]),
    "compare": ("vexport compare --format json", list[ComparedRun]),
    "history": ("vexport report RUN_DIR... --format json", list[HistoryRow]),
    "compare-serve": ("vexport compare --serve --format json", list[ComparedVariant]),
    "compare-versions": ("vexport compare --versions --format json", ComparedVersions),
    "verdict": ("vexport eval and verdict --format json", Verdict),
    "repair": ("vexport repair --format json", RepairReport),
    "dry-load": ("vexport load --dry --format json", list[DryLoadReport]),
    "startup-log": ("vexport load --log --format json", StartupLog),
}
# The schema of a scenario's file, for editors.
SCENARIO = PACKAGE / "scenario" / "scenario.schema.json"


def text(schema: JsonSchemaValue, title: str) -> str:
    """Return the content of a schema's file."""
    whole = {**schema, "$schema": DIALECT, "title": title}
    return json.dumps(whole, indent=2, sort_keys=True) + "\n"


SCHEMAS = {
    f"{name}.schema.json": text(TypeAdapter(kind).json_schema(mode="serialization"), title)
    for name, (title, kind) in KINDS.items()
}
SCENARIO_SCHEMA = text(Scenario.model_json_schema(), "vexport run SCENARIO")

if __name__ == "__main__":
    for name, content in SCHEMAS.items():
        write_text(FOLDER / name, content)
    write_text(SCENARIO, SCENARIO_SCHEMA)
