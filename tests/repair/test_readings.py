"""Faults with several explanations: `repair` uses the source or refuses, and lists assumptions."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.command import vexport
from tests.models import Good, quantize, save_llama, write_calibration
from tests.mutations.edits import (
    ARGUMENTS,
    GROUP,
    Change,
    all_of,
    config,
    copy_group,
    forget_digests,
    inverse,
    json_config,
    multiply_by,
    node,
    put,
    spoiled,
)
from vexport.checkpoint.smoothed import SMOOTHING
from vexport.outputs import RECIPE
from vexport.records import Json

WEIGHTS = "model.safetensors"
ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.2.mlp"
Q, GATE = f"{ATTENTION}.q_proj.weight_global_scale", f"{MLP}.gate_proj.weight_global_scale"
SOURCE_OPTION = "--source"


def repaired(checkpoint: Path, out: Path, *options: object) -> dict[str, list[dict[str, object]]]:
    """Repair a checkpoint, which must succeed, and return the report."""
    ran = vexport("repair", checkpoint, out, "--quiet", "--format", "json", *options)
    assert ran.code == 0, ran.stderr
    report: dict[str, list[dict[str, object]]] = json.loads(ran.stdout)
    return report


def same_tensors(first: Path, second: Path) -> bool:
    left, right = load_file(first / WEIGHTS), load_file(second / WEIGHTS)
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


AMBIGUOUS = [
    (put(Q, multiply_by(4)), "qkv_proj"),
    (put(Q, multiply_by(0.25)), "qkv_proj"),
    (put(GATE, multiply_by(4)), "gate_up_proj"),
    (
        all_of(
            put(Q, multiply_by(4)), put(f"{ATTENTION}.k_proj.weight_global_scale", multiply_by(3))
        ),
        "qkv_proj",
    ),
    (
        all_of(*(put(GATE.replace(".2.", f".{layer}."), multiply_by(4)) for layer in range(3))),
        "gate_up_proj",
    ),
    (put(Q, lambda scale: inverse(scale) * 4), "qkv_proj"),
]


@pytest.mark.parametrize("scheme", ["NVFP4A16", "NVFP4"])
@pytest.mark.parametrize(("change", "fused"), AMBIGUOUS)
def test_only_source_decides_between_two_scales(
    good: Good, llama: Path, tmp_path: Path, scheme: str, change: Change, fused: str
) -> None:
    checkpoint, out = spoiled(good(scheme), tmp_path / "broken", change), tmp_path / "out"
    ran = vexport("repair", checkpoint, out, "--quiet")
    assert ran.code == 1
    assert fused in ran.errors[0]
    assert SOURCE_OPTION in ran.errors[0]
    assert "finds no error" not in ran.stdout
    assert not out.exists()
    report = repaired(checkpoint, out, SOURCE_OPTION, llama)
    assert same_tensors(out, good(scheme))
    assert str(report["source"]) == str(llama)
    for repair in report["repairs"]:
        change_of_weight = repair["change"]
        assert repair["assumption"] is None
        assert isinstance(change_of_weight, dict)
        assert change_of_weight["source_snr_db"][1] > 15
    assert vexport("check", out, SOURCE_OPTION, llama, "--static", "--quiet").code == 0


def test_source_explains_changed_file(good: Good, llama: Path, tmp_path: Path) -> None:
    """A checkpoint with digests is repaired if every weight matches the source afterwards."""
    checkpoint = spoiled(good("NVFP4A16"), tmp_path / "broken", put(Q, multiply_by(4)))
    recipe = (good("NVFP4A16") / RECIPE).read_bytes()
    (checkpoint / RECIPE).write_bytes(recipe)
    assert vexport("repair", checkpoint, tmp_path / "no", "--quiet").code == 1
    out = tmp_path / "out"
    warnings = repaired(checkpoint, out, SOURCE_OPTION, llama)["warnings"]
    severities = [each["severity"] for each in warnings if each["check"] == "digests"]
    assert severities == ["warning"]
    assert same_tensors(out, good("NVFP4A16"))
    assert json.loads((out / RECIPE).read_text())["repaired"] is True
    assert vexport("check", out, SOURCE_OPTION, llama, "--static", "--quiet").code == 0


def test_wrong_source_is_refused(good: Good, tmp_path: Path) -> None:
    checkpoint = spoiled(good("NVFP4A16"), tmp_path / "broken", put(Q, multiply_by(4)))
    other = save_llama(tmp_path / "other")
    put(f"{ATTENTION}.q_proj.weight", lambda weight: weight.flip(0))(other)
    ran = vexport("repair", checkpoint, tmp_path / "out", SOURCE_OPTION, other, "--quiet")
    assert ran.code == 1
    assert "source" in ran.errors[0]
    assert not (tmp_path / "out").exists()
    quantized = vexport(
        "repair", checkpoint, tmp_path / "out", SOURCE_OPTION, good("W8A8"), "--quiet"
    )
    assert quantized.code == 2


def test_wrong_scale_of_unfused_layer_is_refused(good: Good, llama: Path, tmp_path: Path) -> None:
    """Only the comparison with the source shows that the scale is wrong.

    No other scale could replace it.
    """
    name = f"{ATTENTION}.o_proj.weight_global_scale"
    checkpoint = spoiled(good("NVFP4A16"), tmp_path / "broken", put(name, multiply_by(4)))
    ran = vexport("repair", checkpoint, tmp_path / "out", SOURCE_OPTION, llama, "--quiet")
    assert ran.code == 1
    assert "o_proj" in ran.errors[0]
    assert not (tmp_path / "out").exists()


def test_assumptions_are_reported(good: Good, llama: Path, tmp_path: Path) -> None:
    checkpoint = spoiled(good("NVFP4"), tmp_path / "broken", put(Q, inverse))
    (repair,) = repaired(checkpoint, tmp_path / "json")["repairs"]
    assert "reciprocal" in str(repair["assumption"])
    text = vexport("repair", checkpoint, tmp_path / "text", "--quiet").stdout
    assert "assumes that" in text
    assert "values were not compared" in text
    assert "200.0 dB" not in text
    (repair,) = repaired(checkpoint, tmp_path / "compared", SOURCE_OPTION, llama)["repairs"]
    assert repair["assumption"] is None
    text = vexport("repair", checkpoint, tmp_path / "text2", SOURCE_OPTION, llama, "--quiet").stdout
    assert "not compared" not in text
    assert f"compared with {llama}" in text


def test_input_scales_remain_an_assumption(good: Good, llama: Path, tmp_path: Path) -> None:
    """The source has no scales of inputs, and cannot show which scale is right."""
    name = f"{MLP}.gate_proj.input_global_scale"
    checkpoint = spoiled(good("NVFP4"), tmp_path / "broken", put(name, multiply_by(2)))
    for number, options in enumerate(((), (SOURCE_OPTION, llama))):
        (repair,) = repaired(checkpoint, tmp_path / f"out{number}", *options)["repairs"]
        assert "widest range" in str(repair["assumption"])


def test_layer_that_fits_two_groups_is_refused(good: Good, tmp_path: Path) -> None:
    """MXFP4 stores the same tensors with and without quantized inputs."""

    def without_inputs(whole: dict[str, Json]) -> None:
        group = node(whole, ("quantization_config", "config_groups", "copy"))
        group |= {"input_activations": None, "targets": ["re:.*no_such_layer"]}

    change = all_of(
        copy_group(),
        json_config(without_inputs),
        config(GROUP, targets=["re:.*mlp.*"], ignore=[]),
    )
    checkpoint = spoiled(good("MXFP4"), tmp_path / "broken", change)
    ran = vexport("repair", checkpoint, tmp_path / "out", "--quiet")
    assert ran.code == 1
    assert not (tmp_path / "out").exists()


def test_number_of_bits_follows_from_size(good: Good, tmp_path: Path) -> None:
    """Read as four bits, eight bits look like a weight with twice the columns.

    The size in config.json and the stored shape show the right number.
    """
    checkpoint = spoiled(good("W8A16"), tmp_path / "broken", config(ARGUMENTS, num_bits=4))
    (repair,) = repaired(checkpoint, tmp_path / "out")["repairs"]
    assert str(repair["where"]).endswith("group_0.weights.num_bits")
    assert (repair["got"], repair["now"]) == ("4", "8")


def test_smoothed_checkpoint_is_compared_with_smoothed_source(llama: Path, tmp_path: Path) -> None:
    text = write_calibration(tmp_path / "text.jsonl")
    options = ("--calibration", text, "--smoothing", "0.5", "--rounding", "gptq")
    smoothed = quantize(llama, tmp_path / "smoothed", "NVFP4", *options)
    assert (smoothed / SMOOTHING).is_file()
    forget_digests(smoothed)
    sound = tmp_path / "sound"
    assert repaired(smoothed, sound, SOURCE_OPTION, llama)["repairs"] == []
    out = tmp_path / "out"
    repaired(
        spoiled(smoothed, tmp_path / "broken", put(Q, multiply_by(4))), out, SOURCE_OPTION, llama
    )
    assert same_tensors(out, smoothed)
    assert (out / SMOOTHING).read_bytes() == (smoothed / SMOOTHING).read_bytes()
    other = spoiled(
        smoothed, tmp_path / "other", put(f"{ATTENTION}.o_proj.weight_global_scale", multiply_by(4))
    )
    assert vexport("repair", other, tmp_path / "no", SOURCE_OPTION, llama, "--quiet").code == 1


def test_unreadable_smoothing_is_refused(good: Good, llama: Path, tmp_path: Path) -> None:
    checkpoint = spoiled(good("NVFP4"), tmp_path / "broken", put(Q, multiply_by(4)))
    (checkpoint / SMOOTHING).write_text('{"tensors": {"model.norm.weight": {"rows": "AAECAw=="}}}')
    ran = vexport("repair", checkpoint, tmp_path / "out", SOURCE_OPTION, llama, "--quiet")
    assert ran.code == 1
    assert SMOOTHING in ran.errors[0]
    assert not (tmp_path / "out").exists()


def test_missing_kv_scales_are_an_assumption(good: Good, llama: Path, tmp_path: Path) -> None:
    scheme: Json = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    }
    announced = config(("quantization_config",), kv_cache_scheme=scheme)
    checkpoint = spoiled(good("W8A8"), tmp_path / "broken", announced)
    repairs = repaired(checkpoint, tmp_path / "out", SOURCE_OPTION, llama)["repairs"]
    assert repairs
    assert all("calibration" in str(repair["assumption"]) for repair in repairs)


def test_rounded_shared_scale_needs_no_assumption(good: Good, tmp_path: Path) -> None:
    """A scale that went through a conversion is the same number."""
    checkpoint = spoiled(good("NVFP4A16"), tmp_path / "broken", put(Q, multiply_by(1 + 2.0**-21)))
    assert not same_tensors(checkpoint, good("NVFP4A16"))
    (repair,) = repaired(checkpoint, tmp_path / "out")["repairs"]
    assert repair["assumption"] is None
    assert same_tensors(tmp_path / "out", good("NVFP4A16"))
