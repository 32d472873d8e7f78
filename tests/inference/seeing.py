"""A server that takes pictures: it answers the questions of the task `sight`, with faults."""

from collections.abc import Callable
from typing import Any

from tests.inference.replying import CARD, Reply, Sent
from vexport.inference.shipped import SHIPPED
from vexport.inference.shipped.base import ShippedPart

Answer = Callable[[str, str, int], str]
"""A function from the right answer (empty without a picture), the question and the number of the
document to a response."""


def right(target: str, question: str, number: int) -> str:
    return f"It is {target}." if target else "I see no picture."


def blind(target: str, question: str, number: int) -> str:
    return question.rpartition(" ")[2].rstrip(".")


def refusing_pictures(target: str, question: str, number: int) -> str:
    return "I cannot see." if target else blind(target, question, number)


def guessing(target: str, question: str, number: int) -> str:
    """Name a choice by the number of the document, whatever is in the picture."""
    choices = question.split(": ")[1].rstrip(".").replace(" or ", ", ").split(", ")
    return choices[number // 4 * 7 % len(choices)]


def wrong_colours(target: str, question: str, number: int) -> str:
    return "green" if target in ("red", "blue") else right(target, question, number)


class SeeingServer:
    """Replies as vLLM does to conversations with pictures. `asked` has all requests."""

    def __init__(self, answer: Answer = right) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        documents = SHIPPED["sight"].documents(ShippedPart(task="sight", name="sight"))
        self._targets: dict[str, tuple[str, int]] = {}
        for number, document in enumerate(documents):
            (message,) = document.conversations[0].messages
            content: Any = message["content"]
            self._targets[content[0]["image_url"]["url"]] = document.target, number

    @property
    def reply(self) -> Reply:
        return self._reply

    def _reply(self, path: str, body: dict[str, Any]) -> Sent:
        if path == "/v1/models":
            return Sent(content={"data": [{**CARD, "max_model_len": 4096}]})
        if path == "/version":
            return Sent(content={"version": "0.32.0"})
        if path != "/v1/chat/completions":
            return Sent(content={"detail": "Not Found"}, status=404)
        self.asked.append(body)
        content = body["messages"][-1]["content"]
        target, question, number = "", content, 0
        if isinstance(content, list):
            picture, text = content
            target, number = self._targets[picture["image_url"]["url"]]
            question = text["text"]
        response = self.answer(target, question, number)
        message = {"role": "assistant", "content": response}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return Sent(content={"choices": [choice], "usage": {"completion_tokens": 2}})
