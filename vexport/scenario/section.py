"""What all sections of a scenario are."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from vexport.errors import nearest
from vexport.formats.schemes import fold_name


class Section(BaseModel):
    """Keys that are all known, values that stay."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def known_name(value: str, known: Sequence[str]) -> str:
    """The known name that `value` spells, in whatever case and with `-` or `_`; ValueError lists them all."""
    names = {fold_name(name): name for name in known}
    if fold_name(value) not in names:
        raise ValueError(f"one of {', '.join(known)}{nearest(value, known)}")
    return names[fold_name(value)]
