"""The mixed scheme of least loss within a budget: a knapsack with one choice for each group.

Losses of groups are added up, as if each did its harm alone (measured one at a time, they are small); the
run's evaluation has the last word. One pass gives the best mixture of every budget, which the report draws:
scipy.optimize.milp would be called for each, and its tolerances took up to 17 percent more loss than the
best.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vexport.errors import InputError
from vexport.formats.schemes import KEEP
from vexport.scenario import Auto
from vexport.sensitivity.step_time import StepTimes
from vexport.types import Choice, GroupSensitivity, MixedScheme, Tradeoff

# Mixtures kept while groups are added. Below this the answer is exact; groups come in few sizes, so that even
# large models have few different sums of bytes.
MOST_MIXTURES = 1 << 15
MOST_TRADEOFFS = 50
# Budgets of the output's size.
_SIZES = ("bits", "bytes", "share")
# Seconds: in these, times of layers are whole numbers.
_TICK = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixtures:
    """The best mixtures: bytes rise and losses fall from one to the next; `picks` has an option for each
    group, shape (mixtures, groups)."""

    num_bytes: npt.NDArray[np.int64]
    loss: npt.NDArray[np.float64]
    picks: npt.NDArray[np.int16]


def best_mixtures(groups: Sequence[Sequence[Choice]], most: int = MOST_MIXTURES) -> Mixtures:
    """All mixtures that no other beats in both bytes and loss; beyond `most`, one for each step of bytes."""
    num_bytes, loss = np.zeros(1, np.int64), np.zeros(1, np.float64)
    steps: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int16]]] = []
    for options in groups:
        sizes = np.array([option.num_bytes for option in options], np.int64)
        losses = np.array([option.loss for option in options], np.float64)
        all_bytes, all_losses = (num_bytes[:, None] + sizes).ravel(), (loss[:, None] + losses).ravel()
        kept = _thinned(_unbeaten(all_bytes, all_losses), all_bytes, most)
        num_bytes, loss = all_bytes[kept], all_losses[kept]
        before, option = np.divmod(kept, len(options))
        steps.append((before.astype(np.int32), option.astype(np.int16)))
    picks = np.empty((len(num_bytes), len(groups)), np.int16)
    position = np.arange(len(num_bytes))
    for number in range(len(groups) - 1, -1, -1):
        before, option = steps[number]
        picks[:, number] = option[position]
        position = before[position]
    return Mixtures(num_bytes=num_bytes, loss=loss, picks=picks)


def _unbeaten(num_bytes: npt.NDArray[np.int64], loss: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Where no mixture of as few bytes has as little loss, in order of bytes."""
    order = np.lexsort((loss, num_bytes))
    sorted_loss = loss[order]
    least_before = np.concatenate([[np.inf], np.minimum.accumulate(sorted_loss)[:-1]])
    kept: npt.NDArray[np.int64] = order[sorted_loss < least_before]
    return kept


def _thinned(
    kept: npt.NDArray[np.int64], num_bytes: npt.NDArray[np.int64], most: int
) -> npt.NDArray[np.int64]:
    """At most `most` of them: the smallest, and the last (of least loss) in each of equal steps of bytes."""
    if len(kept) <= most:
        return kept
    sizes = num_bytes[kept]
    step = np.linspace(sizes[0], sizes[-1], most)
    last = np.searchsorted(sizes, step, side="right") - 1
    return kept[np.unique(last)]


