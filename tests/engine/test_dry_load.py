"""vLLM's own loaders on sound and on broken checkpoints, from headers; one worker for each group of tests."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.command import vexport
from tests.engine.sketches import LLAMA, QWEN3_MOE, Tensor, sketch
from tests.models import Good
from tests.mutations.edits import QUANTIZATION, config
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checks import devices
from vexport.checks.vllm.view import CheckpointView, Target
from vexport.engine.dry.load import CAPABILITIES, DryLoad
from vexport.records import DryLoadReport, Finding, Json, MatrixCell

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SCHEMES = ("NVFP4", "FP8_DYNAMIC", "W4A16")
# Schemes that not every device takes as they are.
PARTICULAR = ("MXFP4A16", "W4AFP8")
LAYER = "model.layers.1"
EXPERTS = f"{LAYER}.mlp.experts"
SOUND: Mapping[str, tuple[Mapping[str, object], str]] = {
    f"{family} {preset}": (config, preset)
    for family, config in (("llama", LLAMA), ("moe", QWEN3_MOE))
    for preset in ("NVFP4A16", "FP8_DYNAMIC")
}
FAULTY, CUT = ("faulty", "faulty"), ("loads", "refused")


class Broken(NamedTuple):
    """What is done to a sketch; whether vLLM takes it at tp 1 and tp 2; where the finding is, words of it."""

    where: str
    words: str
    stored: Tensor | None = None
    preset: str = "FP8_DYNAMIC"
    statuses: tuple[str, str] = FAULTY
    model: Mapping[str, object] = LLAMA
    tensor: str | None = ""

    @property
    def change(self) -> Mapping[str, Tensor | None]:
        """The tensor is that of the finding where no other is named; None changes none."""
        return {} if self.tensor is None else {self.tensor or self.where: self.stored}


FP8_ROWS: Tensor = ("F8_E4M3", (256, 512))
BROKEN: Mapping[str, Broken] = {
    "a member's scale missing": Broken(
        f"{LAYER}.self_attn.qkv_proj.weight_scale",
        "512 of 768 elements",
        tensor=f"{LAYER}.self_attn.v_proj.weight_scale",
    ),
    "bf16 in an fp8 weight": Broken(f"{LAYER}.mlp.down_proj.weight", "bfloat16", ("BF16", (256, 512))),
    "a weight with too many rows": Broken(
        f"{LAYER}.mlp.gate_proj.weight", "[640, 256]", ("F8_E4M3", (640, 256))
    ),
    "a weight with too few rows": Broken(
        f"{LAYER}.self_attn.v_proj.weight",
        "exceeds dimension size",
        ("F8_E4M3", (128, 256)),
        statuses=("refused", "refused"),
    ),
    "a wrong name": Broken(
        f"{LAYER}.mlp.down_projection.weight", "down_projection", FP8_ROWS, statuses=("refused", "refused")
    ),
    "NVFP4 groups that tp 2 cuts, of which vLLM says nothing": Broken(
        "model.layers.",
        "shape [256, 21]",
        preset="NVFP4A16",
        statuses=("loads", "faulty"),
        model={**LLAMA, "intermediate_size": 336},
        tensor=None,
    ),
    "heads that tp 2 cuts": Broken(
        "checkpoint (tp 2, sm 90)",
        "must be divisible by tensor parallel size",
        statuses=CUT,
        model={**LLAMA, "num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 160},
        tensor=None,
    ),
    "an expert's weight missing": Broken(
        f"{EXPERTS}.routed_experts.w2_weight_packed",
        "short: expert 2",
        preset="W4A16",
        model=QWEN3_MOE,
        tensor=f"{EXPERTS}.2.down_proj.weight_packed",
    ),
}
# Legal oddities, of which vLLM says nothing and which change nothing.
HARMLESS: Mapping[str, tuple[str, Mapping[str, Tensor | None]]] = {
    "scales in float32": ("FP8_DYNAMIC", {f"{LAYER}.mlp.down_proj.weight_scale": ("F32", (256, 1))}),
    "no weight_shape": ("W4A16", {f"{LAYER}.mlp.down_proj.weight_shape": None}),
    "scales of the KV cache": (
        "FP8_DYNAMIC",
        {f"{LAYER}.self_attn.k_scale": ("BF16", (1,)), f"{LAYER}.self_attn.v_scale": ("BF16", (1,))},
    ),
}


@pytest.fixture(scope="module")
def demo(good: Good) -> Mapping[str, DryLoadReport]:
    """The micro model in each scheme, on one GPU of each generation."""
    schemes = (*SCHEMES, *PARTICULAR)
    load = DryLoad(checkpoints=[good(scheme) for scheme in schemes], sm=CAPABILITIES)
    return dict(zip(schemes, load.reports(), strict=True))


@pytest.fixture(scope="module")
def sketched(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, DryLoadReport]:
    folder = tmp_path_factory.mktemp("sketches")
    made: dict[str, Path] = {}
    for name, (model, preset) in SOUND.items():
        made[name] = sketch(folder / name, model, preset, {})
    for name, broken in BROKEN.items():
        made[name] = sketch(folder / name, broken.model, broken.preset, broken.change)
    for name, (preset, change) in HARMLESS.items():
        made[name] = sketch(folder / name, LLAMA, preset, change)
    return dict(zip(made, DryLoad(checkpoints=list(made.values()), tp=(1, 2)).reports(), strict=True))


def errors(report: DryLoadReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity == "error"]


def kernels(report: DryLoadReport, sm: int) -> set[tuple[str, str, str]]:
    """Status, precision and kernel of every quantized kind of layer on one capability."""
    cells: list[MatrixCell] = [cell for row in report.rows for cell in row.cells if cell.sm == sm]
    return {(cell.status, cell.precision, cell.kernel) for cell in cells}


def test_kernels_are_those_that_vllm_documents(demo: Mapping[str, DryLoadReport]) -> None:
    """Rules 29 to 31: Machete only on Hopper, W8A16 below SM 89, FP4 multiplication only on Blackwell."""
    for report in map(demo.get, SCHEMES):
        assert report is not None
        assert report.ok, report.findings
        names = {row.name.rpartition(".")[2] for row in report.rows}
        assert names == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
        assert {row.count for row in report.rows} == {3}
    assert kernels(demo["W4A16"], 90) == {("loads", "W4A16", "MacheteLinearKernel")}
    assert kernels(demo["W4A16"], 80) == {("loads", "W4A16", "MarlinLinearKernel")}
    assert kernels(demo["FP8_DYNAMIC"], 80) == {("other precision", "W8A16", "MarlinFP8ScaledMMLinearKernel")}
    assert {(status, runs) for status, runs, _ in kernels(demo["FP8_DYNAMIC"], 89)} == {("loads", "W8A8")}
    assert kernels(demo["NVFP4"], 90) == {("other precision", "W4A16", "MarlinNvFp4LinearKernel")}
    assert {(status, runs) for status, runs, _ in kernels(demo["NVFP4"], 100)} == {("loads", "W4A4")}
    assert [cell.status for cell in demo["FP8_DYNAMIC"].cells] == ["other precision", *["loads"] * 3]
    report = demo["W4AFP8"]
    assert [cell.status for cell in report.cells] == ["refused", "refused", "loads", "refused"]
    assert kernels(report, 90) == {("loads", "W4A8", "CutlassW4A8LinearKernel")}
    assert not report.ok
    assert "scheme was found" in errors(report)[0].got
    # Rule 31: on Blackwell vLLM multiplies a weight-only MXFP4 checkpoint with FP4 activations.
    report = demo["MXFP4A16"]
    assert {(status, runs) for status, runs, _ in kernels(report, 100)} == {("other precision", "W4A4")}
    assert {(status, runs) for status, runs, _ in kernels(report, 90)} == {("loads", "W4A16")}
    assert [(finding.severity, finding.got.split()[0]) for finding in report.findings] == [
        ("warning", "W4A4")
    ]
    assert "sm 100" in report.findings[0].where


def test_sound_sketches_load(sketched: Mapping[str, DryLoadReport]) -> None:
    for name in SOUND:
        report = sketched[name]
        assert report.ok, report.findings
        assert not [finding for finding in report.findings if finding.severity == "warning"]
        assert ("routed_experts" in str(report.rows)) == name.startswith("moe")
    for name in HARMLESS:
        assert sketched[name].ok, sketched[name].findings
        assert {cell.status for cell in sketched[name].cells} == {"loads"}


@pytest.mark.parametrize("name", BROKEN)
def test_faults_are_found_in_their_cell(sketched: Mapping[str, DryLoadReport], name: str) -> None:
    broken, report = BROKEN[name], sketched[name]
    where = broken.where
    assert not report.ok
    if broken.statuses[0] == "loads":  # ranks cut it: the check says so too
        assert [static(Path(report.checkpoint), tp, 90) for tp in (1, 2)] == ["loads", "refused"]
    assert tuple(cell.status for cell in report.cells) == broken.statuses
    there = [finding for finding in errors(report) if finding.where.startswith(where)]
    assert any(broken.words in finding.got for finding in there)
    assert where.startswith("checkpoint") or there == errors(report)


def test_the_command(tmp_path: Path) -> None:
    """A refused cell fails the command where it was asked for, and only there."""
    cut = sketch(tmp_path / "cut", {**LLAMA, "intermediate_size": 384}, "W4A16", {})
    whole = sketch(tmp_path / "whole", LLAMA, "NVFP4", {})
    devices = ("--tp", "1,2", "--sm", "80,90", "--gpu", "h100")
    ran = vexport("load", "--dry", cut, whole, *devices, "--format", "json", "--quiet")
    assert ran.code == 1
    assert len(ran.errors) == 1
    assert "tp 2" in ran.errors[0]
    reports = json.loads(ran.stdout)
    assert {report["checkpoint"]: report["ok"] for report in reports} == {str(cut): False, str(whole): True}
    assert [(cell["tp"], cell["sm"], cell["status"]) for cell in reports[0]["cells"]] == [
        *((1, sm, "loads") for sm in (80, 90)),
        *((2, sm, "refused") for sm in (80, 90)),
    ]
    assert [rank["tp"] for rank in reports[0]["memory"]] == [1]
    one, two = reports[1]["memory"]
    # 2 layers, keys and values of 8 heads of 32, 2 bytes each, 256 tokens.
    assert one["sequences"] == [{"tokens": 256, "kv_bytes": 2 * 2 * 8 * 32 * 2 * 256}]
    assert two["sequences"] == [{"tokens": 256, "kv_bytes": 2 * 8 * 32 * 2 * 256}]
    stored = sum(file.stat().st_size for file in whole.glob("*.safetensors"))
    assert stored < one["weight_bytes"] < 1.05 * stored  # the table of rotary angles is not stored
    rooms = reports[1]["rooms"]
    assert [(room["gpu"], room["tp"]) for room in rooms] == [("H100", 1), ("H100", 2)]
    assert rooms[0]["kv_bytes"] == int(0.92 * 81_559 * 2**20) - one["weight_bytes"]
    assert rooms[0]["sequences"] == rooms[0]["kv_bytes"] // one["sequences"][0]["kv_bytes"]


SM = (75, 80, 89, 90, 100)
COMPARED = ("NVFP4", "MXFP4XFP8", "MXFP8", "FP8_BLOCK", "W4AFP8", "W4A16_ASYM")
# test_dry_load.py has groups and heads that ranks cut.
AGREEING: Mapping[str, tuple[Mapping[str, object], str]] = {
    "few key heads": ({**LLAMA, "num_key_value_heads": 2}, "FP8_DYNAMIC"),
    "experts": (QWEN3_MOE, "W4A16"),
}
# An FP8 cache runs in FlashInfer from SM 80 on, with heads of 64, 128, 256 or 512 numbers; else from SM 89.
CACHES = {"cache, heads of 32": LLAMA, "cache, heads of 64": {**LLAMA, "head_dim": 64}}
FLOAT8: dict[str, Json] = {"type": "float", "num_bits": 8, "symmetric": True}
CACHE_SCHEME: Json = {**FLOAT8, "strategy": "tensor", "dynamic": False}


def static(checkpoint: Path, tp: int, sm: int) -> str:
    with Reader() as reader:
        view = CheckpointView(read_index(checkpoint), reader, Target(tp=(tp,), sm=(sm,)))
        found = list(devices.run(view))
    severities = {finding.severity for finding in found}
    return "refused" if "error" in severities else "other precision" if "warning" in severities else "loads"


def with_cache(folder: Path, model: Mapping[str, object]) -> Path:
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(2) for kind in "kv"]
    made = sketch(folder, model, "FP8_DYNAMIC", dict.fromkeys(names, ("F32", (1,))))
    config(QUANTIZATION, kv_cache_scheme=CACHE_SCHEME)(made)
    return made


def test_check_and_dry_load_agree(good: Good, tmp_path: Path) -> None:
    caches = [with_cache(tmp_path / name, model) for name, model in CACHES.items()]
    cut = [sketch(tmp_path / name, model, preset, {}) for name, (model, preset) in AGREEING.items()]
    compared = {1: [*map(good, COMPARED), *caches], 4: [*cut, good("MXFP8")]}
    differ: list[tuple[object, ...]] = []
    for tp, checkpoints in compared.items():
        for report in DryLoad(checkpoints=checkpoints, tp=(tp,), sm=SM).reports():
            for cell in report.cells:
                status = static(Path(report.checkpoint), tp, cell.sm)
                if status != ("refused" if cell.status == "faulty" else cell.status):
                    differ.append((Path(report.checkpoint).name, tp, cell.sm, cell.status, status))
    # Ranks' parts of fewer than 128 rows: only the dry load knows that no kernel quantizes their inputs.
    assert differ == [("MXFP8", 4, 100, "other precision", "loads")]
