"""Sound checkpoints that are small enough to be loaded hundreds of times."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree

import torch
from safetensors.torch import load_file, save_file

from tests.architectures.families import save_family
from tests.models import VOCABULARY, quantize, save_llama, save_qwen3, write_calibration

PEER = Path(__file__).parent.parent / "peer"
SIZES: Mapping[str, int] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
NVFP4_LEAVES = ("weight_packed", "weight_scale", "weight_global_scale")
PACKED_LEAVES = ("weight_packed", "weight_scale", "weight_shape")
LEAVES: Mapping[str, tuple[str, ...]] = {
    "NVFP4": (*NVFP4_LEAVES, "input_global_scale"),
    "NVFP4A16": NVFP4_LEAVES,
    "FP8": ("weight", "weight_scale", "input_scale"),
    "FP8_DYNAMIC": ("weight", "weight_scale"),
    "FP8_BLOCK": ("weight", "weight_scale"),
    "W8A8": ("weight", "weight_scale"),
    "W4A16": PACKED_LEAVES,
    "W4A16_ASYM": (*PACKED_LEAVES, "weight_zero_point"),
    "MXFP4": ("weight_packed", "weight_scale"),
    "MXFP8": ("weight", "weight_scale"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    """Recipe of a sound checkpoint: its model, its producer and its scheme."""

    scheme: str
    source: str = "llama"
    peer: str = ""
    kv_cache: bool = False

    @property
    def leaves(self) -> tuple[str, ...]:
        """Return the parameters of a quantized layer, the weight's first."""
        return LEAVES[self.scheme]

    @property
    def layers(self) -> int:
        return 1 if self.peer or self.source == "moe" else SIZES["num_hidden_layers"]

    @property
    def experts(self) -> bool:
        return self.source == "moe"

    @property
    def tied(self) -> bool:
        return self.source in ("qwen3", "gemma3")

    def mlp(self, projection: str) -> str:
        """Return the name of a layer of the last MLP, or of its first expert."""
        inner = "mlp.experts.0" if self.experts else "mlp"
        return f"model.layers.{self.layers - 1}.{inner}.{projection}_proj"

    def attention(self, projection: str) -> str:
        return f"model.layers.{self.layers - 1}.self_attn.{projection}_proj"


GOOD: Mapping[str, Sound] = {
    **{scheme: Sound(scheme=scheme) for scheme in LEAVES},
    "W8A8 experts": Sound(scheme="W8A8", source="moe"),
    "W4A16 experts": Sound(scheme="W4A16", source="moe"),
    "W8A8 tied": Sound(scheme="W8A8", source="qwen3"),
    "FP8_DYNAMIC with KV cache": Sound(scheme="FP8_DYNAMIC", kv_cache=True),
    "peer's NVFP4A16": Sound(scheme="NVFP4A16", peer="llama-NVFP4A16"),
    "peer's W4A16": Sound(scheme="W4A16", peer="llama-W4A16"),
    "peer's FP8_DYNAMIC": Sound(scheme="FP8_DYNAMIC", peer="llama-FP8_DYNAMIC"),
    "W4A16_ASYM of Gemma": Sound(scheme="W4A16_ASYM", source="gemma3"),
    "FP8_DYNAMIC with biases": Sound(scheme="FP8_DYNAMIC", source="qwen2"),
}


def write_good(root: Path, names: Iterable[str] = GOOD) -> Path:
    """Write the sound checkpoints with these names into folders below `root`."""
    sources = {
        "llama": save_llama(root / "source-llama", **SIZES),
        "qwen3": save_qwen3(root / "source-qwen3", **SIZES),
        "moe": copytree(PEER / "moe", root / "source-moe"),
        "gemma3": save_family("gemma3", root / "source-gemma3", **SIZES),
        "qwen2": save_family("qwen2", root / "source-qwen2", **SIZES),
    }
    for source in sources.values():
        vary_norms(source)
    for name in names:
        sound = GOOD[name]
        if sound.peer:
            vary_norms(copytree(PEER / sound.peer, root / name))
            _take_norms(copytree(PEER / "llama", source_of(root, name)), root / name)
        else:
            _quantize(sources[sound.source], root / name, sound)
    return root


def source_of(root: Path, name: str) -> Path:
    """Return the unquantized checkpoint next to a sound checkpoint made from it."""
    sound = GOOD[name]
    return root / (f"source of {name}" if sound.peer else f"source-{sound.source}")


def _quantize(source: Path, out: Path, sound: Sound) -> None:
    vocabulary = 64 if sound.experts else VOCABULARY
    calibration = write_calibration(out.with_name(f"{out.name}.jsonl"), vocabulary=vocabulary)
    cache = ("--kv-cache", "fp8") if sound.kv_cache else ()
    quantize(source, out, sound.scheme, "--calibration", calibration, *cache)


def _take_norms(folder: Path, other: Path) -> None:
    values, norms = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    values |= {name: norms[name] for name in values if "norm" in name}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})


def vary_norms(folder: Path) -> None:
    """Change norms and biases from vLLM's initial values, so that a missing tensor shows."""
    generator = torch.Generator().manual_seed(2)
    values = load_file(folder / "model.safetensors")
    for name, value in values.items():
        if "norm" in name or name.endswith(".bias"):
            values[name] = (torch.rand(value.shape, generator=generator) + 0.5).to(value.dtype)
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
