"""Options that a file of the current folder sets: `vexport.toml`, or [tool.vexport] in pyproject.toml."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from vexport.errors import InputError, nearest

FILE, PROJECT = "vexport.toml", "pyproject.toml"
# What runs code of others, or destroys, is asked for in the call itself.
NEVER = {"trust_remote_code", "vllm_python", "engine_args", "overwrite", "help", "version"}


def default_map(group: click.Group) -> dict[str, dict[str, object]]:
    """The options of each command by their parameters; InputError for a file that no command understands.

    A table is for the command of that name; what stands outside of tables is for every command that has it.
    """
    where, table = _table()
    if not table:
        return {}
    context = click.Context(group)
    commands = ((name, group.get_command(context, name)) for name in group.list_commands(context))
    options = {name: _options(command) for name, command in commands if command}
    shared = {key: value for key, value in table.items() if not isinstance(value, dict)}
    for name in table.keys() - shared.keys() - options.keys():
        fix = f"name a command{nearest(name, [*options])}"
        raise InputError(f"{where}: [{name}]", got="no command of vexport", need="one", fix=fix)
    for key in shared:
        known = [name for each in options.values() for name in each]
        if key not in known:
            raise _unknown(f"{where}: {key}", key, known)
    return {
        name: dict(_values(where, name, shared, table.get(name, {}), each)) for name, each in options.items()
    }


def _values(
    where: str, name: str, shared: Mapping[str, object], own: object, options: Mapping[str, click.Option]
) -> Iterator[tuple[str, object]]:
    """The defaults of a command's options, those of its own table last."""
    table = own if isinstance(own, dict) else {}
    for key in table:
        if key not in options:
            raise _unknown(f"{where}: {name}.{key}", key, [*options])
    for key, value in (*shared.items(), *table.items()):
        if key in options:
            yield str(options[key].name), _value(options[key], value)


def _table() -> tuple[str, Mapping[str, object]]:
    """The file and its settings; none where there is no file."""
    for name in (FILE, PROJECT):
        try:
            content = Path(name).read_bytes()
        except OSError:
            continue
        if name == PROJECT and b"tool.vexport" not in content:
            continue
        try:
            table = tomllib.loads(content.decode())
        except ValueError as error:
            raise InputError(name, got=str(error), need="TOML", fix="correct the file") from None
        where = name if name == FILE else f"{name}: tool.vexport"
        tool = {"vexport": table} if name == FILE else table.get("tool")
        settings = tool.get("vexport", {}) if isinstance(tool, dict) else {}
        if not isinstance(settings, dict):
            raise InputError(where, got=repr(settings)[:80], need="a table", fix="write [tool.vexport]")
        return where, settings
    return FILE, {}


def _options(command: click.Command) -> dict[str, click.Option]:
    """The options that a file may set, by their names on the command line without dashes."""
    options = [each for each in command.params if isinstance(each, click.Option) and each.name not in NEVER]
    return {name.lstrip("-"): option for option in options for name in option.opts if name.startswith("--")}


def _unknown(where: str, key: str, known: list[str]) -> InputError:
    if key.replace("-", "_") in NEVER:
        return InputError(
            where, got="it may run code or destroy: only a call itself says so", need="", fix="remove it"
        )
    return InputError(
        where, got="no option that a file may set", need="one", fix=f"correct it{nearest(key, known)}"
    )


def _value(option: click.Option, value: object) -> object:
    """The value as a command line has it: text, which click converts, of several values a list of it."""
    if isinstance(value, bool):
        return value
    parts = [str(part) for part in (value if isinstance(value, list) else [value])]
    return parts if option.multiple else ",".join(parts)
