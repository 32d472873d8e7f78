"""A task's YAML file read without running anything: its includes merged, its paths made absolute."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from vexport.errors import InputError, require_working_disk
from vexport.outputs.separate import resolved
from vexport.scenario.reading import require_bounded

Config = dict[str, object]
# Bytes of a task's file, and files that include each other; lm-eval's own have 100 kB and three levels.
LARGEST, MOST_LEVELS = 1 << 22, 50


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
    own = resolved(path)
    if own in above:
        raise InputError(str(path), got="an include of itself", need="no cycle", fix="remove the include")
    if len(above) > MOST_LEVELS:
        got, need = "more includes inside includes", f"at most {MOST_LEVELS} levels"
        raise InputError(str(path), got=got, need=need, fix="put them into fewer files")
    if own not in read:
        config = parse_task(path, trust)
        includes = config.pop("include", [])
        merged: Config = {}
        for include in includes if isinstance(includes, list) else [includes]:
            merged |= _read(path.parent / str(include), trust, (*above, own), read)
        read[own] = merged | with_absolute_paths(config, own.parent)
    return read[own]


def parse_task(path: Path, trust: bool) -> Config:
    """The file's own keys; InputError where it is no YAML mapping, or has `!function` without trust."""
    try:
        loader = (_TrustingLoader if trust else _Loader)(_content(path))
        loader.name = str(path)
        node = loader.get_single_node()
        if node is not None:
            require_bounded(node)
        config = None if node is None else loader.construct_document(node)
    except FileNotFoundError:
        raise InputError(str(path), got="no such file", need="a task's YAML", fix="check the path") from None
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


def _content(path: Path) -> bytes:
    """The bytes of a file; InputError of what is none, or too large: an include may name anything."""
    if path.exists() and not path.is_file():
        raise InputError(str(path), got="no file", need="a task's YAML", fix="check the path")
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        need = f"a task's YAML of at most {LARGEST >> 20} MB"
        raise InputError(str(path), got="a larger file", need=need, fix="check the path")
    return content


def remedy(got: str) -> str:
    """What to do about a file that cannot be taken."""
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
