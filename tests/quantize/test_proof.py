"""Checks of quantize's output before it gets its final name."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.command import vexport
from tests.models import quantize, save_llama
from tests.mutations.edits import drop, put, spoiled, tensors
from tests.texts import assert_contains
from vexport.checkpoint.index import read_index
from vexport.engine.loader_check import LoadVerifier
from vexport.errors import CheckpointFailed
from vexport.names import Folder
from vexport.plan.build import PlanSettings, build_plan
from vexport.plan.source import scheme_rules
from vexport.quantize.job import QuantizeJob
from vexport.scenario import Planning

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
EXTRA = "model.layers.0.adapter"
QKV = [Q.replace("q_proj", f"{part}_proj") for part in "qkv"]


@pytest.fixture
def incomplete(llama: Path, tmp_path: Path) -> Path:
    """Save a source without its last norm. vLLM would use uninitialized memory for this norm."""
    return spoiled(llama, tmp_path / "incomplete", drop("model.norm.weight"))


def test_misread_output_is_not_published(incomplete: Path, tmp_path: Path) -> None:
    for _ in range(2):  # the second call replaces the folder of the first call
        ran = vexport(
            "quantize", incomplete, tmp_path / "out", "--scheme", "W8A16", "--rounding", "nearest"
        )
        assert ran.code == 1
        (error,) = ran.errors
        assert_contains(error, f"{tmp_path / 'out'}: model.norm.weight:", "no such tensor")
        assert_contains(error, str(tmp_path / "out.failed"))
        assert "next" not in ran.stdout
        left = {path.name for path in tmp_path.iterdir() if "out" in path.name}
        assert left == {"out.failed"}
        assert not list((tmp_path / "out.failed").glob("*.progress"))
    assert vexport("check", tmp_path / "out.failed").code == 1


def test_foreign_failed_folder_is_kept(incomplete: Path, tmp_path: Path) -> None:
    (tmp_path / "out.failed").mkdir()
    (tmp_path / "out.failed" / "mine").write_text("mine")
    ran = vexport(
        "quantize", incomplete, tmp_path / "out", "--scheme", "W8A16", "--rounding", "nearest"
    )
    assert ran.code == 1
    assert [path.name for path in (tmp_path / "out.failed").iterdir()] == ["mine"]


def failure_of(
    source: Path, folder: Path, *, tp: Sequence[int] = (1,), dry: bool = True
) -> CheckpointFailed | None:
    plan = build_plan(read_index(source), scheme_rules(Planning(scheme="NVFP4A16")))
    job = QuantizeJob(
        source=Folder.at(source), out=folder, rules=(), planning=PlanSettings(ranks=tp)
    )
    return LoadVerifier(note=print, command_that_keeps=" ".join, dry=dry).failure(job, folder, plan)


@pytest.mark.parametrize(
    ("change", "keep"),
    [
        (drop(f"{DOWN}.weight_scale"), [DOWN]),
        (put(f"{Q}.weight_packed", lambda packed: packed[:, :-1].contiguous()), QKV),
    ],
)
def test_faulty_layer_is_named(
    llama: Path, tmp_path: Path, change: object, keep: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With the named layers kept, the quantization succeeds."""
    assert callable(change)
    out = quantize(llama, tmp_path / "out", "NVFP4A16")
    assert failure_of(llama, out, dry=False) is None
    assert capsys.readouterr().out == ""
    failure = failure_of(llama, spoiled(out, tmp_path / "spoiled", change), dry=False)
    assert failure
    assert failure.fix.endswith(f": {' '.join(keep)}")
    words = [word for name in keep for word in ("--ignore", name)]
    kept = quantize(llama, tmp_path / "kept", "NVFP4A16", *words)
    assert all(f"{name}.weight" in read_index(kept).tensors for name in keep)


@pytest.mark.vllm
def test_output_is_loaded_dry(
    calibration: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only GPUs that run the scheme are tried: a KV cache with scales by head needs SM 90."""
    monkeypatch.delenv("VEXPORT_NO_VERIFY")
    source = save_llama(tmp_path / "source", num_hidden_layers=2, head_dim=80)
    cache = ("--kv-cache", "fp8_per_head", "--calibration", calibration, "--format", "json")
    ran = vexport("quantize", source, tmp_path / "out", "--scheme", "NVFP4A16", *cache)
    assert ran.code == 0, ran.stderr
    assert "dry load" in ran.stderr
    serve = shlex.join(["vllm", "serve", str(tmp_path / "out")])
    assert json.loads(ran.stdout)["next_commands"][-1].startswith(serve)
    # vLLM also refuses to divide the source's four heads among three ranks. This is no fault of
    # the quantization.
    assert failure_of(source, tmp_path / "out", tp=(3,)) is None
    output = capsys.readouterr().out
    assert_contains(output, "unquantized source", "divisible by tensor parallel size")
    # The source does not have this scale, so that vLLM's refusal is a fault of the quantization.
    cut = put(f"{DOWN}.weight_scale", lambda scale: scale[:-1].contiguous())
    failure = failure_of(source, spoiled(tmp_path / "out", tmp_path / "cut", cut))
    assert failure
    assert DOWN in failure.where


def with_extra_layer(source: Path, folder: Path) -> Path:
    """Save a source with a layer that vLLM's class does not have."""
    layer = {f"{EXTRA}.weight": torch.randn(64, 256, dtype=torch.bfloat16)}
    return spoiled(source, folder, tensors(lambda values: values.update(layer)))


def checked(*arguments: str | Path) -> list[dict[str, object]]:
    reports: list[dict[str, object]] = json.loads(
        vexport("check", *arguments, "--format", "json").stdout
    )
    return reports


def test_fault_of_source_is_warning(llama: Path, tmp_path: Path) -> None:
    """The static rules find the layer in the source as well."""
    source = with_extra_layer(llama, tmp_path / "source")
    out = tmp_path / "out"
    ran = vexport("quantize", source, out, "--scheme", "W8A16", "--rounding", "nearest")
    assert ran.code == 0
    assert_contains(ran.stderr, "unquantized source has the same problem", f"{EXTRA}.weight_packed")
    (with_source,) = checked(out, "--source", source)
    assert with_source["ok"]
    (alone,) = checked(out)
    assert not alone["ok"]


@pytest.mark.vllm
def test_loaders_refuse_the_source(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM refuses the source. Its message lists the parameters of the model in any order."""
    monkeypatch.delenv("VEXPORT_NO_VERIFY")
    source = with_extra_layer(llama, tmp_path / "source")
    out = tmp_path / "out"
    ran = vexport("quantize", source, out, "--scheme", "W8A16", "--rounding", "nearest")
    assert ran.code == 0
    assert_contains(ran.stderr, "vLLM also refuses the unquantized source", "layers.0.adapter")
    ran = vexport("check", out, "--source", source)
    assert ran.code == 0
    assert_contains("\n".join(ran.stdout.splitlines()[:3]), "PASS of the static rules", "refuses")
    # A fault of the quantization remains an error.
    broken = spoiled(out, tmp_path / "broken", drop(f"{DOWN}.weight_scale"))
    assert vexport("check", broken, "--source", source).code == 1
