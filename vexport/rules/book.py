"""A rule: its id, what it claims, and the templates of its sentences.

Code names a rule and passes facts: `Finding.at(config.ROPE_VALUE, where, key=key, value=value)`, or
`raise InputError.of(usage.NO_FOLDER, where)`. The rule makes the sentences.

A template is a format string with the names of facts:
- `{key}` is the fact as text, `{count:,}` a number with separators.
- `{value!r}` is the value as in Python, and `{value!j}` as in JSON. Both are shortened.
- `{count:# layer}` is a number with its noun: "1 layer" or "2 layers". An irregular plural follows
  a slash: `{count:# entry/entries}`.
- `{names:or}` and `{names:and}` list names: "a, b or c".
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Literal

from vexport.words import as_json, listed, plural, shown

Severity = Literal["error", "warning", "info"]
# What a rule claims about vLLM: it refuses the checkpoint, uses wrong values, or runs the layers in
# another precision or kernel than stored.
Claim = Literal["refused", "values", "precision"]
# How vLLM's loaders show a fault in a dry load: a refusal, or a kind of wrong copy.
LoaderFault = Literal["refused", "missing", "cast", "narrowed"]
# Begins the specification of a number with its noun.
_COUNTED = "# "
_LISTED = ("or", "and")


class _Words(Formatter):
    def convert_field(self, value: object, conversion: str | None) -> object:
        if conversion == "r":
            return shown(value)
        return as_json(value) if conversion == "j" else super().convert_field(value, conversion)

    def format_field(self, value: object, format_spec: str) -> str:
        if format_spec in _LISTED and isinstance(value, list | tuple):
            return listed([*map(str, value)], format_spec)
        if format_spec.startswith(_COUNTED) and isinstance(value, int):
            noun, _, nouns = format_spec.removeprefix(_COUNTED).partition("/")
            return plural(value, noun, nouns)
        return str(super().format_field(value, format_spec))


class _Outline(Formatter):
    """Write the names of facts in the place of facts: `{count:# layer}` as `COUNT layers`."""

    def get_value(self, key: object, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        return str(key).upper()

    def convert_field(self, value: object, conversion: str | None) -> object:
        return value

    def format_field(self, value: object, format_spec: str) -> str:
        if not format_spec.startswith(_COUNTED):
            return str(value)
        noun, _, nouns = format_spec.removeprefix(_COUNTED).partition("/")
        return f"{value} {nouns or f'{noun}s'}"


_WORDS = _Words()
_OUTLINE = _Outline()
# Matches the begin of a fact right behind a word or another fact, except for a number such as 0xFF.
_JOINED_FACT = re.compile(r"(?<=[A-Za-z}])(?<!0x)\{")


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that a checkpoint, an input or the environment must meet.

    `id` is the family and the name: `config/rope-value`. It is stable: users silence and look up
    rules by it. `got`, `need` and `do` are templates of what was found, what is needed and the
    remedy. If `need` is empty, `got` is a whole clause. If `got` is empty, `need` says everything.

    `claim` is what the rule claims about vLLM, or None for another problem, such as a file that
    cannot be read. `loader_faults` are the ways in which a dry load can show the fault. By default,
    a dry load shows a claim that vLLM refuses the checkpoint, and no other claim. It is empty if
    vLLM refuses the checkpoint after loading, or before, such as for want of a tokenizer.
    """

    id: str
    severity: Severity = "error"
    claim: Claim | None = None
    got: str = ""
    need: str = ""
    do: str = ""
    loader_faults: tuple[LoaderFault, ...] | None = None

    @property
    def family(self) -> str:
        """The part of the id before the slash: the name of a check, or the room of an input."""
        return self.id.partition("/")[0]

    @property
    def shown_by_loaders(self) -> tuple[LoaderFault, ...]:
        """The ways in which a dry load can show the fault."""
        if self.loader_faults is not None:
            return self.loader_faults
        is_refusal = self.claim == "refused" and self.severity == "error"
        return ("refused",) if is_refusal else ()

    @property
    def as_warning(self) -> "Rule":
        """This rule for a case in which the problem is only possible."""
        return replace(self, severity="warning")

    def sentences(self, facts: Mapping[str, object]) -> "Sentences":
        """Return the sentences with these facts.

        Raises KeyError if a template names a fact that is not there.
        """
        got, need, do = (_WORDS.vformat(text, (), facts) for text in (self.got, self.need, self.do))
        return Sentences(got=got, need=need, do=do)

    @property
    def outline(self) -> "Sentences":
        """The sentences with the names of the facts in capitals, apart from the words."""
        templates = (_JOINED_FACT.sub(" {", each) for each in (self.got, self.need, self.do))
        got, need, do = (_OUTLINE.vformat(each, (), {}) for each in templates)
        return Sentences(got=got, need=need, do=do)

    @property
    def facts(self) -> frozenset[str]:
        """The names of the facts in the templates."""
        templates = (self.got, self.need, self.do)
        names = (name for text in templates for _, name, _, _ in _WORDS.parse(text) if name)
        return frozenset(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentences:
    """What was found, what is needed and the remedy, in words."""

    got: str
    need: str
    do: str
