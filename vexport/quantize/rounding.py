"""The weights of a plan rounded by what calibration text shows, with the strength that answers best."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from vexport.calibration.data import Samples
from vexport.calibration.hidden import hidden_states
from vexport.calibration.layerwise import OnLayer
from vexport.calibration.token_weights import EQUAL, TokenWeights, find_token_weights
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.smoothed import reader_of
from vexport.files import from_json, to_json, write_text
from vexport.formats.packing.base import Array
from vexport.numerics.ranks import on_first, rank_and_size
from vexport.quantize.passage import Branch
from vexport.quantize.rounded_layers import RoundedLayers
from vexport.quantize.two_streams import RoundingStream
from vexport.rounding.methods import METHODS
from vexport.rounding.settings import WEIGHING_ROWS, Recipe, trial_rows
from vexport.types import Calibration, FusionGroup, OnProgress, Plan
from vexport.types.rounding import RoundingReport, Strength, knows_most

CHOICE = "rounding.json"
# What was found by trying strengths on a part of the text, and how names of the layers that took begin.
TRIAL, TRIAL_LAYERS = "trial.json", "trial-"
TOKEN_WEIGHTS = "token-weights.json"


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

    Finished layers lie in `folder`: a call that was broken off is continued by the next one. Where a refit
    is asked for and there are rows to hold out, `held_out` or a share of them, several strengths run next to
    each other and the one with the least KL over those rows is taken; plain GPTQ is among them. Of much text
    only a part is used to choose, and all of it to round. Torchrun's ranks call it together; all see the
    `folder`, and the first one writes there.
    """
    if not on_first((folder / CHOICE).is_file):
        with reader_of(calibration.smoothing) as reader:
            stream = RoundingStream(
                index,
                plan,
                calibration,
                reader,
                tokens=sum(len(ids) for ids in samples.token_ids),
                trust_remote_code=trust_remote_code,
                device=device,
            )
            weigh = partial(
                find_token_weights,
                index,
                reader,
                samples.spread(WEIGHING_ROWS),
                on_layer=partial(on_progress, "weigh tokens (layers)"),
                trust_remote_code=trust_remote_code,
                device=device,
            )
            report = _rounded(stream, samples, folder, held_out, on_progress, weigh)
        if rank_and_size()[0] == 0:
            write_text(folder / CHOICE, to_json(report))
    report = on_first(lambda: from_json(RoundingReport, folder / CHOICE))
    return _layers(folder, report.chosen).tensors(), report


def _token_weights(
    recipes: Sequence[Recipe], folder: Path, weigh: Callable[[], TokenWeights]
) -> TokenWeights:
    """How much each token counts, where a recipe asks for it; found once for the folder."""
    if not any(recipe.weighs_tokens for recipe in recipes):
        return EQUAL
    file = folder / TOKEN_WEIGHTS
    if not on_first(file.is_file):
        found = weigh()
        if rank_and_size()[0] == 0:
            write_text(file, to_json(found))
    return on_first(lambda: from_json(TokenWeights, file))


def _rounded(
    stream: RoundingStream,
    samples: Samples,
    folder: Path,
    held_out: int | None,
    on_progress: OnProgress,
    weigh: Callable[[], TokenWeights],
) -> RoundingReport:
    method = METHODS[knows_most(group.rounding for group in stream.groups)]
    text, held_out = trial_text(samples, stream.groups, held_out)
    recipes = method.recipes(layers=len(stream.layers), held_out=held_out)
    token_weights = _token_weights(recipes, folder, weigh)
    run = partial(_run, stream, folder=folder, token_weights=token_weights)
    on_layer = partial(on_progress, "round weights (layers)")
    if len(recipes) == 1:
        return run(samples, recipes, on_layer=on_layer)
    if not on_first((folder / TRIAL).is_file):
        on_trial = partial(on_progress, "try strengths (layers)")
        trial = run(text, recipes, held_out=held_out, on_layer=on_trial, prefix=TRIAL_LAYERS)
        if rank_and_size()[0] == 0:
            write_text(folder / TRIAL, to_json(replace(trial, layers=())))
    for file in folder.glob(f"{TRIAL_LAYERS}*") if rank_and_size()[0] == 0 else ():
        file.unlink()
    found = on_first(lambda: from_json(RoundingReport, folder / TRIAL))
    best = found.chosen
    chosen = Recipe(strength=best.strength, ridge=best.ridge, weighs_tokens=best.weighs_tokens)
    return replace(found, layers=run(samples, (chosen,), on_layer=on_layer).layers)


def trial_text(samples: Samples, groups: Sequence[FusionGroup], held_out: int | None) -> tuple[Samples, int]:
    """Rows to try strengths on, evenly spread over all, and how many of them, the last, to hold out."""
    total, columns = len(samples.rows), max(group.members[0].in_features for group in groups)
    tokens = sum(len(ids) for ids in samples.token_ids)
    tried, held_out = trial_rows(total, tokens, columns, held_out)
    held = {number * tried // held_out for number in range(held_out)}
    order = sorted(range(tried), key=lambda number: number in held)
    return samples.taken([number * total // tried for number in order]), held_out


def _run(
    stream: RoundingStream,
    samples: Samples,
    recipes: Sequence[Recipe],
    *,
    folder: Path,
    token_weights: TokenWeights,
    on_layer: OnLayer,
    held_out: int = 0,
    prefix: str = "",
) -> RoundingReport:
    """The branch with the least KL; of equal ones the first, which is the one nearer to GPTQ."""
    with ExitStack() as block:
        branches = [
            Branch(
                recipe=recipe,
                hidden=block.enter_context(hidden_states()),
                done=_layers(folder, recipe, prefix),
            )
            for recipe in recipes
        ]
        source = block.enter_context(hidden_states())
        stream.run(samples, branches, source, on_layer, held_out=held_out, token_weights=token_weights)
    tried = {
        Strength(**asdict(branch.recipe), divergence=branch.divergence): branch.done for branch in branches
    }
    chosen = min(tried, key=lambda strength: strength.divergence or 0.0)
    # The first rank's report counts, which may have removed these files meanwhile.
    layers = tried[chosen].how() if rank_and_size()[0] == 0 else ()
    return RoundingReport(chosen=chosen, tried=tuple(tried), layers=layers)


def _layers(folder: Path, recipe: Recipe | Strength, prefix: str = "") -> RoundedLayers:
    return RoundedLayers(folder, f"{prefix}{_name(recipe)}")


def _name(recipe: Recipe | Strength) -> str:
    weights = "-weighed" if recipe.weighs_tokens else ""
    return f"strength-{recipe.strength:g}-ridge-{recipe.ridge:g}{weights}"
