"""Hand a part of a shipped task to lm-eval as a task. Only worker processes use this module."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vexport.inference.shipped import SHIPPED
from vexport.inference.shipped.base import Conversation, Document, ShippedPart
from vexport.inference.stored_responses import FinishedText

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

_NUMBER = "number"
Row = Mapping[str, str | int]
"""A document as lm-eval stores it: its number, question, target and details."""
_NOTHING = Conversation(messages=())


def lm_eval_task(part: ShippedPart) -> "ConfigurableTask":
    """Return lm-eval's task with the documents of a part."""
    import datasets
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import ConfigurableTask

    kind = SHIPPED[part.task]
    documents = kind.documents(part)

    @dataclass
    class ChatInstance(Instance):  # type: ignore[misc]
        """A request with a conversation. Its arguments are the question and generation kwargs."""

        conversation: Conversation = field(default=_NOTHING)

    class ShippedLmEvalTask(ConfigurableTask):  # type: ignore[misc]
        system = ""

        def download(self, *_: object, **__: object) -> None:
            rows = [_row(number, document) for number, document in enumerate(documents)]
            self.dataset = {"test": datasets.Dataset.from_list(rows)}

        def fewshot_context(
            self, doc: Row, *_: object, system_instruction: str | None = None, **__: object
        ) -> str:
            """Return the question alone. The conversation is rendered when it is asked."""
            self.system = system_instruction or ""
            return str(doc["question"])

        def construct_requests(self, doc: Row, ctx: str, **options: object) -> list[ChatInstance]:
            conversations = documents[int(doc[_NUMBER])].conversations
            return [
                ChatInstance(
                    request_type="generate_until",
                    doc=doc,
                    arguments=(ctx, deepcopy(self.config.generation_kwargs)),
                    idx=index,
                    metadata=options["metadata"],
                    conversation=_with_system(conversation, self.system),
                )
                for index, conversation in enumerate(conversations)
            ]

    def score(doc: Row, responses: Sequence[str]) -> Mapping[str, float]:
        # Without a model, responses are plain texts.
        finished = [
            each if isinstance(each, FinishedText) else FinishedText(each) for each in responses
        ]
        return kind.score(part, documents[int(doc[_NUMBER])], finished)

    return ShippedLmEvalTask(
        config={
            "task": part.name,
            "test_split": "test",
            "doc_to_text": "question",
            "doc_to_target": "target",
            "process_results": score,
            "output_type": "generate_until",
            "generation_kwargs": {
                "until": [],
                "do_sample": False,
                "max_gen_toks": kind.max_gen_toks,
            },
            "metric_list": [
                {"metric": metric, "aggregation": "mean", "higher_is_better": True}
                for metric in kind.metrics
            ],
            "num_fewshot": 0,
            "metadata": {"version": 1},
        }
    )


def _row(number: int, document: Document) -> dict[str, str | int]:
    shown = {"question": document.question, "target": document.target}
    return {_NUMBER: number, **shown, **document.details}


def _with_system(conversation: Conversation, text: str) -> Conversation:
    if not text:
        return conversation
    first = {"role": "system", "content": text}
    return replace(conversation, messages=(first, *conversation.messages))
