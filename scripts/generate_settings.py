#!/usr/bin/env python3
"""Write the options of settings and the tables of the scenario reference.

Both come from the pydantic models in vexport/scenario. Run it after a change of a field: it writes
vexport/cli/generated/settings.json and the tables in vexport/docs/scenario.md.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vexport.api.arguments import PlanArguments, QuantizeArguments, VerdictArguments
from vexport.files import write_text
from vexport.records.options import OptionRecord
from vexport.scenario import (
    Auto,
    Calibration,
    Check,
    Evaluate,
    Rule,
    Scenario,
    Sensitivity,
    Serve,
    Variants,
)
from vexport.scenario.declaring import declaration, default_value, options_of

PACKAGE = Path(__file__).parent.parent / "vexport"
OPTIONS = PACKAGE / "cli" / "generated" / "settings.json"
REFERENCE = PACKAGE / "docs" / "scenario.md"
# The models with options, by the name that the commands use.
SECTIONS: Mapping[str, type[BaseModel]] = {
    "plan": PlanArguments,
    "quantize": QuantizeArguments,
    "calibration": Calibration,
    "evaluate": Evaluate,
    "verdict": VerdictArguments,
    "serve": Serve,
    "variants": Variants,
}
# The models of the reference by the heading of their table, with the prefix of their keys.
TABLES: Mapping[str, tuple[str, type[BaseModel]]] = {
    "Top-level keys": ("", Scenario),
    "Keys of rules": ("rules.", Rule),
    "Keys of calibration": ("calibration.", Calibration),
    "Keys of auto": ("auto.", Auto),
    "Keys of sensitivity": ("sensitivity.", Sensitivity),
    "Keys of check": ("check.", Check),
    "Keys of serve": ("serve.", Serve),
    "Keys of evaluate": ("evaluate.", Evaluate),
    "Keys of variants": ("variants.", Variants),
}
HEAD = "| key | default | meaning |\n|---|---|---|\n"


def options_text() -> str:
    """Return the content of vexport/cli/generated/settings.json."""
    sections = {
        name: [_brief(option) for option in options_of(model)] for name, model in SECTIONS.items()
    }
    return json.dumps(sections, indent=1) + "\n"


def _brief(option: OptionRecord) -> dict[str, object]:
    """Return an option without the values that every option has by default."""
    defaults = {each.name: each.default for each in fields(option)}
    content = asdict(option)
    content["choices"] = tuple(content["choices"])
    return {name: value for name, value in content.items() if value != defaults[name]}


def reference_text(page: str) -> str:
    """Return the page of the reference with the tables of the models."""
    for heading, (prefix, model) in TABLES.items():
        rows = "".join(f"{row}\n" for row in _rows(prefix, model))
        table = re.compile(
            rf"(^## {heading}\n(?:(?!\||##).*\n)*){re.escape(HEAD)}(?:\|.*\n)*", re.MULTILINE
        )
        found = table.search(page)
        assert found is not None, f"no table below the heading {heading!r}"
        page = f"{page[: found.start()]}{found[1]}{HEAD}{rows}{page[found.end() :]}"
    return page


def _rows(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    for key, info in model.model_fields.items():
        declared = declaration(info)
        assert declared is not None, f"{model.__name__}.{key} has no help text"
        unset = f"If left out: {declared.unset}." if declared.unset else ""
        meaning = " ".join(filter(None, (declared.help, unset, declared.more)))
        yield f"| `{prefix}{key}` | {_default(info)} | {_escaped(meaning)} |"


def _default(info: FieldInfo) -> str:
    """Return the default in the notation of the reference."""
    if info.is_required():
        return "required"
    if isinstance(info.default, BaseModel):
        return "all defaults"
    value = default_value(info)
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    write_text(OPTIONS, options_text())
    write_text(REFERENCE, reference_text(REFERENCE.read_text(encoding="utf-8")))
