"""vLLM's loaders on sound and broken checkpoints, from headers alone.

Groups of tests share a worker.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.architectures.families import save_family
from tests.command import vexport
from tests.models import Good, quantize, save_llama
from tests.mutations.edits import Change, add, all_of, drop, put, rename, spoiled
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checks import devices
from vexport.checks.vllm.view import CheckpointView, Target
from vexport.engine.dry.load import CAPABILITIES, DryLoad
from vexport.records import DryLoadReport, Finding, MatrixCell

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SCHEMES = ("NVFP4", "FP8_DYNAMIC", "W4A16")
# W4AFP8 loads only on Hopper. MXFP4A16 has quantized inputs on Hopper and Blackwell.
LIMITED_SCHEMES = ("MXFP4A16", "W4AFP8")
EXPERT_SCHEMES = ("NVFP4A16", "FP8_DYNAMIC", "W4A16")
ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"
DOWN, GATE, V = f"{MLP}.down_proj.weight", f"{MLP}.gate_proj.weight", f"{ATTENTION}.v_proj.weight"
EXPERT, ROUTED = f"{MLP}.experts.2.down_proj", f"{MLP}.experts.routed_experts.w2_weight_packed"
# Scheme and sizes of checkpoints that two ranks cannot share.
INDIVISIBLE: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "NVFP4 groups": ("NVFP4A16", {"intermediate_size": 336}),
    "heads": (
        "FP8_DYNAMIC",
        {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 320},
    ),
}
FAULTY, REFUSED = ["faulty", "faulty"], ["refused", "refused"]
# For each checkpoint: vLLM's result at tp 1 and tp 2, and the place and words of the finding.
FAULTS: Mapping[str, tuple[list[str], str, str]] = {
    "a member's scale missing": (
        FAULTY,
        f"{ATTENTION}.qkv_proj.weight_scale",
        "384 of 512 elements",
    ),
    "bf16 in an fp8 weight": (FAULTY, DOWN, "bfloat16"),
    "too many rows": (FAULTY, GATE, "[640, 256]"),
    "too few rows": (REFUSED, V, "exceeds dimension size"),
    "a wrong name": (REFUSED, f"{MLP}.down_projection.weight", "down_projection"),
    "an expert's weight missing": (FAULTY, ROUTED, "incomplete experts: 2"),
    "NVFP4 groups": (["loads", "faulty"], "model.layers.", "shape [256, 21]"),
    "heads": (
        ["loads", "refused"],
        "checkpoint (tp 2, sm 90)",
        "divisible by tensor parallel size",
    ),
}


def with_row_count(count: int, name: str) -> Change:
    """Change the number of rows of a weight."""
    return put(name, lambda value: value[:1].repeat(count, 1))


CHANGES: Mapping[str, Change] = {
    "a member's scale missing": drop(f"{ATTENTION}.v_proj.weight_scale"),
    # Values between the numbers of FP8, because a lossless conversion would be no error.
    "bf16 in an fp8 weight": put(DOWN, lambda value: value.bfloat16() * 1.0625),
    "too many rows": with_row_count(640, GATE),
    "too few rows": with_row_count(64, V),
    "a wrong name": rename(DOWN, f"{MLP}.down_projection.weight"),
    # Unusual tensors that vLLM accepts without a message or an effect.
    "scales in float32": put(f"{DOWN}_scale", torch.Tensor.float),
    "scales of the KV cache": all_of(
        *(add(f"{ATTENTION}.{kind}_scale", torch.ones(1, dtype=torch.bfloat16)) for kind in "kv")
    ),
}


@pytest.fixture(scope="module")
def loads_by_scheme(good: Good) -> Mapping[str, DryLoadReport]:
    """Return dry loads of the micro model in each scheme, for one GPU of each generation."""
    schemes = (*SCHEMES, *LIMITED_SCHEMES)
    load = DryLoad(checkpoints=[good(scheme) for scheme in schemes], sm=CAPABILITIES)
    return dict(zip(schemes, load.reports(), strict=True))


@pytest.fixture(scope="module")
def reports(good: Good, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, DryLoadReport]:
    """Return dry loads of sound, damaged and indivisible checkpoints on one rank and on two."""
    root = tmp_path_factory.mktemp("checkpoints")
    experts = save_family("qwen3-moe", root / "experts", moe_intermediate_size=256)
    made = {
        f"experts {scheme}": quantize(experts, root / scheme, scheme) for scheme in EXPERT_SCHEMES
    }
    made |= {f"llama {scheme}": good(scheme) for scheme in ("NVFP4A16", "FP8_DYNAMIC")}
    made |= {
        name: spoiled(good("FP8_DYNAMIC"), root / name, change) for name, change in CHANGES.items()
    }
    for name, other, change in (
        ("no weight_shape", good("W4A16"), drop(f"{DOWN}_shape")),
        ("an expert's weight missing", root / "W4A16", drop(f"{EXPERT}.weight_packed")),
    ):
        made[name] = spoiled(other, root / name, change)
    for name, (scheme, sizes) in INDIVISIBLE.items():
        made[name] = quantize(save_llama(root / f"{name} source", **sizes), root / name, scheme)
    return dict(
        zip(made, DryLoad(checkpoints=list(made.values()), tp=(1, 2)).reports(), strict=True)
    )


def errors(report: DryLoadReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity == "error"]


def kernels(report: DryLoadReport, sm: int) -> set[tuple[str, str, str]]:
    """Return status, precision and kernel of all quantized layers on one capability."""
    cells: list[MatrixCell] = [cell for row in report.rows for cell in row.cells if cell.sm == sm]
    return {(cell.status, cell.precision, cell.kernel) for cell in cells}


def test_kernels_match_vllms_rules(loads_by_scheme: Mapping[str, DryLoadReport]) -> None:
    """Machete runs only on Hopper, W8A16 below SM 89, and FP4 multiplication only on Blackwell."""
    for report in map(loads_by_scheme.get, SCHEMES):
        assert report is not None
        assert report.ok, report.findings
        names = {row.name.rpartition(".")[2] for row in report.rows}
        assert names == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
        assert {row.count for row in report.rows} == {3}
    assert kernels(loads_by_scheme["W4A16"], 90) == {("loads", "W4A16", "MacheteLinearKernel")}
    assert kernels(loads_by_scheme["W4A16"], 80) == {("loads", "W4A16", "MarlinLinearKernel")}
    assert kernels(loads_by_scheme["FP8_DYNAMIC"], 80) == {
        ("other precision", "W8A16", "HummingFP8ScaledMMLinearKernel")
    }
    assert {(status, runs) for status, runs, _ in kernels(loads_by_scheme["FP8_DYNAMIC"], 89)} == {
        ("loads", "W8A8")
    }
    assert kernels(loads_by_scheme["NVFP4"], 90) == {
        ("other precision", "W4A16", "HummingNvFp4LinearKernel")
    }
    assert {(status, runs) for status, runs, _ in kernels(loads_by_scheme["NVFP4"], 100)} == {
        ("loads", "W4A4")
    }
    assert [cell.status for cell in loads_by_scheme["FP8_DYNAMIC"].cells] == [
        "other precision",
        *["loads"] * 3,
    ]
    report = loads_by_scheme["W4AFP8"]
    assert [cell.status for cell in report.cells] == ["refused", "refused", "loads", "refused"]
    assert kernels(report, 90) == {("loads", "W4A8", "CutlassW4A8LinearKernel")}
    assert not report.ok
    assert "scheme was found" in errors(report)[0].got
    # On Blackwell, vLLM multiplies a weight-only MXFP4 checkpoint with FP4 activations. On Hopper,
    # its kernel uses FP8 activations, as measured on an H100.
    report = loads_by_scheme["MXFP4A16"]
    assert {(status, runs) for status, runs, _ in kernels(report, 100)} == {
        ("other precision", "W4A4")
    }
    assert {(status, runs) for status, runs, _ in kernels(report, 90)} == {
        ("other precision", "W4A8")
    }
    assert {(status, runs) for status, runs, _ in kernels(report, 89)} == {("loads", "W4A16")}
    assert [(finding.severity, finding.got.split()[0]) for finding in report.findings] == [
        ("warning", "HummingMxFp4LinearKernel"),
        ("warning", "FlashInferMxFp4LinearKernel"),
    ]
    assert ["sm 90" in report.findings[0].where, "sm 100" in report.findings[1].where] == [
        True,
        True,
    ]


def test_kernels_without_a_toolkit(good: Good) -> None:
    """vLLM leaves out FlashInfer's kernels. The report shows only the rows that change."""
    block, w4a16 = DryLoad(
        checkpoints=[good("FP8_BLOCK"), good("W4A16")], sm=(80, 90), toolkits=(True, False)
    ).reports()
    assert kernels(block, 90) == {
        ("loads", "W8A8", "FlashInferFp8DeepGEMMDynamicBlockScaledKernel")
    }
    without = {tuple(cell.kernel for cell in row.cells) for row in block.without_toolkit}
    assert without == {("HummingFP8ScaledMMLinearKernel", "DeepGemmFp8BlockScaledMMKernel")}
    assert len(block.cells) == 2
    assert block.ok
    assert not w4a16.without_toolkit
    # Each library that compiles a kernel of either host.
    compiled = {each.library: each.kernels for each in block.compiled}
    assert [*compiled] == ["FlashInfer", "DeepGEMM", "Humming"]
    assert compiled["FlashInfer"] == (
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
        "sampler (top-k, top-p)",
    )
    # Marlin and Machete are in the wheel. FlashInfer's sampler is compiled for every model.
    assert [(each.library, each.kernels) for each in w4a16.compiled] == [
        ("FlashInfer", ("sampler (top-k, top-p)",))
    ]


