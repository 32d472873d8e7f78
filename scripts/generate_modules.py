"""Write vexport/architectures/generated/modules.json: modules and their names in configs.

Run in an environment with vLLM: `python scripts/generate_modules.py [--out TABLE.json] [CLASS]...`.
A class is built on the meta device, as `vexport load --dry` builds it, from the default config of
transformers or vLLM with few layers. It loads the tensors of transformers' model under the names of
the hub. A layer that calls the quantization config is recorded as a linear layer, an embedding
table or an output head. Other layers are recorded as built without the config. Decoder layers are
left out, because vllm.json has them. Only the names that they pass to the quantization config are
kept.
"""

import json
import multiprocessing
import os
import re
import resource
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tables import arguments, known_classes, write_table

from vexport.engine.dry.worker import preload

if TYPE_CHECKING:
    from built_modules import Built

KINDS = ("linear", "plain", "table", "lookup", "head")
# vLLM reads a key without a default that the config lacks. The key is added, at most this often.
MISSING = re.compile(r"AttributeError: '\w+' object has no attribute '(\w+)'")
MOST_MISSING = 16
# Processor seconds for a class. Only a few classes with conditions that cannot be found take more.
SECONDS = 300
# Values of added keys by name: sizes that divide each other, counts, a factor. Other keys are
# False.
DEFAULTS = {
    "rate": 16000,
    "window|hop": 400,
    "ratio": 4,
    "indexer_head_dim": 256,
    "size|dim|budget": 64,
    "scoring_func": "sigmoid",
    "n_routed_experts|num_experts$": 8,
    "num|n_shared|head|layer|top_?k|_id|rank|factor|scale|length|multiplier": 1,
}
Entry = dict[str, Any]


def main() -> None:
    """Build each class in a separate process, and name the classes that cannot be built here."""
    options = arguments(__doc__, "modules.json", classes=True)
    preload()
    import vllm
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()
    models = {**registry._MULTIMODAL_MODELS, **registry._TEXT_GENERATION_MODELS}
    asked = options.classes or known_classes(options.out.parent)
    names = [name for name in asked if name in models]
    found = {name: merged(list(built(name))) for name in names}
    entries: dict[str, Entry] = {}
    unknown: list[str] = []
    for name in names:  # a class may be registered under several names
        alike = (found[other] for other in names if models[other] == models[name])
        entry = found[name] or next((each for each in alike if each), None)
        if entry is None:
            unknown.append(name)
            print(f"not built: {name}", flush=True)
        else:
            entries[name] = entry
    table = {"vllm": vllm.__version__, "unknown": unknown, "classes": entries}
    write_table(options.out, table, "classes")
    print(
        f"{options.out.name}: {len(entries)} classes of vLLM {vllm.__version__}, "
        f"{len(unknown)} unknown"
    )


def built(name: str) -> Iterator["Built"]:
    """Yield the modules of a class, for each config that the class can be built from."""
    from built_modules import Built, Recipe, build, recipes

    def attempt(recipe: Recipe, missing: Entry) -> Entry:
        with tempfile.TemporaryDirectory() as folder:
            recipe.write(Path(folder), missing)
            return asdict(build(Path(folder)))

    try:
        choices = list(recipes(name))
    except Exception as error:
        choices = []
        print(f"{name}: {error}")
    for choice in choices:
        results = (until_built(partial(attempt, recipe)) for recipe in choice)
        found = next((result for result in results if not isinstance(result, str)), None)
        if found is not None:
            yield Built(**found)


def until_built(attempt: Callable[[Entry], Entry]) -> Entry | str:
    """Return the result of an attempt in a child, with the keys that vLLM misses in a config.

    Returns the error if the attempt fails even so.
    """
    missing: Entry = {}
    while True:
        result = in_child(lambda: attempt(missing))
        key = MISSING.search(result) if isinstance(result, str) else None
        if key is None or key[1] in missing or len(missing) == MOST_MISSING:
            return result
        missing[key[1]] = default_of(key[1])


def default_of(key: str) -> object:
    return next((value for names, value in DEFAULTS.items() if re.search(names, key)), False)


def in_child(work: Callable[[], Entry]) -> Entry | str:
    """Return the result of a child process, or its error. vLLM's logs are discarded."""
    fork = multiprocessing.get_context("fork")
    reading, writing = fork.Pipe(duplex=False)

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            writing.send(json.dumps(work()))
        except Exception as error:
            writing.send(json.dumps(f"{type(error).__name__}: {str(error)[:200]}"))
        os._exit(0)

    child = fork.Process(target=run)
    child.start()
    writing.close()
    try:
        answer: Entry | str = json.loads(reading.recv())
    except EOFError:
        answer = "the process ended"
    child.join()
    return answer


def merged(results: list["Built"]) -> Entry | None:
    """Return the entry of a class: everything that is the same for all of its configs.

    Returns None if no config could be built.
    """
    if not results:
        return None
    kinds: dict[str, str] = {}
    lookup_names: dict[str, str] = {}
    for result in results:
        for name, kind in result.kinds.items():
            kinds[name] = kind if kinds.get(name, kind) == kind else ""
        lookup_names |= result.lookup_names
    known = {name: kind for name, kind in kinds.items() if kind in KINDS}
    return {
        key: value for key, value in {"kinds": known, "lookup_names": lookup_names}.items() if value
    }


if __name__ == "__main__":
    main()
