"""Changes to a checkpoint folder with one file, made in place."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import torch
from safetensors.torch import load_file, save_file

from vexport.outputs import RECIPE
from vexport.outputs.digests import DIGESTS
from vexport.records import Json

Tensors = dict[str, torch.Tensor]
Change = Callable[[Path], None]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Places in config.json: the whole file, its quantization_config, the first group, its arguments.
WHOLE: tuple[str, ...] = ()
QUANTIZATION = ("quantization_config",)
GROUP_KEY = "first"
GROUP = (*QUANTIZATION, "config_groups", GROUP_KEY)
ARGUMENTS = (*GROUP, "weights")
INPUTS = (*GROUP, "input_activations")


def spoiled(good: Path, folder: Path, change: Change) -> Path:
    """Copy a checkpoint to a new folder and change it, as if its producer had written it so."""
    copytree(good, folder)
    change(folder)
    forget_digests(folder)
    return folder


def forget_digests(folder: Path) -> None:
    """Remove the digests from vexport.json, which would reveal any changed file."""
    file = folder / RECIPE
    if file.is_file():
        recipe = json.loads(file.read_text())
        recipe.pop(DIGESTS, None)
        file.write_text(json.dumps(recipe))


def tensors(change: Callable[[Tensors], None]) -> Change:
    """Return a change of the file's tensors."""

    def apply(folder: Path) -> None:
        values = load_file(folder / WEIGHTS)
        change(values)
        save_file(values, folder / WEIGHTS, metadata={"format": "pt"})

    return apply


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return tensors(lambda values: values.update({name: change(values[name]).contiguous()}))


def drop(*names: str) -> Change:
    def apply(values: Tensors) -> None:
        for name in names:
            del values[name]

    return tensors(apply)


def add(name: str, value: torch.Tensor) -> Change:
    return tensors(lambda values: values.update({name: value}))


def rename(old: str, new: str) -> Change:
    return tensors(lambda values: values.update({new: values.pop(old)}))


def rename_all(new: Callable[[str], str | None]) -> Change:
    """Give each tensor the name that `new` returns. Remove the tensor if it returns None."""

    def apply(values: Tensors) -> None:
        old = dict(values)
        values.clear()
        values.update(
            {other: value for name, value in old.items() if (other := new(name)) is not None}
        )

    return tensors(apply)


def move_prefix(old: str, new: str) -> Change:
    """Replace a prefix of the tensors' names."""
    return rename_all(lambda name: new + name.removeprefix(old) if name.startswith(old) else name)


def drop_if(matches: Callable[[str], object]) -> Change:
    """Remove the tensors whose names match."""
    return rename_all(lambda name: None if matches(name) else name)


def unquantize(module: str, *shape: int) -> Change:
    """Replace a quantized layer by a bfloat16 layer."""
    weight = torch.full(shape, 0.01, dtype=torch.bfloat16)
    return all_of(
        drop_if(lambda name: name.startswith(f"{module}.")), add(f"{module}.weight", weight)
    )


def copy_prefix(old: str, new: str) -> Change:
    """Store a second copy of the tensors whose names have this prefix."""
    return tensors(
        lambda values: values.update(
            {
                new + name.removeprefix(old): values[name].clone()
                for name in values
                if name.startswith(old)
            }
        )
    )


def change_all(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change all tensors whose names have this suffix."""
    return tensors(
        lambda values: values.update(
            {name: change(values[name]) for name in values if name.endswith(ending)}
        )
    )


def swap(first: str, second: str) -> Change:
    return tensors(lambda values: values.update({first: values[second], second: values[first]}))


def swap_parts(first: str, second: str, ending: str = "") -> Change:
    """Swap tensors whose names differ only in one part: `first` or `second`."""

    def apply(values: Tensors) -> None:
        for name in [name for name in values if first in name and name.endswith(ending)]:
            twin = name.replace(first, second)
            values[name], values[twin] = values[twin], values[name]

    return tensors(apply)


def config(place: tuple[str, ...], **changes: Json) -> Change:
    """Set keys in an object of config.json."""
    return json_config(lambda whole: node(whole, place).update(changes))


def without(place: tuple[str, ...], *keys: str) -> Change:
    """Remove keys from an object of config.json."""

    def change(whole: dict[str, Json]) -> None:
        for key in keys:
            del node(whole, place)[key]

    return json_config(change)


def json_config(change: Callable[[dict[str, Json]], object]) -> Change:
    return json_file("config.json", change)


def json_file(name: str, change: Callable[[dict[str, Json]], object]) -> Change:
    def apply(folder: Path) -> None:
        path = folder / name
        whole = json.loads(path.read_text())
        change(whole)
        path.write_text(json.dumps(whole))

    return apply


def node(whole: dict[str, Json], place: tuple[str, ...]) -> dict[str, Json]:
    """Return the object at a place. `GROUP_KEY` stands for the first config group of any name."""
    found: Json = whole
    for key in place:
        assert isinstance(found, dict)
        found = next(iter(found.values())) if key == GROUP_KEY else found[key]
    assert isinstance(found, dict)
    return found


def copy_group(*, first: bool = False, num_bits: int = 0) -> Change:
    """Add a copy of the first config group, before or after it."""

    def change(whole: dict[str, Json]) -> None:
        group = copy.deepcopy(node(whole, GROUP))
        if num_bits:
            node(group, ("weights",))["num_bits"] = num_bits
        quantization = node(whole, QUANTIZATION)
        groups = node(quantization, ("config_groups",))
        quantization["config_groups"] = (
            {"copy": group, **groups} if first else {**groups, "copy": group}
        )

    return json_config(change)


def all_of(*changes: Change) -> Change:
    def apply(folder: Path) -> None:
        for change in changes:
            change(folder)

    return apply


def without_files(*names: str) -> Change:
    def apply(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return apply


def file_bytes(name: str, change: Callable[[bytes], bytes]) -> Change:
    def apply(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return apply


def index(weight_map: Callable[[Tensors], dict[str, str]]) -> Change:
    """Write an index with this weight map."""

    def apply(folder: Path) -> None:
        content = {"metadata": {}, "weight_map": weight_map(load_file(folder / WEIGHTS))}
        (folder / INDEX).write_text(json.dumps(content))

    return apply


def set_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that sets the first element."""

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.to(torch.float32).clone()
        changed.view(-1)[0] = value
        return changed.to(tensor.dtype)

    return apply


def fill_with(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that sets all elements."""
    return lambda tensor: torch.full(tensor.shape, value).to(tensor.dtype)


def swap_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return the elements with reversed bytes."""
    size = value.element_size()
    flipped = value.contiguous().view(torch.uint8).reshape(-1, size).flip(1).contiguous()
    return flipped.view(value.dtype).reshape(value.shape)


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return the reciprocal of each element."""
    return (1 / scale.float()).to(scale.dtype)


def multiply_by(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda scale: (scale.float() * factor).to(scale.dtype)


def header(change: Callable[[dict[str, Json]], object], padding: int = 0) -> Change:
    """Change a file's header, and leave its data unchanged."""

    def apply(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode() + b" " * padding
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return file_bytes(WEIGHTS, apply)
