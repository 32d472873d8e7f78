"""A tokenizer.json, opened by the library that transformers and vLLM open it with."""

from pathlib import Path

from tokenizers import Tokenizer

from vexport.errors import InputError

FILE = "tokenizer.json"


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a file; InputError with the library's words where it cannot be opened."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # it raises no other class, from Rust
        got = f"one that the library does not open: {error}"
        raise InputError(str(path), got=got, need="a tokenizer", fix="copy the source's file") from error
