"""The language model within a multimodal one is calibrated on text, by the names of the checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText

from tests.calibration.make import batches_of, plan_for, samples
from tests.calibration.models import LLAMA_LIKE
from vexport.calibration import calibrate
from vexport.calibration.walk import LayerWalk
from vexport.records import InputRange

pytestmark = pytest.mark.usefixtures("own_products")

TEXT: Mapping[str, object] = {**LLAMA_LIKE, "num_hidden_layers": 2, "head_dim": 16, "dtype": None}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
TOKENS = {
    "image_token_id": 100,
    "video_token_id": 101,
    "vision_start_token_id": 102,
    "vision_end_token_id": 103,
}


def configs() -> Mapping[str, tuple[transformers.PreTrainedConfig, str, str]]:
    """A configuration, and the start of the text layers' names in the checkpoint and in the model."""
    siglip = {**TOWER, "num_hidden_layers": 2, "model_type": "siglip_vision_model"}
    return {
        "gemma3": (
            transformers.Gemma3Config(
                text_config={**TEXT, "sliding_window": 8}, vision_config=siglip, mm_tokens_per_image=4
            ),
            "language_model.model.",
            "model.language_model.",
        ),
        "qwen2_5_vl": (
            transformers.Qwen2_5_VLConfig(
                text_config={**TEXT, "rope_parameters": ROPE, "bos_token_id": 1, "eos_token_id": 2},
                vision_config={"depth": 2, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64},
                **TOKENS,
            ),
            "model.",
            "model.language_model.",
        ),
        "mistral3": (
            transformers.Mistral3Config(
                text_config={**TEXT, "model_type": "mistral"},
                vision_config={**TOWER, "num_hidden_layers": 2, "model_type": "pixtral"},
                image_token_index=100,
            ),
            "language_model.model.",
            "model.language_model.",
        ),
    }


@pytest.mark.parametrize("name", configs())
def test_text_layers_see_what_a_whole_model_run_shows(name: str, tmp_path: Path) -> None:
    config, stored, module = configs()[name]
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(tmp_path)
    index, plan = plan_for(tmp_path, kv_cache="fp8")
    layers = tuple(group for group in plan.groups if group.name.startswith(f"{stored}layers."))
    assert len(layers) == 14
    found = calibrate(LayerWalk(index), replace(plan, groups=layers), samples())
    inputs: dict[str, list[torch.Tensor]] = {group.name: [] for group in layers}
    for layer, values in inputs.items():
        watched = model.get_submodule(layer.replace(stored, module, 1))
        watched.register_forward_pre_hook(lambda _, args, into=values: into.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for ids in batches_of(samples()):
            model(input_ids=ids)
    for layer, values in inputs.items():
        every = torch.cat(values)
        assert found.ranges[layer] == InputRange(
            low=every.min().item(), high=every.max().item(), tokens=len(every)
        )
    assert list(found.kv_ranges) == [f"{stored}layers.{number}.self_attn" for number in range(2)]
