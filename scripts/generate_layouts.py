"""Write vexport/architectures/generated/layouts.json: tensors of classes, and their use in vLLM.

Run in an environment with vLLM: `python scripts/generate_layouts.py [--out TABLE.json] [--pinned
SITE_PACKAGES] [CLASS]...`. Named classes are made again. Other classes are made if the table lacks
them or is for another version, so the script can be stopped at any time. A class takes up to a
minute. SITE_PACKAGES of `--pinned` belong to an environment with the pinned vLLM. Classes with the
same code there keep their entries from vexport's table.

Names, layers and shapes come from transformers' models (samples.py, fitting.py). How vLLM uses a
tensor comes from vLLM's class: it loads the tensors of a single config, as `vexport load --dry`
does. The table says nothing about tensors that vLLM does not load.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict
from os.path import commonprefix
from pathlib import Path
from typing import Any

from generate_modules import Entry, in_child, until_built
from same_code import has_same_code
from tables import FOLDER, arguments, known_classes, write_table

from vexport.architectures import with_stars
from vexport.engine.dry.worker import preload

# A tensor name that no class has, to find out whether vLLM ignores it.
UNKNOWN = "zz_unknown.weight"
# Values that rows of the table leave out.
USUAL = {"condition": "1", "shape": None, "kind": ""}


def main() -> None:
    """Make the entries that are named or missing, and write the table after each."""
    options = arguments(__doc__, "layouts.json", classes=True)
    preload()
    import transformers
    import vllm
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()
    versions = {"vllm": vllm.__version__, "transformers": transformers.__version__}
    table = json.loads(options.out.read_text()) if options.out.is_file() else {}
    if {key: table.get(key) for key in versions} != versions:
        table = {**versions, "unknown": {}, "classes": {}}
    pinned = (
        json.loads((FOLDER / "layouts.json").read_text()) if options.pinned else {"classes": {}}
    )
    done = {*table["classes"], *table["unknown"]} - {*options.classes}
    for name in options.classes or known_classes(options.out.parent):
        if name in done or not hasattr(transformers, name):
            continue
        if name in pinned["classes"] and has_same_code(name, options.pinned):
            table["classes"][name] = pinned["classes"][name]
            continue
        with tempfile.TemporaryDirectory() as folder:
            entry = made(name, Path(folder))
            if isinstance(entry, str):  # messages may name the temporary folder
                entry = entry.replace(folder, "MODEL")
        previous = table["classes"].pop(name, None), table["unknown"].pop(name, None)
        table["unknown" if isinstance(entry, str) else "classes"][name] = entry
        changed = "" if entry in previous else "changed: "
        print(
            f"{name}: {changed}{entry if isinstance(entry, str) else len(entry['rows'])}",
            flush=True,
        )
        table["classes"] = dict(sorted(table["classes"].items()))
        write_table(options.out, table, "classes")


def made(name: str, folder: Path) -> Entry | str:
    """Return the entry of a class, or the reason why it has no entry.

    Tensors that vLLM refuses are loaded again in other forms that occur on the hub. A part gets a
    name that is a level deeper or less deep. Experts get their last two dimensions swapped.
    """
    found = in_child(lambda: observed(name, folder))
    built = found if isinstance(found, str) else loaded(folder)
    if isinstance(found, str) or isinstance(built, str):
        return built
    place = other_place(built)
    refused = (name for name, kind in built["stored"].items() if kind == "refused")
    turned = {with_stars(name) for name in refused if ".experts." in name}
    if place is not None or turned:
        old, new = place or ("", "")
        for row in found["rows"]:
            if not turned.isdisjoint(map(with_stars, row["names"])) and row["shape"]:
                row["shape"] = [row["shape"][0], *row["shape"][:0:-1]]
        found = json.loads(json.dumps(found).replace(f'"{old}', f'"{new}'))
        in_child(lambda: rewrite(folder, old, new, turned))
        built = loaded(folder)
    return built if isinstance(built, str) else joined(found, built)


def other_place(built: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the prefixes of refused tensors and of the tensors that vLLM misses instead."""
    lacking = [
        fault.split()[1].rstrip(":") for fault in built["faults"] if fault.startswith("missing ")
    ]
    found: Counter[tuple[str, str]] = Counter()
    for name in (name for name, kind in built["stored"].items() if kind == "refused"):
        for other in lacking:
            alike = len(commonprefix([name.split(".")[::-1], other.split(".")[::-1]]))
            head, place = name.split(".")[:-alike], other.split(".")[:-alike]
            if alike > 1 and head and place[-2:-1] == head[-1:]:
                found[f"{'.'.join(head)}.", f"{'.'.join((*head, place[-1]))}."] += 1
            elif alike > 1 and place and place == head[:-1]:
                found[f"{'.'.join(head)}.", f"{'.'.join(place)}."] += 1
    return max(found, key=found.__getitem__, default=None)


