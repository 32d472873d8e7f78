"""Rounding of weights with text: smaller divergence, and the same bytes after a kill."""

import json
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.calibration.models import configs, save
from tests.command import vexport
from tests.forked import command, start
from tests.models import save_llama, write_calibration
from tests.texts import assert_contains
from vexport.calibration import Samples
from vexport.calibration.walk import Layer, LayerWalk
from vexport.checkpoint.index import read_index
from vexport.engine.reference import reference_logprobs
from vexport.errors import InputError
from vexport.files import digest_file
from vexport.names import Folder
from vexport.numerics.metrics import kl_divergence
from vexport.plan.build import PlanSettings
from vexport.plan.source import plan_headers
from vexport.quantize import waiting_rows
from vexport.quantize.waiting_rows import max_waiting_bytes, require_memory, waiting_bytes
from vexport.records import silent
from vexport.records.calibration import GRADIENTS, ROUND
from vexport.scenario import Rule

# Refit includes GPTQ's steps, so that not each scheme needs both.
SCHEMES = {
    "W4A16": ("gptq", "refit"),
    "NVFP4": ("refit",),
    "FP8_BLOCK": ("gptq",),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("rounding") / "llama")


@pytest.fixture(scope="module")
def text(source: Path) -> Path:
    return write_calibration(source.parent / "text.jsonl", rows=8)


def rows_of(text: Path) -> list[list[int]]:
    return [json.loads(line)["input_ids"] for line in text.read_text().splitlines()]


def divergence(source: Path, checkpoint: Path, rows: list[list[int]]) -> float:
    """Return KL(source || quantized) over rows.

    transformers computes it with dequantized weights and rounded inputs.
    """
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.inference_mode():
        exact = torch.cat([model(torch.tensor([row])).logits[0, :-1].float() for row in rows])
    return float(
        kl_divergence(torch.log_softmax(exact, dim=-1), reference_logprobs(checkpoint, rows)).mean()
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_divergence_is_less_than_of_nearest(
    scheme: str, source: Path, text: Path, tmp_path: Path
) -> None:
    found = {}
    for rounding in ("nearest", *SCHEMES[scheme]):
        out = tmp_path / rounding
        ran = vexport(
            "quantize",
            source,
            out,
            "--scheme",
            scheme,
            "--rounding",
            rounding,
            "--calibration",
            text,
        )
        assert ran.code == 0, ran.stderr
        assert vexport("check", out).code == 0
        assert not list(out.glob(".*"))
        found[rounding] = divergence(source, out, rows_of(text))
    assert all(found[rounding] < found["nearest"] for rounding in SCHEMES[scheme])


@pytest.mark.slow
def test_scales_are_searched_by_inputs(source: Path, text: Path, tmp_path: Path) -> None:
    """With a named observer, GPTQ uses this observer, like in other tools."""
    call = ("quantize", source, "--scheme", "W4A16", "--rounding", "gptq", "--calibration", text)
    observers = {(): "imatrix_mse", ("--observer", "memoryless_minmax"): "memoryless_minmax"}
    found = {}
    for number, (option, observer) in enumerate(observers.items()):
        out = tmp_path / str(number)
        assert vexport(*call, out, *option).code == 0
        groups = json.loads((out / "config.json").read_text())["quantization_config"][
            "config_groups"
        ]
        assert [group["weights"]["observer"] for group in groups.values()] == [observer]
        found[observer] = divergence(source, out, rows_of(text))
    assert found["imatrix_mse"] < found["memoryless_minmax"]


@pytest.mark.slow
def test_text_enables_refit(source: Path, text: Path, tmp_path: Path) -> None:
    ran = vexport(
        "quantize",
        source,
        tmp_path / "out",
        "--scheme",
        "W4A16",
        "--calibration",
        text,
        "--format",
        "json",
    )
    assert ran.code == 0, ran.stderr
    rounding = json.loads(ran.stdout)["rounding"]
    groups = [group for layer in rounding["layers"] for group in layer["groups"]]
    kinds = {group["name"].rpartition(".")[2] for group in groups}
    assert kinds == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert {(group["rounding"], group["strength"]) for group in groups} == {("refit", 0.5)}
    assert all(0 < group["error"] < group["nearest_error"] for group in groups)
    assert all(layer["state_error"] > 0 for layer in rounding["layers"])


@pytest.mark.slow
def test_killed_rounding_resumes_to_same_bytes(source: Path, text: Path, tmp_path: Path) -> None:
    call = ("quantize", source, "--scheme", "W4A16", "--rounding", "refit", "--calibration", text)
    whole = tmp_path / "whole"
    assert vexport(*call, whole).code == 0
    out = tmp_path / "out"
    process = start(tmp_path / "log", command, *call, out)
    deadline = time.monotonic() + 120
    while not list(tmp_path.rglob("layer-0000.json")) and time.monotonic() < deadline:
        assert process.is_alive()
        time.sleep(0.005)
    process.kill()
    process.join()
    assert not out.exists()
    ran = vexport(*call, out)
    assert ran.code == 0, ran.stderr
    assert_contains(ran.stderr, "resumes", "layers are already rounded")
    assert digest_file(out / "model.safetensors") == digest_file(whole / "model.safetensors")


@pytest.mark.slow
def test_steps_show_their_progress(source: Path, text: Path, tmp_path: Path) -> None:
    call = ("quantize", source, "--scheme", "W4A16", "--calibration", text, "--no-verify")
    ran = vexport(*call, tmp_path / "out")
    assert ran.code == 0, ran.stderr
    for step in (GRADIENTS, ROUND):
        assert_contains(ran.stderr, f"{step} ...", f"{step}: done in ")


ROWS, LAYERS = 12, 3


@pytest.mark.parametrize("limit", ["max\n", "1048576\n", "99999999999999\n"])
def test_memory_limit_of_control_group(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting rows may use half of the control group's memory."""
    whole = max_waiting_bytes()
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(waiting_rows, "CGROUP_MEMORY", tmp_path / "memory.max")
    assert max_waiting_bytes() == (2**19 if "1048576" in limit else whole)


def test_too_much_text_names_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The amount of memory changes only this limit, not the results."""
    folder = save(configs()["llama"], tmp_path / "llama")
    rules = [Rule(match="Linear", scheme="W4A16_CHANNEL", rounding="gptq")]
    _, plan = plan_headers(Folder.at(folder), rules, PlanSettings(), silent)
    needed = waiting_bytes(plan.groups, ROWS * 32)
    monkeypatch.setattr(waiting_rows, "max_waiting_bytes", lambda device: needed // 2)
    with pytest.raises(InputError, match=f"--samples {ROWS // 2}"):
        require_memory(plan.groups, ROWS * 32, ROWS, "cpu")
    require_memory(plan.groups, ROWS * 16, ROWS // 2, "cpu")


class LayerRecorder:
    """Watcher that records the layers that it leaves. There are no rows."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def enter(self, layer: Layer) -> None:
        assert not layer.is_head

    def row(self, index: int, hidden: torch.Tensor) -> None:
        raise AssertionError(index)

    def leave(self, layer: Layer) -> None:
        self.seen.append(layer.name)


def test_walk_without_rows(tmp_path: Path) -> None:
    """With more ranks than rows of text, a rank has no rows."""
    index = read_index(save(configs()["llama"], tmp_path / "llama"))
    walk = LayerWalk(index)
    watcher = LayerRecorder()
    with walk.start(Samples(token_ids=(), rows=())) as hidden:
        walk.forward(hidden, watcher)
    assert watcher.seen == [f"model.layers.{number}" for number in range(LAYERS)]
