"""How a model of the hub is written: ORG/NAME, or ORG/NAME@REVISION."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

# huggingface_hub/utils/_validators.py, with a git branch, tag or commit after the @.
_NAME = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w.][\w./-]*))?")
# <cache>/models--ORG--NAME/snapshots/COMMIT, as huggingface_hub lays its cache out.
_SNAPSHOT = re.compile(r"models--(?P<id>.+)/snapshots/(?P<commit>[0-9a-f]{40})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model of the hub; `revision` is a branch, tag or commit, None for the default branch."""

    id: str
    revision: str | None = None

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The hub's name in `name`; None where it is written otherwise. Says nothing about local folders."""
        match = _NAME.fullmatch(name)
        return cls(id=match["id"], revision=match["revision"]) if match else None

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id


def pinned_name(root: Path) -> str | None:
    """ORG/NAME@COMMIT of a folder in the hub's cache; None of every other folder."""
    match = _SNAPSHOT.search(str(root))
    return f"{match['id'].replace('--', '/', 1)}@{match['commit']}" if match else None
