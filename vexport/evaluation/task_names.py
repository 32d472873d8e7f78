"""What lm-eval's folders and a person's own say about a task's name, without importing lm-eval."""

import difflib
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from vexport.errors import InputError
from vexport.evaluation.task_yaml import remedy

_INDEXED = re.compile(
    rb"^[ \t-]*(?:task|group|tag)[ \t]*:[ \t]*[\"']?([\w.+-]+)|^[ \t]*-[ \t]*[\"']?([\w.+-]+)", re.M
)
_INCLUDED = re.compile(rb"([\w./-]+[.]ya?ml)\b")


def require_known(name: str, include_paths: Sequence[Path]) -> None:
    """Look `name` up in the YAML files that lm-eval would index, without importing lm-eval.

    Where lm-eval is not installed next to vexport, the worker's lm-eval is left to judge.
    """
    package = find_spec("lm_eval")
    if package is None or package.submodule_search_locations is None:
        return
    roots = [*include_paths, *(Path(location) / "tasks" for location in package.submodule_search_locations)]
    names: set[str] = set()
    for file in (file for root in roots for file in root.rglob("*.yaml") if file.is_file()):
        names |= _indexed(file.read_bytes())
        if name in names:
            return
    close = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "list them with `lm-eval ls tasks`"
    raise InputError(f"task {name}", got="an unknown name", need="a task of lm-eval or a YAML file", fix=hint)


def require_no_python(name: str, folders: Sequence[Path]) -> None:
    """InputError where a task of these folders, or a file that it names, would run its own Python."""
    files = sorted(file for folder in folders for file in folder.rglob("*.yaml") if file.is_file())
    texts = {file: file.read_bytes() for file in files}
    defined = {file: {one.decode() for one, _ in _INDEXED.findall(text)} for file, text in texts.items()}
    pending = {file for file in texts if name in defined[file]}
    pending = pending or {file for file in texts if name in _indexed(texts[file])}  # a tag in a list
    reached = set[Path]()
    while pending:
        reached |= pending
        words = {word for file in pending for word in (*_indexed(texts[file]), *_included(texts[file]))}
        pending = {file for file in texts if words & {*defined[file], file.name}} - reached
    for file in sorted(reached):
        if b"!function" in texts[file]:
            got, need = "!function, Python that would be run", "a task without Python"
            raise InputError(str(file), got=got, need=need, fix=remedy(got))


def _indexed(text: bytes) -> set[str]:
    """Tasks, groups and tags that a YAML file defines or lists."""
    return {(one or other).decode() for one, other in _INDEXED.findall(text)}


def _included(text: bytes) -> set[str]:
    """The names of the files that a YAML file includes."""
    return {Path(name.decode()).name for name in _INCLUDED.findall(text)}
