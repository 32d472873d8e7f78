"""Read the pictures of calibration rows, and prepare them with the checkpoint's processor.

Pictures come from data addresses, from bytes, and from files in the folder of the data. Remote
addresses are not fetched. As in vLLM (multimodal/media/image.py), pictures are turned by their EXIF
orientation, and transparent pixels become white.
"""

import base64
import binascii
import io
import os
import re
import stat
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from vexport.calibration.conversations import PICTURE_MARK, RowError
from vexport.calibration.picture_rows import Picture
from vexport.errors import InputError, first_line
from vexport.errors.extras import MissingPackage, is_installed, require_extra
from vexport.files import digest_bytes
from vexport.records.values import json_type
from vexport.rules import calibration as rules
from vexport.words import clip, plural

if TYPE_CHECKING:
    import PIL.Image
    import torch

# Formats that Pillow decodes itself. EPS would start Ghostscript.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
# Maximum size of a stored picture in bytes. Pillow limits the number of pixels.
LARGEST_PICTURE = 1 << 26
# The longest path of Linux. A longer text is base64.
LONGEST_PATH = 4096
# Matches addresses such as https://, s3:// and hf://.
_REMOTE = re.compile(r"(?!file:)[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_PURPOSE = "calibrating on pictures"


def sees_pictures(config: Mapping[str, object]) -> bool:
    """Return True if a model takes pictures: its config.json has a `vision_config`."""
    return isinstance(config.get("vision_config"), Mapping)


def read_picture(
    picture: Picture, folder: Path | None, root: Path | None, files: MutableMapping[str, str]
) -> bytes:
    """Return the bytes of a picture.

    Paths are relative to `folder` and must stay in `root`. Both are None for data without a folder.
    The SHA-256 of a file is added to `files`. Raises RowError if the picture cannot be read.
    """
    stored = picture.stored
    if isinstance(stored, Mapping):
        stored = stored.get("bytes") or stored.get("path") or stored.get("url")
    if isinstance(stored, bytes):
        return stored
    if not isinstance(stored, str):
        raise _error(picture, f"{json_type(stored)} instead of a picture")
    if stored[:5].lower() == "data:":
        return _decoded(picture, stored.partition(",")[2])
    if _REMOTE.match(stored):
        reason = f"{picture.field}: the remote picture {clip(stored, 60)}, which is not fetched"
        raise RowError(reason, rules.REMOTE_PICTURE)
    if len(stored) > LONGEST_PATH:
        return _decoded(picture, stored)
    if stored[:7].lower() == "file://":
        stored = unquote(stored[7:])
    elif (data := _plain_base64(stored)) is not None:
        return data
    data = _read_file(picture, stored, folder, root)
    files[str(Path(folder or "", stored).absolute())] = digest_bytes(data)  # links may change
    return data


def _error(picture: Picture, reason: str) -> RowError:
    return RowError(f"{picture.field}: {reason}", rules.PICTURE)


def _decoded(picture: Picture, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _error(picture, "a data address that is not valid base64") from None


def _plain_base64(text: str) -> bytes | None:
    """Return the picture that a text is without the start of a data address, or None."""
    import PIL.Image

    try:
        data = base64.b64decode(text, validate=True)
        PIL.Image.open(io.BytesIO(data), formats=FORMATS).close()
    except Exception:  # decoders raise many kinds of errors
        return None
    return data


def _read_file(picture: Picture, name: str, folder: Path | None, root: Path | None) -> bytes:
    if folder is None or root is None:
        raise _error(picture, f"the path {clip(name, 60)!r} in data without a folder")
    try:
        path = (folder / name).resolve(strict=True)
        details = path.stat()
    except (OSError, ValueError, RuntimeError):
        raise _error(picture, f"no file {clip(name, 60)!r} in {folder}") from None
    if not path.is_relative_to(root.resolve()):
        raise _error(picture, f"the path {clip(name, 60)!r}, which leaves the folder {root}")
    if not stat.S_ISREG(details.st_mode):
        raise _error(picture, f"{clip(name, 60)!r}, which is no file")
    _require_size(picture, details.st_size)
    try:
        return path.read_bytes()
    except OSError as error:
        raise _error(picture, f"{clip(name, 60)!r} ({error.strerror or error})") from None


def _require_size(picture: Picture, size: int) -> None:
    if size > LARGEST_PICTURE:
        reason = f"{picture.field}: a picture of {size:,} bytes, more than {LARGEST_PICTURE:,}"
        raise RowError(reason, rules.PICTURE_SIZE)


def open_picture(data: bytes, picture: Picture) -> "PIL.Image.Image":
    """Decode a picture, in RGB. Raises RowError for too many pixels and for data that is broken."""
    import PIL.Image
    import PIL.ImageOps

    _require_size(picture, len(data))
    most = PIL.Image.MAX_IMAGE_PIXELS or LARGEST_PICTURE
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large pictures, which are refused
            image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = image.size
            if width * height > most:
                raise PIL.Image.DecompressionBombError(f"{width:,} x {height:,} pixels")
            image.load()
            return in_rgb(PIL.ImageOps.exif_transpose(image))
    except PIL.Image.DecompressionBombError as error:
        reason = f"{picture.field}: a picture with more than {most:,} pixels ({first_line(error)})"
        raise RowError(reason, rules.PICTURE_SIZE) from None
    except MemoryError:
        raise
    except PIL.UnidentifiedImageError:
        raise _error(picture, "data that is no picture") from None
    except Exception as error:  # decoders raise many kinds of errors
        raise _error(picture, f"a broken picture ({first_line(error)})") from None


def in_rgb(image: "PIL.Image.Image") -> "PIL.Image.Image":
    """Return a picture in RGB. Transparent pixels become white."""
    import PIL.Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = PIL.Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return white


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSample:
    """A sample with pictures. The model's inputs are made again whenever they are needed.

    Inputs of many pictures would not fit in memory. `pictures` are the places of their bytes in the
    processor's file. `tokens` is the number of tokens after cutting. `values` is the number of
    values of all pictures, as the tower reads them. `digest` is the SHA-256 of the inputs.
    """

    text: str
    pictures: tuple[tuple[int, int], ...]
    adds_special_tokens: bool
    tokens: int
    values: int
    digest: str
    processor: "PictureProcessor"

    def inputs(self) -> "Mapping[str, torch.Tensor]":
        """Return the inputs of the model without `input_ids`."""
        stored = map(self.processor.stored, self.pictures)
        images = [open_picture(data, Picture("picture", data)) for data in stored]
        inputs = self.processor.run(self.text, images, adds_special_tokens=self.adds_special_tokens)
        return self.processor.cut(inputs, self.tokens)


class PictureProcessor:
    """The checkpoint's processor, as transformers loads it.

    Raises EnvironmentFault if a package is missing, and InputError if transformers cannot load the
    processor.
    """

    def __init__(self, checkpoint: Path, *, trust_remote_code: bool) -> None:
        require_extra("PIL", _PURPOSE)
        self._checkpoint = checkpoint
        # The bytes of all pictures. They are read again for each walk.
        self._file = tempfile.TemporaryFile(prefix="vexport-pictures-")  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        with _without_video():
            self._processor = _load(checkpoint, trust_remote_code)

    @property
    def token(self) -> str:
        """Return the text that stands for a picture in the text that the processor reads."""
        token = getattr(self._processor, "image_token", None)
        if not isinstance(token, str):
            reason = f"{type(self._processor).__name__} has no token for pictures"
            raise InputError.of(rules.PROCESSOR, str(self._checkpoint), reason=reason)
        return token

    def ids(
        self, text: str, pictures: Sequence[bytes], fields: Sequence[Picture], *, is_rendered: bool
    ) -> tuple[Sequence[int], "PictureSample"]:
        """Return the token ids of a text with pictures, and the sample.

        PICTURE_MARK or the processor's token is in the place of each picture. Raises RowError if
        a picture or the text cannot be prepared.
        """
        images = [open_picture(data, field) for data, field in zip(pictures, fields, strict=True)]
        text = text.replace(PICTURE_MARK, self.token)
        if (found := text.count(self.token)) != len(images):
            raise RowError(
                f"{plural(len(images), 'picture')}, but {found:,} in the text"
                + (" that the chat template renders" if is_rendered else ""),
                rules.PICTURE,
            )
        try:
            inputs = self.run(text, images, adds_special_tokens=not is_rendered)
        except (MemoryError, ImportError):
            raise
        except Exception as error:
            reason = f"pictures that the processor refuses ({first_line(error)})"
            raise RowError(reason, rules.PICTURE) from None
        ids = inputs["input_ids"][0].tolist()
        return ids, PictureSample(
            text=text,
            pictures=tuple(map(self._store, pictures)),
            adds_special_tokens=not is_rendered,
            tokens=len(ids),
            values=max(each.numel() for each in inputs.values()),
            digest=digest_inputs(inputs),
            processor=self,
        )

    def _store(self, data: bytes) -> tuple[int, int]:
        start = self._file.seek(0, os.SEEK_END)
        self._file.write(data)
        self._file.flush()
        return start, len(data)

    def stored(self, place: tuple[int, int]) -> bytes:
        """Return the bytes of a picture of a sample."""
        start, length = place
        return os.pread(self._file.fileno(), length, start)

    def run(
        self, text: str, images: "Sequence[PIL.Image.Image]", *, adds_special_tokens: bool
    ) -> "Mapping[str, torch.Tensor]":
        """Return all inputs of the model for a text with pictures."""
        import torch

        with _without_video():
            made = self._processor(
                text=[text],
                images=list(images),
                return_tensors="pt",
                add_special_tokens=adds_special_tokens,
            )
        return {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}

    def cut(
        self, inputs: "Mapping[str, torch.Tensor]", tokens: int
    ) -> "Mapping[str, torch.Tensor]":
        """Return the inputs beside `input_ids`, with values for the first tokens only.

        The attention mask is left out, because it hides nothing.
        """
        shape = inputs["input_ids"].shape
        return {
            name: value[:, :tokens] if value.shape == shape else value
            for name, value in inputs.items()
            if name not in ("input_ids", "attention_mask")
        }


def digest_inputs(inputs: "Mapping[str, torch.Tensor]") -> str:
    """Return the SHA-256 of the model's inputs: names, types, shapes and bytes."""
    import torch

    parts = []
    for name, value in sorted(inputs.items()):
        data = value.contiguous().flatten().view(torch.uint8)  # numpy has no bfloat16
        digest = digest_bytes(data.numpy().tobytes())
        parts.append(f"{name} {value.dtype} {tuple(value.shape)} {digest}")
    return digest_bytes("\n".join(parts).encode())


def _load(checkpoint: Path, trust_remote_code: bool) -> Any:
    import transformers

    load = transformers.AutoProcessor.from_pretrained
    try:
        return load(checkpoint, trust_remote_code=trust_remote_code)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise InputError.of(rules.PROCESSOR_CODE, str(checkpoint)) from None
        # Some processors import torchvision, others raise errors that name it, and others need
        # their part for video, which `_without_video` leaves out.
        named = re.search("torchvision|video_processor", str(error), re.IGNORECASE)
        lacks_torchvision = isinstance(error, ImportError) or named is not None
        if lacks_torchvision and not is_installed("torchvision"):
            raise MissingPackage("torchvision", f"{_PURPOSE} of {checkpoint}") from None
        reason = first_line(error)
        raise InputError.of(rules.PROCESSOR, str(checkpoint), reason=reason) from None


@contextmanager
def _without_video() -> Iterator[None]:
    """Use processors without their part for video inside the block, if torchvision is missing.

    Only the parts for video need it in most processors.
    """
    if is_installed("torchvision"):
        yield
        return
    from transformers.processing_utils import ProcessorMixin

    before = ProcessorMixin.__dict__["get_attributes"]

    def attributes(processor: type) -> list[str]:
        return [name for name in before.__func__(processor) if name != "video_processor"]

    ProcessorMixin.get_attributes = classmethod(attributes)
    try:
        yield
    finally:
        ProcessorMixin.get_attributes = before
