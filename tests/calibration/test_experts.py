"""Inputs of experts, compared with a plain loop over a run of the whole model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from tests.architectures.families import save_family
from tests.calibration.models import (
    batches_of,
    calibrated,
    expert_configs,
    inputs_of_whole_model,
    mean_squares,
    plan_for,
    range_of,
    samples,
    save,
)
from tests.mutations.edits import drop, multiply_by, put
from tests.texts import assert_raises
from vexport.calibration import calibrate
from vexport.calibration.inputs import expert_runner_of
from vexport.calibration.walk import LayerWalk
from vexport.checkpoint.index import SourceIndex
from vexport.errors import CheckpointFailed, InputError
from vexport.formats.plan import Plan
from vexport.quantize.scale_search import decode_importance
from vexport.records import CalibrationRecord, LinearPlan, WeightPart

pytestmark = pytest.mark.usefixtures("matmul_in_model_dtype")

EXPERTS = 8
LENGTHS = (12, 20, 33, 7, 20, 41)
# Names of gate, up and down in checkpoints with unusual names.
LEAVES = {"mixtral": ("w1", "w3", "w2")}
Routing = tuple[torch.Tensor, torch.Tensor]


def plan_with_experts(
    folder: Path, *, scheme: str = "FP8", observer: str = "memoryless_minmax"
) -> tuple[SourceIndex, Plan]:
    """Plan to quantize all linear layers except routers, with the layers of each expert by name."""
    index, plan = plan_for(folder, scheme=scheme, observer=observer)
    groups = [
        group for group in plan.groups if group.name.rpartition(".")[2] not in ("gate", "router")
    ]
    for tensor in index.tensors.values():
        module, _, leaf = tensor.name.rpartition(".")
        if len(tensor.shape) == 3 and leaf in ("gate_up_proj", "down_proj"):
            for expert in range(EXPERTS):
                for name in ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",):
                    linear = LinearPlan(
                        name=f"{module}.{expert}.{name}",
                        weight=tensor.name,
                        out_features=1,
                        in_features=tensor.shape[2],
                        part=WeightPart(expert=expert, transposed=False, start=0, stop=1),
                    )
                    groups.append(replace(plan.groups[0], name=linear.name, members=(linear,)))
    return index, replace(plan, groups=tuple(groups))


def routings(
    folder: Path, batches: Sequence[torch.Tensor]
) -> dict[str, tuple[torch.nn.Module, list[Routing]]]:
    """Return each expert module of a run of the whole model, with its tokens and chosen experts.

    Llama 4 chooses one expert, and multiplies the expert's input by the router's weight.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found: dict[str, tuple[torch.nn.Module, list[Routing]]] = {}

    def watch(name: str, module: torch.nn.Module) -> None:
        found[name] = (module, [])
        module.register_forward_pre_hook(
            lambda _, args: found[name][1].append((args[0].clone(), args[1]))
        )

    def watch_router(name: str, module: torch.nn.Module, router: torch.nn.Module) -> None:
        found[name] = (module, [])

        def hook(
            _: torch.nn.Module, args: tuple[torch.Tensor], output: tuple[torch.Tensor, torch.Tensor]
        ) -> None:
            weight, chosen = output[1].max(-1, keepdim=True)
            scaled = args[0] * torch.sigmoid(weight.float()).to(weight.dtype)
            found[name][1].append((scaled, chosen))

        router.register_forward_hook(hook)

    for name, module in model.named_modules():
        if folder.name == "llama4" and name.endswith(".experts"):
            watch_router(name, module, model.get_submodule(name.replace(".experts", ".router")))
        elif name.endswith(".experts"):
            watch(name, module)
    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch)
    return found


