"""Random headers of safetensors files, sound and spoiled, and what safetensors and vexport say of each."""

import json
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from vexport.checkpoint.dtypes import BITS, num_bytes
from vexport.checkpoint.header import read_header
from vexport.errors import InputError

# What safetensors takes and vexport refuses on purpose: no writer makes an entry that is a list of its fields
# or a dtype that is an object, and vLLM's CompressedTensors has no layer of those dtypes.
STRICTER = re.compile(r"no JSON object|unknown dtype (\{|F6_|F8_E[45]M[23]FNUZ)")
NUMBERS = (
    *"0 1 4 8 -0 -1 0.0 1.0 1e0 1e400 -1e400 1e-400 NaN Infinity true false null 01 +1".split(),  # noqa: SIM905
    *("18446744073709551615", "18446744073709551616", "1" + "0" * 308, "1" + "0" * 309, "9" * 5000),
)
TEXTS = (
    r"\ud800",
    r"\ud83d\ude00",
    r"\\ud800",
    r"\udc00x",
    r"\u0000",
    "\x01",
    "a",
    "F32",
    "F4",
    "F6_E2M3",
    "f32",
)
DEEP = ("[" * 125 + "]" * 125, "[" * 126 + "]" * 126, "[" * 3000 + "]" * 3000)
OTHERS = ("[]", "{}", "[1]", '{"F32":null}', '["F32",[1],[0,4]]', '{"a":1,"a":2}')
VALUES = (*NUMBERS, *(f'"{text}"' for text in TEXTS), *DEEP, *OTHERS)
KEYS = ["dtype", "shape", "data_offsets", "__metadata__", "z", "a", "", r"\u0061", r"\ud800", r"\u0064type"]
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9.eE+]+|true|false|null|[\[\]{}:,]')
ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1")


def random_file(rng: random.Random) -> bytes:
    """A safetensors file: a sound one of up to four small tensors, with up to two mistakes in its header."""
    entries, position = {}, 0
    for name in rng.sample(["a", "b", "lm_head.weight", "ä", ""], rng.randint(0, 4)):
        dtype, shape = rng.choice([*BITS]), [rng.choice((0, 1, 2, 8)) for _ in range(rng.randint(0, 3))]
        end = position + num_bytes(dtype, tuple(shape))
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    header: dict[str, object] = {"__metadata__": {"format": "pt"}} if rng.random() < 0.5 else {}
    text = json.dumps({**header, **entries}, ensure_ascii=rng.random() < 0.5)
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        text = rng.choice(MISTAKES)(text, rng)
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.05:
        data = text.encode(rng.choice(ENCODINGS), "replace")
    if rng.random() < 0.05 and data:
        place = rng.randrange(len(data))
        data = data[:place] + bytes([rng.randrange(256)]) + data[place + rng.randint(0, 1) :]
    data += b" " * rng.choice((0, 0, 3)) + (
        b"" if rng.random() < 0.9 else rng.choice((b"\0", b"\n", b"x", b"{}"))
    )
    length = len(data) + (0 if rng.random() < 0.95 else rng.choice((1, -1)))
    return struct.pack("<Q", max(length, 0)) + data + b"\0" * (position + (rng.random() < 0.05))


def _replace(text: str, rng: random.Random) -> str:
    """Another value in the place of one."""
    tokens = [match for match in TOKEN.finditer(text) if match[0] not in "[]{}:,"]
    if not tokens:
        return text
    token = rng.choice(tokens)
    return text[: token.start()] + rng.choice(VALUES) + text[token.end() :]


def _add_key(text: str, rng: random.Random) -> str:
    """A further key of an object, which may be there already."""
    places = [match.end() for match in re.finditer(r"\{", text)]
    if not places:
        return text
    place = rng.choice(places)
    comma = "" if text[place : place + 1] == "}" else ","
    return f'{text[:place]}"{rng.choice(KEYS)}":{rng.choice(VALUES)}{comma}{text[place:]}'


def _repeat(text: str, rng: random.Random) -> str:
    """A key and its value a second time."""
    pairs = [*re.finditer(r'"[a-z_]+": ("[^"]*"|\[[^\[\]{}]*\]|\{[^{}]*\})', text)]
    if not pairs:
        return text
    pair = rng.choice(pairs)
    return f"{text[: pair.end()]}, {pair[0]}{text[pair.end() :]}"


def _drop(text: str, rng: random.Random) -> str:
    """A token less."""
    tokens = [*TOKEN.finditer(text)]
    token = rng.choice(tokens) if tokens else None
    return text if token is None else text[: token.start()] + text[token.end() :]


MISTAKES: tuple[Callable[[str, random.Random], str], ...] = (_replace, _add_key, _repeat, _drop)


def disagreement(data: bytes, file: Path) -> str | None:
    """Where vexport and safetensors differ on a file's bytes, written to `file`; None where they agree."""
    file.write_bytes(data)
    theirs, ours = _safetensors(file), _vexport(file)
    if isinstance(theirs, str) and isinstance(ours, str):
        return None
    if theirs == ours or (isinstance(ours, str) and STRICTER.search(ours)):
        return None
    return f"{data!r}: safetensors {theirs}, vexport {ours}"


def _safetensors(file: Path) -> dict[str, tuple[str, list[int]]] | str:
    """Each tensor's dtype and shape, or why the file is refused."""
    try:
        with safe_open(str(file), "np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        return f"refuses: {error}"


def _vexport(file: Path) -> dict[str, tuple[str, list[int]]] | str:
    try:
        return {name: (tensor.dtype, [*tensor.shape]) for name, tensor in read_header(file).items()}
    except InputError as error:
        return f"refuses: {error}"
