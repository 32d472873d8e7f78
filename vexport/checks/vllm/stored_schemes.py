"""Names of the schemes in which a compressed-tensors checkpoint is stored."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from vexport.checkpoint.index import find_quantization
from vexport.checks.vllm.groups import ConfigGroup, parse_group
from vexport.checks.vllm.quant_methods import method_name
from vexport.errors import InputError
from vexport.files import read_json_object
from vexport.formats.arguments import precision
from vexport.formats.schemes import Scheme, named_scheme


def config_groups_of(checkpoint: Path) -> tuple[ConfigGroup, ...]:
    """Return the config groups of a compressed-tensors checkpoint, or none for another method."""
    try:
        stored = find_quantization(checkpoint, read_json_object(checkpoint / "config.json"))
    except InputError:
        return ()
    if stored is None or method_name(stored.values) is not None:
        return ()
    groups = stored.values.get("config_groups")
    if not isinstance(groups, dict):
        return ()
    default = str(stored.values.get("format", ""))
    parsed = (parse_group(name, raw, default) for name, raw in groups.items())
    return tuple(group for group in parsed if isinstance(group, ConfigGroup))


def schemes_of_groups(groups: Sequence[ConfigGroup]) -> Iterator[Scheme]:
    """Yield the schemes of config groups, without the groups that vexport does not write."""
    yield from filter(None, map(_scheme_of, groups))


def stored_schemes(checkpoint: Path) -> tuple[str, ...]:
    """Return the names of a checkpoint's schemes, each once."""
    return tuple(dict.fromkeys(map(stored_scheme, config_groups_of(checkpoint))))


def stored_scheme(group: ConfigGroup) -> str:
    """Return the name of a group's scheme, or its bits, such as W4A16, if it has no name."""
    scheme = _scheme_of(group)
    return scheme.name if scheme is not None else precision(group)


def _scheme_of(group: ConfigGroup) -> Scheme | None:
    try:
        return named_scheme(group.args)
    except (InputError, ValueError):
        return None
