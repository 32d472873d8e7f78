"""Model classes and quantization methods of each vLLM version.

There is a file for each version in `generated/versions/` (scripts/generate_versions.py).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from pydantic import TypeAdapter

from vexport.architectures import Architecture, EmbeddingLookup, architecture_table
from vexport.architectures.tables import VERSIONS
from vexport.version import Version, short_version
from vexport.words import listed


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFacts:
    """Facts about a model class in a version of vLLM.

    `fused` is its packed_modules_mapping. `embedding` is how vLLM finds the config group of the
    class's token embeddings.
    """

    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    embedding: EmbeddingLookup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """Facts about a version of vLLM, read from its wheel.

    `schemes` maps the class that a linear layer usually gets to the classes that vLLM selects, by
    the first compute capability of each. A class is "" if vLLM refuses the scheme there.
    `asymmetric_widths` are the bits of packed integers with zero points. `absent` are the model
    classes that only `PINNED` has, and `added` the classes that only this version has. `classes`
    are the classes of both versions that differ. `agreeing_methods` are the quantization methods
    with the same rules in both versions: the loaders of both versions accept and refuse the same
    test checkpoints (scripts/version_agreement.py).
    """

    vllm: str
    compressed_tensors: str
    schemes: Mapping[str, Mapping[int, str]]
    asymmetric_widths: tuple[int, ...]
    methods: tuple[str, ...]
    absent: frozenset[str]
    added: Mapping[str, ClassFacts]
    classes: Mapping[str, ClassFacts]
    agreeing_methods: tuple[str, ...] = ()

    def selected_class(self, usual: str, sm: int) -> str | None:
        """Return the class that vLLM selects on a GPU for a layer that usually gets `usual`.

        The class is "" if vLLM refuses the scheme on this GPU. Return None if there is no record of
        `usual`, as for quantization methods other than compressed-tensors.
        """
        selected = self.schemes.get(usual)
        if selected is None:
            return None
        first = max((first for first in selected if first <= sm), default=None)
        return "" if first is None else selected[first]

    def has_rules_for(self, method: str) -> bool:
        """Return True if vexport's rules for a quantization method apply to this version."""
        return method in self.agreeing_methods or self.vllm == architecture_table().vllm


def with_facts(pinned: Architecture, changed: ClassFacts) -> Architecture:
    """Return a class of `PINNED`, changed to the fused layers of another version."""
    kept = {name: parts for name, parts in pinned.fused.items() if name not in pinned.resolved}
    merged = {name: tuple(parts) for name, parts in changed.fused.items() if len(parts) > 1}
    return replace(
        pinned, fused={**kept, **merged}, resolved=tuple(changed.fused), embedding=changed.embedding
    )


@cache
def known_versions() -> tuple[Version, ...]:
    """Return every version that has a file, oldest first."""
    names = (entry.name for entry in VERSIONS.iterdir() if entry.name.endswith(".json"))
    return tuple(sorted(_version(name.removesuffix(".json")) for name in names))


def nearest_version(version: Version) -> Version:
    """Return the known version with the rules for a version.

    This is the version itself, or the nearest known version before it, or else the oldest
    known version.
    """
    known = known_versions()
    return max((each for each in known if each <= version), default=known[0])


def parse_versions(value: str | Sequence[str]) -> tuple[Version, ...]:
    """Return the known versions of a range or a list: `0.30..0.33`, or `0.31,0.33`.

    A range has the known versions between both ends, oldest first. Raises ValueError for a version
    that is not known, and for fewer than two versions.
    """
    parts = value.split(",") if isinstance(value, str) else value
    found: list[Version] = []
    for part in parts:
        low, dots, high = part.strip().partition("..")
        oldest, newest = _numbers(low), _numbers(high if dots else low)
        within = [each for each in known_versions() if _is_between(each, oldest, newest)]
        if not within:
            raise ValueError(f"{part.strip()!r} is not a known version{_known()}")
        found += within
    if len({*found}) < 2:
        raise ValueError(f"{value!r} is a single version; name two or more{_known()}")
    return tuple(sorted({*found}))


def _is_between(version: Version, oldest: tuple[int, ...], newest: tuple[int, ...]) -> bool:
    full = _numbers(facts_of(version).vllm)
    return full[: len(oldest)] >= oldest and full[: len(newest)] <= newest


def _numbers(text: str) -> tuple[int, ...]:
    if re.fullmatch(r"v?[0-9]{1,9}(\.[0-9]{1,9}){1,2}", text.strip()) is None:
        raise ValueError(f"{text!r} is not a version such as 0.30{_known()}")
    return tuple(int(number) for number in text.strip().removeprefix("v").split("."))


def _known() -> str:
    names = [short_version(each) for each in known_versions()]
    return f"; write {names[0]}..{names[-1]}, or a list of {listed(names, 'and')}."


@cache
def facts_of(version: Version) -> VersionFacts:
    """Return the facts of a known version."""
    text = VERSIONS.joinpath(f"{short_version(version)}.json").read_text(encoding="utf-8")
    return TypeAdapter(VersionFacts).validate_json(text)


def _version(name: str) -> Version:
    major, _, minor = name.partition(".")
    return int(major), int(minor)
