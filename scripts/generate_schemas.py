#!/usr/bin/env python3
"""Write vexport/reports/*.schema.json from the types; run it after a change of a type that is an
answer.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vexport.files import write_text
from vexport.formats.plan import Plan
from vexport.records import (
    CheckReport,
    ComparedRun,
    DryLoadReport,
    LoadReport,
    Quantized,
    RepairReport,
    SchemeTable,
    Verdict,
)
from vexport.reports.report import Report

FOLDER = Path(__file__).parent.parent / "vexport" / "reports"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
# The name of the file: the title of the schema, and the type.
KINDS: dict[str, tuple[str, Any]] = {
    "report": ("vexport report", Report),
    "check": ("vexport check --format json", list[CheckReport]),
    "plan": ("vexport plan --format json", Plan),
    "plan-schemes": ("vexport plan SOURCE --format json", SchemeTable),
    "quantize": ("vexport quantize --format json", Quantized),
    "load": ("vexport load --format json", list[LoadReport]),
    "compare": ("vexport compare --format json", list[ComparedRun]),
    "verdict": ("vexport eval and verdict --format json", Verdict),
    "repair": ("vexport repair --format json", RepairReport),
    "dry-load": ("vexport load --dry --format json", list[DryLoadReport]),
}
SCHEMAS = {
    f"{name}.schema.json": json.dumps(
        {**TypeAdapter(kind).json_schema(mode="serialization"), "$schema": DIALECT, "title": title},
        indent=2,
        sort_keys=True,
    )
    + "\n"
    for name, (title, kind) in KINDS.items()
}

if __name__ == "__main__":
    for name, text in SCHEMAS.items():
        write_text(FOLDER / name, text)
