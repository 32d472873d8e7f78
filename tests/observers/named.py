"""Create observers with llm-compressor's methods by name."""

from collections.abc import Mapping

from vexport.observers import Observer, ObserverArgs, OptionValue


def load_observer(
    name: str, base_name: str, args: ObserverArgs, keywords: Mapping[str, OptionValue] | None = None
) -> Observer:
    """Return a new observer of a built-in name."""
    return Observer.get_value_from_registry(name).create(base_name, args, keywords or {})
