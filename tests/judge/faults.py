"""Checkpoints of the demo model that are broken on purpose."""

import shutil
from pathlib import Path

import torch

from tests.mutations.edits import all_of, change_all, multiply_by, put, spoiled

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scenarios" / "demo"
TEMPLATE = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} . {% endfor %}"
WRONG_TEMPLATE = TEMPLATE.replace("m['role']", "'user'")


def with_template(source: Path, folder: Path, template: str) -> Path:
    """Copy a checkpoint and set its chat template."""
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def with_swapped_scales(source: Path, folder: Path) -> Path:
    """Save a copy in which the rows of each layer's scales are in reverse order."""
    swapped = change_all(
        ".weight_scale", lambda scale: scale.view(torch.uint8).flip(0).view(scale.dtype)
    )
    return spoiled(source, folder, swapped)


def with_unequal_global_scales(source: Path, folder: Path) -> Path:
    """Save a copy whose q_proj has another global scale, with the same dequantized weight.

    All readers except vLLM load it correctly: vLLM uses the largest global scale of q, k and v for
    all three.
    """
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3)]
    scales = [f"{name}_{scale}" for name in names for scale in ("global_scale", "scale")]
    return spoiled(source, folder, all_of(*(put(scale, multiply_by(0.25)) for scale in scales)))
