"""The committed JSON schemas, generated from the types (scripts/generate_schemas)."""

import json
from collections.abc import Mapping
from pathlib import Path

from vexport.files import json_schema, write_text
from vexport.types import CheckReport, DryLoadReport, Json, LoadReport, Report

FOLDER = Path(__file__).parent
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> Mapping[str, str]:
    """File name to text of every schema."""
    return {
        "report.schema.json": _titled("vexport report", json_schema(Report)),
        "check.schema.json": _titled("vexport check --format json", json_schema(list[CheckReport])),
        "load.schema.json": _titled("vexport load --format json", json_schema(list[LoadReport])),
        "dry-load.schema.json": _titled("vexport load --dry --format json", json_schema(list[DryLoadReport])),
    }


def write_schemas(folder: Path = FOLDER) -> None:
    """Write every schema into `folder`."""
    for name, text in schemas().items():
        write_text(folder / name, text)


def _titled(title: str, text: str) -> str:
    schema: dict[str, Json] = json.loads(text)
    return json.dumps({**schema, "$schema": _DIALECT, "title": title}, indent=2, sort_keys=True) + "\n"
