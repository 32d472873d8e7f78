"""Makes two tasks of lm-eval from the documentation in two sdists; scripts/real-model runs it.

    .venv-real/bin/python scripts/real_model/tasks.py FOLDER_OF_SDISTS OUT

OUT gets cloze (the last word of a passage, which occurs in it before) and continuation (which of four
sentences comes next), each a YAML file and a JSONL file of documents, and SOURCES. Passages come from
documents that are not calibrated on, as text.py splits them. OUT is there whole or not at all.
"""

import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from text import DJANGO, SYMPY, new_folder, paragraphs, read_documents, split, write_rows

DOCUMENTS = 1200
WORDS = (15, 70)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {name}.jsonl
test_split: test
num_fewshot: 0
{fields}metric_list:
- metric: acc
  aggregation: mean
  higher_is_better: true
metadata:
  version: 1.0
"""
FIELDS = {
    "cloze": """\
output_type: loglikelihood
doc_to_text: '{{prompt}}'
doc_to_target: '{{" " + word}}'
""",
    "continuation": """\
output_type: multiple_choice
doc_to_text: '{{prompt}}'
doc_to_choice: '{{choices}}'
doc_to_target: answer
target_delimiter: ' '
""",
}
Sentences = list[str]


def clozes(passages: Sequence[Sentences]) -> Iterator[dict[str, object]]:
    """Passages without their last word, where that is a longer word that stands in them before."""
    for sentences in passages:
        words = " ".join(sentences).split()[: WORDS[1]]
        for end in range(len(words), WORDS[0], -1):
            word = words[end - 1].rstrip(".,:;!?")
            if word.isalpha() and word.islower() and len(word) > 4 and word in words[: end - 1]:
                yield {"prompt": " ".join(words[: end - 1]), "word": word}
                break


def continuations(passages: Sequence[Sentences], rng: random.Random) -> Iterator[dict[str, object]]:
    """A passage, its next sentence, and three last sentences of other passages of about the same length."""
    pool = sorted((sentences[-1] for sentences in passages if len(sentences) > 1), key=len)
    for sentences in passages:
        *before, true = sentences
        prompt = " ".join(before)
        if not WORDS[0] <= len(prompt.split()) <= WORDS[1] or len(true.split()) < 6:
            continue
        place = pool.index(true)
        near = [other for other in pool[max(0, place - 20) : place + 21] if other != true]
        choices = [true, *rng.sample(near, 3)]
        rng.shuffle(choices)
        yield {"prompt": prompt, "choices": choices, "answer": choices.index(true)}


def main() -> None:
    """Read the sdists and write the tasks."""
    sdists, out = (Path(word).absolute() for word in sys.argv[1:])
    if out.is_dir():
        return
    _, held_out = split(read_documents(sdists, *DJANGO))
    documents = [*held_out, *read_documents(sdists, *SYMPY).values()]
    passages = [SENTENCE_END.split(text) for document in documents for text in paragraphs(document)]
    rng = random.Random(0)
    made = {"cloze": list(clozes(passages)), "continuation": list(continuations(passages, rng))}
    with new_folder(out) as folder:
        for name, rows in made.items():
            if len(rows) < DOCUMENTS:
                raise SystemExit(f"tasks: got {len(rows)} documents of {name}, need {DOCUMENTS}")
            write_rows(folder / f"{name}.jsonl", rng.sample(rows, DOCUMENTS))
            text = TASK.format(name=name, fields=FIELDS[name])
            (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
