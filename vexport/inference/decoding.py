"""Limits and errors of the pictures in the documents of lm-eval's tasks."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from vexport.calibration.conversations import RowError
from vexport.calibration.picture_rows import Picture
from vexport.calibration.pictures import open_picture
from vexport.errors import InputError, VexportError, first_line
from vexport.errors.extras import require_extra
from vexport.files import digest_bytes
from vexport.inference.model import override_attribute
from vexport.rules import sight as rules

PURPOSE = "tasks with pictures"


@contextmanager
def document_errors(where: str) -> Iterator[None]:
    """Raise InputError inside the block if a document's pictures cannot be used."""
    try:
        yield
    except VexportError:
        raise
    except RowError as error:
        raise InputError.of(rules.DOCUMENT, where, reason=error.reason) from error
    except (SyntaxError, ValueError) as error:  # a template that does not make a list
        reason = f"no pictures from `doc_to_image` ({first_line(error)})"
        raise InputError.of(rules.DOCUMENT, where, reason=reason) from error


@contextmanager
def bounded_pictures(files: MutableMapping[str, str]) -> Iterator[None]:
    """Inside the block, pictures in columns of datasets are decoded as `open_picture` does.

    The SHA-256 of each file with a picture is added to `files`. Reading a document raises
    InputError if a picture has too many pixels, or is broken.
    """
    import datasets

    original: Callable[..., object] = datasets.Image.decode_example

    def decode_example(self: object, value: object, *options: object, **named: object) -> object:
        data = _stored_bytes(value, files)
        if data is None:
            return original(self, value, *options, **named)
        require_extra("PIL", PURPOSE)
        with document_errors("a document of a task"):
            picture = open_picture(data, Picture("picture", value))
        mode = getattr(self, "mode", None)
        return picture.convert(mode) if mode else picture

    with override_attribute(datasets.Image, "decode_example", decode_example):
        yield


def _stored_bytes(value: object, files: MutableMapping[str, str]) -> bytes | None:
    """Return the bytes of a picture of a dataset, or None if they are not on this machine."""
    if not isinstance(value, Mapping):
        return None
    if isinstance(data := value.get("bytes"), bytes):
        return data
    path = value.get("path")
    if not isinstance(path, str) or not Path(path).is_file():
        return None
    data = Path(path).read_bytes()
    files[str(Path(path).absolute())] = digest_bytes(data)
    return data
