"""Documents of the task `sight`: conversations with and without pictures."""

import hashlib
from collections.abc import Sequence

from PIL import Image

from vexport.inference.pictures import PictureQuestion, data_address, picture_questions
from vexport.inference.shipped.base import Conversation, Document
from vexport.records import Json


def documents_of(count: int, seed: int) -> list[Document]:
    """Return the documents of a seed."""
    questions = [*picture_questions(count, seed)]
    return [
        _document(question, _other(questions, number)) for number, question in enumerate(questions)
    ]


def _other(questions: Sequence[PictureQuestion], number: int) -> PictureQuestion:
    """Return the next question about the same topic with another answer."""
    own = questions[number]
    following = [*questions[number + 1 :], *questions[:number]]
    return next(each for each in following if each.topic is own.topic and each.answer != own.answer)


def _document(question: PictureQuestion, other: PictureQuestion) -> Document:
    topic = question.topic
    return Document(
        question=topic.prompt,
        target=topic.choices[question.answer],
        conversations=(
            _conversation(topic.prompt, question.picture),
            _conversation(topic.prompt, None),
            _conversation(topic.prompt, other.picture),
        ),
        details={
            "topic": topic.name,
            "choices": "|".join(topic.choices),
            "picture": digest(question.picture),
            "other_picture": digest(other.picture),
        },
    )


def _conversation(prompt: str, picture: Image.Image | None) -> Conversation:
    content: Json = prompt
    if picture is not None:
        shown: Json = {"type": "image_url", "image_url": {"url": data_address(picture)}}
        content = [shown, {"type": "text", "text": prompt}]
    return Conversation(messages=({"role": "user", "content": content},))


def digest(picture: Image.Image) -> str:
    """Return a digest of the pixels."""
    return hashlib.sha256(picture.tobytes()).hexdigest()[:16]
