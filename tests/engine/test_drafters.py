"""The dry load of a target and its drafter, with vLLM's classes for drafters."""

import json
from pathlib import Path
from shutil import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.architectures.families import FAMILIES, save_family
from tests.command import vexport
from tests.mutations.edits import QUANTIZATION, config, drop, rename, spoiled
from vexport.engine.dry.load import DryLoad
from vexport.names import Folder
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.records import DryLoadReport
from vexport.scenario import Rule

# Families that store experts differently in the source are quantized to the same tensors, and are
# left out.
DRAFTING = [
    name
    for name, family in FAMILIES.items()
    if family.draft and not name.endswith(("-mtp-stacked", "-mtp-single"))
]
UP = "mtp.layers.0.mlp.experts.1.up_proj.weight"
EXPERTS = "drafter.model.layers.0.mlp.experts.routed_experts"
WHOLE = (Rule(match="Linear", scheme="FP8_DYNAMIC"),)
# In a draft layer, only the attention is quantized.
RULES = (
    Rule(match=r"re:.*(eh_proj|mtp[.]fc|(^mtp|layers[.]2)[.].*(mlp|experts)[.])", scheme="keep"),
    Rule(match=r"re:.*(^mtp|layers[.]2)[.].*", scheme="W4A16_G64"),
    *WHOLE,
)


def save_eagle(target: Path, folder: Path, without: str) -> Path:
    """Save an EAGLE-3 drafter of a Llama.

    It has a decoder layer over two hidden states, and a smaller vocabulary.
    """
    tensors = load_file(target / "model.safetensors")
    layer = {
        name.partition("layers.0.")[2]: value
        for name, value in tensors.items()
        if "layers.0." in name
    }
    norm, head = layer["input_layernorm.weight"], tensors["lm_head.weight"][:128]
    for name in ("q_proj", "k_proj", "v_proj"):
        layer[f"self_attn.{name}.weight"] = layer[f"self_attn.{name}.weight"].repeat(1, 2)
    drafts = {
        **{
            f"midlayer.{name}": value
            for name, value in {**layer, "hidden_norm.weight": norm}.items()
        },
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
    config((), architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, draft_vocab_size=128)(
        folder
    )
    return folder


def damaged_copies(out: Path, folder: Path) -> dict[Path, str]:
    """Return damaged copies of a Qwen3-Next in FP8 with an unquantized draft layer.

    The values are the beginnings of the expected errors.
    """
    ignore = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    kept = [name for name in ignore if not name.startswith("re:")]
    half_ignored = config(QUANTIZATION, ignore=[*kept, r"re:.*\bmtp\.layers\.0\.self_attn.*"])
    without = save_family("deepseek-v3", folder / "without", num_nextn_predict_layers=1)
    return {
        spoiled(out, folder / "missing", drop(UP)): f"{EXPERTS}.w13_weight: ",
        spoiled(
            out, folder / "renamed", rename(UP, UP.replace("up_proj", "up"))
        ): f"{EXPERTS}.w13_weight: ",
        spoiled(out, folder / "half", half_ignored): f"{EXPERTS}.w2_weight_scale: 0 of",
        without: "checkpoint: ValueError: MTP speculative decoding layer 2 weights missing",
    }


def errors(report: DryLoadReport) -> list[str]:
    return [f"{each.where}: {each.got}" for each in report.findings if each.severity == "error"]


@pytest.mark.vllm
def test_draft_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound draft layers load, and missing tensors are found."""
    # vLLM's drafter of Ernie looks up its layer by a wrong name, so that it must not be quantized.
    jobs = {family: WHOLE if family.startswith("ernie") else RULES for family in DRAFTING}
    sound = [tmp_path / f"{family}-out" for family in jobs]
    for out, (family, rules) in zip(sound, jobs.items(), strict=True):
        source = save_family(family, tmp_path / family)
        quantize_source(QuantizeJob(source=Folder.at(source), out=out, rules=rules))
    kept = QuantizeJob(
        source=Folder.at(tmp_path / "qwen3-next-mtp"), out=tmp_path / "kept", rules=WHOLE
    )
    quantize_source(kept)
    expected = damaged_copies(kept.out, tmp_path)
    loads = DryLoad(checkpoints=[*sound, *expected], tp=(2,), sm=(90,), speculative="mtp").reports()
    for report, (family, rules) in zip(loads, jobs.items(), strict=False):
        # Sides of small models are no multiples of 16 (the known fault cutlass-fp8-padding).
        assert [each for each in report.findings if each.check != "faults"] == [], family
        drafter = {row.name: row.stored for row in report.rows if row.name.startswith("drafter.")}
        attention = {stored for name, stored in drafter.items() if "o_proj" in name}
        assert attention == {"W4A16" if rules == RULES else "W16A16"}, family
        assert "W16A16" in drafter.values()
    for report, words in zip(loads[len(sound) :], expected.values(), strict=True):
        assert any(line.startswith(words) for line in errors(report)), report.checkpoint
    missing = next(iter(expected))
    (report,) = DryLoad(checkpoints=[missing]).reports()
    assert errors(report) == [], "without drafting, the missing tensor is not needed"
    monkeypatch.delenv("VEXPORT_NO_VERIFY")
    checked = vexport("check", missing, "--speculative", "mtp", "--sm", "90")
    assert (checked.code, f"{EXPERTS}.w13_weight" in checked.stdout) == (1, True)


@pytest.mark.vllm
def test_drafter_in_separate_folder(tmp_path: Path) -> None:
    """The drafter loads, except for a missing tensor."""
    target = save_family("llama", tmp_path / "llama")
    drafter = save_eagle(target, tmp_path / "eagle", "midlayer.mlp.up_proj.weight")
    options = ("--sm", "90", "--speculative", f"eagle3={drafter}", "--format", "json")
    ran = vexport("load", "--dry", target, *options)
    (finding,) = json.loads(ran.stdout)[0]["findings"]
    assert (ran.code, finding["severity"]) == (1, "error")
    assert finding["where"] == "drafter.model.layers.0.mlp.gate_up_proj.weight"
    assert finding["got"].startswith("131072 of 262144 elements")
    assert vexport("load", target, "--dry", "--speculative", "eagle3=nowhere").code == 2
