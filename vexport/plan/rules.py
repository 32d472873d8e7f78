"""Which rule decides about a linear layer."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vexport.errors import InputError, raise_all
from vexport.plan.linears import Place
from vexport.scenario import Rule
from vexport.schemes import KEEP

ALL = "Linear"
PATTERN = "re:"
# A rule that keeps what some models do not have matches nothing without being wrong.
MAY_BE_ABSENT = re.compile(
    r"(?:.*\.)?(?:lm_head|embed_out|embed_tokens|embed_positions|word_embeddings|wte|wpe|\w*router\w*|\w*gate|\w*norm\w*)$"
)


class Treatment(NamedTuple):
    """What a rule does to a layer."""

    scheme: str
    observer: str


def choose_rule(rules: Sequence[Rule], name: str, place: Place) -> Treatment | None:
    """Scheme and observer of the first rule that matches a linear layer; None where it stays unquantized.

    What is outside the decoder layers is quantized only by a rule that names it rather than all linear
    layers; what vLLM builds unquantized only by one that names it without a pattern (and is then refused).
    """
    for rule in rules:
        if rule.match == ALL and place != "decoder":
            continue
        if rule.match.startswith(PATTERN) and place == "unquantizable":
            continue
        if matches(rule.match, name):
            return None if rule.scheme == KEEP else Treatment(rule.scheme, rule.observer)
    return None


def matches(pattern: str, name: str) -> bool:
    """Whether a rule's pattern covers a linear layer's name."""
    if pattern == ALL:
        return True
    if pattern.startswith(PATTERN):
        return re.match(pattern[len(PATTERN) :], name) is not None
    return name == pattern or name.endswith(f".{pattern}")


def require_matching_rules(rules: Sequence[Rule], names: Mapping[str, Place]) -> None:
    """InputErrors for the rules that match no layer at all."""
    raise_all(
        [
            InputError(
                f"rule {rule.match!r}",
                got="no layer that it matches",
                need="the name of a linear layer, the end of one, `re:...` or Linear",
                fix="correct the pattern or remove the rule",
            )
            for rule in rules
            if not _may_match_nothing(rule) and not any(matches(rule.match, name) for name in names)
        ]
    )


def _may_match_nothing(rule: Rule) -> bool:
    return rule.scheme == KEEP and MAY_BE_ABSENT.match(rule.match) is not None
