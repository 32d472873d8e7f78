"""Write vexport/schemes/presets.json: the preset schemes of compressed-tensors, which is slow to import.

Run after a change of the pinned compressed-tensors: `python scripts/generate_presets.py`.
"""

import json
from importlib.metadata import version
from pathlib import Path

from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, QuantizationScheme

TARGET = Path(__file__).parent.parent / "vexport" / "schemes" / "presets.json"
SIDES = ("weights", "input_activations")


def preset(name: str) -> dict[str, object]:
    """One preset as the JSON that compressed-tensors writes into config.json."""
    scheme = QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[name]).model_dump(mode="json")
    return {side: scheme[side] for side in SIDES}


def main() -> None:
    """Write all presets but the one that quantizes nothing."""
    presets = {name: preset(name) for name in PRESET_SCHEMES if name != "UNQUANTIZED"}
    content = {"compressed_tensors": version("compressed-tensors"), "presets": presets}
    TARGET.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{TARGET}: {len(presets)} presets")


if __name__ == "__main__":
    main()
