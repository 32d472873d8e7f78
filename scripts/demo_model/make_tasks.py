"""Write the demo's calibration data and its four lm-eval tasks to scenarios/demo."""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml
from demo_corpus import (
    END,
    VALUES,
    Fact,
    Statement,
    Sum,
    facts,
    folder_argument,
    reversed_digits,
    sums,
)

SEED = 3
CALIBRATION_ROWS, CALIBRATION_TOKENS = 256, 128
SHARE_OF_SUMS = 1 / 3
TASK_VERSION = 1.0
WRONG_CHOICES = 3
SLIPS = (-10, 10, -1, 1, -11, 11, -9, 9)  # a carry forgotten, a carry too many, off by one, both

Row = dict[str, str | int | list[str]]
Config = dict[str, object]


GENERATION: Config = {
    "output_type": "generate_until",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {
        "until": [END],
        "max_gen_toks": 8,
        "do_sample": False,
        "temperature": 0.0,
    },
    "filter_list": [
        {
            "name": "answer",
            "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
        }
    ],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
CHOICE: Config = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{prompt}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def calibration_rows(chooser: random.Random) -> list[Row]:
    """Return rows of facts and training sums. Each row has as many as fit with `<bos>` in front."""
    rows: list[Row] = []
    for _ in range(CALIBRATION_ROWS):
        words: list[str] = []
        while len(words) < CALIBRATION_TOKENS - 1:
            pool: Sequence[Statement] = sums()[0] if chooser.random() < SHARE_OF_SUMS else facts()
            following = chooser.choice(pool).text.split()
            if 1 + len(words) + len(following) > CALIBRATION_TOKENS:
                break
            words += following
        rows.append({"text": " ".join(words)})
    return rows


def free_row(statement: Statement) -> Row:
    return {"prompt": statement.prompt, "answer": statement.answer}


def choice_row(statement: Statement, wrong: Sequence[str], chooser: random.Random) -> Row:
    """Return the choices in random order. `answer` is the index of the right choice."""
    choices = chooser.sample([statement.answer, *wrong], len(wrong) + 1)
    return {
        "prompt": statement.prompt,
        "choices": choices,
        "answer": choices.index(statement.answer),
    }


def sum_choice_row(pair: Sum, chooser: random.Random) -> Row:
    slips = chooser.sample(SLIPS, WRONG_CHOICES)
    return choice_row(pair, [reversed_digits(pair.total + slip) for slip in slips], chooser)


def fact_choice_row(fact: Fact, chooser: random.Random) -> Row:
    others = [value for value in VALUES[fact.attribute] if value != fact.answer]
    return choice_row(fact, chooser.sample(others, WRONG_CHOICES), chooser)


def tasks(chooser: random.Random) -> list[tuple[str, Config, list[Row]]]:
    """Return (name, YAML keys of its kind, documents) of the four tasks.

    The documents are shuffled, because `limit` takes the first documents.
    """
    pairs = chooser.sample(sums()[1], len(sums()[1]))
    known = chooser.sample(facts(), len(facts()))
    return [
        ("addition", GENERATION, [free_row(pair) for pair in pairs]),
        ("addition_choice", CHOICE, [sum_choice_row(pair, chooser) for pair in pairs]),
        ("facts", GENERATION, [free_row(fact) for fact in known]),
        ("facts_choice", CHOICE, [fact_choice_row(fact, chooser) for fact in known]),
    ]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_task(folder: Path, name: str, kind: Config, rows: Iterable[Row]) -> None:
    """Write `NAME.jsonl` and `NAME.yaml`. The data file's path is relative to the YAML file."""
    write_rows(folder / f"{name}.jsonl", rows)
    config: Config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
        **kind,
        "target_delimiter": " ",
        "num_fewshot": 0,
        "metadata": {"version": TASK_VERSION},
    }
    text = yaml.safe_dump(config, sort_keys=False, width=110)
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def main() -> None:
    out, chooser = folder_argument(__doc__), random.Random(SEED)
    (out / "tasks").mkdir(parents=True, exist_ok=True)
    write_rows(out / "calibration.jsonl", calibration_rows(chooser))
    for name, kind, rows in tasks(chooser):
        write_task(out / "tasks", name, kind, rows)


if __name__ == "__main__":
    main()
