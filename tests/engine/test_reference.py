"""The reference model, and the scheme that it uses for a layer."""

from pathlib import Path

import pytest
import torch
from torch.nn import Linear

from tests.calibration.seeing import save_seeing
from tests.command import ROOT
from tests.models import quantize
from tests.mutations.edits import config, spoiled
from tests.texts import breaks
from vexport.checkpoint.index import StoredQuantization, read_index
from vexport.engine.reference import load_dequantized, schemes_of_layers
from vexport.records import Json
from vexport.rules import engine as rules


def group(bits: int, *targets: str) -> dict[str, Json]:
    weights: dict[str, Json] = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
    }
    return {"targets": list(targets), "weights": weights}


def test_name_takes_precedence_over_class() -> None:
    """vLLM looks for a layer's name in all groups before it looks for the layer's class."""
    groups: dict[str, Json] = {
        "group_0": group(8, "Linear"),
        "group_1": group(4, "re:.*down_proj", "layers.0.up_proj"),
    }
    names = (
        "layers.0.up_proj",
        "layers.0.down_proj",
        "layers.0.o_proj",
        "lm_head",
        "layers.1.kept",
    )
    stored = StoredQuantization(
        place="config.json",
        values={
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": groups,
            "ignore": ["lm_head"],
        },
    )
    tensors = {f"{name}.weight_scale": torch.ones(1) for name in names[:4]}
    schemes = schemes_of_layers({name: Linear(8, 8) for name in names}, stored, tensors)
    bits = {name: scheme.weights and scheme.weights.num_bits for name, scheme in schemes.items()}
    assert bits == {"layers.0.up_proj": 4, "layers.0.down_proj": 4, "layers.0.o_proj": 8}


@pytest.mark.parametrize("changes", [{"model_type": "of-vllm"}, {"architectures": ["OfVllm"]}])
def test_model_that_transformers_lacks(
    changes: dict[str, Json], llama: Path, tmp_path: Path
) -> None:
    """`vexport load` then reports a note instead of the comparison."""
    unknown = config((), **{"model_type": "t5", **changes})
    with breaks(rules.REFERENCE):
        load_dequantized(spoiled(llama, tmp_path / "copy", unknown))


def test_model_with_vision_tower(tmp_path: Path) -> None:
    """AutoModelForCausalLM does not have the class."""
    source = ROOT / "scenarios" / "demo" / "model-sight"
    model = load_dequantized(quantize(source, tmp_path / "out", "FP8_DYNAMIC"))
    assert type(model).__name__ == "Idefics3ForConditionalGeneration"
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[8, 9, 10]])).logits
    assert torch.isfinite(logits).all()


def test_modules_under_other_names_than_in_the_checkpoint(tmp_path: Path) -> None:
    """LLaVA's checkpoints have `language_model.model`, transformers has `model.language_model`."""
    source = save_seeing("llava", tmp_path / "llava")
    out = quantize(source, tmp_path / "out", "FP8_DYNAMIC")
    assert any(name.startswith("language_model.model.") for name in read_index(out).tensors)
    exact, model = load_dequantized(source), load_dequantized(out)
    rounded = [name for name, module in model.named_modules() if module._forward_pre_hooks]
    assert len(rounded) == 14
    assert all(name.startswith("model.language_model.layers.") for name in rounded)
    with torch.inference_mode():
        logits, expected = (
            each(input_ids=torch.tensor([range(40)])).logits for each in (model, exact)
        )
    assert 0 < (logits - expected).std() < 0.2 * expected.std()
