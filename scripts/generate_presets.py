"""Write vexport/formats/generated/presets.json: the preset schemes of compressed-tensors.

compressed-tensors is slow to import, so vexport reads its presets from this file.

The pinned compressed-tensors lacks presets for weights of 2, 3, 5, 6 and 7 bits and for MXFP4
weights with FP8 inputs. vLLM runs these, so the script makes them as later versions of
compressed-tensors do. Run it after a change of the pinned version: `python
scripts/generate_presets.py`.
"""

import json
from importlib.metadata import version
from pathlib import Path

from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, QuantizationScheme

TARGET = Path(__file__).parent.parent / "vexport" / "formats" / "generated" / "presets.json"
SIDES = ("weights", "input_activations")
MODEL = "W4A16"
# WNA16_SUPPORTED_TYPES_MAP in vLLM's compressed_tensors_wNa16.py.
WEIGHT_ONLY_BITS = range(2, 9)
# Presets of compressed-tensors 0.20, from the weights and inputs of older presets.
NEWER = {"MXFP4XFP8": ("MXFP4", "FP8_BLOCK")}
# The order of the presets in tables. Other presets follow.
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
    ),
    *("FP8_BLOCK", "W8A8", "INT8", "W4A8", "W4AFP8", "W4A16", "W4A16_ASYM", "W8A16"),
)


def preset(name: str, bits: int | None = None) -> dict[str, object]:
    """Return a preset as compressed-tensors writes it into config.json.

    `bits` replaces the number of weight bits.
    """
    scheme = QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[name])
    assert bits is None or scheme.weights is not None
    if bits is not None:
        scheme.weights.num_bits = bits
    dumped = scheme.model_dump(mode="json")
    return {side: dumped[side] for side in SIDES}


def main() -> None:
    """Write the presets of compressed-tensors and the missing presets.

    The preset that quantizes nothing is left out.
    """
    presets = {name: preset(name) for name in PRESET_SCHEMES if name != "UNQUANTIZED"}
    presets = {f"W{bits}A16": preset(MODEL, bits) for bits in WEIGHT_ONLY_BITS} | presets
    for name, sources in NEWER.items():
        presets[name] = {
            side: presets[source][side] for side, source in zip(SIDES, sources, strict=True)
        }
    ordered = {name: presets[name] for name in (*FIRST, *presets) if name in presets}
    content = {"compressed_tensors": version("compressed-tensors"), "presets": ordered}
    TARGET.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{TARGET}: {len(ordered)} presets")


if __name__ == "__main__":
    main()
