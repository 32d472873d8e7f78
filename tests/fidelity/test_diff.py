"""What differs is named and measured; what does not differ is not."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from tests.command import Ran, vexport

PEER = Path(__file__).parent.parent / "peer"
LLAMA, FP8, NVFP4 = PEER / "llama", PEER / "llama-FP8_DYNAMIC", PEER / "llama-NVFP4A16"
Q = "model.layers.0.self_attn.q_proj"
LAYERS = 7


def diff(a: Path, b: Path) -> tuple[Ran, dict[str, list[dict[str, object]]]]:
    ran = vexport("diff", a, b, "--quiet", "--format", "json")
    return ran, json.loads(ran.stdout)


def changed(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    copytree(FP8, folder)
    values = load_file(folder / "model.safetensors")
    values[name] = change(values[name])
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("checkpoint", [LLAMA, FP8, NVFP4])
def test_a_checkpoint_is_the_same_as_its_copy(checkpoint: Path, tmp_path: Path) -> None:
    copytree(checkpoint, tmp_path / "copy")
    ran, report = diff(checkpoint, tmp_path / "copy")
    assert ran.code == 0
    assert not any(
        report[key] for key in ("config", "files", "only_a", "only_b", "forms", "values", "weights")
    )
    text = vexport("diff", checkpoint, tmp_path / "copy", "--quiet")
    assert (text.code, text.stdout.splitlines()[-1]) == (0, "the same")


def test_values_are_measured_against_the_first(tmp_path: Path) -> None:
    name = f"{Q}.weight_scale"
    ran, report = diff(FP8, changed(tmp_path / "b", name, lambda scale: scale * 1.1))
    assert ran.code == 1
    assert len(ran.errors) == 1
    (values,), (weights,) = report["values"], report["weights"]
    assert (values["name"], values["changed"]) == (name, 1.0)
    assert values["snr_db"] == pytest.approx(20, abs=0.05)
    assert (weights["layer"], weights["stored_a"]) == (Q, "float-quantized")
    assert weights["snr_db"] == pytest.approx(20, abs=0.05)
    assert not any(report[key] for key in ("config", "files", "only_a", "only_b", "forms"))


def test_a_value_that_is_no_number_has_no_ratio(tmp_path: Path) -> None:
    name = f"{Q}.weight_scale"
    _, report = diff(FP8, changed(tmp_path / "b", name, lambda scale: scale * torch.nan))
    assert report["values"] == [{"name": name, "changed": 1.0, "snr_db": None}]


def test_dtypes_and_shapes_that_differ_are_named(tmp_path: Path) -> None:
    name = f"{Q}.weight_scale"
    _, report = diff(FP8, changed(tmp_path / "b", name, lambda scale: scale.reshape(-1)))
    shape = list(load_file(FP8 / "model.safetensors")[name].shape)
    dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[load_file(FP8 / "model.safetensors")[name].dtype]
    assert report["forms"] == [{"where": name, "a": f"{dtype} {shape}", "b": f"{dtype} {shape[:1]}"}]


def test_a_quantized_checkpoint_is_compared_with_its_source() -> None:
    """The noise of each layer is that of compressed-tensors' own dequantization."""
    _, report = diff(LLAMA, NVFP4)
    source, stored = (load_file(root / "model.safetensors") for root in (LLAMA, NVFP4))
    groups = json.loads((NVFP4 / "config.json").read_text())["quantization_config"]["config_groups"]
    scheme = QuantizationScheme.model_validate(next(iter(groups.values())))
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    assert len(report["weights"]) == LAYERS
    assert len(report["only_a"]) == LAYERS
    assert len(report["only_b"]) == 3 * LAYERS
    assert [difference["where"] for difference in report["config"]] == ["quantization_config"]
    for difference in report["weights"]:
        layer = str(difference["layer"])
        leaves = {name.removeprefix(f"{layer}."): value for name, value in stored.items() if layer in name}
        exact = source[f"{layer}.weight"].double()
        noise = (compressor.decompress(leaves, scheme)["weight"].double() - exact).square().sum()
        expected = 10 * torch.log10(exact.square().sum() / noise)
        assert difference["snr_db"] == pytest.approx(float(expected), abs=1e-3)


def test_configs_and_files_differ_by_place(tmp_path: Path) -> None:
    copytree(FP8, tmp_path / "b")
    config = json.loads((FP8 / "config.json").read_text())
    config["max_position_embeddings"] = 7
    del config["vocab_size"]
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    (tmp_path / "b" / "chat_template.jinja").write_text("{{ messages }}")
    _, report = diff(FP8, tmp_path / "b")
    places = {str(each["where"]): (each["a"], each["b"]) for each in report["config"]}
    assert places == {"max_position_embeddings": ("128", "7"), "vocab_size": ("64", "absent")}
    assert report["files"] == [{"where": "chat_template.jinja", "a": "absent", "b": "present"}]


def test_text_puts_alike_layers_on_one_line() -> None:
    ran = vexport("diff", PEER / "moe", PEER / "moe-NVFP4A16", "--quiet")
    assert "model.layers.*.mlp.experts.*.down_proj: 2 layers, BF16 -> nvfp4-pack-quantized" in ran.stdout
    assert len(ran.stdout.splitlines()) < 60


def test_what_cannot_be_read_is_bad_input(tmp_path: Path) -> None:
    ran = vexport("diff", FP8, tmp_path / "nowhere", "--quiet")
    assert ran.code == 2
    assert "nowhere" in ran.errors[0]
