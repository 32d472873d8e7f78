"""JSON: our own types as they are, plain ASCII on stdout, valid against the committed schemas."""

import json
import math
from collections.abc import Sequence
from typing import TypeVar

from pydantic import TypeAdapter

from vexport.types import CheckReport, Json, LoadReport, Report, Verdict

T = TypeVar("T")


def report(report: Report) -> str:
    """The report as report.json holds it."""
    return _dumps(Report, report)


def reports(reports: Sequence[Report]) -> str:
    """Several runs, in order."""
    return _dumps(list[Report], list(reports))


def checks(reports: Sequence[CheckReport]) -> str:
    """Always a list, in the order of the command line (check.schema.json)."""
    return _dumps(list[CheckReport], list(reports))


def loads(reports: Sequence[LoadReport]) -> str:
    """Always a list, in the order of the command line."""
    return _dumps(list[LoadReport], list(reports))


def verdict(verdict: Verdict) -> str:
    """The verdict with every task and flip."""
    return _dumps(Verdict, verdict)


def _dumps(kind: type[T], value: T) -> str:
    """Indented ASCII: terminal controls and lone surrogates leave as JSON escapes, not as themselves."""
    plain: Json = TypeAdapter(kind).dump_python(value, mode="json")
    return json.dumps(_finite(plain), indent=2, allow_nan=False) + "\n"


def _finite(value: Json) -> Json:
    """`value` with null for infinities and NaN, which JSON cannot write (as vexport.files.to_json)."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
