"""Digests of questions, and the comparison of a task's questions with expected digests.

Accepted baselines store a digest of each question. A worker process compares them with the
questions of this evaluation before it starts an engine or sends a prompt.
"""

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence

from vexport.errors import InputError
from vexport.records import Json
from vexport.rules import baseline as rules

DIGEST_LENGTH = 3
"""Base64 characters (6 bits each) per question.

The probability that a changed question has the same digest is 1 in 262144.
"""
HASHES = ("doc_hash", "prompt_hash", "target_hash")
"""lm-eval's hashes of a document, its prompt and its target."""
QuestionDigests = Mapping[str, Mapping[str, str]]
"""Digest of each question, by task and by document."""


def question_digest(doc_id: int | str, hashes: Sequence[str]) -> str:
    """Return a digest of a document, its prompt and its target."""
    text = f"{doc_id} {' '.join(hashes)}"
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())[:DIGEST_LENGTH].decode()


def changed_questions(
    expected: QuestionDigests, samples: Mapping[str, Sequence[Mapping[str, Json]]]
) -> Iterator[InputError]:
    """Yield an error for each task with other questions than expected.

    `samples` are lm-eval's samples by task. Tasks without expected digests are skipped.
    """
    for task, digests in expected.items():
        rows = samples.get(task)
        if rows is None:
            continue
        found = {
            str(row["doc_id"]): question_digest(
                str(row["doc_id"]), [str(row[name]) for name in HASHES]
            )
            for row in rows
        }
        where = f"task {task}"
        if len(found) != len(digests):
            yield InputError.of(
                rules.OTHER_DOCUMENTS,
                where,
                count=len(found),
                metric="questions",
                accepted=len(digests),
                older="",
            )
            continue
        changed = [doc for doc, digest in digests.items() if found.get(doc) != digest]
        if changed:
            reason = f"{len(changed):,} of {len(digests):,} questions changed"
            place = f"{where}, document {changed[0]}"
            yield InputError.of(rules.OTHER_QUESTION, place, reason=reason)