def input_of_down(module: torch.nn.Module, expert: int, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the input of an expert's down projection step by step."""
    weight = module.get_parameter("gate_up_proj")[expert]
    if type(module).__name__ == "GptOssExperts":
        made = tokens @ weight + module.get_parameter("gate_up_proj_bias")[expert]
        gate, up = made[:, ::2].clamp(max=7.0), made[:, 1::2].clamp(-7.0, 7.0)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    if type(module).__name__ == "Llama4TextExperts":
        weight = weight.T
    gate, up = (tokens @ weight.T).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def reference(
    folder: Path, *, all_experts: bool
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, ...]]]:
    """Return the inputs of each expert's layers, and each expert's number of routed tokens."""
    leaves = LEAVES.get(folder.name, ("gate_proj", "up_proj", "down_proj"))
    inputs, counts = {}, {}
    for name, (module, routing) in routings(folder, batches_of(samples(LENGTHS))).items():
        stored = name.replace("mlp", "block_sparse_moe") if folder.name == "mixtral" else name
        counts[stored] = tuple(
            sum(int((chosen == expert).sum()) for _, chosen in routing) for expert in range(EXPERTS)
        )
        for expert in range(EXPERTS):
            seen = [
                hidden if all_experts else hidden[(chosen == expert).any(1)]
                for hidden, chosen in routing
            ]
            with torch.no_grad():
                inner = torch.cat([input_of_down(module, expert, tokens) for tokens in seen])
            for leaf, values in zip(leaves, (torch.cat(seen), torch.cat(seen), inner), strict=True):
                inputs[f"{stored}.{expert}.{leaf}"] = values
    return inputs, counts


def require_equal(found: CalibrationRecord, folder: Path, plan: Plan, *, all_experts: bool) -> None:
    inputs, counts = reference(folder, all_experts=all_experts)
    assert found.routed == counts
    assert min(min(row) for row in counts.values()) > 0
    ranges = {name: range_of(values) for name, values in inputs.items()}
    dense = [group.name for group in plan.groups if group.name not in ranges]
    for name, values in inputs_of_whole_model(folder, dense, batches_of(samples(LENGTHS))).items():
        ranges[name] = range_of(values)
    assert found.ranges == ranges


@pytest.mark.parametrize("name", [*expert_configs(), "stacked"])
def test_inputs_of_experts_equal_plain_loop(name: str, tmp_path: Path) -> None:
    """Dense layers after the first experts agree to the bit, so their routed output is unchanged.

    Qwen's experts are also compared with a layer stored in one tensor.
    """
    kind = "qwen3_moe" if name == "stacked" else name
    family = save(expert_configs()[kind], tmp_path / kind, stacked=name == "stacked")
    index, plan = plan_with_experts(family)
    for all_experts in (True, False) if name in ("mixtral", "gpt_oss") else (True,):
        found = calibrate(LayerWalk(index), plan, samples(LENGTHS), all_experts=all_experts)
        require_equal(found, family, plan, all_experts=all_experts)


def test_expert_without_tokens_is_named(tmp_path: Path) -> None:
    folder = save(expert_configs()["qwen3_moe"], tmp_path / "model")
    index, plan = plan_with_experts(folder)
    few = samples([1])
    with pytest.raises(CheckpointFailed, match=r"\.0\.mlp\.experts\.\d\.\w+_proj: .*\b0 tokens"):
        calibrate(LayerWalk(index), plan, few, all_experts=False)
    found = calibrate(LayerWalk(index), plan, few)
    assert {expert_range.tokens for expert_range in found.ranges.values()} == {1}
    assert sum(found.routed["model.layers.1.mlp.experts"]) == 2


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_importance_of_experts(name: str, tmp_path: Path) -> None:
    folder = save(expert_configs()[name], tmp_path / name)
    index, plan = plan_with_experts(folder, scheme="NVFP4A16", observer="imatrix_mse")
    found = calibrate(LayerWalk(index), plan, samples(LENGTHS)).importance
    assert set(found) == {group.name for group in plan.groups}
    for layer, values in reference(folder, all_experts=True)[0].items():
        torch.testing.assert_close(
            decode_importance(found[layer]), mean_squares(values), rtol=1e-6, atol=1e-8
        )


