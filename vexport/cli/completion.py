"""What the shell offers after an option: names that vexport knows, found without torch or lm-eval."""

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click
from click.shell_completion import CompletionItem

_NAMED = re.compile(rb"^(?:task|group|tag):[ \t]*[\"']?([\w.+-]+)", re.MULTILINE)


def complete_scheme(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Schemes that begin so, in any case, with what they store."""
    from vexport.formats.schemes import all_schemes

    return [
        CompletionItem(scheme.name, help=scheme.format.name)
        for scheme in all_schemes()
        if scheme.name.lower().startswith(incomplete.lower())
    ]


def complete_observer(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Observers that begin so, with what they do."""
    from vexport.plugins import OBSERVERS as PLUGINS
    from vexport.plugins import plugins
    from vexport.types.observer_names import OBSERVERS

    return [
        CompletionItem(name, help=observer.summary)
        for name, observer in OBSERVERS.items()
        if name.startswith(incomplete)
    ] + [CompletionItem(name) for name in plugins(PLUGINS) if name.startswith(incomplete)]


def complete_topic(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Names that `vexport explain` knows and that begin so, in any case, with their page."""
    from vexport.explain.pages import all_sections

    return [
        CompletionItem(name, help=section.page)
        for section in all_sections()
        for name in section.names
        if name.lower().startswith(incomplete.lower())
    ]


def complete_task(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """YAML files and folders that begin so, then lm-eval's tasks."""
    head, _, start = incomplete.rpartition("/")
    items = [
        CompletionItem(incomplete, type="file")
        for entry in _entries(Path(head or "."))
        if entry.name.startswith(start) and entry.suffix in (".yaml", ".yml")
    ][:1]
    return [*items, *(CompletionItem(name) for name in sorted(_tasks(incomplete)))]


def _tasks(start: str) -> set[str]:
    """Names of lm-eval's tasks and groups that begin so, from the files whose names do; nothing for ''."""
    package = find_spec("lm_eval")
    if not start or package is None or package.submodule_search_locations is None:
        return set()
    found: set[str] = set()
    for root in package.submodule_search_locations:
        for folder, _, files in os.walk(Path(root) / "tasks"):
            for file in files:
                if file.endswith(".yaml") and _plain(file).startswith(_plain(start)):
                    names = _NAMED.findall((Path(folder) / file).read_bytes())
                    found.update(name.decode() for name in names if name.decode().startswith(start))
    return found


def _plain(name: str) -> str:
    """A task's name as files spell it: `gsm8k-cot.yaml` has gsm8k_cot, `_mmlu.yaml` mmlu."""
    return name.lstrip("_").replace("-", "_")


def _entries(folder: Path) -> Iterator[Path]:
    yield from folder.iterdir() if folder.is_dir() else ()
