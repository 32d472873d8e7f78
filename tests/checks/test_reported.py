"""Small versions of checkpoints that people have reported as broken. A row is a thread on GitHub.

If the files alone do not show the fault, the dry load finds it.
"""

from collections.abc import Mapping
from pathlib import Path
from shutil import copy
from typing import NamedTuple

import pytest
import torch

from tests.architectures.families import save_family
from tests.checks.quant_methods import write_experts
from tests.command import ROOT, vexport
from tests.models import quantize
from tests.mutations.edits import (
    QUANTIZATION,
    WHOLE,
    Change,
    Tensors,
    all_of,
    change_all,
    config,
    copy_prefix,
    drop,
    inverse,
    move_prefix,
    put,
    rename_all,
    spoiled,
    tensors,
    unquantize,
)
from tests.texts import assert_contains
from vexport.api import check
from vexport.checks import check_checkpoint
from vexport.checks.vllm.view import Target
from vexport.records import Json

PEER, PRODUCERS = (Path(__file__).parent.parent / name for name in ("peer", "producers"))
LLAMA, MOE = PEER / "llama-W4A16", PEER / "moe-NVFP4A16"
MODELOPT = PRODUCERS / "methods" / "modelopt-llama-NVFP4-KV"
ASYMMETRIC = PRODUCERS / "checkpoints" / "llmcompressor-llama-GPTQ-ASYM"
LAYER = "model.layers.0"
Q, DOWN, GATE = f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.down_proj", f"{LAYER}.mlp.gate"
MERGING_LAYER, PROJECTOR = (
    f"multi_modal_projector.{name}" for name in ("patch_merger.merging_layer", "linear_1")
)
DRAFT_LAYERS = "num_nextn_predict_layers"


class Reported(NamedTuple):
    """A sound checkpoint, the change that the reported checkpoint had, and the expected finding."""

    sound: Path
    change: Change
    check: str
    where: str
    fix: str = ""
    severity: str = "error"
    speculative: str = ""


def set_class(name: str, **more: Json) -> Change:
    return config(WHOLE, architectures=[name], **more)


def nested(name: str) -> str:
    return f"language_model.{name}" if name.startswith(("model.", "lm_head.")) else name


def quantize_projector(place: str) -> Change:
    """Quantize the projector of Mistral 3 or LLaVA, which vLLM builds in 16 bits."""
    return all_of(copy_prefix(f"{LAYER}.mlp.up_proj.", f"{place}."), rename_all(nested))


def group_by_projection(name: str) -> str:
    head, of_expert, tail = name.partition(".experts.")
    if not of_expert:
        return name
    number, projection, parameter = tail.split(".")
    return f"{head}.experts.{projection}.{number}.{parameter}"


