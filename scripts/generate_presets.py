"""Write vexport/formats/presets.json: the preset schemes of compressed-tensors, which is slow to import.

The pinned compressed-tensors lacks presets for weights of 2, 3, 5, 6 and 7 bits and for MXFP4 weights with
FP8 inputs, which vLLM runs: they are made as its later versions make them. Run after a change of the pinned
version: `python scripts/generate_presets.py`.
"""

import json
from importlib.metadata import version
from pathlib import Path

from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, QuantizationScheme

TARGET = Path(__file__).parent.parent / "vexport" / "formats" / "presets.json"
SIDES = ("weights", "input_activations")
MODEL = "W4A16"
# WNA16_SUPPORTED_TYPES_MAP in vLLM's compressed_tensors_wNa16.py.
WEIGHT_ONLY_BITS = range(2, 9)
# Presets of compressed-tensors 0.20: weights and inputs are those of older ones.
NEWER = {"MXFP4XFP8": ("MXFP4", "FP8_BLOCK")}
# The order in which tables list the presets; others follow.
FIRST = (
    *(
        "NVFP4",
        "NVFP4A16",
        "MXFP4",
        "MXFP4A16",
        "MXFP4XFP8",
        "MXFP8",
        "MXFP8A16",
        "FP8",
        "FP8_DYNAMIC",
        "FP8_BLOCK",
    ),
    *("W8A8", "INT8", "W4A8", "W4AFP8", "W4A16", "W4A16_ASYM", "W8A16"),
)


def preset(name: str) -> dict[str, object]:
    """One preset as the JSON that compressed-tensors writes into config.json."""
    scheme = QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[name]).model_dump(mode="json")
    return {side: scheme[side] for side in SIDES}


def weight_only(bits: int) -> dict[str, object]:
    """The arguments of W4A16 with another number of bits."""
    scheme = QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[MODEL])
    assert scheme.weights is not None
    scheme.weights.num_bits = bits
    dumped = scheme.model_dump(mode="json")
    return {side: dumped[side] for side in SIDES}


def all_presets() -> dict[str, dict[str, object]]:
    """compressed-tensors' presets but the one that quantizes nothing, and the weight-only ones it lacks."""
    presets = {name: preset(name) for name in PRESET_SCHEMES if name != "UNQUANTIZED"}
    missing = {f"W{bits}A16": weight_only(bits) for bits in WEIGHT_ONLY_BITS if f"W{bits}A16" not in presets}
    newer = {
        name: {
            "weights": presets[weights]["weights"],
            "input_activations": presets[inputs]["input_activations"],
        }
        for name, (weights, inputs) in NEWER.items()
    }
    known = {**presets, **missing, **newer}
    return {name: known[name] for name in (*FIRST, *known) if name in known}


def main() -> None:
    """Write all presets."""
    presets = all_presets()
    content = {"compressed_tensors": version("compressed-tensors"), "presets": presets}
    TARGET.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{TARGET}: {len(presets)} presets")


if __name__ == "__main__":
    main()
