"""Write vexport/architectures/generated/transformers.json: facts about model types.

Run after scripts/generate_architectures.py with vLLM's transformers: `python
scripts/generate_transformers.py [--out TABLE.json]`. Model classes that vLLM does not have are read
from transformers' code as text. To find accepted values, the default config of every model type is
created. A value that vexport's rules refuse is accepted if a default config has it. A base of 0 for
one layer is also accepted if a model with this value has finite position tables.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tables import arguments, known_classes, write_table

from vexport.architectures.rotary import BASES, refused_values, wrong_numbers

# Classes that a config.json may name: whole models.
MODEL = re.compile(r"^class (\w+(?:Model|For[A-Z]\w+))\(", re.MULTILINE)


# Sizes of a model that is built to try a value.
SMALL = {"num_hidden_layers": 2, "vocab_size": 8, "intermediate_size": 8}


def main() -> None:
    target = arguments(__doc__, "transformers.json").out
    known = known_classes(target.parent)
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    folders = sorted(
        {path.parent for path in Path(spec.origin).parent.glob("models/*/modeling_*.py")}
    )
    models = {folder.name: [*classes(folder, known)] for folder in folders}
    table = {"transformers": version("transformers"), "accepted": accepted(), "models": models}
    write_table(target, table, "accepted", "models")
    print(f"{target.name}: {len(folders)} model types")


def classes(folder: Path, known: Mapping[str, object]) -> Iterator[str]:
    for file in sorted(folder.glob("modeling_*.py")):
        yield from (
            name for name in MODEL.findall(file.read_text(encoding="utf-8")) if name not in known
        )


def accepted() -> dict[str, dict[str, list[object]]]:
    """Return the accepted values by model type and key, as in `TransformersTable`."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # some default configs load a file from the hub
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    found: dict[str, dict[str, list[object]]] = {}
    for kind in sorted(CONFIG_MAPPING):
        try:
            config = CONFIG_MAPPING[kind]()
        except Exception:  # a type without a default config, or one that needs another package
            continue
        values = json.loads(json.dumps(config.to_dict(), default=str))
        for name, value in wrong_numbers(values, {}):
            key = name.rpartition(".")[2]
            add(found, kind, key, refused_values(key, value, {}))
        for key, value in values.items():
            is_tried = key.endswith(BASES) and isinstance(value, list) and 0 not in value
            if is_tried and runs_without_base(kind, key):
                add(found, kind, key, [0])
    return found


def add(
    found: dict[str, dict[str, list[object]]], kind: str, key: str, values: Iterable[object]
) -> None:
    known = found.setdefault(kind, {}).setdefault(key, [])
    known += [value for value in dict.fromkeys(values) if value not in known]


def runs_without_base(kind: str, key: str) -> bool:
    """Return True if a model has finite position tables although the base of a layer is 0."""
    import torch
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind](**SMALL, **{key: [0, 10000.0]})
    tables = [*AutoModel.from_config(config).buffers()]
    return all(bool(torch.isfinite(table).all()) for table in tables)


if __name__ == "__main__":
    main()
