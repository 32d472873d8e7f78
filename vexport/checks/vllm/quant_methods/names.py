"""How vLLM tells by its name whether a layer is one of a list (`is_layer_skipped`, quantization/utils)."""

from collections.abc import Collection

EXPERTS = "experts"


def is_listed(name: str, listed: Collection[str]) -> bool:
    """By its whole name; experts where an entry with `experts` contains it."""
    if EXPERTS in name:
        return any(name in entry for entry in listed if EXPERTS in entry)
    return name in listed


def contains_listed(name: str, listed: Collection[str]) -> bool:
    """Where an entry is a part of the name."""
    return any(entry in name for entry in listed)
