"""What could change a score besides the weights: named, so that a change of it can be named."""

from collections.abc import Mapping

Fingerprint = Mapping[str, str]
"""Name of a circumstance (`vllm`, `dtype`, `task hash of gsm8k`) -> its value in words."""


def changes(old: Fingerprint, new: Fingerprint, *, where: tuple[str, str]) -> tuple[str, ...]:
    """A sentence for each circumstance that both sides tell and that differs; `where` names the sides."""
    return tuple(
        f"{name}: {old[name]} {where[0]}, {new[name]} {where[1]}"
        for name in old
        if name in new and old[name] != new[name]
    )
