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
from vexport.rounding.methods import METHODS
from vexport.rounding.settings import HELD_OUT_ONE_IN, Recipe
from vexport.types import Calibration, OnProgress, Plan
from vexport.types.rounding import ROUNDINGS, RoundingReport, Strength

CHOICE = "rounding.json"


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
    held_out: int | None = None,
) -> tuple[Mapping[str, Array], RoundingReport]:
    """The bytes that replace the weights, by tensor name, read as they are asked for; how they were rounded.

    Finished layers lie in `folder`: a call that was broken off is continued by the next one. Where a refit is
    asked for and there are rows to hold out, `held_out` or one in eight, several strengths run next to each
    other and the one with the least KL over those rows is taken; plain GPTQ is among them.
    """
    if not (folder / CHOICE).is_file():
        method = METHODS[max((group.rounding for group in plan.groups), key=ROUNDINGS.index)]
        if held_out is None:
            held_out = len(samples.rows) // HELD_OUT_ONE_IN
        with Reader() as reader, ExitStack() as block:
            stream = RoundingStream(
                index, plan, calibration, samples, reader, trust_remote_code=trust_remote_code, device=device
            )
            recipes = method.recipes(layers=len(stream.layers), held_out=held_out)
            if len(recipes) > 1:
                stream.hold_out(held_out)
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
        write_text(folder / CHOICE, to_json(_report(branches)))
    report = from_json(RoundingReport, folder / CHOICE)
    recipe = Recipe(strength=report.chosen.strength, ridge=report.chosen.ridge)
    return RoundedLayers(folder, _name(recipe)).tensors(), report


def _report(branches: Sequence[Branch]) -> RoundingReport:
    """Of the branch with the least KL; of the first of equal ones, which is the one nearer to GPTQ."""
    tried = {
        Strength(**asdict(branch.recipe), divergence=branch.divergence): branch.done for branch in branches
    }
    chosen = min(tried, key=lambda strength: strength.divergence or 0.0)
    return RoundingReport(chosen=chosen, tried=tuple(tried), layers=tried[chosen].how())


def _name(recipe: Recipe) -> str:
    return f"strength-{recipe.strength:g}-ridge-{recipe.ridge:g}"
