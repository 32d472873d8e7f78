"""Types of fields for names of models and paths. A scenario and `vexport.api` parse them once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from vexport.names import ModelRef, SourceRef, parse_model, parse_source, user_text


@dataclass(frozen=True, slots=True)
class _Parsed:
    """Parse text to a reference, and write the reference as its text to JSON."""

    parse: Callable[[str], ModelRef]

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        text = core_schema.str_schema(min_length=1)
        return core_schema.no_info_wrap_validator_function(
            self._validate,
            text,
            serialization=core_schema.plain_serializer_function_ser_schema(str, return_schema=text),
        )

    def _validate(self, value: object, parse_text: Callable[[object], str]) -> ModelRef:
        return value if isinstance(value, ModelRef) else self.parse(parse_text(value))


SourceSetting = Annotated[SourceRef, _Parsed(parse_source)]
ModelSetting = Annotated[ModelRef, _Parsed(parse_model)]
# Text that may be a path, with the home folder in place of `~`.
UserText = Annotated[str, AfterValidator(user_text)]
