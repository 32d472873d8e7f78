"""Write vexport/architectures/vllm.json: the fused modules of every text-generation class of vLLM.

Run in an environment with vLLM: `python scripts/generate_architectures.py`.
"""

import importlib
import json
from pathlib import Path

import vllm
from vllm.model_executor.models import registry

TARGET = Path(__file__).parent.parent / "vexport" / "architectures" / "vllm.json"


def fused_modules(module: str, name: str) -> dict[str, list[str]]:
    """A model class's `packed_modules_mapping`, without the entries that fuse nothing."""
    path = module if "." in module else f"vllm.model_executor.models.{module}"
    mapping = getattr(getattr(importlib.import_module(path), name), "packed_modules_mapping", None) or {}
    return {fused: list(members) for fused, members in mapping.items() if len(members) > 1}


def main() -> None:
    """Import each class and record its table; name the classes that cannot be imported here."""
    table: dict[str, dict[str, list[str]]] = {}
    for architecture, (module, name) in sorted(registry._TEXT_GENERATION_MODELS.items()):
        try:
            table[architecture] = fused_modules(module, name)
        except ImportError as error:
            print(f"left out {architecture}: {error}")
    TARGET.write_text(json.dumps({"vllm": vllm.__version__, "architectures": table}, indent=1) + "\n")
    print(f"{TARGET}: {len(table)} architectures of vLLM {vllm.__version__}")


if __name__ == "__main__":
    main()
