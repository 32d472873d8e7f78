"""Write checkpoints that compute the same as the demo model to the bit, but are harder to quantize.

Every `--every`th input column of q, k, v, gate and up is multiplied by `--factor`, and the gain of
the RMSNorm in front is divided by it. Powers of two only move exponents in bfloat16, so every
product and sum of the forward pass keeps its bits, while the large columns take the range of
their quantization group away from the others. Without arguments both committed variants are written.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

DEMO = Path(__file__).resolve().parents[2] / "scenarios/demo"
# The linear layers that read the output of a layer's RMSNorm: (gain, weights [out, in]).
NORM_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Multiply each `every`th column, starting with the first, by `factor`."""

    folder: Path
    factor: int
    every: int


COMMITTED = (
    Variant(folder=DEMO / "model-x8", factor=8, every=64),
    Variant(folder=DEMO / "model-x16", factor=16, every=16),
)


def scaled(tensor: torch.Tensor, factor: float, every: int) -> torch.Tensor:
    """A copy with every `every`th entry of the last dimension times `factor`.

    ValueError where a value leaves the range of its dtype and loses bits.
    """
    result = tensor.clone()
    result[..., ::every] *= factor
    if not torch.equal(result[..., ::every] / factor, tensor[..., ::every]):
        raise ValueError(f"factor {factor}: a value leaves {tensor.dtype}'s range; choose a smaller one")
    return result


def harden(tensors: dict[str, torch.Tensor], factor: int, every: int) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint, those around the layers' norms rescaled."""
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


def write_variant(source: Path, variant: Variant) -> None:
    """Copy `source` with its weights rescaled; the same source gives the same bytes."""
    variant.folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.name != WEIGHTS:
            shutil.copyfile(path, variant.folder / path.name)
    tensors = harden(load_file(source / WEIGHTS), variant.factor, variant.every)
    save_file(tensors, variant.folder / WEIGHTS, metadata={"format": "pt"})
    (variant.folder / WEIGHTS).chmod(0o644)


def power_of_two(_context: click.Context, _parameter: click.Parameter, value: int) -> int:
    if not math.log2(value).is_integer():
        raise click.BadParameter(f"got {value}, need a power of two; only those keep the function's bits")
    return value


@click.command(help=__doc__)
@click.option(
    "--source",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=DEMO / "model",
    show_default="scenarios/demo/model",
    help="Checkpoint to start from.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of a single variant; without it both committed variants are written.",
)
@click.option(
    "--factor",
    type=click.IntRange(min=2),
    default=16,
    show_default=True,
    callback=power_of_two,
    help="With --out: 2^k.",
)
@click.option(
    "--every",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="With --out: columns from one to the next.",
)
def main(source: Path, out: Path | None, factor: int, every: int) -> None:
    console = Console(stderr=True)
    variants = COMMITTED if out is None else (Variant(folder=out, factor=factor, every=every),)
    for variant in variants:
        write_variant(source, variant)
        console.print(f"wrote {variant.folder}: x{variant.factor}, every {variant.every} columns")


if __name__ == "__main__":
    main()
