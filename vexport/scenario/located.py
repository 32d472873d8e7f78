"""Errors that a validator of a section finds itself, each at its key."""

from pydantic import JsonValue, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

Problem = tuple[tuple[str, ...], JsonValue, str, str]
"""Place, value, what is needed, what to do."""


def located_errors(problems: list[Problem]) -> ValidationError:
    """Several errors of one model, each with its where; pydantic adds them to its own."""
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
