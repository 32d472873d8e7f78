"""Make options of the command line from the settings in the models of `vexport.scenario`.

`generated/settings.json` contains the options of each section. `scripts/generate_settings.py`
writes the file from the models, so that `--help` imports neither the models nor pydantic.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import click

from vexport.cli.options import (
    PATH,
    Callback,
    Count,
    Decorator,
    Real,
    SettingOption,
    given,
    stacked,
    switch_names,
)
from vexport.records.options import OptionRecord
from vexport.records.values import MOST_COUNT

FILE = Path(__file__).parent / "generated" / "settings.json"
SETTINGS: Mapping[str, Mapping[str, OptionRecord]] = {
    section: {each["key"]: OptionRecord(**each) for each in options}
    for section, options in json.loads(FILE.read_text(encoding="utf-8")).items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Syntax:
    """Parser of an option for settings that are not a plain number, text, path or switch.

    `whole` is the click type of an option that takes all values in one text, such as `--tp 1,2`.
    `item` is the click type of each value of a repeatable option. `combine` is a callback that
    makes the setting from all values of a repeatable option.
    """

    whole: object = None
    item: object = None
    combine: Callback | None = None


PLAIN = Syntax()


def setting_options(
    section: str, syntaxes: Mapping[str, Syntax] = MappingProxyType({})
) -> Decorator:
    """Return all options of a section. `syntaxes` contains the keys without a plain type."""
    unknown = syntaxes.keys() - SETTINGS[section].keys()
    assert not unknown, f"no settings of {section}: {unknown}"
    return stacked(
        *(setting_option(section, key, syntaxes.get(key, PLAIN)) for key in SETTINGS[section])
    )


def setting_option(section: str, key: str, syntax: Syntax = PLAIN) -> Decorator:
    """Return the option of a setting. Its value is None or empty unless the user gives it."""
    record = SETTINGS[section][key]
    has_own_name = not record.names[-1].startswith("--")
    names = " ".join(record.names if has_own_name else (*record.names, key))
    is_repeatable = syntax.combine is not None or (record.repeatable and syntax.whole is None)
    return click.option(
        *(switch_names(names) if record.type == "boolean" else names).split(),
        cls=SettingOption,
        section=section,
        key=key,
        heading=record.heading,
        default_text=record.default,
        help=f"{record.help.removesuffix('.')}; repeatable." if is_repeatable else record.help,
        type=syntax.whole or syntax.item or click_type(record),
        metavar=record.metavar,
        multiple=is_repeatable,
        callback=syntax.combine,
        default=None,
    )


def click_type(record: OptionRecord) -> object:
    """Return the click type of a setting's values, or text if the setting has no plain type."""
    if record.type == "integer":
        low = 0 if record.low is None else int(record.low) + record.open_low
        high = MOST_COUNT if record.high is None else int(record.high) - record.open_high
        return Count(low, high)
    if record.type == "number":
        return Real(record.low, record.high, record.open_low, record.open_high)
    if record.type == "choice":
        return click.Choice(record.choices)
    if record.type == "boolean":
        return click.BOOL
    return PATH if record.type == "path" else click.STRING


def given_settings(*sections: str) -> dict[str, object]:
    """Return the settings of these sections that the user gave to the running command, by key."""
    context = click.get_current_context()
    values = {
        each.key: context.params[str(each.name)]
        for each in context.command.params
        if isinstance(each, SettingOption) and each.section in sections
    }
    return {key: value for key, value in values.items() if value not in (None, (), {})}


def option_names(*sections: str) -> list[str]:
    """Return the names of these sections' options on the command line, such as `--seq-len`."""
    return [each.opts[0] for each in _on_command_line(sections)]


def option_words(*sections: str) -> list[str]:
    """Return the options on the command line with their values, as words of a new command line."""
    words: list[str] = []
    for each in _on_command_line(sections):
        value = click.get_current_context().params[str(each.name)]
        if isinstance(value, bool):
            words.append(each.opts[0] if value else each.secondary_opts[0])
        elif each.multiple:
            words += [word for item in value for word in (each.opts[0], str(item))]
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [each.opts[0], text]
    return words


def _on_command_line(sections: tuple[str, ...]) -> list[SettingOption]:
    parameters = click.get_current_context().command.params
    options = [each for each in parameters if isinstance(each, SettingOption)]
    return [each for each in options if each.section in sections and given(str(each.name))]
