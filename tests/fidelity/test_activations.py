"""`vexport check --source --calibration`: static scales beside what the source computes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tests.command import vexport
from tests.models import quantize, save_qwen3, write_calibration
from tests.mutations.edits import Change, put, spoiled

LAYER = "model.layers.1"
Report = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("activations") / "qwen3")


@pytest.fixture(scope="module")
def text(model: Path) -> Path:
    return write_calibration(model.with_name("text.jsonl"))


@pytest.fixture(scope="module")
def quantized(model: Path, text: Path) -> Callable[[str], Path]:
    """The model in a scheme, with an fp8 KV cache."""

    def make(scheme: str) -> Path:
        out = model.with_name(scheme)
        if not out.exists():
            quantize(model, out, scheme, "--kv-cache", "fp8", "--calibration", text)
        return out

    return make


def check(checkpoint: Path, model: Path, text: Path) -> tuple[int, list[dict[str, str]]]:
    """Exit code, and what is found on activations."""
    given = ("--source", model, "--calibration", text, "--format", "json", "--quiet")
    ran = vexport("check", checkpoint, *given)
    assert ran.stdout, ran.stderr
    (report,) = json.loads(ran.stdout)
    return ran.code, [finding for finding in report["findings"] if finding["check"] == "activations"]


@pytest.mark.parametrize("scheme", ["FP8", "NVFP4"])
def test_the_ranges_are_those_of_the_text_that_it_was_calibrated_on(
    quantized: Callable[[str], Path], model: Path, text: Path, scheme: str
) -> None:
    code, notes = check(quantized(scheme), model, text)
    assert code == 0
    assert len(notes) == 9  # seven layers, keys and values
    assert {note["got"] for note in notes} == {"1.00 to 1.00 times that, median 1.00"}


def test_other_text_is_as_good(quantized: Callable[[str], Path], model: Path) -> None:
    other = write_calibration(model.with_name("other.jsonl"), rows=2, length=11)
    code, notes = check(quantized("FP8"), model, other)
    assert code == 0
    assert {note["severity"] for note in notes} == {"info"}
    assert {note["got"] for note in notes} != {"1.00 to 1.00 times that, median 1.00"}


@pytest.mark.parametrize(
    ("scheme", "change", "effect"),
    [
        ("NVFP4", put(f"{LAYER}.mlp.down_proj.input_global_scale", lambda scale: scale * 10), "cut off"),
        ("FP8", put(f"{LAYER}.mlp.down_proj.input_scale", lambda scale: scale / 10), "cut off"),
        ("FP8", put(f"{LAYER}.mlp.down_proj.input_scale", lambda scale: scale * 100), "rounded away"),
        ("FP8", put(f"{LAYER}.self_attn.v_scale", lambda scale: scale / 5), "cut off"),
        ("FP8", put(f"{LAYER}.self_attn.k_scale", lambda scale: scale * 100), "rounded away"),
    ],
)
def test_ranges_that_no_text_has_are_errors(
    quantized: Callable[[str], Path],
    model: Path,
    text: Path,
    tmp_path: Path,
    scheme: str,
    change: Change,
    effect: str,
) -> None:
    code, findings = check(spoiled(quantized(scheme), tmp_path / "spoiled", change), model, text)
    errors = [finding for finding in findings if finding["severity"] == "error"]
    assert code == 1
    assert len(errors) == 1
    assert errors[0]["where"].startswith(LAYER)
    assert errors[0]["got"].endswith(effect)


def test_what_was_seen_is_what_transformers_computes(
    quantized: Callable[[str], Path], model: Path, text: Path, tmp_path: Path
) -> None:
    seen: list[float] = []
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    plain.model.layers[1].mlp.down_proj.register_forward_pre_hook(
        lambda module, inputs: seen.append(float(inputs[0].abs().max()))
    )
    with torch.no_grad():
        for line in text.read_text(encoding="utf-8").splitlines():
            plain(torch.tensor([json.loads(line)["input_ids"]]))
    change = put(f"{LAYER}.mlp.down_proj.input_scale", lambda scale: scale * 100)
    _, findings = check(spoiled(quantized("FP8"), tmp_path / "spoiled", change), model, text)
    (found,) = [finding for finding in findings if finding["severity"] == "error"]
    assert f"a range of about {max(seen):.3g}, " in found["expected"]


def test_text_needs_a_source(quantized: Callable[[str], Path], text: Path) -> None:
    ran = vexport("check", quantized("FP8"), "--calibration", text)
    assert ran.code == 2
    assert "--calibration needs --source" in ran.stderr


def test_bad_text_is_one_error(quantized: Callable[[str], Path], model: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"input_ids": "seven"}\n', encoding="utf-8")
    ran = vexport("check", quantized("FP8"), "--source", model, "--calibration", bad)
    assert ran.code == 2
    assert f"{bad}:1: " in ran.errors[0]


@pytest.mark.parametrize("factor", [1 / 100, 1000])
@pytest.mark.parametrize("layer", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"])
def test_what_the_norm_cannot_make_is_an_error_without_a_source(
    quantized: Callable[[str], Path], tmp_path: Path, factor: float, layer: str
) -> None:
    name = f"{LAYER}.{layer}.input_scale"
    folder = spoiled(quantized("FP8"), tmp_path / "spoiled", put(name, lambda scale: scale * factor))
    ran = vexport("check", folder, "--format", "json", "--quiet")
    (report,) = json.loads(ran.stdout)
    assert [f["where"] for f in report["findings"] if "the norm before" in f["expected"]] == [name]


def test_a_checkpoint_without_static_scales_is_told_that_no_ranges_are_compared(
    model: Path, text: Path
) -> None:
    out = model.with_name("dynamic")
    quantize(model, out, "FP8_DYNAMIC")
    code, (finding,) = check(out, model, text)
    assert code == 0
    assert finding["severity"] == "info"
    assert "nothing of ranges" in finding["got"]
