"""Reads the YAML of tasks without importing lm-eval or running anything: a person's own file, and the names
in lm-eval's folders. Of a file its includes are merged and its paths made absolute.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import yaml

from vexport.errors import InputError, require_working_disk
from vexport.outputs.replaceable import resolved

Config = dict[str, object]
_INDEXED = re.compile(
    rb"^[ \t-]*(?:task|group|tag)[ \t]*:[ \t]*[\"']?([\w.+-]+)|^[ \t]*-[ \t]*[\"']?([\w.+-]+)", re.M
)
TRUST = "add --trust-remote-code if you trust the file"
_INCLUDED = re.compile(rb"([\w./-]+[.]ya?ml)\b")


@dataclass(frozen=True, slots=True)
class _Function:
    """A `!function module.name` tag: Python that lm-eval would import from a file in `folder`, if there."""

    name: str
    folder: Path
    line: int


class _Loader(yaml.SafeLoader):
    """YAML without Python; a `!function` tag is kept as a _Function."""


class TaskDumper(yaml.SafeDumper):
    """Writes `!function` back."""


def _function(loader: yaml.SafeLoader, node: yaml.Node) -> _Function:
    return _Function(str(node.value), Path(loader.name).parent, node.start_mark.line + 1)


_Loader.add_constructor("!function", _function)
TaskDumper.add_representer(_Function, lambda dumper, tag: dumper.represent_scalar("!function", tag.name))


def read_task(
    path: Path, trust: bool, above: tuple[Path, ...] = (), read: dict[Path, Config] | None = None
) -> Config:
    """The file's keys over those of the files it includes, with paths made absolute.

    Files `above` include this one. Each file is `read` once, however many files include it.
    """
    file, read = resolved(path), {} if read is None else read
    if file in above:
        raise InputError(str(path), got="an include of itself", need="no cycle", fix="remove the include")
    if file not in read:
        config = parse_task(path, trust)
        includes = config.pop("include", [])
        merged: Config = {}
        for include in includes if isinstance(includes, list) else [includes]:
            merged |= read_task(path.parent / str(include), trust, (*above, file), read)
        read[file] = merged | with_absolute_paths(config, file.parent)
    return read[file]


def parse_task(path: Path, trust: bool) -> Config:
    """The file's own keys; InputError where it is no YAML mapping, or has `!function` without trust."""
    where, need, fix = str(path), "a task's YAML", "fix the file"
    if not path.is_file():
        raise InputError(where, got="no such file", need=need, fix="check the path")
    try:
        loader = _Loader(path.read_bytes())
        loader.name = str(path)
        config = loader.get_single_data()
        functions = () if trust else tuple(_functions(config))
    except OSError as error:
        require_working_disk(error, path)
        raise InputError(where, got=str(error), need=need, fix="check the path") from None
    except yaml.MarkedYAMLError as error:
        where = f"{path}:{error.problem_mark.line + 1 if error.problem_mark else 1}"
        raise InputError(where, got=error.problem or "broken YAML", need=need, fix=fix) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(where, got=f"broken YAML ({error})", need=need, fix=fix) from None
    for function in functions:
        got = f"!function {function.name}, Python that would be run"
        raise InputError(f"{path}:{function.line}", got=got, need=need, fix=TRUST)
    if not isinstance(config, dict):
        raise InputError(where, got=f"a {type(config).__name__}", need="a mapping of a task's keys", fix=fix)
    return {str(key): value for key, value in config.items()}


def with_absolute_paths(config: Config, base: Path) -> Config:
    """Make `data_files`, `data_dir` and a dataset folder absolute; URLs stay."""

    def absolute(value: object) -> object:
        if isinstance(value, dict):
            return {key: absolute(member) for key, member in value.items()}
        if isinstance(value, list):
            return [absolute(member) for member in value]
        return str(base / value) if isinstance(value, str) and "://" not in value else value

    absolute_config = dict(config)
    if isinstance(kwargs := config.get("dataset_kwargs"), dict):
        local = {key: absolute(kwargs[key]) for key in ("data_files", "data_dir") if key in kwargs}
        absolute_config["dataset_kwargs"] = kwargs | local
    dataset = config.get("dataset_path")
    if isinstance(dataset, str) and dataset.startswith(("./", "../")):
        absolute_config["dataset_path"] = str((base / dataset).resolve())
    return absolute_config


def leaves(value: object) -> Iterator[object]:
    """The values in nested mappings and lists."""
    if isinstance(value, (Mapping, list)):
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(member)
    else:
        yield value


def _functions(value: object) -> Iterator[_Function]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, _Function))


def named_modules(config: Config) -> Iterator[Path]:
    """The Python files that the `!function` tags name, as far as they lie next to their YAML."""
    files = (tag.folder / f"{tag.name.rpartition('.')[0]}.py" for tag in _functions(config))
    return (file for file in files if file.is_file())


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
    texts = {
        file: file.read_bytes() for folder in folders for file in folder.rglob("*.yaml") if file.is_file()
    }
    defined = {file: {key.decode() for key, _ in _INDEXED.findall(text)} for file, text in texts.items()}
    listed = {file: _indexed(text) for file, text in texts.items()}
    pending = {file for file in texts if name in defined[file]}
    pending = pending or {file for file in texts if name in listed[file]}  # a tag in a list
    reached = set[Path]()
    while pending:
        reached |= pending
        included = {Path(path.decode()).name for file in pending for path in _INCLUDED.findall(texts[file])}
        words = included.union(*(listed[file] for file in pending))
        pending = {file for file in texts if words & {*defined[file], file.name}} - reached
    for file in sorted(reached):
        if b"!function" in texts[file]:
            got, need = "!function, Python that would be run", "a task without Python"
            raise InputError(str(file), got=got, need=need, fix=TRUST)


def _indexed(text: bytes) -> set[str]:
    """Tasks, groups and tags that a YAML file defines or lists."""
    return {(key or other).decode() for key, other in _INDEXED.findall(text)}
