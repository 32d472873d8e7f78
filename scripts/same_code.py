"""Check whether a model class has the same code in two environments."""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def has_same_code(name: str, other: Path) -> bool:
    """Return True if a class has the same code in another environment.

    The files of transformers' class and config and the file of vLLM's class are compared, without
    comments and docstrings. Code that they import is not compared. `other` is the site-packages
    folder of the other environment.
    """
    own = own_packages()
    return all(
        (other / file.relative_to(own)).is_file()
        and code_of(file) == code_of(other / file.relative_to(own))
        for file in files_of(name)
    )


def own_packages() -> Path:
    """Return the site-packages folder of the running interpreter."""
    import transformers

    return Path(inspect.getfile(transformers)).parent.parent


def files_of(name: str) -> Iterator[Path]:
    """Yield vLLM's file of a class, and transformers' files of its model types."""
    import transformers
    from vllm.model_executor.models import registry

    models = {**registry._MULTIMODAL_MODELS, **registry._TEXT_GENERATION_MODELS}
    if name in models:
        package = Path(inspect.getfile(registry)).parent
        yield package / f"{models[name][0]}.py"
    kind: Any = getattr(transformers, name)
    folders = {Path(inspect.getfile(kind)).parent}
    config = kind.config_class() if kind.config_class else None
    for part in vars(config).values() if config is not None else ():
        if isinstance(part, transformers.PretrainedConfig):
            module = importlib.import_module(type(part).__module__)
            folders.add(Path(inspect.getfile(module)).parent)
    for folder in sorted(folders):
        yield from sorted([*folder.glob("modeling_*.py"), *folder.glob("configuration_*.py")])


def code_of(file: Path) -> str:
    """Return the syntax tree of a file without its docstrings, as text."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return ast.dump(tree)


if __name__ == "__main__":
    for each in sys.argv[2:]:
        print(each, has_same_code(each, Path(sys.argv[1])))
