"""Write vexport/architectures/transformers.json: the model classes of transformers that vLLM has none for.

Run after scripts/generate_architectures.py with vLLM's transformers:
`python scripts/generate_transformers.py [--out TABLE.json]`. Its code is read as text, nothing is imported.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "vexport" / "architectures"
# Classes that a config.json may name: whole models.
MODEL = re.compile(r"^class (\w+(?:Model|For[A-Z]\w+))\(", re.MULTILINE)


def main() -> None:
    """Read the models of each folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=FOLDER / "transformers.json", help="where the table goes")
    target: Path = parser.parse_args().out
    known = json.loads((FOLDER / "vllm.json").read_text())["architectures"]
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    folders = sorted({path.parent for path in Path(spec.origin).parent.glob("models/*/modeling_*.py")})
    rows = ",\n".join(
        f"  {json.dumps(folder.name)}: {json.dumps([*classes(folder, known)])}" for folder in folders
    )
    release = json.dumps(version("transformers"))
    target.write_text(f'{{\n "transformers": {release},\n "models": {{\n{rows}\n }}\n}}\n')
    print(f"{target.name}: {len(folders)} model types of transformers {release}")


def classes(folder: Path, known: Mapping[str, object]) -> Iterator[str]:
    """The models of a folder that vLLM has no class for."""
    for file in sorted(folder.glob("modeling_*.py")):
        yield from (name for name in MODEL.findall(file.read_text(encoding="utf-8")) if name not in known)


if __name__ == "__main__":
    main()
