"""Sound checkpoints that are small enough to be loaded hundreds of times."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.command import vexport
from tests.models import save_llama, write_calibration

SCHEMES = ("NVFP4", "NVFP4A16", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W4A16")
LAYERS = 2
SIZES: Mapping[str, int] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def _vary_norms(source: Path) -> None:
    """Weights of norms that are not the ones that vLLM begins with: a missing one shows."""
    generator = torch.Generator().manual_seed(2)
    values = load_file(source / "model.safetensors")
    for name, value in values.items():
        if "norm" in name:
            values[name] = (torch.rand(value.shape, generator=generator) + 0.5).to(value.dtype)
    save_file(values, source / "model.safetensors", metadata={"format": "pt"})


def write_good(root: Path) -> Path:
    """A micro Llama quantized in every scheme, each in a folder of its name below `root`."""
    source = save_llama(root / "source", **SIZES)
    _vary_norms(source)
    calibration = write_calibration(root / "rows.jsonl")
    for scheme in SCHEMES:
        ran = vexport(
            "quantize", source, root / scheme, "--scheme", scheme, "--calibration", calibration, "--quiet"
        )
        assert ran.code == 0, ran.stderr
    return root
