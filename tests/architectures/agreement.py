"""How often `check --static` and vLLM's loaders agree: `python -m tests.architectures.agreement` prints it.

Every micro family, quantized and spoiled in each way below; what the two do not agree on is printed.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from safetensors.torch import load_file, save_file

from tests.architectures.families import FAMILIES, save_family
from tests.models import errors, quantize
from tests.mutations.edits import WEIGHTS, Tensors, forget_digests, spoiled
from vexport.architectures.text_config import text_config
from vexport.engine.dry.load import DryLoad
from vexport.records import Json

SCHEMES = ("NVFP4A16", "FP8_DYNAMIC")
NUMBER = re.compile(r"\.\d+\.")
EXPERT = re.compile(r"(.*\.experts)\.\d+\.")
NORM = re.compile(r".*norm\w*\.weight|.*\.ln_\w+\.weight")
WIDTHS = ("intermediate_size", "moe_intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
HIDDEN, HEADS = ("hidden_size", "n_embd"), ("num_key_value_heads", "num_attention_heads", "n_head")
GOOD = "nothing"


@dataclass(slots=True, kw_only=True)
class Model:
    """A checkpoint that is spoiled, and what chooses where."""

    tensors: Tensors
    config: dict[str, Json]
    random: Random

    def one(self, wanted: Callable[[str], object] = bool) -> str:
        """One of the tensors that are wanted. Raises LookupError where there is none."""
        found = sorted(name for name in self.tensors if wanted(name))
        if not found:
            raise LookupError
        return self.random.choice(found)

    def drop(self, dropped: Iterable[str]) -> None:
        """Take tensors out."""
        for name in list(dropped):
            del self.tensors[name]

    def like(self, name: str) -> list[str]:
        """A tensor and those of its name in other layers."""
        return [other for other in self.tensors if NUMBER.sub(".", other) == NUMBER.sub(".", name)]

    def below(self, prefix: str) -> list[str]:
        """The tensors of a module."""
        return [name for name in self.tensors if name.startswith(f"{prefix}.")]

    def rename(self, names: Iterable[str], new: Callable[[str], str]) -> None:
        """Give tensors other names."""
        for name in list(names):
            self.tensors[new(name)] = self.tensors.pop(name)

    def cut(self, axis: int) -> None:
        """Halve a matrix."""
        name = self.one(lambda name: self.tensors[name].dim() == 2 and min(self.tensors[name].shape) > 1)
        half = self.tensors[name].shape[axis] // 2
        self.tensors[name] = self.tensors[name].narrow(axis, 0, half).clone()

    def text(self) -> dict[str, Json]:
        """The config of the language model."""
        found = text_config(self.config)
        assert isinstance(found, dict)
        return found

    def change(self, keys: Iterable[str], new: Callable[[int], int]) -> None:
        """Another number for the first key that the language model's config has."""
        key = next(key for key in keys if type(self.text().get(key)) is int)
        value = self.text()[key]
        assert isinstance(value, int)
        self.text()[key] = new(value)

    @property
    def ignore(self) -> list[Json]:
        """The layers that are not quantized."""
        quantization = self.config["quantization_config"]
        assert isinstance(quantization, dict)
        ignored = quantization["ignore"]
        assert isinstance(ignored, list)
        return ignored


def numbered(name: str) -> bool:
    """Whether a tensor is one of a layer."""
    return NUMBER.search(name) is not None


def layer(name: str) -> str:
    """The layer of a tensor."""
    found = NUMBER.search(name)
    assert found
    return name[: found.end() - 1]


def expert(model: Model) -> str:
    """One expert of a layer, or a module of one."""
    name = model.one(EXPERT.match) if any(map(EXPERT.match, model.tensors)) else model.one(numbered)
    found = EXPERT.match(name)
    return found[0].rstrip(".") if found else name.rpartition(".")[0]


def experts(model: Model) -> str:
    """All experts of a layer, or the module around one."""
    found = EXPERT.match(expert(model))
    return found[1] if found else expert(model).rpartition(".")[0]


def swap(model: Model) -> None:
    """Let two tensors of a layer change their names."""
    one = model.one(lambda name: numbered(name) and model.tensors[name].dim() == 2)
    others = {
        name for name in model.below(layer(one)) if model.tensors[name].shape != model.tensors[one].shape
    }
    other = model.one(others.__contains__)
    model.tensors[one], model.tensors[other] = model.tensors[other], model.tensors[one]


def add(model: Model, new: Callable[[str], str], wanted: Callable[[str], object] = bool) -> None:
    """Store a tensor once more under another name."""
    name = model.one(wanted)
    model.tensors[new(name)] = model.tensors[name].clone()


def extra_layer(model: Model) -> None:
    """Store a layer once more behind the last one."""
    first = layer(model.one(numbered))
    start = first.rpartition(".")[0]
    number = 1 + max(int(name.removeprefix(f"{start}.").partition(".")[0]) for name in model.below(start))
    for name in model.below(first):
        model.tensors[name.replace(f"{first}.", f"{start}.{number}.", 1)] = model.tensors[name].clone()


def ignore(model: Model) -> None:
    """Leave a layer unquantized whose tensors are quantized."""
    model.ignore.append(model.one(lambda name: name.endswith("weight_scale")).rpartition(".")[0])


