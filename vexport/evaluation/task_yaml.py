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
from vexport.outputs.separate import resolved

Config = dict[str, object]
_INDEXED = re.compile(
    rb"^[ \t-]*(?:task|group|tag)[ \t]*:[ \t]*[\"']?([\w.+-]+)|^[ \t]*-[ \t]*[\"']?([\w.+-]+)", re.M
)
_INCLUDED = re.compile(rb"([\w./-]+[.]ya?ml)\b")


@dataclass(frozen=True, slots=True)
class _Function:
    """A `!function module.name` tag: Python that lm-eval would import from a file in `folder`, if there."""

    name: str
    folder: Path

    @property
    def module(self) -> Path:
        return self.folder / f"{self.name.rpartition('.')[0]}.py"


def read_task(path: Path, trust: bool, above: tuple[Path, ...]) -> Config:
    """The file's keys over those of the files it includes, with paths made absolute."""
    return _read(path, trust, above, {})


def _read(path: Path, trust: bool, above: tuple[Path, ...], read: dict[Path, Config]) -> Config:
    """Each file is `read` once, however many files include it."""
    file = resolved(path)
    if file in above:
        raise InputError(str(path), got="an include of itself", need="no cycle", fix="remove the include")
    if file not in read:
        config = parse_task(path, trust)
        includes = config.pop("include", [])
        merged: Config = {}
        for include in includes if isinstance(includes, list) else [includes]:
            merged |= _read(path.parent / str(include), trust, (*above, file), read)
        read[file] = merged | with_absolute_paths(config, file.parent)
    return read[file]


def parse_task(path: Path, trust: bool) -> Config:
    """The file's own keys; InputError where it is no YAML mapping, or has `!function` without trust."""
    if not path.is_file():
        raise InputError(str(path), got="no such file", need="a task's YAML", fix="check the path")
    try:
        loader = (_TrustingLoader if trust else _Loader)(path.read_bytes())
        loader.name = str(path)
        config = loader.get_single_data()
    except OSError as error:
        require_working_disk(error, path)
        raise InputError(str(path), got=str(error), need="a task's YAML", fix="check the path") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        got = error.problem or "broken YAML"
        raise InputError(f"{path}:{line}", got=got, need="a task's YAML", fix=remedy(got)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        got = f"broken YAML ({error})"
        raise InputError(str(path), got=got, need="a task's YAML", fix="fix the file") from None
    if not isinstance(config, dict):
        got = f"a {type(config).__name__}"
        raise InputError(str(path), got=got, need="a mapping of a task's keys", fix="fix the file")
    return {str(key): value for key, value in config.items()}


def remedy(got: str) -> str:
    """Return what to do about a file that cannot be taken."""
    return "add --trust-remote-code if you trust the file" if "!function" in got else "fix the file"


class _Loader(yaml.SafeLoader):
    """YAML without Python; `!function` is refused."""


class _TrustingLoader(yaml.SafeLoader):
    """YAML that keeps `!function` for lm-eval."""


class TaskDumper(yaml.SafeDumper):
    """Writes `!function` back."""


def _refuse(loader: yaml.SafeLoader, node: yaml.Node) -> None:
    problem = f"!function {node.value}, Python that would be run"
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _keep(loader: yaml.SafeLoader, node: yaml.Node) -> _Function:
    return _Function(str(node.value), Path(loader.name).parent)


_Loader.add_constructor("!function", _refuse)
_TrustingLoader.add_constructor("!function", _keep)
TaskDumper.add_representer(_Function, lambda dumper, tag: dumper.represent_scalar("!function", tag.name))


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


def named_modules(value: object) -> Iterator[Path]:
    """The Python files that the `!function` tags name, as far as they lie next to their YAML."""
    if isinstance(value, _Function):
        yield from (value.module,) if value.module.is_file() else ()
    elif isinstance(value, (Mapping, list)):
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from named_modules(member)


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
    defined = {file: {key.decode() for key, _ in _INDEXED.findall(text)} for file, text in texts.items()}
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
    return {(key or other).decode() for key, other in _INDEXED.findall(text)}


def _included(text: bytes) -> set[str]:
    """The names of the files that a YAML file includes."""
    return {Path(name.decode()).name for name in _INCLUDED.findall(text)}
