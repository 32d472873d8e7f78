"""How much memory rounding by calibration text takes: gptq and refit, layer by layer in two streams.

What is in memory at once: the weights outside the decoder layers, one decoder layer as it is and as it is
quantized, the hidden states of the source's stream and of each recipe's, for each input of the layer its
second moments (in, in) in float32 for each recipe (and as many with the source's inputs where it refits), and
what one group needs to be rounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vexport.architectures.fusion import moe_layer
from vexport.architectures.text_config import text_config
from vexport.checkpoint.index import SourceIndex
from vexport.plan.linears import STACK
from vexport.rounding.settings import GPTQ, REFIT, Recipe, refit_recipes, trial_rows
from vexport.types import FusionGroup, Plan

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
    """Rows of text that run through all layers, in the source's stream and in one of each recipe."""

    recipes: tuple[Recipe, ...]
    rows: int


def passes_of(plan: Plan, rows: int, tokens: int) -> tuple[Pass, ...]:
    """What runs one after another: strengths are tried on a part of much text, then all of it is used."""
    groups = [group for group in plan.groups if group.rounding != "nearest"]
    if all(group.rounding == "gptq" for group in groups):
        return (Pass(recipes=(GPTQ,), rows=rows),)
    columns = max(group.members[0].in_features for group in groups)
    tried, held_out = trial_rows(rows, rows * tokens, columns, None)
    layers = {stack[1] for group in plan.groups if (stack := STACK.search(group.members[0].name))}
    recipes, whole = refit_recipes(len(layers), held_out), Pass(recipes=(REFIT,), rows=rows)
    return (Pass(recipes=recipes, rows=tried), whole) if len(recipes) > 1 else (whole,)


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
    rounded = [group for group in plan.groups if group.rounding != "nearest"]
    in_layer = round(
        (1 + QUANTIZED_COPIES) * layer
        + max(_moments(rounded, one.recipes).values(), default=0)
        + max((_group(group) for group in rounded), default=0)
    )
    judged = len(one.recipes) > 1
    vocabulary = text_config(index.config).get("vocab_size")
    logits = tokens * (vocabulary if isinstance(vocabulary, int) else 0) * BFLOAT16 * LOGITS if judged else 0
    return around + (1 + len(one.recipes)) * min(states, MOST_STATES) + in_layer + logits


def _moments(groups: list[FusionGroup], recipes: tuple[Recipe, ...]) -> Mapping[str, int]:
    """The second moments of each decoder layer's inputs; gate and up of all its experts share theirs."""
    inputs: dict[tuple[str, str], int] = {}
    with_cross = len(recipes) + sum(recipe.strength > 0 for recipe in recipes)
    for group in groups:
        first = group.members[0]
        stack = STACK.search(first.name)
        experts = moe_layer(first.name)
        shared = experts if experts and len(group.members) > 1 else group.name
        matrices = len(recipes) if group.rounding == "gptq" else with_cross
        size = first.in_features**2 * FLOAT32 * matrices
        inputs[stack[0] if stack else "", shared] = size
    layers: dict[str, int] = {}
    for (layer, _), size in inputs.items():
        layers[layer] = layers.get(layer, 0) + size
    return layers


def _group(group: FusionGroup) -> int:
    """What one group takes while it is rounded."""
    columns = group.members[0].in_features
    rows = sum(member.out_features for member in group.members)
    return (FACTOR_MATRICES * columns + GROUP_WEIGHTS * rows) * columns * FLOAT32
