"""Checkpoints of the demo model that are broken on purpose."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.models import quantize
from tests.mutations.edits import forget_digests

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scenarios" / "demo"
TEMPLATE = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} . {% endfor %}"
WRONG_TEMPLATE = TEMPLATE.replace("m['role']", "'user'")


def quantized(folder: Path, scheme: str = "NVFP4A16") -> Path:
    return quantize(DEMO / "model", folder, scheme)


def with_template(source: Path, folder: Path, template: str) -> Path:
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def with_swapped_scales(source: Path, folder: Path) -> Path:
    """A copy in which the first row of each layer's scales is swapped with the last, and so on inwards."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in (name for name in tensors if name.endswith(".weight_scale")):
        tensors[name] = tensors[name].view(torch.uint8).flip(0).view(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    forget_digests(folder)
    return folder


def with_own_global_scales(source: Path, folder: Path) -> Path:
    """A copy whose q_proj has a global scale of its own, of the same product: right for every reader but
    vLLM, which loads q, k and v with the largest of the three.
    """
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.weight_global_scale"] = tensors[f"{name}.weight_global_scale"] / 4
        scale = tensors[f"{name}.weight_scale"]
        tensors[f"{name}.weight_scale"] = (scale.float() / 4).to(scale.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    forget_digests(folder)
    return folder
