"""Written checkpoints, compared with compressed-tensors: dequantization, config and packing."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from safetensors.torch import load_file

from tests.command import vexport
from tests.models import Good, quantize, save_llama, save_qwen3
from tests.mutations.edits import copy_prefix
from vexport.checkpoint.index import read_index
from vexport.checks import check_checkpoint
from vexport.names import Folder
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.scenario import Rule

SCHEMES = ("NVFP4", "NVFP4A16", "FP8", "FP8_DYNAMIC", "W8A8", "W4A16")


def test_global_scale_of_largest_member(llama: Path, good: Good) -> None:
    original, tensors = (
        load_file(folder / "model.safetensors") for folder in (llama, good("NVFP4"))
    )
    names = [f"model.layers.1.self_attn.{member}_proj" for member in "qkv"]
    largest = max(original[f"{name}.weight"].abs().max().item() for name in names)
    assert tensors[f"{names[0]}.weight_global_scale"].item() == pytest.approx(
        448 * 6 / largest, rel=1e-6
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_reads_config(scheme: str, good: Good) -> None:
    raw = json.loads((good(scheme) / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(raw)
    preset = preset_name_to_scheme(scheme, ["Linear"])
    group = config.config_groups["group_0"]
    assert group.weights == preset.weights
    assert group.input_activations == preset.input_activations
    assert config.ignore == ["lm_head"]
    assert config.quantization_status == "compressed"


def test_kept_layers_are_copied_exactly(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert (
        vexport("quantize", llama, out, "--scheme", "W8A8", "--ignore", "down_proj", "--quiet").code
        == 0
    )
    before, after = load_file(llama / "model.safetensors"), load_file(out / "model.safetensors")
    kept = [name for name in before if "_proj" not in name or "down_proj" in name]
    assert len(kept) > 9
    for name in kept:
        assert torch.equal(before[name].view(torch.int16), after[name].view(torch.int16)), name
    ignore = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert sorted(ignore) == [
        "lm_head",
        *(f"model.layers.{layer}.mlp.down_proj" for layer in range(3)),
    ]


def test_side_files_are_copied(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source")
    names = (
        "preprocessor_config.json",
        "processor_config.json",
        "tokenizer.model",
        "tokenizer.json",
    )
    for name in names:
        (source / name).write_text('{"a": 1}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("{{ rag }}")
    (source / "additional_chat_templates" / "endless.jinja").symlink_to("/dev/zero")
    out = tmp_path / "out"
    assert vexport("quantize", source, out, "--scheme", "W8A8", "--quiet").code == 0
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert all((out / name).read_text() == '{"a": 1}' for name in names)
    assert not (out / "pytorch_model.bin").exists()
    assert [file.name for file in (out / "additional_chat_templates").iterdir()] == ["rag.jinja"]


def test_shards_and_index(tmp_path: Path, llama: Path, good: Good) -> None:
    parts = quantize(llama, tmp_path / "parts", "NVFP4A16", "--max-shard-size", "300KB")
    assert len(list(parts.glob("*.safetensors"))) > 3
    assert read_index(parts).num_bytes == read_index(good("NVFP4A16")).num_bytes
    whole = load_file(good("NVFP4A16") / "model.safetensors")
    for file in parts.glob("*.safetensors"):
        for name, value in load_file(file).items():
            assert torch.equal(value.view(torch.uint8), whole[name].view(torch.uint8)), name


def test_importance_changes_weights(llama: Path, calibration: Path, tmp_path: Path) -> None:
    written = set()
    for observer in ("memoryless_mse", "imatrix_mse"):
        options = ("--observer", observer, "--calibration", calibration)
        out = quantize(llama, tmp_path / observer, "W4A16", *options)
        written.add((out / "model.safetensors").read_bytes())
    assert len(written) == 2


def test_quantized_head_unties_the_config(tmp_path: Path) -> None:
    source = save_qwen3(tmp_path / "tied")
    copy_prefix("model.embed_tokens.weight", "lm_head.weight")(source)
    tied = {}
    for name, scheme in (("kept", "keep"), ("quantized", "W4A16")):
        rules = (Rule(match="lm_head", scheme=scheme), Rule(match="Linear", scheme="FP8_DYNAMIC"))
        out = tmp_path / name
        quantize_source(QuantizeJob(source=Folder.at(source), out=out, rules=rules))
        tied[name] = json.loads((out / "config.json").read_text())["tie_word_embeddings"]
        found = check_checkpoint(str(out)).findings
        assert [finding.rule for finding in found if finding.check == "completeness"] == []
    assert tied == {"kept": True, "quantized": False}
