"""Quantize towers of pictures and their projectors (`--include-vision`)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

from tests.architectures.families import FAMILIES, save_family
from tests.architectures.families import save as save_micro
from tests.calibration.models import configs, save
from tests.calibration.seeing import address, picture, question, save_seeing, write_rows
from tests.command import vexport
from tests.models import VOCABULARY
from vexport.calibration import read_samples
from vexport.checkpoint.index import read_index
from vexport.errors import InputError
from vexport.formats.plan import Plan
from vexport.plan.build import PlanSettings, build_plan
from vexport.records import CalibrationData
from vexport.scenario import Rule

WITH_TOWER = PlanSettings(include_vision=True)
PICTURES = (question(address(picture(90, 70))), question(address(picture(60, 150, 1))))
TOWER = "vision_tower.vision_model.encoder.layers.0"

pytestmark = pytest.mark.usefixtures("matmul_in_model_dtype")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing("llava", tmp_path_factory.mktemp("llava") / "model")


def plan_of(model: Path, settings: PlanSettings, *rules: tuple[str, str]) -> Plan:
    chosen = [Rule(match=match, scheme=scheme) for match, scheme in rules]
    return build_plan(read_index(model), chosen, settings)


def groups_in_tower(plan: Plan) -> list[str]:
    return [group.name for group in plan.groups if group.in_tower]


def quantize(model: Path, out: Path, scheme: str, *options: object) -> dict[str, torch.Tensor]:
    ran = vexport("quantize", model, out, "--scheme", scheme, *options)
    assert ran.code == 0, ran.stderr
    with safe_open(out / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_linear_rule_applies_to_tower(llava: Path) -> None:
    assert groups_in_tower(plan_of(llava, PlanSettings(), ("Linear", "FP8"))) == []
    plan = plan_of(llava, WITH_TOWER, ("Linear", "FP8"))
    assert groups_in_tower(plan) == [
        "multi_modal_projector.linear_1",
        "multi_modal_projector.linear_2",
        f"{TOWER}.mlp.fc1",
        f"{TOWER}.mlp.fc2",
        f"{TOWER}.self_attn.qkv_proj",
        f"{TOWER}.self_attn.out_proj",
    ]
    assert plan.kept_linears == ("language_model.lm_head",)
    plan = plan_of(llava, WITH_TOWER, ("re:.*projector.*", "keep"), ("Linear", "FP8"))
    assert not any("projector" in name for name in groups_in_tower(plan))


def test_tower_is_rounded_to_nearest(llava: Path) -> None:
    settings = PlanSettings(include_vision=True, has_text=True)
    plan = plan_of(llava, settings, ("Linear", "W4A16_G64"))
    assert {group.rounding for group in plan.groups if group.in_tower} == {"nearest"}
    assert {group.rounding for group in plan.groups if not group.in_tower} == {"refit"}


@pytest.mark.parametrize("family", ["llama", "internvl"])
def test_models_without_quantizable_tower(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if family == "llama":
        save(configs()["llama"], folder)
    else:
        save_seeing(family, folder)
    with pytest.raises(InputError) as raised:
        plan_of(folder, WITH_TOWER, ("Linear", "FP8"))
    assert (raised.value.rule, raised.value.exit_code) == ("quantize/no-tower", 2)


def test_towers_of_sound_stay_unquantized(tmp_path: Path) -> None:
    model = save_family("gemma4-vision", tmp_path / "model")
    plan = plan_of(model, WITH_TOWER, ("Linear", "FP8_DYNAMIC"))
    names = groups_in_tower(plan)
    assert any("vision" in name for name in names)
    assert not any("audio" in name for name in names)


def save_siglip(folder: Path) -> Path:
    family = FAMILIES["gemma3-vision"]
    vision = {**(family.towers or {})["vision_config"], "intermediate_size": 272}
    return save_micro(replace(family, towers={"vision_config": vision}), folder)


def test_unsupported_shape_of_tower(tmp_path: Path) -> None:
    """SigLIP's fc2 has 4,304 columns, which are no multiple of 32."""
    model = save_siglip(tmp_path / "model")
    plan = plan_of(model, WITH_TOWER, ("Linear", "W4A16_G32"))
    assert [refusal.where.rpartition(".")[2] for refusal in plan.refusals] == ["fc2"]
    keeping = PlanSettings(include_vision=True, on_unsupported_shape="keep")
    kept = plan_of(model, keeping, ("Linear", "W4A16_G32"))
    assert kept.refusals == ()
    assert [name.rpartition(".")[2] for name in kept.kept_linears] == ["fc2"]