def untie(model: Model) -> None:
    """Say the contrary of whether the head is that of the embeddings."""
    for config in (model.config, model.text()):
        config["tie_word_embeddings"] = not config.get("tie_word_embeddings", False)


def misspelled(name: str) -> str:
    """A tensor's name with another module."""
    module, _, parameter = name.rpartition(".")
    return f"{module}_x.{parameter}"


SPOILINGS: Mapping[str, Callable[[Model], None]] = {
    GOOD: lambda model: None,
    "drop a tensor": lambda model: model.drop([model.one()]),
    "drop a tensor of a layer": lambda model: model.drop([model.one(numbered)]),
    "drop it in every layer": lambda model: model.drop(model.like(model.one(numbered))),
    "drop a norm": lambda model: model.drop([model.one(NORM.fullmatch)]),
    "drop a layer": lambda model: model.drop(model.below(layer(model.one(numbered)))),
    "drop an expert": lambda model: model.drop(model.below(expert(model))),
    "drop all experts": lambda model: model.drop(model.below(experts(model))),
    "drop one outside layers": lambda model: model.drop([model.one(lambda name: not numbered(name))]),
    "drop all scales": lambda model: model.drop(
        [name for name in model.tensors if name.endswith("weight_scale")]
    ),
    "rename a tensor": lambda model: model.rename([model.one(numbered)], misspelled),
    "rename it in every layer": lambda model: model.rename(model.like(model.one(numbered)), misspelled),
    "rename one outside layers": lambda model: model.rename(
        [model.one(lambda name: not numbered(name))], misspelled
    ),
    "cut rows": lambda model: model.cut(0),
    "cut columns": lambda model: model.cut(1),
    "swap two": swap,
    "add an unknown tensor": lambda model: add(model, misspelled),
    "add a bias": lambda model: add(
        model, lambda name: name.replace(".weight", ".bias"), lambda name: name.endswith(".weight")
    ),
    "add a layer": extra_layer,
    "more layers": lambda model: model.change(LAYERS, lambda number: number + 1),
    "fewer layers": lambda model: model.change(LAYERS, lambda number: number - 1),
    "other hidden size": lambda model: model.change(HIDDEN, lambda number: 2 * number),
    "other width": lambda model: model.change(WIDTHS, lambda number: 2 * number),
    "other heads": lambda model: model.change(HEADS, lambda number: 2 * number),
    "other experts": lambda model: model.change(EXPERTS, lambda number: number + 4),
    "fewer experts": lambda model: model.change(EXPERTS, lambda number: number - 1),
    "other vocabulary": lambda model: model.change(["vocab_size"], lambda number: 2 * number),
    "ignore a quantized layer": ignore,
    "ignore nothing": lambda model: model.ignore.clear(),
    "untie": untie,
}


def spoil(what: str, folder: Path) -> None:
    """Spoil a checkpoint in place. Raises LookupError, StopIteration where it has nothing of the kind."""
    file = folder / "config.json"
    random = Random(f"{what} {folder.parent.name}")
    model = Model(tensors=load_file(folder / WEIGHTS), config=json.loads(file.read_text()), random=random)
    SPOILINGS[what](model)
    save_file(model.tensors, folder / WEIGHTS, metadata={"format": "pt"})
    file.write_text(json.dumps(model.config))


def checkpoints(families: Iterable[str], folder: Path) -> Iterator[Path]:
    """Each family in each way, written where it is not there."""
    for number, family in enumerate(FAMILIES):
        if family not in families:
            continue
        good = folder / family / "good"
        if not good.is_dir():
            scheme = SCHEMES[number % len(SCHEMES)]
            source = save_family(family, folder / family / "source")
            quantize(source, good, scheme, "--on-unsupported-shape", "keep")
            forget_digests(good)
        for what in SPOILINGS:
            out = good.with_name(what)
            try:
                yield out if out.is_dir() else spoiled(good, out, partial(spoil, what))
            except (LookupError, StopIteration):
                continue


def refusals(made: Iterable[Path], folder: Path) -> dict[Path, str]:
    """What vLLM's loaders say first against each checkpoint, kept for the next time."""
    file = folder / "dry.json"
    known: dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}
    new = [out for out in made if str(out) not in known]
    for out, report in zip(new, DryLoad(checkpoints=new, timeout=3000).reports() if new else (), strict=True):
        found = [each for each in report.findings if each.severity == "error"]
        known[str(out)] = f"vLLM: {found[0].where}: {found[0].got}" if found else ""
    file.write_text(json.dumps(known))
    return {Path(out): said for out, said in known.items()}


def main(names: list[str]) -> int:
    """Measure families in a folder, the first argument where it is one; 1 where less than 99 % agree."""
    with TemporaryDirectory() as temporary:
        kept = names and "/" in names[0]
        folder = Path(names.pop(0)) if kept else Path(temporary)
        made = list(checkpoints(names or FAMILIES, folder))
        refused, alike = refusals(made, folder), 0
        for out in made:
            found = [f"{each.check}: {each.where}: {each.got}" for each in errors(out)]
            alike += bool(found) is bool(refused[out])
            if bool(found) is not bool(refused[out]):
                print(
                    f"{out.parent.name}: {out.name}",
                    *found[:1],
                    refused[out] or "loads",
                    sep="\n  ",
                    flush=True,
                )
    print(f"{alike} of {len(made)} alike, {alike / len(made):.1%}")
    return int(alike < 0.99 * len(made))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
