"""Micro models of several families, plans, samples, and recordings of whole-model runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.architectures.families import FAMILIES, Family
from vexport.calibration import Samples, calibrate
from vexport.calibration.walk import LayerWalk
from vexport.checkpoint.index import SourceIndex, read_index
from vexport.formats.plan import FusionGroup, Plan
from vexport.formats.schemes import get_scheme
from vexport.records import CalibrationRecord, InputRange, KvCache, LinearPlan

VOCABULARY = 128
# Names of modules by their names in the checkpoint, if they differ.
RENAMED = {"embed_out": "lm_head"}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA_LIKE: Mapping[str, object] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def _config(family: Family, **changes: object) -> transformers.PreTrainedConfig:
    return family.config(**{**LLAMA_LIKE, "head_dim": 16, **changes})


def configs() -> Mapping[str, transformers.PreTrainedConfig]:
    """Return a small configuration for each family.

    The families call their layers in different ways.
    """
    gemma_layers = ["sliding_attention", "full_attention", "sliding_attention"]
    neox, mistral = (Family(model_type=name, text={}) for name in ("gpt_neox", "mistral"))
    return {
        "llama": _config(FAMILIES["llama"]),
        "qwen3": _config(FAMILIES["qwen3-tied"], tie_word_embeddings=False),
        "gemma3": _config(FAMILIES["gemma3"], sliding_window=8, layer_types=gemma_layers),
        "phi3": _config(FAMILIES["phi3"]),
        "gpt_neox": _config(neox, num_key_value_heads=None, rotary_pct=0.5),
        "gpt2": _config(FAMILIES["gpt2"], n_embd=64, n_layer=3, n_positions=64),
        "opt": _config(FAMILIES["opt"], ffn_dim=128, word_embed_proj_dim=32),
        "bloom": _config(FAMILIES["bloom"], n_layer=3),
        "mistral": _config(mistral, sliding_window=8),
    }


def expert_configs() -> Mapping[str, transformers.PreTrainedConfig]:
    """Return mixtures of experts: plain, stacked, shared, with latent or linear attention."""
    mixture = {"num_hidden_layers": 2, "num_local_experts": 8}
    qwen = {"num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 32}
    latent = {**qwen, "n_routed_experts": 8, "head_dim": 64, "num_key_value_heads": 4}
    layer_types = ["linear_attention", "full_attention"]
    return {
        "mixtral": _config(FAMILIES["mixtral"], **mixture),
        "qwen3_moe": _config(FAMILIES["qwen3-moe"], **qwen),
        "deepseek_v3": _config(FAMILIES["deepseek-v3"], **latent, topk_group=2),
        "qwen3_next": _config(FAMILIES["qwen3-next"], **qwen, layer_types=layer_types),
        "gpt_oss": _config(FAMILIES["gpt-oss"], **mixture, rope_parameters=PLAIN_ROPE),
        "llama4": _config(FAMILIES["llama4"], **mixture, num_experts_per_tok=1),
    }


def save(config: transformers.PreTrainedConfig, folder: Path, *, stacked: bool = False) -> Path:
    """Save a checkpoint of this configuration with random weights from a fixed seed.

    With `stacked`, one tensor contains the experts of a layer.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    model.save_pretrained(folder, save_original_format=not stacked)
    return folder


def inputs_of_whole_model(
    folder: Path,
    names: Iterable[str],
    batches: Sequence[torch.Tensor],
    *,
    auto: type[AutoModelForCausalLM] | type[AutoModelForImageTextToText] = AutoModelForCausalLM,
    module_of: Callable[[str], str] = lambda name: RENAMED.get(name, name),
) -> dict[str, torch.Tensor]:
    """Load the whole model, run each batch, and return the inputs of the named layers.

    This is the reference for layer-by-layer calibration.
    """
    model = auto.from_pretrained(folder, dtype=torch.bfloat16)
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for name, seen in inputs.items():
        model.get_submodule(module_of(name)).register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0].flatten(0, -2).clone())
        )
    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch)
    return {name: torch.cat(values) for name, values in inputs.items() if values}


def range_of(values: torch.Tensor) -> InputRange:
    return InputRange(low=values.min().item(), high=values.max().item(), tokens=len(values))


def mean_squares(values: torch.Tensor) -> torch.Tensor:
    return values.double().square().mean(0).float()


def samples(lengths: Sequence[int] = (12, 20, 12, 7, 20, 12), seed: int = 3) -> Samples:
    """Return random token ids. The rows have odd numbers, as if each second line were blank."""
    generator = torch.Generator().manual_seed(seed)
    ids = [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]
    rows = tuple(1 + 2 * number for number in range(len(lengths)))
    return Samples(token_ids=tuple(tuple(row) for row in ids), rows=rows)


def batches_of(chosen: Samples) -> list[torch.Tensor]:
    return [torch.tensor([ids]) for ids in chosen.token_ids]


def calibrated(planned: tuple[SourceIndex, Plan], chosen: Samples) -> CalibrationRecord:
    index, plan = planned
    return calibrate(LayerWalk(index), plan, chosen)


def plan_for(
    folder: Path,
    *,
    scheme: str = "FP8",
    observer: str = "memoryless_minmax",
    head: bool = False,
    kv_cache: KvCache | None = None,
) -> tuple[SourceIndex, Plan]:
    """Plan to quantize each linear layer separately, even if the architecture fuses it."""
    index = read_index(folder)
    groups = []
    for tensor in index.tensors.values():
        name = tensor.name.removesuffix(".weight")
        embedding = any(
            part in name for part in ("embed_tokens", "embed_positions", "wte", "wpe", "embed")
        )
        if (
            tensor.name == name
            or len(tensor.shape) != 2
            or "norm" in name
            or (embedding and "embed_out" not in name)
        ):
            continue
        if name in ("lm_head", "embed_out") and not head:
            continue
        rows, columns = tensor.shape
        linear = LinearPlan(name=name, weight=tensor.name, out_features=rows, in_features=columns)
        groups.append(
            FusionGroup(name=name, scheme=get_scheme(scheme), observer=observer, members=(linear,))
        )
    unsized = partial(Plan, source_bytes=0, output_bytes=0, parameters=0, kept=(), kept_linears=())
    name = "LlamaForCausalLM"
    return index, unsized(
        source=str(folder), architecture=name, groups=tuple(groups), kv_cache=kv_cache
    )
