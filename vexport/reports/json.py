"""JSON: our own types as they are, plain ASCII on stdout, valid against the committed schemas."""

import json
import math
from typing import TypeVar

from pydantic import TypeAdapter

from vexport.types import Json

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
