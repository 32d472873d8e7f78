"""Write checkpoints with the same outputs as the demo model that are harder to quantize.

They compute exactly the same bits. Some input columns of q, k, v, gate and up are multiplied by a
factor, and the gain of the RMSNorm in front is divided by it. Powers of two only move exponents in
bfloat16, so every product and sum of the forward pass keeps its bits. The large columns take the
range of their quantization group away from its other columns.
"""

import shutil
from pathlib import Path

import torch
from demo_corpus import DEMO, folder_argument
from safetensors.torch import load_file, save_file

# The linear layers that read the output of a layer's RMSNorm: (gain, weights [out, in]).
NORM_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
WEIGHTS = "model.safetensors"
# The folder of each variant, with the step between multiplied columns and the factor. The first
# column is multiplied.
VARIANTS = {"model-x8": (8, 64), "model-x16": (16, 16)}


def scaled(tensor: torch.Tensor, factor: float, every: int) -> torch.Tensor:
    """Return a copy with every `every`th entry of the last dimension multiplied by `factor`.

    Raises ValueError if a value leaves the range of its dtype or loses bits.
    """
    result = tensor.clone()
    result[..., ::every] *= factor
    if not torch.equal(result[..., ::every] / factor, tensor[..., ::every]):
        raise ValueError(
            f"factor {factor}: a value leaves {tensor.dtype}'s range; choose a smaller one"
        )
    return result


def harden(tensors: dict[str, torch.Tensor], factor: int, every: int) -> dict[str, torch.Tensor]:
    """Return all tensors of the checkpoint, with the tensors around the layers' norms rescaled."""
    hardened = dict(tensors)
    for name, gain in tensors.items():
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm not in NORM_READERS:
            continue
        hardened[name] = scaled(gain, 1 / factor, every)
        for reader in NORM_READERS[norm]:
            weight = f"{layer}.{reader}.weight"
            hardened[weight] = scaled(tensors[weight], factor, every)
    return hardened


def write_variant(source: Path, out: Path, factor: int, every: int) -> None:
    """Copy `source` with its weights rescaled. The same source gives the same bytes."""
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.name != WEIGHTS:
            shutil.copyfile(path, out / path.name)
    tensors = harden(load_file(source / WEIGHTS), factor, every)
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    (out / WEIGHTS).chmod(0o644)


def main() -> None:
    out = folder_argument(__doc__)
    for name, (factor, every) in VARIANTS.items():
        write_variant(DEMO / "model", out / name, factor, every)


if __name__ == "__main__":
    main()
