"""Each observer in options, rules and recipes, for weights and for inputs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from tests.command import vexport
from tests.models import write_calibration
from tests.texts import assert_contains
from vexport.api import Rule, quantize
from vexport.records.observer_names import BY_IMPORTANCE, OBSERVERS
from vexport.scenario import problems_at

LAYER = "model.layers.0.mlp.down_proj"
FOR_INPUTS = [name for name in OBSERVERS if name not in BY_IMPORTANCE]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calibration(tmp_path_factory.mktemp("text") / "text.jsonl", rows=5)


def input_scales(out: Path) -> Mapping[str, float]:
    tensors = load_file(out / "model.safetensors")
    return {name: float(value) for name, value in tensors.items() if name.endswith(".input_scale")}


def extremes_of_samples(llama: Path, text: Path) -> Sequence[float]:
    """Return the largest magnitude of a layer's input for each sample, using transformers alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype="auto")
    seen: list[float] = []
    model.get_submodule(LAYER).register_forward_pre_hook(
        lambda module, inputs: seen.append(float(inputs[0].float().abs().max()))
    )
    for line in text.read_text().splitlines():
        with torch.no_grad():
            model(torch.tensor([json.loads(line)["input_ids"]]))
    return seen


def test_input_observer_in_option_rule_and_recipe(llama: Path, text: Path, tmp_path: Path) -> None:
    """The moving average follows the order of the samples."""
    options = ("--calibration", text, "--samples", "5")
    for name in ("static_minmax", "MinMax"):
        ran = vexport(
            "quantize",
            llama,
            tmp_path / name,
            "--scheme",
            "FP8",
            "--input-observer",
            name,
            *options,
        )
        assert ran.code == 0, ran.stderr
    (tmp_path / "recipe.yaml").write_text(
        "QuantizationModifier: {scheme: FP8, input_observer: minmax}\n"
    )
    recipe = ("--recipe", tmp_path / "recipe.yaml", "--ignore", "lm_head")
    ran = vexport("quantize", llama, tmp_path / "recipe", *recipe, *options)
    assert ran.code == 0, ran.stderr
    last = {"input_observer": "minmax", "input_observer_kwargs": {"averaging_constant": 1.0}}
    rule = Rule.model_validate({"match": "Linear", "scheme": "FP8", **last})
    quantize(llama, tmp_path / "last", rules=[rule], calibration=str(text))
    averaged, running = input_scales(tmp_path / "MinMax"), input_scales(tmp_path / "static_minmax")
    assert averaged == input_scales(tmp_path / "recipe")
    assert all(averaged[name] < running[name] for name in running)
    seen = extremes_of_samples(llama, text)
    average = seen[0]
    for value in seen[1:]:
        average = average * 0.99 + value * 0.01
    key = f"{LAYER}.input_scale"
    newest = input_scales(tmp_path / "last")
    for scales, expected in ((averaged, average), (running, max(seen)), (newest, seen[-1])):
        assert scales[key] == pytest.approx(expected / 448, rel=0.01)
    (group,) = yaml.safe_load((tmp_path / "last" / "config.json").read_text())[
        "quantization_config"
    ]["config_groups"].values()
    assert group["input_activations"]["observer"] == "minmax"
    assert group["input_activations"]["observer_kwargs"] == {"averaging_constant": 1.0}
    assert vexport("check", tmp_path / "last").code == 0


@pytest.mark.parametrize("name", FOR_INPUTS)
@pytest.mark.parametrize("scheme", ["FP8", "NVFP4"])
def test_all_input_observers(
    name: str, scheme: str, llama: Path, text: Path, tmp_path: Path
) -> None:
    rule = Rule(match="Linear", scheme=scheme, input_observer=name, rounding="nearest")
    quantize(llama, tmp_path / "out", rules=[rule], calibration=str(text))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    ends = ".input_scale" if scheme == "FP8" else ".input_global_scale"
    found = [value for key, value in tensors.items() if key.endswith(ends)]
    assert len(found) >= 7
    assert all(bool(torch.isfinite(value).all() and (value > 0).all()) for value in found)


