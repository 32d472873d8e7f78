"""Ask lm-eval's tasks with pictures (`doc_to_image`) as conversations.

lm-eval renders the prompt of such a task as text with a placeholder for each picture, and hands the
pictures over beside the prompt. Here each request gets a conversation with both in their order. The
text that lm-eval hashes and stores has a digest in the place of each picture.
"""

import hashlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.calibration.conversations import RowError
from vexport.calibration.picture_rows import Picture
from vexport.calibration.pictures import in_rgb, open_picture, read_picture
from vexport.errors import InputError
from vexport.errors.extras import require_extra
from vexport.inference.decoding import PURPOSE, document_errors
from vexport.inference.shipped.base import Conversation
from vexport.inference.task_data import found_documents
from vexport.inference.tasks import leaves
from vexport.records import Json
from vexport.rules import sight as rules
from vexport.words import plural

if TYPE_CHECKING:
    import PIL.Image
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task

_PLACEHOLDER = "<image>"
Message = Mapping[str, str]


class _Chat(str):
    """The messages of a prompt, in the place of the text that a chat template makes of them."""

    messages: Sequence[Message]

    def __new__(cls, messages: Sequence[Message], **_: object) -> "_Chat":
        chat = super().__new__(cls, messages)
        chat.messages = messages
        return chat


def takes_pictures(task: "Task") -> bool:
    """Return True if lm-eval's task has pictures, or sound, which `ask_with_pictures` refuses."""
    return task.config.doc_to_image is not None or task.config.doc_to_audio is not None


def ask_with_pictures(
    task: "Task", include_paths: Sequence[Path], files: MutableMapping[str, str]
) -> None:
    """Make the requests of a task with pictures conversations.

    The SHA-256 of each file with a picture is added to `files`. Raises InputError if the task does
    not generate text, or has sound. Later, the task raises InputError for a document whose pictures
    cannot be used.
    """
    _require_form(task)
    require_extra("PIL", PURPOSE)
    folder = _folder(task, include_paths)
    build, construct = task.build_all_requests, task.construct_requests

    def build_all_requests(**options: object) -> None:
        build(**{**options, "apply_chat_template": True, "chat_template": _Chat})

    def construct_requests(doc: Mapping[str, object], ctx: str, **options: object) -> "Instance":
        metadata = options["metadata"]
        assert isinstance(metadata, tuple)
        where = f"task {task.config.task}, document {metadata[1]}"
        with document_errors(where):
            request = construct(doc=doc, ctx=ctx, **options)
            prompt, generation, media = request.args
            pictures = _pictures(media["visual"], folder, files)
            messages = prompt.messages if isinstance(prompt, _Chat) else _one_message(prompt)
            request.conversation = _conversation(messages, pictures)
        request.arguments = (_described(messages, pictures), generation)
        request.doc = without_pictures(doc)
        return request

    task.MULTIMODAL = False  # for lm-eval, the requests are texts
    task.build_all_requests = build_all_requests
    task.construct_requests = construct_requests


def _require_form(task: "Task") -> None:
    where = f"task {task.config.task}"
    if task.config.doc_to_audio is not None:
        raise InputError.of(rules.TASK, where, found="a task with sound")
    if task.OUTPUT_TYPE != "generate_until":
        found = f"a task with pictures and `output_type: {task.OUTPUT_TYPE}`"
        raise InputError.of(rules.TASK, where, found=found)


def _folder(task: "Task", include_paths: Sequence[Path]) -> Path | None:
    """Return the folder of a task's documents, or None if they are not local files."""
    given = (task.config.dataset_kwargs or {}).get("data_files")
    files = found_documents(given, str(task.config.task), include_paths)
    local = [each for each in leaves(files) if isinstance(each, str) and "://" not in each]
    return Path(local[0]).resolve().parent if local else None


def _pictures(
    visual: object, folder: Path | None, files: MutableMapping[str, str]
) -> "list[PIL.Image.Image]":
    """Return the pictures of a document. lm-eval's task gives one picture or a list."""
    given = visual if isinstance(visual, (list, tuple)) else [visual]
    stored = [Picture(f"doc_to_image[{number}]", each) for number, each in enumerate(given)]
    return [_opened(picture, folder, files) for picture in stored if picture.stored is not None]


def _opened(
    picture: Picture, folder: Path | None, files: MutableMapping[str, str]
) -> "PIL.Image.Image":
    import PIL.Image

    if isinstance(picture.stored, PIL.Image.Image):
        return in_rgb(picture.stored)
    return open_picture(read_picture(picture, folder, folder, files), picture)


def _one_message(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _conversation(
    messages: Sequence[Message], pictures: "Sequence[PIL.Image.Image]"
) -> Conversation:
    """Put pictures in the place of the placeholders. Raises RowError if the numbers differ."""
    found = sum(message["content"].count(_PLACEHOLDER) for message in messages)
    if found != len(pictures):
        shown = plural(len(pictures), "picture")
        raise RowError(f"{shown}, but {found:,} {_PLACEHOLDER} in the text")
    left = iter(pictures)
    return Conversation(
        messages=tuple(
            {"role": message["role"], "content": _content(message["content"], left)}
            for message in messages
        )
    )


def _content(text: str, pictures: "Iterator[PIL.Image.Image]") -> Json:
    from vexport.inference.pictures import data_address

    first, *others = text.split(_PLACEHOLDER)
    if not others:
        return text
    parts: list[Json] = []
    for number, following in enumerate([first, *others]):
        if number:
            address = data_address(next(pictures))
            parts.append({"type": "image_url", "image_url": {"url": address}})
        if following:
            parts.append({"type": "text", "text": following})
    return parts


def _described(messages: Sequence[Message], pictures: "Sequence[PIL.Image.Image]") -> str:
    """Return the messages as text, with digests of the pictures."""
    text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
    first, *others = text.split(_PLACEHOLDER)
    shown = zip(pictures, others, strict=True)
    return first + "".join(f"<image {_digest(picture)}>{rest}" for picture, rest in shown)


def without_pictures(value: object) -> object:
    """Return a part of a document with digests in the place of pictures and bytes.

    lm-eval would hash and store a picture as text with its place in memory.
    """
    import PIL.Image

    if isinstance(value, Mapping):
        return {name: without_pictures(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(without_pictures, value)]
    if isinstance(value, PIL.Image.Image):
        return f"picture {_digest(value)}"
    if isinstance(value, bytes):
        return f"bytes {_hash(value)}"
    return value


def _digest(picture: "PIL.Image.Image") -> str:
    return _hash(f"{picture.mode} {picture.size} ".encode() + picture.tobytes())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
