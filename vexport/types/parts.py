"""Work on one checkpoint shared out to processes that need not know of each other."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Part:
    """One of `of` parts, `number` from 1."""

    of: int
    number: int

    def __str__(self) -> str:
        return f"part {self.number} of {self.of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPart:
    """What one part of a quantization wrote: the names of its files of weights in `folder`, their bytes."""

    number: int
    of: int
    folder: str
    files: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """A checkpoint that was put together from its parts."""

    checkpoint: str
    parts: int
    files: int
    num_bytes: int
