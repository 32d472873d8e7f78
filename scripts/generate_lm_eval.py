"""Write vexport/scores/generated/lm_eval.json: the arguments of lm-eval's model classes.

vexport compares the settings of results, and lm-eval records only the arguments that were given.
Run it after a change of the pinned lm-eval: `python scripts/generate_lm_eval.py`.

Classes that need a package that is not installed are left out, and printed.
"""

import argparse
import importlib
import inspect
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from lm_eval.loggers.evaluation_tracker import GeneralConfigTracker
from lm_eval.models import MODEL_MAPPING
from tables import write_table

TARGET = Path(__file__).parent.parent / "vexport" / "scores" / "generated" / "lm_eval.json"


def signature_of(model: type) -> dict[str, inspect.Parameter]:
    """Return the arguments of a model class and of its parents, as far as they are passed on."""
    found: dict[str, inspect.Parameter] = {}
    for each in model.__mro__:
        if "__init__" in vars(each):
            parameters = inspect.signature(vars(each)["__init__"]).parameters
            found = {**parameters, **found}
            if all(value.kind != value.VAR_KEYWORD for value in parameters.values()):
                break
    return found


def model_classes() -> Iterator[tuple[str, type]]:
    """Yield the names of lm-eval's models with their classes."""
    for name, target in MODEL_MAPPING.items():
        module, _, model = target.partition(":")
        try:
            yield name, getattr(importlib.import_module(module), model)
        except (ImportError, ValueError) as error:
            print(f"without {name}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=TARGET, help="[default: vexport's table]")
    target = parser.parse_args().out
    classes = dict(model_classes())
    signatures = {model.__name__: signature_of(model) for model in classes.values()}
    defaults = {
        model: {
            name: json.loads(json.dumps(value.default, default=str))
            for name, value in parameters.items()
            if value.default is not value.empty
        }
        for model, parameters in signatures.items()
    }
    names = {name for parameters in signatures.values() for name in parameters}
    table = {
        "lm_eval": version("lm-eval"),
        "model_names": sorted(filter(is_model_name, names)),
        "classes": {name: model.__name__ for name, model in classes.items()},
        "defaults": defaults,
    }
    write_table(target, table, "classes", "defaults")
    print(f"{target.name}: {len(defaults)} classes")


def is_model_name(argument: str) -> bool:
    """Return True if lm-eval takes the name of the model from this argument."""
    return GeneralConfigTracker._get_model_name({argument: "x"}) is not None


if __name__ == "__main__":
    main()
