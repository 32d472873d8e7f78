"""What `vexport explain NAME` answers: the section that explains it, and the facts of the tables."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import getdoc

from vexport.errors import InputError
from vexport.explain.catalog import CATALOGS, scheme_facts
from vexport.explain.pages import Section, find_key, find_section, fold, topic_names
from vexport.formats.arguments import input_bits
from vexport.formats.schemes import all_schemes, get_scheme, is_scheme, meant, scheme_name

# The tables whose rows are the facts of the sections on the page of the same name, and what a row is called.
TABLES: Mapping[str, str] = {"schemes": "scheme", "observers": "observer"}
# How the section of a check or another finding begins; tests compare these with the table of checks.
FINDING = "**What:** "
# What an entry of a scenario's key is called.
KEY = "scenario key"
_SOURCE = re.compile(r"^Layouts?: (.+?)\.?\Z", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An explanation under the heading `title`.

    `kind` is scheme, observer, check, finding, scenario key, option, command, topic or page.
    """

    name: str
    title: str
    kind: str
    page: str
    facts: Mapping[str, str]
    text: str


def explain(name: str) -> Entry:
    """What is known about `name`; InputError, with the nearest name, where nothing is."""
    own_name = scheme_name(name)
    if find_section(name) is None and is_scheme(own_name):
        return _other_scheme(own_name)
    section = find_section(name)
    key = find_key(name) if section is None else None
    if key is not None:
        default = {"default": key.default}
        return Entry(
            name=key.name, title=key.name, kind=KEY, page="scenario", facts=default, text=key.meaning
        )
    if section is None:
        raise InputError(
            f"explain {name!r}",
            got="an unknown name",
            need="a scheme, observer, rounding, check, option, scenario key, page or topic",
            fix=f"run `vexport explain` to list all names{meant(name, topic_names())}",
        )
    kind, facts = facts_of(section, name)
    own = next((given for given in section.names if fold(given) == fold(name)), section.names[0])
    return Entry(name=own, title=section.title, kind=kind, page=section.page, facts=facts, text=section.text)


def _other_scheme(name: str) -> Entry:
    """A scheme that is no preset: its facts, and the section of the first preset that is stored alike."""
    scheme = get_scheme(name)
    bits, inputs = scheme.args.weights.num_bits, input_bits(scheme.args)
    alike = min(
        (one for one in all_schemes() if one.format is scheme.format),
        key=lambda one: (abs(input_bits(one.args) - inputs), abs(one.args.weights.num_bits - bits)),
    )
    section = find_section(alike.name)
    assert section is not None
    facts = {**dict(list(scheme_facts(scheme).items())[1:]), **_of_scheme(name)}
    return Entry(
        name=name, title=section.title, kind="scheme", page=section.page, facts=facts, text=section.text
    )


def facts_of(section: Section, name: str) -> tuple[str, Mapping[str, str]]:
    """(kind, facts) of what `name` names in its section: a row of a table, or no facts."""
    if section.depth == 1:
        return "page", {}
    if section.text.startswith(FINDING):
        return ("check" if section.page == "check" else "finding"), {}
    for row in CATALOGS[section.page]() if section.page in TABLES else ():
        title, *_ = row.values()
        if fold(title) == fold(name):
            facts = dict(list(row.items())[1:])
            more = _of_scheme(title) if section.page == "schemes" else {}
            return TABLES[section.page], {**facts, **more}
    return "topic", {}


def _of_scheme(name: str) -> Mapping[str, str]:
    """Tensors, shapes and source of a scheme, as the docstrings of its format say them."""
    storage = get_scheme(name).format
    source = _SOURCE.search((sys.modules[type(storage).__module__].__doc__ or "").strip())
    return {
        "stored as": _line(getdoc(storage.parameters)),
        "shapes": _line(getdoc(storage.unsupported_shape)),
        "source": _line(source[1] if source else ""),
    }


def _line(doc: str | None) -> str:
    """The first paragraph of a docstring in one line."""
    return " ".join((doc or "").partition("\n\n")[0].split())
