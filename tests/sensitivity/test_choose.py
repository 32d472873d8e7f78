"""The chosen mixture is the best one: every mixture of small instances is tried."""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.command import vexport
from vexport.errors import InputError
from vexport.formats.schemes import KEEP
from vexport.records import GroupSensitivity, MixedScheme, SchemeChoice, SchemeLoss
from vexport.scenario import Auto
from vexport.sensitivity.auto import best_mixtures, mixed_scheme

CANDIDATES = ("NVFP4", "FP8_DYNAMIC", KEEP)
REST = 1000


def groups(seed: int, number: int) -> list[GroupSensitivity]:
    """Groups of a few sizes with random losses; now and then four bits lose less than eight."""
    chance = random.Random(seed)
    made = []
    for name in map(str, range(number)):
        size = chance.choice((64, 96, 256)) * 16
        losses = sorted((chance.expovariate(20), chance.expovariate(200)), reverse=chance.random() < 0.9)
        schemes = tuple(
            SchemeLoss(scheme=scheme, observer="", num_bytes=size * bits // 16, loss=loss)
            for scheme, bits, loss in zip(CANDIDATES, (5, 9), losses, strict=False)
        )
        made.append(
            GroupSensitivity(
                name=name, layers=(name,), parameters=size // 2, source_bytes=size, schemes=schemes
            )
        )
    return made


def every_mixture(made: Sequence[GroupSensitivity]) -> Iterator[tuple[int, float]]:
    """(bytes of the whole output, loss) of every mixture."""
    options = [
        [*((one.num_bytes, one.loss) for one in group.schemes), (group.source_bytes, 0.0)] for group in made
    ]
    for picked in itertools.product(*options):
        yield REST + sum(size for size, _ in picked), sum(loss for _, loss in picked)


def choose(made: Sequence[GroupSensitivity], auto: Auto) -> MixedScheme:
    source = REST + sum(group.source_bytes for group in made)
    allowed = {group.name: CANDIDATES for group in made}
    parameters = source // 2
    return mixed_scheme(made, allowed, auto, rest_bytes=REST, source_bytes=source, parameters=parameters)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("share", [0.35, 0.5, 0.8])
def test_no_mixture_within_the_size_loses_less(seed: int, share: float) -> None:
    made = groups(seed, 7)
    source = REST + sum(group.source_bytes for group in made)
    best = min((loss for size, loss in every_mixture(made) if size <= share * source), default=None)
    if best is None:
        with pytest.raises(InputError, match=r"auto\.share"):
            choose(made, Auto(candidates=CANDIDATES, share=share))
        return
    found = choose(made, Auto(candidates=CANDIDATES, share=share))
    assert found.loss == pytest.approx(best, abs=1e-12)
    assert found.output_bytes <= share * source
    assert found.output_bytes == REST + sum(one.num_bytes for one in found.choices)
    assert found.loss == pytest.approx(sum(one.loss for one in found.choices))


def test_other_budgets_are_the_same_size_said_otherwise() -> None:
    made = groups(3, 7)
    source = REST + sum(group.source_bytes for group in made)
    by_share = choose(made, Auto(candidates=CANDIDATES, share=0.5))
    assert choose(made, Auto(candidates=CANDIDATES, bytes=source // 2)).choices == by_share.choices
    assert choose(made, Auto(candidates=CANDIDATES, bits=8.0)).choices == by_share.choices


def test_thinning_costs_little() -> None:
    """A model of 300 groups with a bound on mixtures far below what there are."""
    options = [
        [
            SchemeChoice(name=group.name, scheme=one.scheme, num_bytes=one.num_bytes, loss=one.loss)
            for one in group.schemes
        ]
        for group in groups(1, 300)
    ]
    exact, thinned = best_mixtures(options), best_mixtures(options, most=500)
    assert len(exact.loss) > 1000 >= 2 * len(thinned.loss)
    for share in (0.25, 0.5, 0.75):
        most = exact.num_bytes[0] + share * (exact.num_bytes[-1] - exact.num_bytes[0])
        best = exact.loss[exact.num_bytes <= most][-1]
        assert thinned.loss[thinned.num_bytes <= most][-1] <= best * 1.1


@pytest.mark.parametrize(("key", "limit"), [("bits", 0.5), ("bytes", 10), ("share", 0.01)])
def test_a_budget_out_of_reach_says_what_is_in_reach(key: str, limit: float) -> None:
    made = groups(2, 5)
    with pytest.raises(InputError) as caught:
        choose(made, Auto.model_validate({"candidates": CANDIDATES, key: limit}))
    least = min(size for size, _ in every_mixture(made))
    source = REST + sum(group.source_bytes for group in made)
    said = {
        "bits": f"{8 * least / (source // 2):.3f} bits",
        "bytes": f"{least} bytes",
        "share": f"{least / source:.3f} of",
    }
    assert f"auto.{key}" in str(caught.value)
    assert said[key] in str(caught.value)


def test_a_size_that_no_candidate_reaches_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    scenarios = Path(__file__).parent.parent.parent / "scenarios"
    text = (scenarios / "demo-auto.yaml").read_text(encoding="utf-8").replace("bits: 7.0", "bits: 5.0")
    scenario = tmp_path / "tight.yaml"
    scenario.write_text(text.replace("demo/", f"{scenarios}/demo/"))
    for command in (("plan", scenario), ("run", scenario, "--run-dir", tmp_path / "run")):
        ran = vexport(*command)
        assert ran.code == 2
        assert "auto.bits: got 5, need at least 5.660 bits per weight of the whole model" in ran.stderr
    assert not (tmp_path / "run" / "calibration").exists()
