"""Written checkpoints against compressed-tensors: its dequantization, its config model, its packing."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from safetensors.torch import load_file

from tests.command import vexport
from tests.models import Good, quantize, save_llama

SCHEMES = ("NVFP4", "NVFP4A16", "FP8", "FP8_DYNAMIC", "W8A8", "W4A16")


def test_global_scale_is_the_divisor_of_the_largest_member(llama: Path, good: Good) -> None:
    original, tensors = (load_file(folder / "model.safetensors") for folder in (llama, good("NVFP4")))
    names = [f"model.layers.1.self_attn.{member}_proj" for member in "qkv"]
    largest = max(original[f"{name}.weight"].abs().max().item() for name in names)
    assert tensors[f"{names[0]}.weight_global_scale"].item() == pytest.approx(448 * 6 / largest, rel=1e-6)


@pytest.mark.usefixtures("own_products")
def test_input_scale_is_what_a_whole_model_run_sees(llama: Path, tmp_path: Path, calibration: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = quantize(llama, tmp_path / "out", "FP8", "--calibration", calibration)
    tensors = load_file(out / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    seen: dict[str, float] = {}

    def watch(name: str) -> None:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            seen[name] = max(seen.get(name, 0.0), inputs[0].abs().max().item())

        model.get_submodule(name).register_forward_pre_hook(hook)

    names = [name for name, _ in model.named_modules() if name.endswith("_proj")]
    for name in names:
        watch(name)
    with torch.inference_mode():
        for line in calibration.read_text().splitlines():
            model(input_ids=torch.tensor([json.loads(line)["input_ids"]]))
    for name in names:
        assert tensors[f"{name}.input_scale"].item() == pytest.approx(seen[name] / 448, rel=1e-6), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_config_is_one_that_compressed_tensors_reads(scheme: str, good: Good) -> None:
    raw = json.loads((good(scheme) / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(raw)
    preset = preset_name_to_scheme(scheme, ["Linear"])
    group = config.config_groups["group_0"]
    assert group.weights == preset.weights
    assert group.input_activations == preset.input_activations
    assert config.ignore == ["lm_head"]
    assert config.quantization_status == "compressed"


def test_what_is_kept_is_copied_to_the_byte(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert vexport("quantize", llama, out, "--scheme", "W8A8", "--ignore", "down_proj", "--quiet").code == 0
    before, after = load_file(llama / "model.safetensors"), load_file(out / "model.safetensors")
    kept = [name for name in before if "_proj" not in name or "down_proj" in name]
    assert len(kept) > 9
    for name in kept:
        assert torch.equal(before[name].view(torch.int16), after[name].view(torch.int16)), name
    ignore = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert sorted(ignore) == ["lm_head", *(f"model.layers.{layer}.mlp.down_proj" for layer in range(3))]


def test_side_files_travel(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source")
    (source / "tokenizer.json").write_text('{"a": 1}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("{{ rag }}")
    (source / "additional_chat_templates" / "endless.jinja").symlink_to("/dev/zero")
    out = tmp_path / "out"
    assert vexport("quantize", source, out, "--scheme", "W8A8", "--quiet").code == 0
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (out / "tokenizer.json").read_text() == '{"a": 1}'
    assert not (out / "pytorch_model.bin").exists()
    assert [file.name for file in (out / "additional_chat_templates").iterdir()] == ["rag.jinja"]


def test_shards_and_index(tmp_path: Path, llama: Path) -> None:
    from vexport.checkpoint.index import read_index
    from vexport.plan.source import plan_source, rules_for
    from vexport.quantize.job import QuantizeJob, write_checkpoint
    from vexport.records import PlanRequest

    index, plan = plan_source(
        str(llama), rules_for(PlanRequest(scheme="NVFP4A16", observer="memoryless_minmax"))
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, size in ((whole, 10**9), (parts, 300_000)):
        job = QuantizeJob(source=str(llama), out=folder, rules=(), shard_bytes=size)
        write_checkpoint(job, index, plan)
    assert len(list(parts.glob("*.safetensors"))) > 3
    read = read_index(parts)
    assert read.num_bytes == plan.output_bytes == read_index(whole).num_bytes
    one = load_file(whole / "model.safetensors")
    for file in parts.glob("*.safetensors"):
        for name, value in load_file(file).items():
            assert torch.equal(value.view(torch.uint8), one[name].view(torch.uint8)), name


def test_same_bytes_each_time(llama: Path, tmp_path: Path, calibration: Path, good: Good) -> None:
    again = quantize(llama, tmp_path / "again", "NVFP4", "--calibration", calibration)
    first, second = ((folder / "model.safetensors").read_bytes() for folder in (good("NVFP4"), again))
    assert first == second


def test_importance_is_gathered_for_weights_alone(llama: Path, calibration: Path, tmp_path: Path) -> None:
    written = {}
    for observer in ("memoryless_mse", "imatrix_mse"):
        out = tmp_path / observer
        samples = ("--observer", observer, "--rounding", "nearest", "--calibration", calibration, "--quiet")
        ran = vexport("quantize", llama, out, "--scheme", "W4A16", *samples)
        assert ran.code == 0, ran.stderr
        assert "importance" not in ran.stderr
        written[observer] = (out / "model.safetensors").read_bytes()
    assert written["memoryless_mse"] != written["imatrix_mse"]