def mixed_scheme(
    groups: Sequence[GroupSensitivity],
    allowed: Mapping[str, Sequence[str]],
    auto: Auto,
    *,
    rest_bytes: int,
    source_bytes: int,
    parameters: int,
    times: StepTimes | None = None,
) -> MixedScheme:
    """The choice for every group within the budget of `auto`.

    `allowed` has the schemes to choose from by group, `rest_bytes` is what no choice changes of the output.
    A budget of size or speed takes the least loss, one of loss the fewest bytes; `times` are for a budget of
    speed. Raises InputError where none fits.
    """
    options = [tuple(_options(group, allowed[group.name])) for group in groups]
    mixtures = by_size = best_mixtures(options)
    sizes = mixtures.num_bytes + rest_bytes
    kind, limit = auto.budget
    if times is not None:
        mixtures = best_mixtures([_timed(one, times) for one in options])
        rest = round(times.rest / _TICK)
        within = np.flatnonzero(mixtures.num_bytes + rest <= _most_seconds(auto) / _TICK)[-1:]
        least = (int(mixtures.num_bytes[0]) + rest) * _TICK
    elif kind == "loss":
        within, least = np.flatnonzero(mixtures.loss <= limit)[:1], float(mixtures.loss[-1])
    else:
        most = _most_bytes(auto, source_bytes, parameters)
        within, least = np.flatnonzero(sizes <= most)[-1:], float(sizes[0])
    if not within.size:
        raise _out_of_reach(auto, least, source_bytes, parameters)
    chosen = int(within[0])
    choices = tuple(one[pick] for one, pick in zip(options, mixtures.picks[chosen], strict=True))
    step = times.rest + sum(times.groups[one.name, one.scheme] for one in choices) if times else None
    return MixedScheme(
        budget=kind,
        limit=limit,
        candidates=auto.candidates,
        output_bytes=rest_bytes + sum(one.num_bytes for one in choices),
        loss=float(mixtures.loss[chosen]),
        gpu=auto.gpu or "",
        step_ms=None if step is None else 1000 * step,
        choices=choices,
        frontier=tuple(_tradeoffs(sizes, by_size.loss)),
    )


def require_size_in_reach(auto: Auto, least_bytes: int, *, source_bytes: int, parameters: int) -> None:
    """Raise InputError where the smallest candidates, `least_bytes` of output, are beyond a budget of size.

    What needs no measurement is said before one.
    """
    if auto.budget[0] in _SIZES and least_bytes > _most_bytes(auto, source_bytes, parameters):
        raise _out_of_reach(auto, float(least_bytes), source_bytes, parameters)


def require_speed_in_reach(auto: Auto, times: StepTimes, allowed: Mapping[str, Sequence[str]]) -> None:
    """Raise InputError where the fastest candidates are beyond a budget of speed."""
    least = times.rest + sum(
        min(times.groups[name, scheme] for scheme in schemes) for name, schemes in allowed.items()
    )
    if least > _most_seconds(auto):
        raise _out_of_reach(auto, least, 0, 0)


def _most_seconds(auto: Auto) -> float:
    """The seconds of a step that a budget of speed allows."""
    kind, limit = auto.budget
    return 1 / limit if kind == "tokens_per_second" else limit / 1000


def _most_bytes(auto: Auto, source_bytes: int, parameters: int) -> float:
    """The bytes that a budget of size allows."""
    kind, limit = auto.budget
    return {"bits": limit * parameters / 8, "bytes": limit, "share": limit * source_bytes}[kind]


def _timed(options: Sequence[Choice], times: StepTimes) -> list[Choice]:
    """The options with picoseconds in the place of bytes: the knapsack adds whole numbers."""
    return [replace(one, num_bytes=round(times.groups[one.name, one.scheme] / _TICK)) for one in options]


def _options(group: GroupSensitivity, allowed: Sequence[str]) -> Iterator[Choice]:
    for scheme in allowed:
        if scheme == KEEP:
            yield Choice(name=group.name, scheme=KEEP, num_bytes=group.source_bytes, loss=0.0)
        for one in group.schemes:
            if one.scheme == scheme:
                yield Choice(name=group.name, scheme=scheme, num_bytes=one.num_bytes, loss=max(0.0, one.loss))


def _tradeoffs(sizes: npt.NDArray[np.int64], loss: npt.NDArray[np.float64]) -> Iterator[Tradeoff]:
    shown = np.unique(np.linspace(0, len(sizes) - 1, MOST_TRADEOFFS).round().astype(np.int64))
    for one in shown:
        yield Tradeoff(output_bytes=int(sizes[one]), loss=float(loss[one]))


def _out_of_reach(auto: Auto, least: float, source_bytes: int, parameters: int) -> InputError:
    """`least` are bytes, nats or seconds, as the budget has it."""
    kind, limit = auto.budget
    reached = {
        "bits": f"at least {8 * least / max(1, parameters):.3f} bits per weight of the whole model",
        "bytes": f"at least {least:.0f} bytes",
        "share": f"at least {least / max(1, source_bytes):.3f} of the source",
        "loss": f"at least {least:.3g} nats per token",
        "tokens_per_second": f"at most {1 / least:.4g} tokens/s on {auto.gpu}",
        "step_ms": f"at least {1000 * least:.4g} ms on {auto.gpu}",
    }[kind]
    return InputError(
        f"auto.{kind}",
        got=f"{limit:g}",
        need=f"{reached}, what the candidates can reach",
        fix="widen the budget, or add a candidate",
    )