@pytest.mark.parametrize("routed", [True, False])
def test_overflowing_expert_is_named(tmp_path: Path, routed: bool) -> None:
    """Without a routed token, the expert's router logit is 0, and other logits are large."""
    folder = save(expert_configs()["mixtral"], tmp_path / "model")
    block = "model.layers.1.block_sparse_moe"
    for leaf in ("w1", "w3"):
        put(f"{block}.experts.3.{leaf}.weight", multiply_by(1e20))(folder)
    if not routed:
        put(f"{block}.gate.weight", lambda gate: gate * (torch.arange(EXPERTS)[:, None] != 3))(
            folder
        )
        put("model.layers.1.post_attention_layernorm.weight", multiply_by(100))(folder)
    with assert_raises(CheckpointFailed, f"{block}.experts.3.w2:", "row 1", "input", "not finite"):
        calibrated(plan_with_experts(folder), samples([5]))


def test_incomplete_experts_are_named(tmp_path: Path) -> None:
    folder = save(expert_configs()["mixtral"], tmp_path / "model")
    drop("model.layers.1.block_sparse_moe.experts.5.w2.weight")(folder)
    with pytest.raises(InputError, match=r"experts\.0\.w2\.weight: .*\(7, "):
        calibrated(plan_with_experts(folder), samples([5]))


@pytest.mark.parametrize("all_tokens", [True, False])
def test_experts_without_a_gate(all_tokens: bool) -> None:
    """Nemotron's experts have only an up projection. The module's output does not change."""
    config = SimpleNamespace(
        n_routed_experts=4,
        hidden_size=16,
        moe_intermediate_size=8,
        moe_latent_size=None,
        mlp_hidden_act="relu2",
        _experts_implementation="grouped_mm",
    )
    module = NemotronHExperts(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    hidden = torch.randn(9, 16, generator=generator)
    chosen = torch.stack(
        [torch.randperm(3, generator=generator)[:2] for _ in hidden]
    )  # the last expert is never chosen
    weights = torch.rand(9, 2, generator=generator)
    with torch.no_grad():
        own = module(hidden, chosen, weights)
        runner = expert_runner_of(module)
        assert runner is not None
        routed = runner.route_tokens(module, (hidden, chosen), {"top_k_weights": weights})
        assert [len(route) for route in routed.routes] == torch.bincount(
            chosen.flatten(), minlength=4
        ).tolist()
        answers = []
        for expert, route in enumerate(routed.routes):
            tokens = routed.tokens if all_tokens else routed.tokens[route]
            made = runner.down_input(module, expert, tokens)
            up = torch.relu(tokens @ module.get_parameter("up_proj")[expert].T).square()
            torch.testing.assert_close(made, up)
            answers.append(runner.down_output(module, expert, made[route] if all_tokens else made))
        torch.testing.assert_close(runner.combine_outputs(routed, answers), own)


def test_experts_with_unknown_arithmetic_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, plan = plan_with_experts(save(expert_configs()["qwen3_moe"], tmp_path / "qwen3_moe"))
    monkeypatch.setattr("vexport.calibration.inputs.EXPERT_KINDS", ())
    with pytest.raises(InputError, match=r"the unsupported class Qwen3MoeExperts"):
        calibrate(LayerWalk(index), plan, samples(LENGTHS))


# Prefixes of the text layers in the checkpoint and in the model.
WRAPPED = {
    "gemma3-vision": ("language_model.model.", "model.language_model."),
    "qwen2.5-vl": ("model.", "model.language_model."),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_inputs_of_text_layers_equal_whole_model(name: str, tmp_path: Path) -> None:
    stored, module = WRAPPED[name]
    folder = save_family(name, tmp_path / "model")
    index, plan = plan_for(folder, kv_cache="fp8")
    layers = tuple(group for group in plan.groups if group.name.startswith(f"{stored}layers."))
    assert len(layers) == 14
    found = calibrate(LayerWalk(index), replace(plan, groups=layers), samples())
    seen = inputs_of_whole_model(
        folder,
        [group.name for group in layers],
        batches_of(samples()),
        auto=AutoModelForImageTextToText,
        module_of=lambda layer: layer.replace(stored, module, 1),
    )
    assert found.ranges == {layer: range_of(values) for layer, values in seen.items()}
    assert list(found.kv_ranges) == [f"{stored}layers.{number}.self_attn" for number in range(2)]