def test_static_scales_are_the_ranges_of_inputs(llava: Path, tmp_path: Path) -> None:
    """The static scales of FP8 equal the largest inputs of transformers' own forward, / 448."""
    data = write_rows(tmp_path / "rows.jsonl", PICTURES)
    options = ("--calibration", data, "--samples", 2, "--seq-len", 400, "--no-verify")
    stored = quantize(llava, tmp_path / "out", "FP8", "--include-vision", *options)
    wanted = largest_inputs(llava, data)
    for name, largest in wanted.items():
        scale = float(stored[f"{name}.input_scale"])
        assert scale == pytest.approx(largest / 448, rel=1e-2), name
    shared = stored[f"{TOWER}.self_attn.q_proj.input_scale"]
    assert shared == stored[f"{TOWER}.self_attn.v_proj.input_scale"]


def largest_inputs(folder: Path, data: Path) -> dict[str, float]:
    chosen = CalibrationData(name=str(data), samples=2, seq_len=400)
    samples = read_samples(chosen, folder, vocab_size=VOCABULARY, with_pictures=True)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()
    modules = dict(model.named_modules())
    stored_names = {
        f"{TOWER}.mlp.fc2": next(name for name in modules if name.endswith("layers.0.mlp.fc2")),
        "multi_modal_projector.linear_1": "model.multi_modal_projector.linear_1",
    }
    seen = dict.fromkeys(stored_names, 0.0)
    for stored, name in stored_names.items():

        def hook(_: object, inputs: tuple[torch.Tensor, ...], stored: str = stored) -> None:
            seen[stored] = max(seen[stored], float(inputs[0].abs().max()))

        modules[name].register_forward_pre_hook(hook)
    for index, ids in enumerate(samples.token_ids):
        sample = samples.pictures_of(index)
        assert sample is not None
        inputs = {
            name: value.to(torch.bfloat16) if value.is_floating_point() else value
            for name, value in sample.inputs().items()
        }
        with torch.no_grad():
            model(input_ids=torch.tensor([ids]), use_cache=False, **inputs)
    return seen


def test_static_scales_without_pictures(llava: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"text": "a row of text for calibration"}] * 4)
    arguments = ("quantize", llava, tmp_path / "out", "--include-vision", "--calibration", data)
    length = ("--samples", 2, "--seq-len", 10, "--no-verify")
    ran = vexport(*arguments, "--scheme", "FP8", *length)
    assert ran.code == 2
    assert "quantize/no-pictures" in ran.stderr
    assert not (tmp_path / "out").exists()
    assert vexport(*arguments, "--scheme", "W8A16", "--rounding", "nearest", *length).code == 0


def test_default_leaves_bytes_and_recipe(llava: Path, tmp_path: Path) -> None:
    stored = quantize(llava, tmp_path / "out", "FP8_DYNAMIC", "--no-verify")
    assert stored[f"{TOWER}.mlp.fc1.weight"].dtype == torch.bfloat16
    recipe = json.loads((tmp_path / "out" / "vexport.json").read_text())
    assert "include_vision" not in recipe["scenario"]
    quantize(llava, tmp_path / "with", "FP8_DYNAMIC", "--no-verify", "--include-vision")
    recipe = json.loads((tmp_path / "with" / "vexport.json").read_text())
    assert recipe["scenario"]["include_vision"] is True


def test_auto_excludes_towers(llava: Path, tmp_path: Path) -> None:
    scenario = tmp_path / "s.yaml"
    scenario.write_text(
        f"name: s\nsource: {llava}\nrules: [{{match: Linear, scheme: auto}}]\n"
        "auto: {candidates: [FP8_DYNAMIC, keep], bits: 9}\ninclude_vision: true\n"
        "calibration: {data: default}\n"
    )
    ran = vexport("plan", scenario)
    assert ran.code == 2
    assert "include_vision" in ran.stderr


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("family", "scheme"), [("qwen3-vl", "NVFP4"), ("gemma3", "W4A16"), ("idefics3", "FP8")]
)
def test_dry_load_and_check(family: str, scheme: str, tmp_path: Path) -> None:
    """The command itself loads the result dry. `check --source` compares the weights."""
    folder = save_seeing(family, tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", PICTURES)
    options = ("--include-vision", "--calibration", data, "--samples", 2, "--seq-len", 400)
    stored = quantize(folder, tmp_path / "out", scheme, *options)
    assert any("vis" in name and name.endswith("weight_scale") for name in stored)
    ran = vexport("check", tmp_path / "out", "--static", "--source", folder)
    assert ran.code == 0, ran.stdout
