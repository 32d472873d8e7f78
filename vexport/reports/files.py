"""What a run directory holds besides the page: links that stay right where the folder is moved as a whole."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

# In the order of a reader's interest: what a run writes (vexport.run, vexport.run.serving), and what it is.
_FILES = (
    ("checkpoint", "the quantized checkpoint"),
    ("scenario.yaml", "the scenario that was run"),
    ("report.json", "everything on this page, for programs"),
    ("report.md", "the summary in Markdown"),
    ("junit.xml", "test cases for CI"),
    ("model-card.md", "README.md for the checkpoint"),
    ("plan.json", "what was to be done to every tensor"),
    ("check.json", "findings of the check"),
    ("dry-load.json", "loads on other devices"),
    ("load.json", "the load in vLLM"),
    ("eval/baseline/vllm.log", "vLLM's log with the baseline"),
    ("eval/candidate/vllm.log", "vLLM's log with the quantized model"),
    ("eval/baseline", "lm-eval's results and samples of the baseline"),
    ("eval/candidate", "lm-eval's results and samples of the quantized model"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A file or folder of a run directory, as a link relative to the page."""

    name: str
    href: str
    about: str


def _relative(path: Path, start: Path) -> str:
    """A relative link; a colon in its first part is no scheme, since that part is escaped."""
    return quote(os.path.relpath(path, start).replace(os.sep, "/"))


def run_files(folder: Path, start: Path) -> Sequence[RunFile]:
    """Those that exist, for a page in the folder `start`."""
    found = []
    for name, about in _FILES:
        path = folder / name
        if path.exists():
            shown = f"{name}/" if path.is_dir() else name
            href = _relative(path, start) + ("/" if path.is_dir() else "")
            found.append(RunFile(name=shown, href=href, about=about))
    return tuple(found)
