"""Convert pydantic's validation errors to problems with a place and a requirement.

For a union, pydantic reports a separate error for each alternative, with the alternative's name in
the place: `limit.int` and `limit.float`. This module merges them: `limit` needs a number.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vexport.errors import InputError, nearest_hint
from vexport.rules import setting as rules
from vexport.words import clip, shown

MOST_CHARACTERS = 300
MISSING = "missing"
UNKNOWN_KEY = "extra_forbidden"
# Maps pydantic's error types to descriptions of a valid value.
_KINDS: Mapping[str, str] = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "callable_type": "a function",
    "dataclass_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number with fewer digits",
    "int_type": "a whole number",
    "list_type": "a list",
    "mapping_type": "a mapping of keys to values",
    "missing": "a value",
    "model_attributes_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "none_required": "null",
    "path_type": "a path",
    "set_type": "a list",
    "string_type": "text",
    "string_unicode": "text in Unicode",
    "tuple_type": "a list",
}
# pydantic's error types for exceptions that were raised in a validator of vexport or vLLM.
_RAISED_ERROR_TYPES = frozenset({"value_error", "assertion_error", "setting"})
# Names of alternatives in places: `int`, `literal['auto']`, `dict[str,any]`, `Refit`.
_ALTERNATIVE = re.compile(
    r"none|bool|int|float|str|bytes|list|tuple|dict|set|path|[A-Z]\w*|[\w-]+\[.*\]", re.DOTALL
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationProblem:
    """A value that is not valid: its keys, the value itself, what is needed, and the remedy.

    `kind` is pydantic's type of error.
    """

    keys: tuple[str, ...]
    value: object
    need: str
    fix: str
    kind: str

    @property
    def place(self) -> str:
        """The path of the key, such as `evaluate.limit`, or "" for the whole input."""
        return clip(".".join(self.keys), MOST_CHARACTERS)

    @property
    def found(self) -> str:
        """The value as messages show it."""
        if self.value is None or self.value == ():
            return "nothing"
        if isinstance(self.value, dict):
            return clip(f"the keys {', '.join(map(str, self.value))}", MOST_CHARACTERS)
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return shown(value, MOST_CHARACTERS)

    def at(self, where: str, fix: str = "") -> InputError:
        """Return the problem as an InputError at `where`. `fix` replaces the default remedy."""
        if self.kind == MISSING:
            return InputError.of(rules.MISSING, where, do=fix or "add it")
        do = fix or self.fix
        return InputError.of(rules.VALUE, where, found=self.found, need=self.need, do=do)


def validation_problems(error: ValidationError) -> list[ValidationProblem]:
    """Return a problem for each invalid value, in pydantic's order.

    If a key inside a value is wrong, errors on the value itself are left out.
    """
    details = error.errors()
    outer = {detail["loc"][:end] for detail in details for end in range(len(detail["loc"]))}
    problems = [_problem(detail) for detail in details if detail["loc"] not in outer]
    return _merged(problems)


def requirement(detail: ErrorDetails) -> str:
    """Return what a valid value would be: `a number above 0`, `text`, `fp8 or fp8_per_head`."""
    kind = detail["type"]
    if kind in _KINDS:
        return _KINDS[kind]
    if kind in ("literal_error", "enum"):
        return _one_of(str(detail["ctx"]["expected"]), detail["input"])
    return _bound(detail) or _message(detail["msg"])


def _one_of(expected: str, value: object) -> str:
    """Return pydantic's list of choices without quotes, and the choice nearest to the value."""
    choices = re.findall(r"'([^']*)'", expected)
    hint = nearest_hint(value, choices) if isinstance(value, str) and len(choices) > 1 else ""
    return expected.replace("'", "") + hint


def _bound(detail: ErrorDetails) -> str:
    """Return the requirement of an error about a bound or a length, or "" for other errors."""
    kind = detail["type"]
    context = detail.get("ctx", {})
    if kind == "greater_than":
        return f"a number above {_number(context['gt'])}"
    if kind == "greater_than_equal":
        return f"a number of at least {_number(context['ge'])}"
    if kind == "less_than":
        return f"a number below {_number(context['lt'])}"
    if kind == "less_than_equal":
        return f"a number of at most {_number(context['le'])}"
    if kind == "too_short":
        return f"a list of at least {_counted(context['min_length'], 'value')}"
    if kind == "too_long":
        return f"a list of at most {_counted(context['max_length'], 'value')}"
    if kind == "string_too_short":
        least = context["min_length"]
        return "text, which must not be empty" if least == 1 else f"at least {least} characters"
    if kind == "string_too_long":
        return f"at most {_counted(context['max_length'], 'character')}"
    if kind == "string_pattern_mismatch":
        return f"text that matches the regular expression {context['pattern']}"
    return ""


def _number(bound: float) -> str:
    """Return a bound without decimals that are zero: 1.0 becomes 1."""
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _message(text: str) -> str:
    """Return a message of pydantic without its generic prefix, such as `Value error, `."""
    for beginning in ("Value error, ", "Assertion failed, ", "Input should be "):
        text = text.removeprefix(beginning)
    return text


def _problem(detail: ErrorDetails) -> ValidationProblem:
    return ValidationProblem(
        keys=tuple(str(part) for part in detail["loc"]),
        value=detail["input"],
        need=requirement(detail),
        fix=str(detail.get("ctx", {}).get("fix", "correct the value")),
        kind=detail["type"],
    )


def _merged(problems: Sequence[ValidationProblem]) -> list[ValidationProblem]:
    """Return the problems, with a single problem for all alternatives of a union."""
    by_key: dict[str, list[ValidationProblem]] = {}
    merged: list[ValidationProblem] = []
    for problem in problems:
        if problem.keys:
            below = replace(problem, keys=problem.keys[1:])
            by_key.setdefault(problem.keys[0], []).append(below)
        else:
            merged.append(problem)
    if len(by_key) > 1 and all(map(_ALTERNATIVE.fullmatch, by_key)):
        return [*merged, *_nearest_alternative(list(by_key.values()))]
    for key, inner in by_key.items():
        merged += [replace(each, keys=(key, *each.keys)) for each in _merged(inner)]
    return merged


def _nearest_alternative(
    alternatives: Sequence[Sequence[ValidationProblem]],
) -> list[ValidationProblem]:
    """Return the problems of the alternative that the user has probably meant.

    If the value has the type of an alternative, all errors of this alternative are at keys inside
    the value. The first such alternative is chosen. If there is none, the first error that a
    validator of vexport or vLLM raised is returned. Otherwise no type fits, and a single problem
    names all valid types.
    """
    for problems in alternatives:
        if all(problem.keys for problem in problems):
            return _merged(problems)
    flat = [problem for problems in alternatives for problem in problems if not problem.keys]
    raised = [problem for problem in flat if problem.kind in _RAISED_ERROR_TYPES]
    if raised:
        return raised[:1]
    needs = list(dict.fromkeys(problem.need for problem in flat))
    if "a number" in needs and "a whole number" in needs:
        needs.remove("a whole number")
    *first, last = needs
    need = f"{', '.join(first)} or {last}" if first else last
    return [replace(flat[0], need=need)]
