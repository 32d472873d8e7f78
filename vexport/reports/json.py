"""JSON: our own types as they are, plain ASCII on stdout, valid against the committed schemas.

The schemas are generated from the types (scripts/generate_schemas).
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from vexport.files import json_schema, write_text
from vexport.records import (
    CheckReport,
    ComparedRun,
    DryLoadReport,
    Json,
    LoadReport,
    Plan,
    Quantized,
    Report,
    SchemeTable,
    Verdict,
)

T = TypeVar("T")


def dumps(kind: type[T], value: T) -> str:
    """Indented ASCII: terminal controls and lone surrogates leave as JSON escapes, not as themselves."""
    plain: Json = TypeAdapter(kind).dump_python(value, mode="json", by_alias=True)
    return json.dumps(_finite(plain), indent=2, allow_nan=False) + "\n"


def _finite(value: Json) -> Json:
    """`value` with null for infinities and NaN, which JSON cannot write (as vexport.files.to_json)."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


FOLDER = Path(__file__).parent
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> Mapping[str, str]:
    """File name to text of every schema."""
    from vexport.repair.changes import RepairReport

    kinds: Mapping[str, tuple[str, str]] = {
        "report": ("vexport report", json_schema(Report)),
        "check": ("vexport check --format json", json_schema(list[CheckReport])),
        "plan": ("vexport plan --format json", json_schema(Plan)),
        "plan-schemes": ("vexport plan SOURCE --format json", json_schema(SchemeTable)),
        "quantize": ("vexport quantize --format json", json_schema(Quantized)),
        "load": ("vexport load --format json", json_schema(list[LoadReport])),
        "compare": ("vexport compare --format json", json_schema(list[ComparedRun])),
        "verdict": ("vexport eval and verdict --format json", json_schema(Verdict)),
        "repair": ("vexport repair --format json", json_schema(RepairReport)),
        "dry-load": ("vexport load --dry --format json", json_schema(list[DryLoadReport])),
    }
    texts = {}
    for name, (title, text) in kinds.items():
        schema: dict[str, Json] = json.loads(text)
        whole = {**schema, "$schema": _DIALECT, "title": title}
        texts[f"{name}.schema.json"] = json.dumps(whole, indent=2, sort_keys=True) + "\n"
    return texts


def write_schemas(folder: Path = FOLDER) -> None:
    """Write every schema into `folder`."""
    for name, text in schemas().items():
        write_text(folder / name, text)
