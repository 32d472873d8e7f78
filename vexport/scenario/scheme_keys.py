"""The keys of a rule or candidate that say a scheme: its name, a group size, or the arguments themselves."""

from collections.abc import Mapping

from pydantic import JsonValue

from vexport.errors import InputError
from vexport.formats.own_schemes import own_args
from vexport.formats.schemes import KEEP, is_scheme, named_scheme, scheme_name, with_group_size
from vexport.scenario.section import located_errors

SIZE, WEIGHTS, INPUTS = OWN_KEYS = ("group_size", "weights", "input_activations")
# The scheme of a rule that leaves the choice to measured losses and a budget.
AUTO = "auto"
# Values of `scheme` that are no scheme.
_NO_SCHEMES = (KEEP, AUTO)


def parse_group_size(value: object) -> int | None:
    """The columns of a group, None for a scale a row; ValueError for what is no size.

    -1 is a scale a row too, as in llm-compressor and AutoRound.
    """
    if isinstance(value, str) and value.lower() == "channel" or value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1_000_000:
        raise ValueError("a number of columns (32, 64, 128), or channel for one scale a row")
    return value


def with_named_scheme(content: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """The keys with one scheme by name in the place of a group size or of arguments.

    Raises pydantic's ValidationError at the key that cannot be.
    """
    given = {key: content[key] for key in OWN_KEYS if content.get(key) is not None}
    others = {key: value for key, value in content.items() if key not in OWN_KEYS}
    if WEIGHTS in given:
        return _with_arguments(given, others)
    if INPUTS in given:
        need = "the arguments of the weights as well"
        raise located_errors([((INPUTS,), given[INPUTS], need, "add weights, or name a scheme")])
    if SIZE in given:
        return {**others, "scheme": _sized(given[SIZE], others.get("scheme"))}
    return others


def _with_arguments(
    given: Mapping[str, JsonValue], others: Mapping[str, JsonValue]
) -> Mapping[str, JsonValue]:
    """`weights` and `input_activations` as the name that spells them; their observers as the rule's."""
    weights = given[WEIGHTS]
    if others.get("scheme") is not None:
        need = "a scheme, or weights with the arguments themselves"
        raise located_errors([(("scheme",), others["scheme"], need, "remove one of the two")])
    if SIZE in given:
        need = "the group size once"
        raise located_errors([((SIZE,), given[SIZE], need, "write it into weights")])
    try:
        name = named_scheme(own_args(weights, given.get(INPUTS))).name
    except ValueError as error:
        raise located_errors([((WEIGHTS,), weights, str(error), "correct the arguments")]) from None
    except InputError as error:
        need = f"{error.need} (these are: {error.got})"
        raise located_errors([((WEIGHTS,), weights, need, error.fix)]) from None
    return {**_observers(weights, ""), **_observers(given.get(INPUTS), "input_"), **others, "scheme": name}


def _observers(args: JsonValue, prefix: str) -> dict[str, JsonValue]:
    """The keys of a rule for the observer that arguments name, and its keywords."""
    arguments = args if isinstance(args, dict) else {}
    return {f"{prefix}{key}": arguments[key] for key in ("observer", "observer_kwargs") if arguments.get(key)}


def _sized(size: JsonValue, scheme: JsonValue) -> JsonValue:
    """The name of the scheme with that group size; a scheme that is none is left to its own validator."""
    if scheme in _NO_SCHEMES:
        raise located_errors(
            [((SIZE,), size, f"no group size with scheme: {scheme}", "remove it, or name a scheme")]
        )
    try:
        columns = parse_group_size(size)
    except ValueError as error:
        raise located_errors([((SIZE,), size, str(error), "correct the value")]) from None
    if not isinstance(scheme, str) or not is_scheme(scheme_name(scheme)):
        return scheme
    try:
        return with_group_size(scheme, columns)
    except InputError as error:
        raise located_errors([((SIZE,), size, error.need, error.fix)]) from None