@tensors
def quantize_head(values: Tensors) -> None:
    rows, columns = values["lm_head.weight"].shape
    values["lm_head.weight"] = torch.full((rows, columns // 2), 17, dtype=torch.uint8)
    values["lm_head.weight_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
    values |= {
        "lm_head.weight_scale_2": torch.tensor(0.01),
        "lm_head.input_scale": torch.tensor(0.01),
    }


@tensors
def stack_experts(values: Tensors) -> None:
    """Stack packed experts in tensors such as gate_up_proj_packed (experts, out, in)."""
    for mlp in [
        name.removesuffix(".gate.weight") for name in values if name.endswith(".mlp.gate.weight")
    ]:
        for new, parts in {
            "gate_up_proj": ("gate_proj", "up_proj"),
            "down_proj": ("down_proj",),
        }.items():
            for parameter in ("weight_packed", "weight_scale", "weight_global_scale"):
                single = [
                    torch.cat(
                        [values.pop(f"{mlp}.experts.{expert}.{part}.{parameter}") for part in parts]
                    )
                    for expert in range(len(values[f"{mlp}.gate.weight"]))
                ]
                values[f"{mlp}.experts.{new}_{parameter.removeprefix('weight_')}"] = torch.stack(
                    single
                )


def copy_tokenizer(folder: Path) -> None:
    copy(ROOT / "scenarios" / "demo" / "model" / "tokenizer.json", folder)


ROUTER_OF_GEMMA = all_of(
    copy_prefix(f"{Q}.", f"{LAYER}.router.proj."), set_class("Gemma4ForCausalLM")
)
IN_16_BITS = all_of(
    unquantize(DOWN, 128, 256),
    config(QUANTIZATION, ignore=["lm_head", DOWN.replace("model.", "model.language_model.")]),
)
LLAVA = all_of(
    quantize_projector(PROJECTOR),
    set_class("LlavaNextForConditionalGeneration"),
    config(QUANTIZATION, ignore=["re:.*lm_head", f"re:{PROJECTOR}"]),
)
MISTRAL = all_of(quantize_projector(MERGING_LAYER), set_class("Mistral3ForConditionalGeneration"))
GEMMA = all_of(copy_tokenizer, set_class("Gemma3ForConditionalGeneration", model_type="gemma3"))
SHORT_IGNORE = config(QUANTIZATION, ignore=["lm_head"])
HALF_SCALES = put(f"{Q}.weight_scale", lambda value: value[:, ::2].contiguous())
SYMMETRIC = config((*QUANTIZATION, "config_groups", "group_0", "weights"), symmetric=True)
WITH_DRAFT_LAYER = config(WHOLE, **{DRAFT_LAYERS: 1})
IGNORE_REMEDY = "add the layer to ignore"
# The keys are threads on GitHub.
REPORTED: Mapping[str, Reported] = {
    "vllm-project/vllm/issues/45102": Reported(MODELOPT, quantize_head, "targets", "lm_head"),
    "vllm-project/llm-compressor/issues/2714": Reported(
        MOE, ROUTER_OF_GEMMA, "targets", "router", "in ignore"
    ),
    "vllm-project/llm-compressor/issues/2568": Reported(
        LLAMA,
        move_prefix("model.", "model.language_model.model."),
        "completeness",
        "model.language_model.model",
    ),
    "vllm-project/llm-compressor/issues/2255": Reported(
        ASYMMETRIC, SYMMETRIC, "config", "config_groups.group_0.weights.symmetric"
    ),
    "vllm-project/llm-compressor/issues/1652": Reported(LLAMA, MISTRAL, "targets", MERGING_LAYER),
    "vllm-project/llm-compressor/issues/1305": Reported(
        LLAMA, GEMMA, "tokenizer", "preprocessor_config.json", "copy the source's"
    ),
    "NVIDIA/Model-Optimizer/pull/1858": Reported(MOE, SHORT_IGNORE, "targets", GATE, IGNORE_REMEDY),
    "vllm-project/vllm/issues/40885": Reported(
        MOE, rename_all(group_by_projection), "completeness", f"{LAYER}.mlp.experts"
    ),
    "unslothai/unsloth/issues/6224": Reported(MOE, stack_experts, "dry-load", "experts"),
    "NVIDIA/Model-Optimizer/pull/2038": Reported(
        MODELOPT, HALF_SCALES, "shapes", f"{Q}.weight_scale"
    ),
    "vllm-project/llm-compressor/issues/2641": Reported(
        LLAMA, IN_16_BITS, "targets", DOWN, IGNORE_REMEDY
    ),
    "kekzl/imp/pull/1433": Reported(
        PEER / "llama-NVFP4A16",
        change_all("weight_global_scale", inverse),
        "values",
        f"{Q}.weight_global_scale",
    ),
    "vllm-project/vllm/issues/34771": Reported(LLAMA, LLAVA, "targets", PROJECTOR),
    "vllm-project/vllm/pull/35548": Reported(
        MOE, WITH_DRAFT_LAYER, "completeness", DRAFT_LAYERS, "without MTP drafts", "warning"
    ),
    "vllm-project/llm-compressor/issues/2735": Reported(
        MOE, WITH_DRAFT_LAYER, "completeness", DRAFT_LAYERS, speculative="mtp"
    ),
    # The outer config ties the head, but the file contains a head.
    "vllm-project/vllm/issues/51063": Reported(
        LLAMA,
        all_of(rename_all(nested), config(WHOLE, tie_word_embeddings=True)),
        *("completeness", "language_model.lm_head.weight", "", "warning"),
    ),
}
IDS = [
    pytest.param(thread, marks=[pytest.mark.vllm] * (row.check == "dry-load"))
    for thread, row in REPORTED.items()
]


@pytest.mark.parametrize("thread", IDS)
def test_reported_faults_are_found(
    thread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = REPORTED[thread]
    dry = row.check == "dry-load"
    if dry:
        monkeypatch.delenv("VEXPORT_NO_VERIFY")
    folder = spoiled(row.sound, tmp_path / "reported", row.change)
    known = check(row.sound, static=True).findings
    found = check(folder, static=not dry, speculative=row.speculative).findings
    new = [finding for finding in found if finding.severity != "info" and finding not in known]
    matching = [
        finding for finding in new if (finding.check, finding.severity) == (row.check, row.severity)
    ]
    assert [
        finding for finding in matching if row.where in finding.where and row.fix in finding.fix
    ], new


@pytest.mark.parametrize(("width", "refused"), [(384, {8}), (320, {1, 2, 4, 8})])
def test_expert_blocks_across_ranks(width: int, refused: set[int], tmp_path: Path) -> None:
    """vllm-project/vllm#54178 and #52997: vLLM 0.32 divides blocks of experts down to 32 x 32."""
    source = save_family("qwen3-moe", tmp_path / "model", moe_intermediate_size=width)
    folder = write_experts("fp8-block", source, tmp_path / "fp8")
    for ranks in (1, 2, 4, 8):
        findings = check_checkpoint(str(folder), Target(tp=(ranks,))).findings
        found = [
            finding
            for finding in findings
            if finding.check in ("devices", "shapes") and "experts" in finding.where
        ]
        assert bool(found) is (ranks in refused), (ranks, found)


def test_expert_without_input_scale(calibration: Path, tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/45212: its scale stays zero, outputs are NaN."""
    source = save_family("qwen3-moe", tmp_path / "model")
    folder = quantize(source, tmp_path / "out", "NVFP4", "--calibration", calibration)
    name = f"{LAYER}.mlp.experts.1.down_proj.input_global_scale"
    drop(name)(folder)
    assert name in [
        finding.where
        for finding in check(folder, static=True).findings
        if finding.severity == "error"
    ]


def test_adapter_names_base_model(tmp_path: Path) -> None:
    """The message names the model that the adapter must be merged into."""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    for command in ("check", "plan"):
        ran = vexport(command, tmp_path)
        assert ran.code == 2
        assert_contains(ran.errors[0], "LoRA adapter of Qwen/Qwen3-0.6B")
        assert_contains(ran.errors[0], "merge it into Qwen/Qwen3-0.6B")
