"""The weights of a plan rounded by what calibration text shows, with the strength that answers best."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from vexport.calibration.data import Samples
from vexport.calibration.hidden import hidden_states
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.files import from_json, to_json, write_text
from vexport.formats.packing.base import Array
from vexport.quantize.rounded_layers import RoundedLayers
from vexport.quantize.two_streams import Branch, RoundingStream
from vexport.rounding.settings import CANDIDATES, GPTQ, HELD_OUT_ONE_IN, REFIT, Recipe
from vexport.types import Calibration, OnProgress, Plan
from vexport.types.rounding import Strength

CHOICE = "strength.json"


def round_weights(
    index: SourceIndex,
    plan: Plan,
    calibration: Calibration,
    samples: Samples,
    folder: Path,
    *,
    on_progress: OnProgress,
    trust_remote_code: bool,
    device: str,
) -> Mapping[str, Array]:
    """The bytes that replace the weights of the decoder layers, by tensor name, read as they are asked for.

    Finished layers lie in `folder`: a call that was broken off is continued by the next one. Where a refit is
    asked for and there are rows enough, several strengths run side by side and the one with the least KL over
    the rows held out is taken; plain GPTQ is among them.
    """
    if not (folder / CHOICE).is_file():
        held_out = len(samples.rows) // HELD_OUT_ONE_IN
        refitted = any(group.rounding == "refit" for group in plan.groups)
        recipes = CANDIDATES if refitted and held_out else (REFIT if refitted else GPTQ,)
        with Reader() as reader, ExitStack() as block:
            stream = RoundingStream(
                index,
                plan,
                calibration,
                samples,
                reader,
                held_out=held_out if len(recipes) > 1 else 0,
                trust_remote_code=trust_remote_code,
                device=device,
            )
            branches = [
                Branch(
                    recipe=recipe,
                    hidden=block.enter_context(hidden_states()),
                    done=RoundedLayers(folder, _name(recipe)),
                )
                for recipe in recipes
            ]
            source = block.enter_context(hidden_states())
            stream.run(branches, source, partial(on_progress, "round weights (layers)"))
        write_text(folder / CHOICE, to_json(_best(branches)))
    chosen = from_json(Strength, folder / CHOICE)
    recipe = Recipe(strength=chosen.strength, ridge=chosen.ridge)
    return RoundedLayers(folder, _name(recipe)).tensors()


def _best(branches: Sequence[Branch]) -> Strength:
    """The branch with the least KL; the first of equal ones, which is the one nearer to GPTQ."""
    best = min(branches, key=lambda branch: branch.divergence or 0.0)
    return Strength(**asdict(best.recipe), divergence=best.divergence)


def _name(recipe: Recipe) -> str:
    return f"strength-{recipe.strength:g}-ridge-{recipe.ridge:g}"
