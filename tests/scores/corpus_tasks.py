"""Tasks with each of lm-eval's metrics of a whole corpus."""

import json
import random
from pathlib import Path

DATA = """
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
"""
TASKS = {
    "pages": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "last_word": """
output_type: loglikelihood
doc_to_text: "{{text}}"
doc_to_target: " {{option}}"
metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]
""",
    "labels": """
output_type: multiple_choice
doc_to_text: "Is it so? ({{option}})"
doc_to_choice: ["no", "yes"]
doc_to_target: label
metric_list: [{metric: f1}, {metric: mcc}, {metric: brier_score}]
""",
    "kinds": """
output_type: multiple_choice
doc_to_text: "Which is it? ({{kind}})"
doc_to_choice: ["low", "middle", "high"]
doc_to_target: kind_number
metric_list: [{metric: mcc}, {metric: brier_score}]
""",
    "translation": """
output_type: generate_until
doc_to_text: "Translate: {{text}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 64}
metric_list: [{metric: bleu}, {metric: chrf}, {metric: chrf++}, {metric: ter}]
""",
}
_WORDS = ("the", "a", "cat", "dog", "house", "river", "sees", "finds", "under", "near,", "old.")
_KINDS = ("low", "middle", "high")


def make_corpus_tasks(folder: Path, documents: int) -> list[str]:
    """Write the tasks over the same documents, and return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    choose = random.Random(1)
    rows = []
    for number in range(documents):
        kind = choose.randrange(3)
        label = int(choose.random() < 0.6)
        rows.append(
            {
                "text": f"{number} " + " ".join(choose.choices(_WORDS, k=choose.randint(6, 30))),
                "label": label,
                "option": ("no", "yes")[label],
                "kind": _KINDS[kind],
                "kind_number": kind,
            }
        )
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = []
    for name, text in TASKS.items():
        file = folder / f"{name}.yaml"
        data = DATA.replace("rows.jsonl", str(folder / "rows.jsonl"))
        file.write_text(f"task: {name}{data}{text.lstrip()}")
        files.append(str(file))
    return files
