"""The dry load of a target with its drafter: vLLM's own draft classes judge what is kept or quantized."""

import json
from collections.abc import Sequence
from pathlib import Path
from shutil import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.architectures.families import FAMILIES, save_family
from tests.command import vexport
from tests.mutations.edits import QUANTIZATION, config, drop, rename, spoiled
from vexport.engine.dry.load import DryLoad
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.scenario import Rule

DRAFTING = [name for name, family in FAMILIES.items() if family.draft]
UP = "mtp.layers.0.mlp.experts.1.up_proj.weight"
RULES = (
    Rule(match=r"re:.*(eh_proj|mtp[.]fc)", scheme="keep"),
    Rule(match=r"re:.*(^mtp|layers[.]2)[.].*", scheme="W4A16_G64"),
    Rule(match="Linear", scheme="FP8_DYNAMIC"),
)


def eagle(target: Path, folder: Path, without: str = "") -> Path:
    """An EAGLE-3 drafter of a Llama: a decoder layer over two hidden states, a smaller vocabulary."""
    tensors = load_file(target / "model.safetensors")
    layer = {name.partition("layers.0.")[2]: value for name, value in tensors.items() if "layers.0." in name}
    norm, head = layer["input_layernorm.weight"], tensors["lm_head.weight"][:128]
    for name in ("q_proj", "k_proj", "v_proj"):
        layer[f"self_attn.{name}.weight"] = layer[f"self_attn.{name}.weight"].repeat(1, 2)
    drafts = {
        **{f"midlayer.{name}": value for name, value in {**layer, "hidden_norm.weight": norm}.items()},
        "fc.weight": torch.zeros(len(norm), 3 * len(norm), dtype=norm.dtype),
        "norm.weight": norm,
        "lm_head.weight": head,
        "d2t": torch.zeros(len(head), dtype=torch.int64),
        "t2d": torch.zeros(len(tensors["lm_head.weight"]), dtype=torch.bool),
    }
    folder.mkdir()
    stored = {name: value.clone() for name, value in drafts.items() if name != without}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    copy(target / "config.json", folder)
    config((), architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, draft_vocab_size=128)(folder)
    return folder


def errors(checkpoints: Sequence[Path], speculative: str) -> list[list[str]]:
    options = ("--sm", "90", "--speculative", speculative, "--format", "json")
    loaded = vexport("load", "--dry", *checkpoints, *options)
    reports = json.loads(loaded.stdout)
    assert loaded.code == (not all(report["ok"] for report in reports))
    return [
        [f"{each['where']}: {each['got']}" for each in report["findings"] if each["severity"] == "error"]
        for report in reports
    ]


@pytest.mark.vllm
def test_draft_layers_load_where_they_are_kept_and_where_they_are_quantized(tmp_path: Path) -> None:
    made = []
    for family in DRAFTING:
        source = save_family(family, tmp_path / family)
        kept, drafts = tmp_path / f"{family}-kept", tmp_path / f"{family}-quantized"
        assert vexport("quantize", source, kept, "--scheme", "NVFP4A16", "--no-verify", "--quiet").code == 0
        made.append(kept)
        # vLLM's drafter of Ernie asks for its layer by another name than it has: it is kept.
        if family != "ernie4.5-moe-mtp":
            quantize_source(QuantizeJob(source=str(source), out=drafts, rules=RULES))
            made.append(drafts)
    for report in DryLoad(checkpoints=made, tp=(2,), sm=(90,), speculative="mtp").reports():
        assert (report.ok, report.findings) == (True, ()), report.checkpoint
        drafter = {row.name: row.stored for row in report.rows if row.name.startswith("drafter.")}
        attention = next(stored for name, stored in drafter.items() if "o_proj" in name)
        assert attention == ("W4A16" if report.checkpoint.endswith("-quantized") else "W16A16")


@pytest.mark.vllm
def test_what_a_drafter_lacks_is_found_only_where_it_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_family("qwen3-next-mtp", tmp_path / "model")
    out = tmp_path / "out"
    assert vexport("quantize", source, out, "--scheme", "FP8_DYNAMIC", "--no-verify", "--quiet").code == 0
    missing = spoiled(out, tmp_path / "missing", drop(UP))
    renamed = spoiled(out, tmp_path / "renamed", rename(UP, UP.replace("up_proj", "up")))
    without = save_family("deepseek-v3", tmp_path / "without", num_nextn_predict_layers=1)
    # Of a draft layer only the attention is ignored.
    ignore = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    kept = [name for name in ignore if not name.startswith("re:")]
    half_ignored = config(QUANTIZATION, ignore=[*kept, r"re:.*\bmtp\.layers\.0\.self_attn.*"])
    half = spoiled(out, tmp_path / "half", half_ignored)
    experts = "drafter.model.layers.0.mlp.experts.routed_experts"
    expected = {
        missing: f"{experts}.w13_weight: ",
        renamed: f"{experts}.w13_weight: ",
        without: "checkpoint: ValueError: MTP speculative decoding layer 2 weights missing",
        half: f"{experts}.w2_weight_scale: 0 of",
    }
    loaded = errors([*expected], "mtp")
    for (folder, words), lines in zip(expected.items(), loaded, strict=True):
        assert any(line.startswith(words) for line in lines), folder
    assert errors([missing], "") == [[]]
    monkeypatch.delenv("VEXPORT_NO_VERIFY")
    checked = vexport("check", missing, "--speculative", "mtp")
    assert (checked.code, f"{experts}.w13_weight" in checked.stdout) == (1, True)


@pytest.mark.vllm
def test_a_drafter_of_its_own_folder_loads_next_to_the_target(tmp_path: Path) -> None:
    target = save_family("llama", tmp_path / "llama")
    assert errors([target], f"eagle3={eagle(target, tmp_path / 'eagle')}") == [[]]
    ((error,),) = errors([target], f"eagle3={eagle(target, tmp_path / 'cut', 'midlayer.mlp.up_proj.weight')}")
    assert error.startswith("drafter.model.layers.0.mlp.gate_up_proj.weight: 131072 of 262144 elements")
    assert vexport("load", target, "--dry", "--speculative", "eagle3=nowhere").code == 2
