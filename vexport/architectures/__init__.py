"""Which linear layers vLLM fuses, from its own model classes (`scripts/generate_architectures.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from pydantic import TypeAdapter

from vexport.errors import InputError

# fused module name -> names of the layers that it is made of, in vLLM's order
FusedModules = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureTable:
    """The text-generation classes of one vLLM version and what each fuses."""

    vllm: str
    architectures: Mapping[str, FusedModules]


@cache
def architecture_table() -> ArchitectureTable:
    """The generated table."""
    text = files("vexport.architectures").joinpath("vllm.json").read_text(encoding="utf-8")
    return TypeAdapter(ArchitectureTable).validate_json(text)


def fused_modules(architecture: str) -> FusedModules:
    """The fused modules of a model class; InputError where this vLLM does not know the class."""
    table = architecture_table()
    if architecture in table.architectures:
        return table.architectures[architecture]
    raise InputError(
        f"architecture {architecture}",
        got="a model class that is not in the table",
        need=f"a text-generation class of vLLM {table.vllm}",
        fix="see `vexport list architectures`",
    )