def test_arguments_choose_kernels(good: Good) -> None:
    (report,) = DryLoad(
        checkpoints=[good("FP8_BLOCK")],
        arguments={
            "linear_backend": "triton",
            "pipeline_parallel_size": 2,
            "distributed_executor_backend": "uni",
        },
    ).reports()
    assert kernels(report, 90) == {("loads", "W8A8", "TritonFp8BlockScaledMMKernel")}


def test_sound_checkpoints_load(reports: Mapping[str, DryLoadReport]) -> None:
    for name in reports.keys() - FAULTS.keys():
        report = reports[name]
        assert {cell.status for cell in report.cells} == {"loads"}, report.findings
        assert ("routed_experts" in str(report.rows)) == name.startswith("experts")
        if name.startswith(("experts", "llama")):
            assert {finding.severity for finding in report.findings} <= {"info"}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found_in_their_cell(reports: Mapping[str, DryLoadReport], name: str) -> None:
    report, (statuses, where, words) = reports[name], FAULTS[name]
    assert not report.ok
    assert [cell.status for cell in report.cells] == statuses
    if name in INDIVISIBLE:  # the static check refuses the same cells
        assert [static_result(Path(report.checkpoint), tp, 90) for tp in (1, 2)] == [
            "loads",
            "refused",
        ]
    there = [finding for finding in errors(report) if finding.where.startswith(where)]
    assert any(words in finding.got for finding in there)
    assert where.startswith("checkpoint") or there == errors(report)