@pytest.mark.parametrize("name", OBSERVERS)
def test_observer_keywords_are_checked(name: str, tmp_path: Path) -> None:
    """An invalid keyword is named by its path. Valid keywords are accepted."""
    values = {"maxshrink": 0.5, "patience": 2, "grid": 10, "norm": 2.0, "averaging_constant": 0.5}
    values |= {"strict": True, "expand": 1.2}
    known = {field.name for field in fields(OBSERVERS[name].options)}
    given = {key: value for key, value in values.items() if key in known}
    assert given.keys() == known
    rule = {"match": "Linear", "scheme": "W4A16", "observer": name, "observer_kwargs": given}
    assert Rule.model_validate(rule).observer_kwargs == given
    wrong = {**rule, "observer_kwargs": {**{key: -1 for key in given}, "numerics": "reference"}}
    with (
        pytest.raises(Exception, match="observer_kwargs") as caught,
        problems_at("scenario.yaml: rules.0"),
    ):
        Rule.model_validate(wrong)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(given) + 1
    assert all("scenario.yaml: rules.0: observer_kwargs." in line for line in lines)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("{scheme: FP8_DYNAMIC, input_observer: minmax}", "need a scheme with static"),
        ("{scheme: W4A16, input_observer: minmax}", "does not quantize inputs"),
        (
            "{scheme: FP8, input_observer: imatrix_mse}",
            "which only weights have",
        ),
        ("{scheme: FP8_BLOCK, observer: imatrix_mse}", "one scale per block"),
        ("{scheme: FP8, observer: msse}", "did you mean mse?"),
        ("{scheme: FP8, input_observer: mse, input_observer_kwargs: {grids: 9}}", "_kwargs.grids"),
        ("{scheme: FP8, observer_kwargs: {grid: 9}}", "observer_kwargs: got"),
        ("{scheme: FP8, observer: 'os:system'}", "--trust-remote-code"),
    ],
)
def test_unsupported_observers_name_place(
    rule: str, words: str, llama: Path, tmp_path: Path
) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(f"name: a\nsource: {llama}\nrules:\n  - {{match: Linear, {rule[1:]}\n")
    ran = vexport("plan", path)
    assert ran.code == 2
    assert words in ran.stderr
    assert "rules.0" in ran.stderr or "rule 'Linear': observer" in ran.stderr


def test_observer_of_other_package(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document's class, named by package.module:Class, halves the range and so the scale."""
    page = Path(__file__).parents[2] / "vexport" / "docs" / "observers-python.md"
    code = (
        page.read_text(encoding="utf-8").partition("## An observer of your own")[2].split("```")[1]
    )
    (tmp_path / "halves.py").write_text(code.removeprefix("python"))
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ("--scheme", "FP8_DYNAMIC", "--trust-remote-code", "--observer")
    for name, out in (("halves:HalfRange", "half"), ("memoryless_minmax", "whole")):
        ran = vexport("quantize", llama, tmp_path / out, *options, name)
        assert ran.code == 0, ran.stderr
    missing = vexport("plan", llama, *options, "nowhere.of:It")
    assert missing.code == 2
    assert "ModuleNotFoundError" in missing.stderr
    half, whole = (load_file(tmp_path / out / "model.safetensors") for out in ("half", "whole"))
    key = f"{LAYER}.weight_scale"
    torch.testing.assert_close(half[key].float() * 2, whole[key].float(), rtol=0.01, atol=0)
    assert vexport("check", tmp_path / "half").code == 0


OLDER = """
from vexport.observers import Observer


class Halved(Observer):
    def calculate_qparams(self, observed, reduce_dims=None, tensor_id=None, global_scale=None):
        scale, zero_point = super().calculate_qparams(
            observed, reduce_dims, tensor_id, global_scale
        )
        return scale / 2, zero_point


class Own(Observer):
    def get_qparams(self):
        found = super().get_qparams()
        return {**found, "scale": found["scale"] / 2}


class Ignored(Observer):
    def get_min_max(self, observed):
        return observed.amin((0, -1)), observed.amax((0, -1))
"""


def test_observers_of_older_documents(
    llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of weights and inputs are halved.

    A method without effect is refused with its replacement.
    """
    (tmp_path / "older.py").write_text(OLDER)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = (
        *("--scheme", "FP8", "--trust-remote-code", "--calibration", text),
        *("--samples", "1", "--rounding", "nearest"),
    )
    for name, out in (("older:Halved", "half"), ("memoryless_minmax", "whole")):
        observers = ("--observer", name, "--input-observer", name)
        ran = vexport("quantize", llama, tmp_path / out, *options, *observers)
        assert ran.code == 0, ran.stderr
    half, whole = (load_file(tmp_path / out / "model.safetensors") for out in ("half", "whole"))
    for kind in ("weight_scale", "input_scale"):
        found, expected = half[f"{LAYER}.{kind}"].float() * 2, whole[f"{LAYER}.{kind}"].float()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for command in ("plan", "quantize"):
        output = () if command == "plan" else (tmp_path / "refused", *options[3:])
        arguments = (command, llama, *output, "--scheme", "FP8", "--trust-remote-code")
        ran = vexport(*arguments, "--observer", "older:Ignored")
        assert ran.code == 2
        assert_contains(ran.stderr, "override update_statistics_from_observed")
        ran = vexport(*arguments, "--input-observer", "older:Own")
        assert ran.code == 2
        assert_contains(
            ran.stderr, "older:Own", "get_qparams()", "update_statistics_from_observed()"
        )
    assert not (tmp_path / "refused").exists()
    ran = vexport("quantize", llama, tmp_path / "own", *options, "--observer", "older:Own")
    assert ran.code == 0, ran.stderr
    own = load_file(tmp_path / "own" / "model.safetensors")
    assert torch.equal(own[f"{LAYER}.weight_scale"], half[f"{LAYER}.weight_scale"])
