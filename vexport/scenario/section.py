"""Base class of all sections of a scenario, and validation errors at a key."""

from collections.abc import Sequence

from pydantic import (
    BaseModel,
    ConfigDict,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from vexport.errors import nearest_hint
from vexport.formats.schemes import fold_name


class ScenarioSection(BaseModel):
    """A frozen model that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_boolean_as_number(cls, value: object, info: ValidationInfo) -> object:
        """Raise ValueError for a boolean instead of a number. Pydantic would convert true to 1."""
        values = value if isinstance(value, list | tuple) else [value]
        kind = str(cls.model_fields[info.field_name or ""].annotation)
        if any(isinstance(item, bool) for item in values) and "bool" not in kind:
            raise ValueError("a number or text, not true or false")
        return value


def known_name(value: str, known: Sequence[str]) -> str:
    """Return the known name that equals `value` if case, `-` and `_` are ignored.

    Raises ValueError with a list of all known names if there is no such name.
    """
    names = {fold_name(name): name for name in known}
    if fold_name(value) not in names:
        raise ValueError(f"one of {', '.join(known)}{nearest_hint(value, known)}")
    return names[fold_name(value)]


KeyProblem = tuple[tuple[str, ...], JsonValue, str, str]
"""A problem for `located_errors`: keys that lead to the value, value, `need` and `fix`."""


def located_error(key: str, value: JsonValue, need: str, fix: str) -> ValidationError:
    """Return the error at a key of a model."""
    return located_errors([((key,), value, need, fix)])


def located_errors(problems: list[KeyProblem]) -> ValidationError:
    """Return several errors of a model. Each place is relative to the model.

    If a validator raises the result, pydantic puts the model's place in front of the places.
    """
    return ValidationError.from_exception_data(
        "section",
        [
            InitErrorDetails(
                type=PydanticCustomError("setting", "{need}", {"need": need, "fix": fix}),
                loc=where,
                input=value,
            )
            for where, value, need, fix in problems
        ],
    )
