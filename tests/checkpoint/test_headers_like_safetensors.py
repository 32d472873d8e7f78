"""`read_header` refuses the same headers as the safetensors library.

Exceptions are values in further keys that JSON or the library's parser refuses, such as NaN.
"""

import struct
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from tests.command import vexport
from tests.texts import assert_contains
from vexport.checkpoint.index import read_header
from vexport.errors import InputError

FIELDS = '"dtype":"F32","shape":[2],"data_offsets":[0,8]'
TENSOR = f'"a":{{{FIELDS}}}'


def with_further(value: str) -> str:
    return f'{{"a":{{{FIELDS},"x":{value}}}}}'


def with_metadata(value: str) -> str:
    return f'{{"__metadata__":{value},{TENSOR}}}'


HEADERS = {
    "sound": f"{{{TENSOR}}}",
    "further key": with_further('[1, {"y": -2.5}]'),
    "character beyond 16 bits": f'{{"__metadata__":{{"k":"\\ud83d\\ude00"}},{TENSOR}}}',
    "half a character in a name": f'{{"\\ud800":{{{FIELDS}}}}}',
    "half a character in a further key": with_further('"\\ud800"'),
    "half a character in metadata": f'{{"__metadata__":{{"k":"\\udc00"}},{TENSOR}}}',
    "metadata null": with_metadata("null"),
    "metadata empty": with_metadata("{}"),
    "metadata array": with_metadata("[]"),
    "metadata array of strings": with_metadata('["a"]'),
    "metadata string": with_metadata('""'),
    "metadata number": with_metadata("0"),
    "metadata boolean": with_metadata("false"),
    "metadata of numbers": with_metadata('{"k":1}'),
    "metadata of null": with_metadata('{"k":null}'),
    "metadata of objects": with_metadata('{"k":{"l":"m"}}'),
    "metadata of 200 levels": with_metadata("[" * 200 + "]" * 200),
    "tensor null": f'{{"b":null,{TENSOR}}}',
    "tensor number": f'{{"b":1,{TENSOR}}}',
    "tensor of 200 levels": f'{{"b":{"[" * 200 + "]" * 200},{TENSOR}}}',
    "field missing": f'{{"b":{{"dtype":"F32","shape":[0]}},{TENSOR}}}',
    "field null": f'{{"b":{{"dtype":null,"shape":[0],"data_offsets":[0,0]}},{TENSOR}}}',
    "metadata twice": f'{{"__metadata__":{{"k":"a"}},"__metadata__":{{"k":"b"}},{TENSOR}}}',
    "field twice": f'{{"a":{{"dtype":"F32",{FIELDS}}}}}',
    "20000 levels": with_further("[" * 20000 + "1" + "]" * 20000),
    "fraction as size": '{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}',
}
# The format forbids these. The library uses the last value.
FORBIDDEN = {
    "name twice": f"{{{TENSOR},{TENSOR}}}",
    "metadata key twice": f'{{"__metadata__":{{"k":"a","k":"b"}},{TENSOR}}}',
}


def write(folder: Path, header: str) -> Path:
    data = header.encode()
    data += b" " * (-len(data) % 8)
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(data)) + data + bytes(8))
    return file


def is_read(file: Path) -> bool:
    try:
        return list(read_header(file)) == ["a"]
    except InputError:
        return False


@pytest.mark.parametrize("name", HEADERS)
def test_header_is_read_like_in_library(tmp_path: Path, name: str) -> None:
    file = write(tmp_path, HEADERS[name])
    try:
        with safe_open(file, "np") as opened:
            accepted = list(opened.keys()) == ["a"]
    except SafetensorError:
        accepted = False
    assert is_read(file) is accepted


@pytest.mark.parametrize("name", FORBIDDEN)
def test_duplicate_keys_are_refused(tmp_path: Path, name: str) -> None:
    assert not is_read(write(tmp_path, FORBIDDEN[name]))


@pytest.mark.parametrize(
    ("header", "parts"),
    [
        ("field twice", ["dtype", "twice"]),
        ("20000 levels", ["nested too deeply"]),
        ("metadata array", ["__metadata__ is an array", "object of strings"]),
        ("metadata number", ["__metadata__ is a number", "object of strings"]),
        ("metadata of null", ["__metadata__: k is null", "string"]),
        ("metadata of 200 levels", ["__metadata__ is an array", "object of strings"]),
        ("tensor null", ["b is null", "object"]),
        ("field missing", ["b: no data_offsets"]),
    ],
)
def test_check_names_file_and_cause(tmp_path: Path, header: str, parts: list[str]) -> None:
    file = write(tmp_path, HEADERS[header])
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
    )
    ran = vexport("check", tmp_path, "--static")
    assert ran.code == 1
    assert_contains(ran.stdout, file.name, *parts)
