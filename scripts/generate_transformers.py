"""Write vexport/architectures/generated/transformers.json: classes that vLLM does not have.

Run after scripts/generate_architectures.py with vLLM's transformers: `python
scripts/generate_transformers.py [--out TABLE.json]`. transformers' code is read as text and not
imported.
"""

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tables import arguments, known_classes, write_table

# Classes that a config.json may name: whole models.
MODEL = re.compile(r"^class (\w+(?:Model|For[A-Z]\w+))\(", re.MULTILINE)


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
    write_table(target, {"transformers": version("transformers"), "models": models}, "models")
    print(f"{target.name}: {len(folders)} model types")


def classes(folder: Path, known: Mapping[str, object]) -> Iterator[str]:
    for file in sorted(folder.glob("modeling_*.py")):
        yield from (
            name for name in MODEL.findall(file.read_text(encoding="utf-8")) if name not in known
        )


if __name__ == "__main__":
    main()