def test_load_dry_command(good: Good, tmp_path: Path) -> None:
    """A refused cell that the user requested fails the command."""
    cut = quantize(save_llama(tmp_path / "model", intermediate_size=384), tmp_path / "cut", "W4A16")
    whole = good("NVFP4")
    devices = ("--tp", "1,2", "--sm", "80,90", "--gpu", "h100")
    ran = vexport("load", "--dry", cut, whole, *devices, "--format", "json", "--quiet")
    assert ran.code == 1
    assert len(ran.errors) == 1
    assert "tp 2" in ran.errors[0]
    reports = json.loads(ran.stdout)
    assert [(report["checkpoint"], report["ok"]) for report in reports] == [
        (str(cut), False),
        (str(whole), True),
    ]
    assert [(cell["tp"], cell["sm"], cell["status"]) for cell in reports[0]["cells"]] == [
        *((1, sm, "loads") for sm in (80, 90)),
        *((2, sm, "refused") for sm in (80, 90)),
    ]
    assert [rank["tp"] for rank in reports[0]["memory"]] == [1]
    single, double = reports[1]["memory"]
    # 3 layers, keys and values of 2 heads of 64, 2 bytes each, 256 tokens.
    assert single["sequences"] == [{"tokens": 256, "kv_bytes": 3 * 2 * 2 * 64 * 2 * 256}]
    assert double["sequences"] == [{"tokens": 256, "kv_bytes": 3 * 2 * 64 * 2 * 256}]
    stored = sum(file.stat().st_size for file in whole.glob("*.safetensors"))
    assert (
        stored < single["weight_bytes"] < 1.05 * stored
    )  # the table of rotary angles is not stored
    rooms = reports[1]["rooms"]
    assert [(room["gpu"], room["tp"]) for room in rooms] == [("H100", 1), ("H100", 2)]
    assert rooms[0]["kv_bytes"] == int(0.92 * 81_559 * 2**20) - single["weight_bytes"]
    assert rooms[0]["sequences"] == rooms[0]["kv_bytes"] // single["sequences"][0]["kv_bytes"]


