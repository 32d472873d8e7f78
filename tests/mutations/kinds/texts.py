"""JSON that parsers read differently, and files next to the weights."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copyfile

import torch
from safetensors.torch import load_file, save_file

from tests.mutations.edits import INDEX, WEIGHTS, WHOLE, Change, all_of, config, file_bytes, header, index
from tests.mutations.good import Sound
from vexport.types import Json

CONFIG = "config.json"
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}


def kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """All of them, whatever the scheme."""
    yield from _json()
    yield from _headers()
    yield from _links()
    yield from _beside()
    yield from _indices()


def _json() -> Iterator[tuple[str, Change]]:
    yield "config with a BOM", file_bytes(CONFIG, lambda data: b"\xef\xbb\xbf" + data)
    yield "config in UTF-16", file_bytes(CONFIG, lambda data: data.decode().encode("utf-16"))
    yield "config with a comment", file_bytes(CONFIG, lambda data: b"// a comment\n" + data)
    yield "config with a comma too many", _text(lambda text: text.rstrip().removesuffix("}") + ",}")
    yield "config a list", file_bytes(CONFIG, lambda data: b"[" + data + b"]")
    yield "config twice", file_bytes(CONFIG, lambda data: data + data)
    yield "a key twice, the last one right", _text(lambda text: text.replace("{", '{"hidden_size": 64,', 1))
    yield (
        "a key twice, the last one wrong",
        _text(lambda text: text.rstrip().removesuffix("}") + ',"num_hidden_layers": 7}'),
    )
    yield "epsilon of norms NaN", config(WHOLE, rms_norm_eps=float("nan"))
    yield "epsilon of norms infinite", config(WHOLE, rms_norm_eps=float("inf"))
    yield "config not UTF-8", _text(lambda text: text.replace("{", '{"name": "\xff",', 1), "latin-1")


def _text(change: Callable[[str], str], encoding: str = "utf-8") -> Change:
    return file_bytes(CONFIG, lambda data: change(data.decode()).encode(encoding))


def _headers() -> Iterator[tuple[str, Change]]:
    yield "metadata not of strings", header(lambda entries: entries.update({"__metadata__": {"format": 1}}))
    yield "metadata a list", header(lambda entries: entries.update({"__metadata__": []}))
    yield "metadata of numpy", header(lambda entries: entries.update({"__metadata__": {"format": "np"}}))
    yield "header begins with a space", _header_text(lambda text: " " + text)
    yield "header with a tensor twice", _header_text(_first_twice)
    yield "a key too many in the header", header(lambda entries: _norm(entries).update(extra=1))
    yield "an entry without offsets", header(lambda entries: _norm(entries).pop("data_offsets"))
    yield "an entry without a dtype", header(lambda entries: _norm(entries).pop("dtype"))
    yield "a dtype in small letters", header(lambda entries: _norm(entries).update(dtype="bf16"))
    yield "sides as floats", header(lambda entries: _norm(entries).update(shape=[128.0]))
    yield "an empty tensor beside", _more_tensors({"no_such": torch.ones(0)})


def _norm(entries: dict[str, Json]) -> dict[str, Json]:
    entry = entries["model.norm.weight"]
    assert isinstance(entry, dict)
    return entry


def _header_text(change: Callable[[str], str]) -> Change:
    def apply(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        text = change(data[8 : 8 + length].decode()).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return file_bytes(WEIGHTS, apply)


def _first_twice(text: str) -> str:
    entries = json.loads(text)
    name = "model.norm.weight"
    return text.rstrip().removesuffix("}") + f",{json.dumps(name)}:{json.dumps(entries[name])}}}"


def _more_tensors(more: dict[str, torch.Tensor]) -> Change:
    def apply(folder: Path) -> None:
        values = {**load_file(folder / WEIGHTS), **more}
        save_file(values, folder / WEIGHTS, metadata={"format": "pt"})

    return apply


def _links() -> Iterator[tuple[str, Change]]:
    yield "weights behind a link", lambda folder: _linked(folder, broken=False)
    yield "weights behind a broken link", lambda folder: _linked(folder, broken=True)
    yield "a folder in the weights' place", _in_a_folder


def _linked(folder: Path, *, broken: bool) -> None:
    blobs = folder / "blobs"
    blobs.mkdir()
    (folder / WEIGHTS).rename(blobs / "0123")
    (folder / WEIGHTS).symlink_to(Path("blobs") / ("4567" if broken else "0123"))


def _in_a_folder(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def _beside() -> Iterator[tuple[str, Change]]:
    yield "generation config broken", _written("generation_config.json", b"{")
    yield "generation config of another end", _written("generation_config.json", b'{"eos_token_id": [7, 8]}')
    yield "generation config empty", _written("generation_config.json", b"")
    yield "ModelOpt's config beside", _written("hf_quant_config.json", json.dumps(MODELOPT).encode())
    yield "ModelOpt's config beside, broken", _written("hf_quant_config.json", b"{")
    yield (
        "ModelOpt's config instead",
        all_of(
            config(WHOLE, quantization_config=None),
            _written("hf_quant_config.json", json.dumps(MODELOPT).encode()),
        ),
    )
    yield "Mistral's config beside", _written("params.json", b'{"dim": 128}')
    yield "the same weights as consolidated", lambda folder: _copied(folder, "consolidated.safetensors")
    yield "an adapter beside", lambda folder: _adapter(folder)
    yield "a recipe broken", _written("recipe.yaml", b"{[")
    yield "an empty safetensors file beside", _written("model-extra.safetensors", b"")
    yield "a tokenizer broken", _written("tokenizer.json", b"{")


def _written(name: str, data: bytes) -> Change:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return apply


def _copied(folder: Path, name: str) -> None:
    copyfile(folder / WEIGHTS, folder / name)


def _adapter(folder: Path) -> None:
    save_file(
        {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 128)},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )


def _indices() -> Iterator[tuple[str, Change]]:
    yield "index with a BOM", all_of(_right_index(), file_bytes(INDEX, lambda data: b"\xef\xbb\xbf" + data))
    yield "index of numbers", index(lambda values: dict.fromkeys(values, 1))  # type: ignore[arg-type]
    yield "index a list", _written(INDEX, b"[]")
    yield "index with a dot in its paths", index(lambda values: dict.fromkeys(values, f"./{WEIGHTS}"))
    yield (
        "index with a way out and back",
        lambda folder: index(lambda values: dict.fromkeys(values, f"../{folder.name}/{WEIGHTS}"))(folder),
    )
    yield (
        "index with a whole path",
        lambda folder: index(lambda values: dict.fromkeys(values, str(folder / WEIGHTS)))(folder),
    )
    yield "index of another size", all_of(_right_index(), _another_size)
    yield "index without metadata", all_of(_right_index(), _no_metadata)
    yield "index in capitals", index(lambda values: dict.fromkeys(values, WEIGHTS.upper()))


def _right_index() -> Change:
    return index(lambda values: dict.fromkeys(values, WEIGHTS))


def _another_size(folder: Path) -> None:
    content = json.loads((folder / INDEX).read_text())
    content["metadata"] = {"total_size": 1}
    (folder / INDEX).write_text(json.dumps(content))


def _no_metadata(folder: Path) -> None:
    content = json.loads((folder / INDEX).read_text())
    content.pop("metadata")
    (folder / INDEX).write_text(json.dumps(content))
