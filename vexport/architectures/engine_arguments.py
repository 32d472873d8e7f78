"""Types of vLLM's engine arguments, for each version of vLLM that has a record.

scripts/engine_arguments.py reads the types from vLLM's wheels, and describes how they are written.
"""

import json
from collections.abc import Mapping
from functools import cache

from vexport.architectures.tables import FOLDER
from vexport.version import Version, short_version

_RECORDS = FOLDER.joinpath("engine_arguments")
# Types of the fields of each config class.
ArgumentTypes = Mapping[str, Mapping[str, str]]
ARGUMENTS = "EngineArgs"
"""The class that has all arguments of the engine."""


@cache
def recorded_version(version: Version) -> Version:
    """Return the version itself if it has a record, and the newest recorded version if not."""
    names = [entry.name.removesuffix(".json") for entry in _RECORDS.iterdir()]
    known = {
        (int(major), int(minor)) for major, _, minor in (name.partition(".") for name in names)
    }
    return version if version in known else max(known)


@cache
def argument_types(version: Version) -> ArgumentTypes:
    """Return the types of `ARGUMENTS` and of all config classes that its fields name.

    A version without a record has the types of the newest recorded version.
    """
    name = f"{short_version(recorded_version(version))}.json"
    types: ArgumentTypes = json.loads(_RECORDS.joinpath(name).read_text("utf-8"))["classes"]
    return types
