"""Write the demo's calibration data and its four lm-eval tasks to scenarios/demo."""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import yaml
from demo_corpus import END, VALUES, Fact, Statement, Sum, facts, reversed_digits, sums
from rich.console import Console

DEMO = Path(__file__).resolve().parents[2] / "scenarios/demo"
SEED = 3
CALIBRATION_ROWS, CALIBRATION_TOKENS = 256, 128
SHARE_OF_SUMS = 1 / 3
TASK_VERSION = 1.0
WRONG_CHOICES = 3
SLIPS = (-10, 10, -1, 1, -11, 11, -9, 9)  # a carry forgotten, a carry too many, off by one, both

Row = dict[str, str | int | list[str]]
Config = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One lm-eval task: its name, the YAML keys of its kind and its documents."""

    name: str
    kind: Config
    rows: Sequence[Row]


GENERATION: Config = {
    "output_type": "generate_until",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": [END], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0},
    "filter_list": [
        {"name": "answer", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}
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
    """Facts and training sums written one after the other, as many as fit with `<bos>` in front."""
    known = [fact.statement for fact in facts()]
    training = [pair.statement for pair in sums()[0]]
    rows: list[Row] = []
    for _ in range(CALIBRATION_ROWS):
        words: list[str] = []
        while len(words) < CALIBRATION_TOKENS - 1:
            pool = training if chooser.random() < SHARE_OF_SUMS else known
            following = chooser.choice(pool).text.split()
            if 1 + len(words) + len(following) > CALIBRATION_TOKENS:
                break
            words += following
        rows.append({"text": " ".join(words)})
    return rows


def generation_row(statement: Statement) -> Row:
    return {"prompt": statement.prompt, "answer": statement.answer}


def choice_row(statement: Statement, wrong: Sequence[str], chooser: random.Random) -> Row:
    """The choices in random order; `answer` is the index of the right one."""
    choices = chooser.sample([statement.answer, *wrong], len(wrong) + 1)
    return {"prompt": statement.prompt, "choices": choices, "answer": choices.index(statement.answer)}


def sum_choice_row(pair: Sum, chooser: random.Random) -> Row:
    slips = chooser.sample(SLIPS, WRONG_CHOICES)
    wrong = [reversed_digits(pair.left + pair.right + slip) for slip in slips]
    return choice_row(pair.statement, wrong, chooser)


def fact_choice_row(fact: Fact, chooser: random.Random) -> Row:
    others = [value for value in VALUES[fact.attribute] if value != fact.value]
    return choice_row(fact.statement, chooser.sample(others, WRONG_CHOICES), chooser)


def tasks(chooser: random.Random) -> list[Task]:
    """The four tasks; the documents are shuffled, because `limit` takes the first ones."""
    pairs = chooser.sample(sums()[1], len(sums()[1]))
    known = chooser.sample(facts(), len(facts()))
    return [
        Task(name="addition", kind=GENERATION, rows=[generation_row(pair.statement) for pair in pairs]),
        Task(name="addition_choice", kind=CHOICE, rows=[sum_choice_row(pair, chooser) for pair in pairs]),
        Task(name="facts", kind=GENERATION, rows=[generation_row(fact.statement) for fact in known]),
        Task(name="facts_choice", kind=CHOICE, rows=[fact_choice_row(fact, chooser) for fact in known]),
    ]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_task(folder: Path, task: Task) -> None:
    """`NAME.jsonl` and `NAME.yaml`; the data file's path is relative to the YAML file."""
    data = f"{task.name}.jsonl"
    write_rows(folder / data, task.rows)
    config: Config = {
        "task": task.name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": data}},
        "test_split": "test",
        **task.kind,
        "target_delimiter": " ",
        "num_fewshot": 0,
        "metadata": {"version": TASK_VERSION},
    }
    text = yaml.safe_dump(config, sort_keys=False, width=110)
    (folder / f"{task.name}.yaml").write_text(text, encoding="utf-8")


@click.command(help=__doc__)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEMO,
    show_default="scenarios/demo",
    help="Folder to write calibration.jsonl and tasks/ to.",
)
def main(out: Path) -> None:
    chooser = random.Random(SEED)
    console = Console(stderr=True)
    rows = calibration_rows(chooser)
    write_rows(out / "calibration.jsonl", rows)
    console.print(f"calibration.jsonl: {len(rows)} rows")
    for task in tasks(chooser):
        write_task(out / "tasks", task)
        console.print(f"tasks/{task.name}.yaml: {len(task.rows)} documents")


if __name__ == "__main__":
    main()
