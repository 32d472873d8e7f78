"""Layer groups for `scheme: auto`: their candidates, and the best mixture of schemes."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.command import vexport
from tests.models import save_llama
from tests.texts import assert_contains
from vexport.checkpoint.index import read_index
from vexport.errors import InputError
from vexport.files import to_json
from vexport.formats.schemes import KEEP
from vexport.plan.build import PlanSettings, build_plan
from vexport.quantize.auto import Budget, best_mixtures, choose_schemes
from vexport.quantize.layer_groups import (
    LayerGroup,
    find_layer_groups,
    fixed_bytes,
    rules_with_schemes,
    smallest_schemes,
)
from vexport.records import (
    GroupSensitivities,
    GroupSensitivity,
    MixedScheme,
    SchemeChoice,
    SchemeLoss,
)
from vexport.scenario import Auto, Rule

MOE = Path(__file__).parents[1] / "peer" / "moe"
CANDIDATES = ("NVFP4", "FP8_DYNAMIC", KEEP)
AUTO = (Rule(match="Linear", scheme="auto"),)
SCENARIO = """
name: mixed
source: {source}
rules: [{{match: Linear, scheme: auto}}]
auto: {{candidates: [NVFP4, FP8_DYNAMIC, keep], {budget}}}
calibration: {{data: rows.jsonl}}
"""


def layer_groups(
    source: Path, *candidates: str, rules: tuple[Rule, ...] = AUTO, has_text: bool = False
) -> tuple[LayerGroup, ...]:
    auto = Auto(candidates=candidates, bits=5)
    return find_layer_groups(read_index(source), rules, auto, PlanSettings(has_text=has_text))


def test_fused_layers_are_one_group(llama: Path) -> None:
    units = layer_groups(llama, "NVFP4", KEEP)
    kinds = Counter(unit.name.rpartition(".")[2] for unit in units)
    assert kinds == {"qkv_proj": 3, "o_proj": 3, "gate_up_proj": 3, "down_proj": 3}
    assert all([option.scheme for option in unit.options] == ["NVFP4"] for unit in units)


def test_experts_of_layer_are_one_group() -> None:
    units = layer_groups(MOE, "FP8_DYNAMIC", KEEP)
    experts = [unit for unit in units if unit.name.endswith(".experts")]
    assert experts
    assert all(len(unit.layers) % 3 == 0 and len(unit.layers) > 3 for unit in experts)
    chosen = {unit.name: KEEP if unit in experts[:1] else "FP8_DYNAMIC" for unit in units}
    plan = build_plan(read_index(MOE), rules_with_schemes(units, chosen, AUTO))
    assert plan.refusals == ()
    quantized = {member.name for group in plan.groups for member in group.members}
    assert not quantized & set(experts[0].layers)
    assert {
        layer for unit in units if unit not in experts[:1] for layer in unit.layers
    } == quantized


@pytest.mark.parametrize("scheme", CANDIDATES)
def test_choice_gives_plan_of_equal_rule(scheme: str, llama: Path) -> None:
    index, units = read_index(llama), layer_groups(llama, *CANDIDATES)
    made = build_plan(index, rules_with_schemes(units, {unit.name: scheme for unit in units}, AUTO))
    usual = build_plan(index, [Rule(match="Linear", scheme=scheme)])
    assert to_json(made) == to_json(usual)
    sizes = sum(unit.bytes_in(scheme) for unit in units)
    assert made.output_bytes == sizes + fixed_bytes(index, units, usual)


def test_fixed_rule_splits_no_fused_layer(llama: Path) -> None:
    rules = (Rule(match="re:.*o_proj", scheme="FP8_DYNAMIC"), *AUTO)
    units = layer_groups(llama, "NVFP4", KEEP, rules=rules)
    assert {unit.allowed for unit in units if unit.name.endswith("o_proj")} == {("FP8_DYNAMIC",)}
    assert {unit.allowed for unit in units if "o_proj" not in unit.name} == {("NVFP4", KEEP)}
    rules = (Rule(match="q_proj", scheme="FP8_DYNAMIC"), *AUTO)
    with pytest.raises(InputError, match=r"qkv_proj.*same rule.* q_proj, k_proj, v_proj"):
        layer_groups(llama, "NVFP4", KEEP, rules=rules)


def test_unsupported_scheme_is_no_candidate(tmp_path: Path) -> None:
    """520 columns are not a multiple of 16, so that NVFP4 is refused for down_proj. FP8 is not."""
    source = save_llama(tmp_path / "model", num_hidden_layers=1, intermediate_size=520)
    units = layer_groups(source, "NVFP4", "FP8_DYNAMIC")
    (down,) = (unit for unit in units if unit.name.endswith("down_proj"))
    assert down.allowed == ("FP8_DYNAMIC",)
    assert_contains(down.refused[0].got, "in_features 520", "group size 16")
    assert smallest_schemes(units)[down.name] == "FP8_DYNAMIC"
    with pytest.raises(InputError, match="no candidate fits"):
        layer_groups(source, "NVFP4", "NVFP4A16")


def scenario(folder: Path, source: Path, budget: str) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(SCENARIO.format(source=source, budget=budget))
    return path


def test_plan_without_losses_is_smallest(llama: Path, tmp_path: Path) -> None:
    path = scenario(tmp_path, llama, "share: 0.5")
    ran = vexport("plan", path, "--run-dir", tmp_path / "run", "--format", "json")
    assert ran.code == 0, ran.stderr
    plan = json.loads(ran.stdout)
    assert {group["scheme"] for group in plan["groups"]} == {"NVFP4"}
    assert [note["check"] for note in plan["notes"]] == ["auto"]
    assert "vexport run" in plan["notes"][0]["fix"]


def test_plan_uses_measured_losses(llama: Path, tmp_path: Path) -> None:
    """One layer loses much more than all others, so that only this layer stays in 8 bits."""
    index, units = read_index(llama), layer_groups(llama, *CANDIDATES, has_text=True)
    worst = units[5].name
    groups = tuple(
        GroupSensitivity(
            name=unit.name,
            layers=unit.layers,
            parameters=unit.parameters,
            source_bytes=unit.source_bytes,
            schemes=tuple(
                SchemeLoss(
                    scheme=option.scheme,
                    observer=option.groups[0].observer,
                    rounding=option.groups[0].rounding,
                    num_bytes=option.num_bytes,
                    loss=loss,
                )
                for option, loss in zip(
                    unit.options, (1.0 if unit.name == worst else 0.01, 0.001), strict=True
                )
            ),
        )
        for unit in units
    )
    (tmp_path / "run").mkdir()
    found = GroupSensitivities(samples=1, tokens=1, groups=groups)
    (tmp_path / "run" / "sensitivity.json").write_text(to_json(found))
    plain = build_plan(index, rules_with_schemes((), {}, AUTO))
    least = sum(unit.bytes_in("NVFP4") for unit in units) + fixed_bytes(index, units, plain)
    most = least + units[5].bytes_in("FP8_DYNAMIC") - units[5].bytes_in("NVFP4")
    file = scenario(tmp_path, llama, f"bytes: {most}")
    ran = vexport("plan", file, "--run-dir", tmp_path / "run", "--format", "json")
    assert ran.code == 0, ran.stderr
    plan = json.loads(ran.stdout)
    assert plan["notes"] == []
    by_scheme = {group["name"]: group["scheme"] for group in plan["groups"]}
    assert {name for name, scheme in by_scheme.items() if scheme == "FP8_DYNAMIC"} == {worst}
    other = scenario(tmp_path, llama, f"bytes: {most}")
    other.write_text(other.read_text().replace("scheme: auto}", "scheme: auto, rounding: nearest}"))
    ran = vexport("plan", other, "--run-dir", tmp_path / "run", "--format", "json")
    assert [note["check"] for note in json.loads(ran.stdout)["notes"]] == ["auto"], (
        "losses of a refit"
    )


REST_BYTES = 1000


def groups(seed: int, number: int) -> list[GroupSensitivity]:
    """Return groups of a few sizes with random losses. Sometimes four bits lose less than eight."""
    chance = random.Random(seed)
    made = []
    for name in map(str, range(number)):
        size = chance.choice((64, 96, 256)) * 16
        losses = sorted(
            (chance.expovariate(20), chance.expovariate(200)), reverse=chance.random() < 0.9
        )
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
    """Yield the bytes of the whole output and the loss of each mixture."""
    options = [
        [*((choice.num_bytes, choice.loss) for choice in group.schemes), (group.source_bytes, 0.0)]
        for group in made
    ]
    for picked in itertools.product(*options):
        yield REST_BYTES + sum(size for size, _ in picked), sum(loss for _, loss in picked)


def chosen_mixture(made: Sequence[GroupSensitivity], **limit: float) -> MixedScheme:
    source = REST_BYTES + sum(group.source_bytes for group in made)
    auto = Auto.model_validate({"candidates": CANDIDATES, **limit})
    open_to_all = [
        LayerGroup(
            name=group.name,
            source_bytes=group.source_bytes,
            parameters=group.parameters,
            allowed=CANDIDATES,
            options=(),
            refused=(),
        )
        for group in made
    ]
    budget = Budget(auto=auto, fixed_bytes=REST_BYTES, source_bytes=source, parameters=source // 2)
    return choose_schemes(made, open_to_all, budget)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.35, 0.5, 0.8])
def test_chosen_mixture_loses_least(seed: int, share: float) -> None:
    made = groups(seed, 7)
    source = REST_BYTES + sum(group.source_bytes for group in made)
    best = min((loss for size, loss in every_mixture(made) if size <= share * source), default=None)
    if best is None:
        with pytest.raises(InputError, match=r"auto\.share"):
            chosen_mixture(made, share=share)
        return
    found = chosen_mixture(made, share=share)
    assert found.loss == pytest.approx(best, abs=1e-12)
    assert found.output_bytes <= share * source
    assert found.output_bytes == REST_BYTES + sum(choice.num_bytes for choice in found.choices)
    assert found.loss == pytest.approx(sum(choice.loss for choice in found.choices))


def test_budget_keys_give_same_mixture() -> None:
    made = groups(3, 7)
    source = REST_BYTES + sum(group.source_bytes for group in made)
    by_share = chosen_mixture(made, share=0.5)
    assert chosen_mixture(made, bytes=source // 2).choices == by_share.choices
    assert chosen_mixture(made, bits=8.0).choices == by_share.choices


def test_thinned_mixtures_lose_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 300 groups has many more mixtures than the limit allows."""
    options = [
        [
            SchemeChoice(
                name=group.name, scheme=choice.scheme, num_bytes=choice.num_bytes, loss=choice.loss
            )
            for choice in group.schemes
        ]
        for group in groups(1, 300)
    ]
    exact = best_mixtures(options)
    monkeypatch.setattr("vexport.quantize.auto.MAX_MIXTURES", 500)
    thinned = best_mixtures(options)
    assert len(exact.loss) > 1000 >= 2 * len(thinned.loss)
    for share in (0.25, 0.5, 0.75):
        most = exact.num_bytes[0] + share * (exact.num_bytes[-1] - exact.num_bytes[0])
        best = exact.loss[exact.num_bytes <= most][-1]
        assert thinned.loss[thinned.num_bytes <= most][-1] <= best * 1.1