def rewrite(folder: Path, old: str, new: str, turned: Collection[str]) -> Entry:
    from built_modules import save

    from vexport.checkpoint.index import read_header

    shapes = {
        name: tensor.shape for name, tensor in read_header(folder / "model.safetensors").items()
    }
    changed = {
        name: (shape[0], *shape[:0:-1]) if with_stars(name) in turned else shape
        for name, shape in shapes.items()
    }
    save(
        {re.sub(f"^{re.escape(old)}", new, name): shape for name, shape in changed.items()}, folder
    )
    return {}


def observed(name: str, folder: Path) -> Entry:
    """Return the tensors of transformers' class, and write a checkpoint of it.

    The checkpoint has extra names that no class has.
    """
    import transformers
    from built_modules import QUANTIZATION, Recipe, own_types, save, transformers_types
    from fitting import entry_of
    from samples import Model

    transformers.logging.set_verbosity_error()
    problem: Exception = ValueError("no model type")
    for kind in transformers_types(name) or own_types(name):
        raw = json.loads(json.dumps(Recipe(architecture=name, model_type=kind).values()))
        model = Model.of(getattr(transformers, name), kind, raw)
        try:
            model.observe()
        except ValueError as error:
            problem = error
            continue
        entry = entry_of(model)
        base = model.samples[0]
        entry["types"] = {
            path: part["model_type"] for path, part in typed({**base.config, "model_type": kind})
        }
        entry["based"] = list(base.tensors)
        probes = entry["probes"] = containers(base.tensors)
        save({**base.tensors, **dict.fromkeys(probes.values(), (2, 2))}, folder)
        (folder / "config.json").write_text(
            json.dumps({**base.raw, "quantization_config": QUANTIZATION})
        )
        return entry
    raise problem


def typed(config: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    inner = [
        (f"{path}.{key}".lstrip("."), part)
        for key, part in config.items()
        if isinstance(part, dict)
    ]
    own = [(path, config)] if isinstance(config.get("model_type"), str) else []
    return [
        *own,
        *(each for key, part in inner if key.endswith("config") for each in typed(part, key)),
    ]


def containers(names: Mapping[str, object]) -> dict[str, str]:
    """Return a name that no class has, for each part of a model.

    Keys are parts with stars for numbers. The key "" is the model itself.
    """
    found = {"": UNKNOWN, "mtp": f"mtp.{UNKNOWN}"}
    for name in names:
        parts = name.split(".")[:-1]
        for end in range(1, len(parts)):
            prefix = ".".join(parts[:end])
            found.setdefault(with_stars(f"{prefix}.").rstrip("."), f"{prefix}.{UNKNOWN}")
    return found


def loaded(folder: Path) -> Entry | str:
    from built_modules import ALL, build, nested_value, shorten

    def attempt(missing: Entry) -> Entry:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        shorten(
            config, ALL, {key: nested_value(config, key, value) for key, value in missing.items()}
        )
        file.write_text(json.dumps(config))
        return asdict(build(folder))

    return until_built(attempt)


def joined(found: Entry, built: Mapping[str, Any]) -> Entry:
    """Return the entry with vLLM's use of each tensor.

    The use of tensors that vLLM does not read is unknown.
    """
    stored, probes = built["stored"], found.pop("probes")
    kinds: dict[str, set[str]] = {}
    for name in found.pop("based"):
        kinds.setdefault(with_stars(name), set()).add(stored.get(name, "refused"))
    rows: dict[str, list[str]] = {}
    for row in found["rows"]:
        for name in row["names"]:
            of_name = kinds.get(with_stars(name), {""})
            kind = next(
                (each for each in ("refused", "dropped", "experts") if each in of_name),
                min(of_name),
            )
            values = {key: row[key] for key in ("condition", "shape")} | {"kind": kind}
            if kind == "refused":
                values = {"condition": "", "shape": None, "kind": ""}
            unusual = {key: value for key, value in values.items() if value != USUAL[key]}
            rows.setdefault(json.dumps(unusual), []).append(name)
    entry = {
        **found,
        "drops": sorted(prefix for prefix, name in probes.items() if stored.get(name) == "dropped"),
        "rows": [{"names": names, **json.loads(unusual)} for unusual, names in rows.items()],
    }
    return {key: value for key, value in entry.items() if value}


if __name__ == "__main__":
    main()
