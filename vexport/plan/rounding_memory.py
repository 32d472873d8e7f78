"""How much memory rounding by calibration text takes: gptq and refit, layer by layer in two streams.

What is in memory at once: the weights outside the decoder layers, one decoder layer as it is and as it is
quantized, the hidden states of the source's stream and of each recipe's, what one group needs to be rounded,
and second moments (in, in) in float32, as many again with the source's inputs for a refit. Where rows wait in
the layer these are of one input and recipe, next to the rows; else of all inputs and recipes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vexport.architectures.fusion import moe_layer
from vexport.architectures.text_config import text_config
from vexport.checkpoint.index import SourceIndex
from vexport.plan.linears import STACK
from vexport.rounding.settings import (
    GPTQ,
    REFIT,
    Recipe,
    most_waiting,
    refit_recipes,
    trial_rows,
    waiting_bytes,
)
from vexport.types import FusionGroup, Plan
from vexport.types.rounding import is_refit

FLOAT32, BFLOAT16 = 4, 2
# Hidden states of one stream beyond this go to disk (calibration/hidden.py, which loads torch).
MOST_STATES = 2**30
# Matrices (in, in) that factorizing one H and correcting weights hold at once, and weights (out, in) that
# rounding a group does, all float32.
FACTOR_MATRICES, GROUP_WEIGHTS = 6, 6
# Where recipes are chosen by rows held out: the logits of one row in two streams, in the model's dtype. What
# the layers took has not been given back to the system by then.
LOGITS = 2
# A quantized layer as compressed-tensors dequantizes it and as the model holds it, for each of its bytes.
QUANTIZED_COPIES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Rows of text, of so many in `all_rows`, that run through all layers, in the source's stream and in one
    of each recipe."""

    recipes: tuple[Recipe, ...]
    rows: int
    all_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """An input that groups of a decoder layer share; `is_refitted` says whether one of them is.

    It enters `module`, all inputs of experts the same one, which shows all but those of down projections.
    """

    module: str
    columns: int
    is_refitted: bool
    is_shown: bool


def passes_of(plan: Plan, rows: int, tokens: int) -> tuple[Pass, ...]:
    """What runs one after another: strengths are tried on a part of much text, then all of it is used."""
    groups = _rounded(plan)
    if not any(is_refit(group.rounding) for group in groups):
        return (Pass(recipes=(GPTQ,), rows=rows, all_rows=rows),)
    columns = max(group.members[0].in_features for group in groups)
    tried, held_out = trial_rows(rows, rows * tokens, columns, None)
    layers = {stack[1] for group in plan.groups if (stack := STACK.search(group.members[0].name))}
    recipes, whole = refit_recipes(len(layers), held_out), Pass(recipes=(REFIT,), rows=rows, all_rows=rows)
    return (Pass(recipes=recipes, rows=tried, all_rows=rows), whole) if len(recipes) > 1 else (whole,)


def rounding_bytes(index: SourceIndex, plan: Plan, *, rows: int, tokens: int) -> int:
    """The largest size of all that is named above, for rows of text of at most `tokens` tokens each."""
    return max(_pass_bytes(index, plan, one, tokens) for one in passes_of(plan, rows, tokens))


def _pass_bytes(index: SourceIndex, plan: Plan, one: Pass, tokens: int) -> int:
    stored: dict[str, int] = {}
    around = 0
    for tensor in index.tensors.values():
        stack = STACK.search(tensor.name)
        if stack:
            stored[stack[0]] = stored.get(stack[0], 0) + tensor.num_bytes
        else:
            around += tensor.num_bytes
    hidden = text_config(index.config).get("hidden_size")
    states = one.rows * tokens * (hidden if isinstance(hidden, int) else 0) * BFLOAT16
    layer = max(stored.values(), default=0)
    rounded = _rounded(plan)
    in_layer = round(
        (1 + QUANTIZED_COPIES) * layer
        + max((_sums(inputs, one, tokens) for inputs in _inputs(rounded).values()), default=0)
        + max((_group(group) for group in rounded), default=0)
    )
    judged = len(one.recipes) > 1
    vocabulary = text_config(index.config).get("vocab_size")
    logits = tokens * (vocabulary if isinstance(vocabulary, int) else 0) * BFLOAT16 * LOGITS if judged else 0
    return around + (1 + len(one.recipes)) * min(states, MOST_STATES) + in_layer + logits


def waits_in(plan: Plan, one: Pass, tokens: int) -> bool:
    """Whether rows of at most `tokens` tokens each can wait in every decoder layer."""
    layers = _inputs(_rounded(plan))
    return all(_waiting(inputs, one, tokens) is not None for inputs in layers.values())


def _waiting(inputs: Sequence[Input], one: Pass, tokens: int) -> int | None:
    """What rows take that wait in a layer with these inputs; None where they are too many to wait."""
    columns = [found.columns for found in inputs if found.is_shown]
    refits = any(recipe.strength for recipe in one.recipes)
    if waiting_bytes(columns, one.all_rows * tokens, refits=refits) > most_waiting():
        return None
    return waiting_bytes(columns, one.rows * tokens, refits=refits)


def _sums(inputs: Sequence[Input], one: Pass, tokens: int) -> int:
    """The second moments of a decoder layer's inputs, and the rows that wait for them."""
    refits = sum(recipe.strength > 0 for recipe in one.recipes)
    sizes = [found.columns**2 * FLOAT32 for found in inputs]
    waiting = _waiting(inputs, one, tokens)
    if waiting is not None:
        modules: dict[str, int] = {}
        for found, size in zip(inputs, sizes, strict=True):
            both = 2 * size if found.is_refitted and refits else size
            modules[found.module] = modules.get(found.module, 0) + both
        return waiting + max(modules.values(), default=0)
    recipes = len(one.recipes)
    matrices = [recipes + refits if found.is_refitted else recipes for found in inputs]
    return sum(size * number for size, number in zip(sizes, matrices, strict=True))


def _rounded(plan: Plan) -> list[FusionGroup]:
    """The groups that are rounded by text."""
    return [group for group in plan.groups if group.rounding != "nearest"]


def _inputs(groups: Sequence[FusionGroup]) -> Mapping[str, Sequence[Input]]:
    """The inputs of each decoder layer; gate and up of all its experts share theirs."""
    inputs: dict[tuple[str, str], Input] = {}
    for group in groups:
        first = group.members[0]
        stack = STACK.search(first.name)
        experts = moe_layer(first.name)
        is_shown = not experts or len(group.members) > 1
        inputs[stack[0] if stack else "", experts if experts and is_shown else group.name] = Input(
            module=experts or group.name,
            columns=first.in_features,
            is_refitted=is_refit(group.rounding),
            is_shown=is_shown,
        )
    layers: dict[str, list[Input]] = {}
    for (layer, _), found in inputs.items():
        layers.setdefault(layer, []).append(found)
    return layers


def _group(group: FusionGroup) -> int:
    """What one group takes while it is rounded."""
    columns = group.members[0].in_features
    rows = sum(member.out_features for member in group.members)
    return (FACTOR_MATRICES * columns + GROUP_WEIGHTS * rows) * columns * FLOAT32
