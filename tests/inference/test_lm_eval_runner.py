"""The real lm-eval on an engine of the real vLLM."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.inference.in_vllm import Outcomes, Requests
from tests.models import save_llama, write_tokenizer
from tests.scores.make import make_tasks, samples_file
from tests.texts import assert_contains
from vexport.engine.messages import SessionRequest
from vexport.engine.session import Worker
from vexport.inference.repeated import read_repeated
from vexport.inference.tasks import read_tasks
from vexport.judge.verdict import decide
from vexport.records import silent
from vexport.scenario.evaluate import LmEvalSettings
from vexport.scores.readers.lm_eval import read_lm_eval

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

Evaluated = tuple[Path, Outcomes]

DEMO = Path(__file__).parents[2] / "scenarios" / "demo"
DOCUMENTS = 60
TOO_LONG = 'generation_kwargs: {until: ["."], max_gen_toks: 300'
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if enable_thinking is defined %} {{ enable_thinking }}{% endif %}"
)
SYSTEM = "Add both numbers."
CHAT = LmEvalSettings(
    num_fewshot=2,
    limit=DOCUMENTS - 10,
    apply_chat_template=True,
    fewshot_as_multiturn=True,
    system_instruction=SYSTEM,
    gen_kwargs={"max_gen_toks": 3, "temperature": 0},
)
SAMPLED = LmEvalSettings(gen_kwargs={"temperature": 1.0}, seeds=3, limit=30)
PLAIN = LmEvalSettings(limit=DOCUMENTS - 10)
LEAKING = "doc_to_text: \"{{ ''.__class__.__mro__ }}\""


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """Run the same tasks twice (`first`, `second`), then with other settings.

    Some tasks must be refused.
    """
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("vllm")
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 128}
    model = save_llama(folder / "model", **sizes, bos_token_id=None, eos_token_id=2)
    write_tokenizer(model, ["+", "=", ".", "none", "of", "them", *map(str, range(200))])
    (model / "chat_template.jinja").write_text(TEMPLATE)
    sums, choices, _ = make_tasks(folder / "tasks", DOCUMENTS)
    text = Path(sums).read_text()
    (folder / "tasks/long.yaml").write_text(
        text.replace("task: sums", "task: long").replace(
            'generation_kwargs: {until: ["."], max_gen_toks: 2', TOO_LONG
        )
    )
    (folder / "tasks/leak.yaml").write_text(
        text.replace("task: sums", "task: leak").replace('doc_to_text: "{{a}} + {{b}} ="', LEAKING)
    )
    for name in ("sums", "choices"):
        (folder / f"tasks/{name}-chat.yaml").write_text(
            (folder / f"tasks/{name}.yaml").read_text() + "fewshot_split: test\n"
        )
    chat = [str(folder / f"tasks/{name}-chat.yaml") for name in ("sums", "choices")]
    tasks = {"first": [sums, choices], "second": [sums, choices]}
    tasks |= {name: [str(folder / f"tasks/{name}.yaml")] for name in ("long", "leak")}
    tasks |= {"chat": chat, "sampled": [sums, choices], "sampled again": [sums, choices]}
    requests = [
        SessionRequest(
            checkpoint=model,
            tasks=read_tasks(given).write(folder / "resolved" / name),
            output=folder / name,
            max_model_len=64,
            batch_size=16 if name == "chat" else "auto",
            repeat=name in ("second", "chat", "sampled"),
            lm_eval={"chat": CHAT, "sampled": SAMPLED}.get(name.split()[0], PLAIN),
        )
        for name, given in tasks.items()
    ]
    worker = Worker(
        module="tests.inference.in_vllm",
        request=Requests(requests=tuple(requests), cache=folder / "datasets"),
        kind=Outcomes,
        where="lm-eval",
        log=folder / "vllm.log",
        timeout=600,
    )
    return folder, worker.run(silent)


def test_lm_eval_files_are_read(evaluated: Evaluated) -> None:
    folder, outcomes = evaluated
    assert outcomes.errors[0] == ""
    results = read_lm_eval(folder / "first")
    assert {name: len(task.rows) for name, task in results.tasks.items()} == {
        "sums": 50,
        "choices": 50,
    }
    content = json.loads(results.file.read_text())
    assert content["config"]["model_args"]["pretrained"] == str(folder / "model")
    assert {
        content["config"][f"{name}_seed"] for name in ("random", "numpy", "torch", "fewshot")
    } == {0}
    assert {("sums", 50, 50), ("choices", 150, 150)} <= set(outcomes.progress[0])
    assert not (folder / "datasets").exists()


def test_same_engine_gives_same_answers(evaluated: Evaluated) -> None:
    folder, _ = evaluated
    verdict = decide(folder / "first", folder / "second", margin=0.1, alpha=0.05)
    # A model with random weights guesses, so that equal answers may be no evidence for PASS.
    assert all(task.outcome == "PASS" or task.obstacle for task in verdict.tasks)
    assert_contains(verdict.method, "0 of 100 responses")
    first, second = (
        sorted(
            line
            for file in (folder / name).glob("samples_*")
            for line in file.read_text().splitlines()
        )
        for name in ("first", "second")
    )
    assert first == second
    assert all(
        task.changes.changed_wrong
        == task.changes.right_to_wrong
        == task.changes.wrong_to_right
        == 0
        for task in verdict.tasks
    )


def test_long_prompts_and_unsafe_templates_are_refused(
    evaluated: Evaluated,
) -> None:
    errors = evaluated[1].errors
    assert errors[2].startswith("InputError: task long, document 0: ")
    assert_contains(errors[2], "4 tokens", "300")
    assert not (evaluated[0] / "long").exists()
    assert_contains(errors[3], "'__class__'", "unsafe")


def expected_prompts(folder: Path) -> list[str]:
    """Return the conversation about each document as transformers renders it.

    Few-shot examples are drawn as in lm-eval.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [
        json.loads(line) for line in (folder / "tasks/additions.jsonl").read_text().splitlines()
    ]
    random_state, prompts = random.Random(0), []
    for row in rows[: DOCUMENTS - 10]:
        examples = [other for other in random_state.sample(rows, 3) if other != row][:2]
        messages = [{"role": "system", "content": SYSTEM}]
        for example in examples:
            messages.append({"role": "user", "content": f"{example['a']} + {example['b']} ="})
            messages.append({"role": "assistant", "content": str(example["sum"])})
        messages.append({"role": "user", "content": f"{row['a']} + {row['b']} ="})
        prompts.append(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
    return prompts


def samples(folder: Path, task: str) -> list[dict[str, dict[str, dict[str, object]]]]:
    return [json.loads(line) for line in samples_file(folder, task).read_text().splitlines()]


def test_prompts_follow_chat_template(evaluated: Evaluated) -> None:
    folder, outcomes = evaluated
    assert outcomes.errors[4] == ""
    expected = expected_prompts(folder)
    assert expected[0].startswith("<|system|> Add both numbers. <|end|> <|user|> ")
    generated, chosen = (samples(folder / "chat", name) for name in ("sums", "choices"))
    assert [row["arguments"]["gen_args_0"]["arg_0"] for row in generated] == expected
    assert [row["arguments"]["gen_args_0"]["arg_0"] for row in chosen] == expected
    assert [row["arguments"]["gen_args_2"]["arg_1"] for row in chosen] == ["0"] * len(expected)
    settings: Any = generated[0]["arguments"]["gen_args_0"]["arg_1"]
    assert (settings["until"], settings["max_gen_toks"]) == (["."], 3)


def test_prompt_settings_are_recorded(evaluated: Evaluated) -> None:
    file = read_lm_eval(evaluated[0] / "chat").file
    content = json.loads(file.read_text())
    assert content["chat_template"] == TEMPLATE
    assert content["chat_template_sha"] == hashlib.sha256(TEMPLATE.encode()).hexdigest()
    assert content["system_instruction"] == SYSTEM
    assert content["fewshot_as_multiturn"] is True
    assert content["n-shot"] == {"choices": 2, "sums": 2}
    assert content["config"]["gen_kwargs"] == {"max_gen_toks": 3, "temperature": 0}
    assert content["config"]["batch_size"] == 16
    repeated = read_repeated(evaluated[0] / "chat")
    assert repeated is not None
    assert (repeated.documents, repeated.changed) == (100, 0)


def test_sampled_answers_follow_seeds(evaluated: Evaluated) -> None:
    folder, _ = evaluated
    first, again = (read_lm_eval(folder / name).tasks for name in ("sampled", "sampled again"))
    assert {name: len(task.rows) for name, task in first.items()} == {"sums": 90, "choices": 30}
    answers = {key: sample.shown_text for key, sample in first["sums"].rows.items()}
    assert answers == {key: sample.shown_text for key, sample in again["sums"].rows.items()}
    assert len({answers["none", 3, seed] for seed in range(3)}) > 1
    repeated = read_repeated(folder / "sampled")
    assert repeated is not None
    assert (repeated.changed, repeated.sampled) == (0, True)
    (choices, sums) = decide(
        folder / "sampled", folder / "sampled again", margin=0.02, alpha=0.05
    ).tasks
    assert [(task.documents, task.seeds) for task in (sums, choices)] == [(30, 3), (30, 1)]
