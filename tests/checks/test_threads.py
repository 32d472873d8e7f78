"""Further checkpoints that people have reported, in small: one row a thread, with its address.

`test_public_issues.py` has those that came first. What the files alone do not tell vLLM's loaders are asked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import copy, copytree

import pytest
import torch

from tests.command import ROOT, vexport
from tests.engine.sketches import QWEN3_MOE, sketch
from tests.models import quantize
from tests.mutations.edits import QUANTIZATION, WHOLE, Change, Tensors, all_of, config, put, spoiled, tensors
from vexport.api import check

TESTS = Path(__file__).parent.parent
MOE, LLAMA = TESTS / "peer" / "moe-NVFP4A16", TESTS / "peer" / "llama-W4A16"
MODELOPT = TESTS / "producers" / "methods" / "modelopt-llama-NVFP4-KV"
LAYER = "model.layers.0"
Q, DOWN, GATE = f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.down_proj", f"{LAYER}.mlp.gate"
PROJECTOR = "multi_modal_projector.linear_1"
PREPROCESSOR = "preprocessor_config.json"
HUB = "https://github.com/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """A sound checkpoint, what the reported one had otherwise; family, place and advice of the finding."""

    sound: Path
    change: Change
    check: str
    where: str
    fix: str = ""
    severity: str = "error"
    dry: bool = False
    speculative: str = ""


@tensors
def experts_under_their_projection(values: Tensors) -> None:
    for name in [name for name in values if ".experts." in name]:
        head, _, tail = name.partition(".experts.")
        number, projection, parameter = tail.split(".")
        values[f"{head}.experts.{projection}.{number}.{parameter}"] = values.pop(name)


@tensors
def experts_packed_together(values: Tensors) -> None:
    """As gate_up_proj_packed and the like, (experts, out, in)."""
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp"
        if f"{mlp}.gate.weight" not in values:
            continue
        for new, parts in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.items():
            for parameter in ("weight_packed", "weight_scale", "weight_global_scale"):
                single = [
                    torch.cat([values.pop(f"{mlp}.experts.{one}.{part}.{parameter}") for part in parts])
                    for one in range(len(values[f"{mlp}.gate.weight"]))
                ]
                name = f"{mlp}.experts.{new}_{parameter.removeprefix('weight_')}"
                values[name] = torch.stack(single)


@tensors
def projector_in_int4(values: Tensors) -> None:
    for name in [name for name in values if name.startswith(f"{LAYER}.mlp.up_proj.")]:
        values[f"{PROJECTOR}.{name.rpartition('.')[2]}"] = values[name].clone()
    for name in [name for name in values if name.startswith(("model.", "lm_head."))]:
        values[f"language_model.{name}"] = values.pop(name)


@tensors
def a_layer_in_16_bits(values: Tensors) -> None:
    rows, columns = values[f"{DOWN}.weight_shape"].tolist()
    for name in [name for name in values if name.startswith(f"{DOWN}.")]:
        del values[name]
    values[f"{DOWN}.weight"] = torch.ones(rows, columns, dtype=torch.bfloat16)


def with_tokenizer(folder: Path) -> None:
    copy(ROOT / "scenarios" / "demo" / "model" / "tokenizer.json", folder)


def reciprocals(values: Tensors) -> None:
    for name in [name for name in values if name.endswith("weight_global_scale")]:
        values[name] = 1 / values[name]


THREADS: Mapping[str, Thread] = {
    f"{HUB}vllm-project/llm-compressor/issues/1305": Thread(
        sound=LLAMA,
        change=all_of(
            with_tokenizer,
            config(WHOLE, architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3"),
        ),
        check="tokenizer",
        where=PREPROCESSOR,
        fix="copy the source's",
    ),
    f"{HUB}NVIDIA/Model-Optimizer/pull/1858": Thread(
        sound=MOE,
        change=config(QUANTIZATION, ignore=["lm_head"]),
        check="targets",
        where=GATE,
        fix="add the layer to ignore",
    ),
    f"{HUB}vllm-project/vllm/issues/40885": Thread(
        sound=MOE, change=experts_under_their_projection, check="completeness", where=f"{LAYER}.mlp.experts"
    ),
    f"{HUB}unslothai/unsloth/issues/6224": Thread(
        sound=MOE, change=experts_packed_together, check="dry-load", where="experts", dry=True
    ),
    f"{HUB}vllm-project/compressed-tensors/issues/832": Thread(
        sound=LLAMA,
        change=put(f"{Q}.weight_scale", lambda value: value.fill_(torch.inf)),
        check="values",
        where=f"{Q}.weight_scale",
    ),
    f"{HUB}NVIDIA/Model-Optimizer/pull/2038": Thread(
        sound=MODELOPT,
        change=put(f"{Q}.weight_scale", lambda value: value[:, ::2].contiguous()),
        check="shapes",
        where=f"{Q}.weight_scale",
    ),
    f"{HUB}vllm-project/llm-compressor/issues/2641": Thread(
        sound=LLAMA,
        change=all_of(
            a_layer_in_16_bits,
            config(QUANTIZATION, ignore=["lm_head", DOWN.replace("model.", "model.language_model.")]),
        ),
        check="targets",
        where=DOWN,
        fix="add the layer to ignore",
    ),
    f"{HUB}kekzl/imp/pull/1433": Thread(
        sound=TESTS / "peer" / "llama-NVFP4A16",
        change=tensors(reciprocals),
        check="values",
        where=f"{Q}.weight_global_scale",
    ),
    f"{HUB}vllm-project/vllm/issues/34771": Thread(
        sound=LLAMA,
        change=all_of(
            projector_in_int4,
            config(WHOLE, architectures=["LlavaNextForConditionalGeneration"]),
            config(QUANTIZATION, ignore=["re:.*lm_head", f"re:{PROJECTOR}"]),
        ),
        check="targets",
        where=PROJECTOR,
    ),
    f"{HUB}vllm-project/vllm/pull/35548": Thread(
        sound=MOE,
        change=config(WHOLE, num_nextn_predict_layers=1),
        check="completeness",
        where="num_nextn_predict_layers",
        fix="or do not draft",
        severity="warning",
    ),
    f"{HUB}vllm-project/llm-compressor/issues/2735": Thread(
        sound=MOE,
        change=config(WHOLE, num_nextn_predict_layers=1),
        check="completeness",
        where="num_nextn_predict_layers",
        speculative="mtp",
    ),
}


@pytest.mark.vllm
@pytest.mark.parametrize("address", THREADS)
def test_what_was_reported_is_found(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = THREADS[address]
    if thread.dry:
        monkeypatch.delenv("VEXPORT_NO_VERIFY")
    folder = spoiled(thread.sound, tmp_path / "reported", thread.change)
    found = check(folder, static=not thread.dry, speculative=thread.speculative).findings
    known = check(thread.sound, static=True).findings
    new = [each for each in found if each.severity != "info" and each not in known]
    assert [
        each
        for each in new
        if (each.check, each.severity) == (thread.check, thread.severity)
        and thread.where in each.where
        and thread.fix in each.fix
    ], new


def test_an_expert_without_its_input_scale(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/45212: zero in vLLM's memory, NaN where it is routed to."""
    name = f"{LAYER}.mlp.experts.1.down_proj.input_global_scale"
    folder = sketch(tmp_path / "sketch", QWEN3_MOE, "NVFP4", {name: None})
    assert name in [each.where for each in check(folder, static=True).findings if each.severity == "error"]


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    """The message names what it is to be merged into."""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    for command in ("check", "plan"):
        ran = vexport(command, tmp_path)
        assert ran.code == 2
        assert "a LoRA adapter of Qwen/Qwen3-0.6B" in ran.errors[0]
        assert "merge it into Qwen/Qwen3-0.6B first" in ran.errors[0]


def test_a_router_that_vllm_builds_plain_is_not_to_be_targeted(tmp_path: Path) -> None:
    @tensors
    def gemma_router(values: Tensors) -> None:
        for parameter in ("weight_packed", "weight_scale", "weight_global_scale"):
            values[f"{LAYER}.router.proj.{parameter}"] = values[f"{Q}.{parameter}"].clone()

    change = all_of(gemma_router, config(WHOLE, architectures=["Gemma4ForCausalLM"]))
    found = check(spoiled(MOE, tmp_path / "routed", change), static=True).findings
    (finding,) = [each for each in found if each.check == "targets" and "router" in each.where]
    assert finding.fix.startswith("do not quantize it")


def test_files_of_a_processor_are_carried_over(llama: Path, tmp_path: Path) -> None:
    source = copytree(llama, tmp_path / "source")
    names = ("preprocessor_config.json", "processor_config.json", "chat_template.jinja", "tokenizer.model")
    for name in names:
        (source / name).write_text("{}")
    out = quantize(source, tmp_path / "out", "FP8_DYNAMIC")
    assert all((out / name).read_text() == "{}" for name in names)
