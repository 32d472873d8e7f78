"""Messages for values that pydantic refuses: place, value and requirement in vexport's words."""

from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from tests.texts import assert_contains
from vexport.errors.validation import validation_problems


class Method(BaseModel):
    """A section that is an alternative to a name."""

    model_config = ConfigDict(extra="forbid")

    name: str
    strength: Annotated[float, Ge(0), Le(1)] = 0.5


class Settings(BaseModel):
    """One key for each kind of value."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    required: int = 1
    count: Annotated[int, Gt(0)] = 1
    share: float | None = None
    size: int | Literal["auto"] = "auto"
    limit: int | float | None = None
    names: Annotated[tuple[str, ...], MinLen(2)] = ("a", "b")
    choice: Literal["keep", "refuse"] = "keep"
    flag: bool = True
    text: Annotated[str, MinLen(1)] = "a"
    section: Method | str = "a"
    free: dict[str, bool | int | float | str | list[int]] = {}


@pytest.mark.parametrize(
    ("content", "place", "found", "need"),
    [
        ({"count": 0}, "count", "0", "a number above 0"),
        ({"count": 1.5}, "count", "1.5", "a whole number"),
        ({"share": "many"}, "share", "'many'", "a number"),
        ({"share": float("nan")}, "share", "nan", "a finite number"),
        ({"size": "x"}, "size", "'x'", "a whole number or auto"),
        ({"limit": "x"}, "limit", "'x'", "a number"),
        ({"names": ["a"]}, "names", "['a']", "a list of at least 2 values"),
        ({"names": "a"}, "names", "'a'", "a list"),
        ({"names": ["a", 3]}, "names.1", "3", "text"),
        ({"choice": "kep"}, "choice", "'kep'", "keep or refuse (did you mean keep?)"),
        ({"flag": "perhaps"}, "flag", "'perhaps'", "true or false"),
        ({"text": ""}, "text", "''", "text, which must not be empty"),
        ({"section": {"name": "a", "strength": 3}}, "section.strength", "3", "at most 1"),
        ({"section": 3}, "section", "3", "a mapping of keys to values or text"),
        ({"free": {"a": {"b": 1}}}, "free.a", "the keys b", "true or false, a number"),
        (3, "", "3", "a mapping of keys to values"),
        (None, "", "nothing", "a mapping of keys to values"),
    ],
)
def test_requirement(content: JsonValue, place: str, found: str, need: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(content)
    (problem,) = validation_problems(caught.value)
    assert (problem.place, problem.found) == (place, found)
    assert need in problem.need


def test_each_place_is_named_once() -> None:
    content = {"count": -1, "size": "x", "section": {"strength": 2}, "text": ""}
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(content)
    places = [problem.place for problem in validation_problems(caught.value)]
    assert places == ["count", "size", "text", "section.name", "section.strength"]


def test_missing_key() -> None:
    with pytest.raises(ValidationError) as caught:
        Method.model_validate({})
    (problem,) = validation_problems(caught.value)
    error = str(problem.at("file: name"))
    assert error.startswith("file: name: ")
    assert_contains(error, "missing", "add")
