"""The same few-shot examples for a document, whichever other documents are asked. Used in the worker only.

lm-eval draws the examples of one document after the other from one random state (`ContextSampler` in
lm_eval/api/samplers.py, 0.4.13): where only some documents are asked, each would get other examples than in a
run over all of them, and its prompt would be another one.
"""

from collections.abc import Sequence
from typing import Protocol

Row = dict[str, object]


class Sampler(Protocol):
    """What lm-eval's tasks use of a sampler."""

    def sample(self, n: int, eval_doc: Row | None = None) -> Sequence[Row]:
        """`n` examples, none of them `eval_doc`."""
        ...

    def set_rnd(self, rnd: int | None) -> object:
        """Start again from a seed."""
        ...


class Task(Protocol):
    """What is used of lm-eval's tasks here."""

    sampler: Sampler

    @property
    def eval_docs(self) -> Sequence[Row]:
        """All documents."""
        ...


class IndexedSampler:
    """Draws for each of a task's documents what `inner` draws for it in a run over all documents.

    `documents` are the numbers of those that are asked, in order; None for all.
    """

    def __init__(self, inner: Sampler, task: Task) -> None:
        self._inner, self._task = inner, task
        self._drawn: list[Sequence[Row]] = []
        self._asked = 0
        self.documents: Sequence[int] | None = None

    def set_rnd(self, rnd: int | None) -> "IndexedSampler":
        """Start again from a seed, with the first document."""
        self._inner.set_rnd(rnd)
        self._drawn, self._asked = [], 0
        return self

    def sample(self, n: int, eval_doc: Row | None = None) -> Sequence[Row]:
        """`n` examples for the next document, none of them `eval_doc`."""
        number = self._asked if self.documents is None else self.documents[self._asked]
        self._asked += 1
        while len(self._drawn) < number:  # for the documents that are not asked
            other = None if eval_doc is None else self._task.eval_docs[len(self._drawn)]
            self._drawn.append(self._inner.sample(n, eval_doc=other))
        self._drawn.append(self._inner.sample(n, eval_doc=eval_doc))
        return self._drawn[number]


def draw_by_document(task: Task, documents: Sequence[int] | None) -> None:
    """Let a task's examples depend on the document's number alone; a task that draws none stays as it is."""
    sampler = getattr(task, "sampler", None)
    if sampler is None:
        return
    if not isinstance(sampler, IndexedSampler):
        sampler = task.sampler = IndexedSampler(sampler, task)
    sampler.documents = documents
