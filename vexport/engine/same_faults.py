"""Show a fault once if both the static check and vLLM's loaders find it."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from vexport.checks import HEADER_FAMILIES
from vexport.records import DOTTED_NAME, MESSAGE_SEPARATOR, Finding, without_details
from vexport.words import first_and_more

_NUMBER = re.compile(r"\d+")


def without_repetitions(
    static: Sequence[Finding], loaders: Iterable[Finding]
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Return the findings of the check and of the loaders, each fault in one of them.

    A wrong copy of a tensor is the same fault as an error of the check on this tensor or its layer.
    A refusal is the same fault as an error that claims a refusal, if vLLM names one of its tensors,
    or names no tensor at all. The error of the check stays, with vLLM's message.
    """
    found, left = list(static), list[Finding]()
    for each in _across_cells(loaders):
        if each.claim == "refused" and each.severity == "error":
            same = next((one for one in found if _is_same_refusal(one, each)), None)
            if same is None:
                left.append(each)
            elif MESSAGE_SEPARATOR not in same.got:
                message = f"{same.got}{MESSAGE_SEPARATOR}{each.got}"
                found[found.index(same)] = replace(same, got=message)
        elif each.claim == "values":
            left += _without_known_places(each, found)
        else:
            left.append(each)
    return tuple(found), tuple(left)


def _across_cells(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings, with refusals that differ only in numbers as one finding.

    On other numbers of ranks, vLLM refuses the same tensor with other sizes in its message.
    """
    alike: dict[object, list[Finding]] = {}
    for number, each in enumerate(findings):
        cause = _NUMBER.sub("#", without_details(each.got))
        key = (each.severity, cause) if each.claim == "refused" else number
        alike.setdefault(key, []).append(each)
    for first, *others in alike.values():
        places = tuple(place for each in (first, *others) for place in each.every_place)
        yield replace(first, places=places) if others else first


def _is_same_refusal(one: Finding, refusal: Finding) -> bool:
    if one.severity != "error" or "refused" not in one.loader_faults:
        return False
    if one.sm and refusal.sm and not {*one.sm} & {*refusal.sm}:
        return False
    if one.tp and refusal.tp and not {*one.tp} & {*refusal.tp}:
        return False
    names = DOTTED_NAME.findall(without_details(refusal.got))
    if not names:
        return one.claim == "refused"
    return any(place.endswith(f".{name}") for place in one.every_place for name in names)


def _without_known_places(fault: Finding, static: Iterable[Finding]) -> Iterator[Finding]:
    known = {
        place
        for each in static
        if each.severity == "error" and each.check in HEADER_FAMILIES
        for place in each.every_place
    }
    left = [
        place
        for place in fault.every_place
        if place.partition(" (")[0] not in known
        and place.partition(" (")[0].rpartition(".")[0] not in known
    ]
    if len(left) == len(fault.every_place):
        yield fault
    elif left:
        places = tuple(left) if len(left) > 1 else ()
        yield replace(fault, where=first_and_more(left), places=places)