@pytest.mark.parametrize(("key", "limit"), [("bits", 0.5), ("bytes", 10), ("share", 0.01)])
def test_unreachable_budget_names_least(key: str, limit: float) -> None:
    made = groups(2, 5)
    with pytest.raises(InputError) as caught:
        chosen_mixture(made, **{key: limit})
    least = min(size for size, _ in every_mixture(made))
    source = REST_BYTES + sum(group.source_bytes for group in made)
    expected = {
        "bits": f"{8 * least / (source // 2):.3f} bits",
        "bytes": f"{least} bytes",
        "share": f"{least / source:.3f} of",
    }
    assert f"auto.{key}" in str(caught.value)
    assert expected[key] in str(caught.value)


def test_unreachable_budget_is_refused_before_calibration(
    tmp_path: Path,
) -> None:
    scenarios = Path(__file__).parent.parent.parent / "scenarios"
    text = (
        (scenarios / "demo-auto.yaml").read_text(encoding="utf-8").replace("bits: 7.0", "bits: 5.0")
    )
    scenario = tmp_path / "tight.yaml"
    scenario.write_text(text.replace("demo/", f"{scenarios}/demo/"))
    for command in (("plan", scenario), ("run", scenario, "--run-dir", tmp_path / "run")):
        ran = vexport(*command)
        assert ran.code == 2
        assert_contains(ran.stderr, "auto.bits: got 5", "at least 5.660 bits", "whole model")
    assert not (tmp_path / "run" / "calibration").exists()