def test_room_follows_memory_utilization(good: Good) -> None:
    options = ("--dry", "--gpu", "h100", "--gpu-memory-utilization", "0.5", "--format", "json")
    (report,) = json.loads(vexport("load", good("NVFP4"), *options, "--quiet").stdout)
    (rank,), (room,) = report["memory"], report["rooms"]
    assert room["kv_bytes"] == int(0.5 * 81_559 * 2**20) - rank["weight_bytes"]


def test_github_summary(good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary of the step has the table of kernels, which the annotations do not have."""
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    ran = vexport("load", "--dry", good("FP8_DYNAMIC"), "--sm", "90", "--format", "github")
    assert (ran.code, ran.stdout[:9]) == (0, "::notice ")
    assert "Cutlass" in summary.read_text()


SM = (75, 80, 89, 90, 100)
COMPARED_SCHEMES = ("NVFP4", "MXFP4XFP8", "MXFP8", "FP8_BLOCK", "W4AFP8", "W4A16_ASYM")
# With a head size of 64, 128, 256 or 512, FlashInfer runs an FP8 cache from SM 80. Other sizes
# need SM 89.
CACHES: Mapping[str, Mapping[str, int]] = {
    "heads of 32": {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32},
    "heads of 64": {},
}


def static_result(checkpoint: Path, tp: int, sm: int) -> str:
    with Reader() as reader:
        view = CheckpointView(read_index(checkpoint), reader, Target(tp=(tp,), sm=(sm,)))
        found = list(devices.run(view))
    if any(finding.severity == "error" for finding in found):
        return "refused"
    return "other precision" if found else "loads"


def test_check_and_dry_load_report_precision_alike(good: Good) -> None:
    """The severity, the layers and the remedy are equal. Only the dry load knows the kernel."""
    for scheme, sm in (("NVFP4", 90), ("FP8_DYNAMIC", 80), ("MXFP8A16", 100)):
        (report,) = DryLoad(checkpoints=[good(scheme)], sm=(sm,)).reports()
        with Reader() as reader:
            view = CheckpointView(read_index(good(scheme)), reader, Target(sm=(sm,)))
            (static,) = devices.run(view)
        (dry,) = report.findings
        assert (static.severity, static.expected, static.fix) == (
            dry.severity,
            dry.expected,
            dry.fix,
        )
        assert static.where == f"{dry.where} (sm {sm})"
        assert "LinearKernel" in dry.got
        assert dry.got.startswith(static.got)


def test_check_and_dry_load_agree(good: Good, calibration: Path, tmp_path: Path) -> None:
    """Some models have fewer key heads than ranks, or experts that are split over the ranks."""
    cache = ("--kv-cache", "fp8_attention", "--calibration", calibration)
    caches = [
        quantize(
            save_llama(tmp_path / f"{name} source", **sizes), tmp_path / name, "FP8_DYNAMIC", *cache
        )
        for name, sizes in CACHES.items()
    ]
    model = save_family("qwen3-moe", tmp_path / "model", moe_intermediate_size=256)
    cut = [good("FP8_DYNAMIC"), good("MXFP8"), quantize(model, tmp_path / "experts", "W4A16")]
    compared = {1: [*map(good, COMPARED_SCHEMES), *caches], 4: cut}
    differ: list[tuple[object, ...]] = []
    for tp, checkpoints in compared.items():
        for report in DryLoad(checkpoints=checkpoints, tp=(tp,), sm=SM).reports():
            for cell in report.cells:
                status = static_result(Path(report.checkpoint), tp, cell.sm)
                if status != ("refused" if cell.status == "faulty" else cell.status):
                    differ.append((Path(report.checkpoint).name, tp, cell.sm, cell.status, status))
    # On four ranks, weights have fewer than 128 rows. Only the dry load finds that vLLM then has no
    # kernel with quantized inputs.
    assert differ == [("MXFP8", 4, 100, "other precision", "loads")]
