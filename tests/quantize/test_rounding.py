"""Weights rounded by what calibration text shows: closer answers, the same bytes after a kill."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.command import vexport
from tests.models import save_llama, write_calibration
from vexport.engine.reference import reference_logprobs
from vexport.files import digest_file
from vexport.numerics.metrics import kl_divergence

pytestmark = pytest.mark.slow
# Refit goes through all of what GPTQ does: where it is not named, that is enough.
SCHEMES = {
    "W4A16": ("gptq", "refit"),
    "NVFP4": ("refit",),
    "MXFP4": ("gptq",),
    "FP8_BLOCK": ("gptq",),
    "W8A8": ("gptq",),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("rounding") / "llama")


@pytest.fixture(scope="module")
def text(source: Path) -> Path:
    return write_calibration(source.parent / "text.jsonl", rows=8)


def divergence(source: Path, checkpoint: Path, text: Path) -> float:
    """KL(source || quantized) over the text, by transformers with dequantized weights and rounded inputs."""
    rows = [json.loads(line)["input_ids"] for line in text.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.inference_mode():
        exact = torch.cat([model(torch.tensor([row])).logits[0, :-1].float() for row in rows])
    return float(kl_divergence(torch.log_softmax(exact, dim=-1), reference_logprobs(checkpoint, rows)).mean())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_answers_are_closer_than_with_the_nearest_numbers(
    scheme: str, source: Path, text: Path, tmp_path: Path
) -> None:
    found = {}
    for rounding in ("nearest", *SCHEMES[scheme]):
        out = tmp_path / rounding
        ran = vexport(
            "quantize", source, out, "--scheme", scheme, "--rounding", rounding, "--calibration", text
        )
        assert ran.code == 0, ran.stderr
        assert vexport("check", out).code == 0
        assert not list(out.glob(".*"))
        found[rounding] = divergence(source, out, text)
    assert all(found[rounding] < found["nearest"] for rounding in SCHEMES[scheme])


def test_scales_are_searched_by_what_enters_the_layer(source: Path, text: Path, tmp_path: Path) -> None:
    """Unless an observer is named: plain GPTQ stays what other tools do."""
    call = ("quantize", source, "--scheme", "W4A16", "--rounding", "gptq", "--calibration", text)
    observers = {(): "imatrix_mse", ("--observer", "memoryless_minmax"): "memoryless_minmax"}
    found = {}
    for number, (option, observer) in enumerate(observers.items()):
        out = tmp_path / str(number)
        assert vexport(*call, out, *option).code == 0
        groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
        assert [group["weights"]["observer"] for group in groups.values()] == [observer]
        found[observer] = divergence(source, out, text)
    assert found["imatrix_mse"] < found["memoryless_minmax"]


def test_with_text_weights_are_refitted_and_the_answer_says_how(
    source: Path, text: Path, tmp_path: Path
) -> None:
    ran = vexport(
        "quantize", source, tmp_path / "out", "--scheme", "W4A16", "--calibration", text, "--format", "json"
    )
    assert ran.code == 0, ran.stderr
    rounding = json.loads(ran.stdout)["rounding"]
    groups = [group for layer in rounding["layers"] for group in layer["groups"]]
    kinds = {group["name"].rpartition(".")[2] for group in groups}
    assert kinds == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert {(group["rounding"], group["strength"]) for group in groups} == {("refit", 0.5)}
    assert all(0 < group["error"] < group["nearest_error"] for group in groups)
    assert all(layer["state_error"] > 0 for layer in rounding["layers"])


def test_killed_between_two_layers_it_goes_on_to_the_same_bytes(
    source: Path, text: Path, tmp_path: Path
) -> None:
    call = ("quantize", source, "--scheme", "W4A16", "--rounding", "refit", "--calibration", text)
    whole = tmp_path / "whole"
    assert vexport(*call, whole).code == 0
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "vexport", *map(str, (*call, out))],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.rglob("layer-0000.json")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not out.exists()
    assert vexport(*call, out).code == 0
    assert digest_file(out / "model.safetensors") == digest_file(whole / "model.safetensors")


def test_time_is_told_before_the_work_and_the_time_left_is_that_of_all_steps(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is measured on two of twelve layers; what is written does not depend on it."""
    source = save_llama(tmp_path / "deep", num_hidden_layers=12, intermediate_size=512)
    call = ("quantize", source, "--scheme", "W4A16", "--calibration", text)
    assert vexport(*call, tmp_path / "unmeasured", "--no-verify", "--quiet").code == 0
    monkeypatch.setattr("vexport.quantize.text.SMALL_WORK", 0.0)
    ran = vexport(*call, tmp_path / "out", "--no-verify")
    assert ran.code == 0, ran.stderr
    first, second = (digest_file(tmp_path / name / "model.safetensors") for name in ("unmeasured", "out"))
    assert first == second

    names = ("look back", "round weights")
    told = re.search(r"note: with this text: about (\S+) s, in 2 steps: look back \S+ s, round", ran.stderr)
    done = re.search(r"calibrate \(seconds as estimated\): done in (\S+) s", ran.stderr)
    assert told
    assert done
    assert 1 / 4 < float(told[1]) / float(done[1]) < 4  # of a second, on a machine that others use
    steps = [f"step {number} of 2, {name} (layers), " for number, name in enumerate(names, start=1)]
    places = [ran.stderr.index(part) for part in (told[0], *steps, done[0])]
    assert places == sorted(places)

    planned = vexport("plan", *call[1:])
    assert planned.code == 0, planned.stderr
    assert "note: with this text: about " in planned.stderr
    assert f"--scheme W4A16 --calibration {text}" in planned.stdout
