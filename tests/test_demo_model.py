"""The committed demo: made by its scripts, with equal variants, tasks and data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    Idefics3ForConditionalGeneration,
    LlamaForCausalLM,
)

from vexport.inference.pictures import picture_questions

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts/demo_model"
DEMO = ROOT / "scenarios/demo"
VARIANTS = ("model-x8", "model-x16")
TASKS = ("addition", "addition_choice", "facts", "facts_choice")


def run_script(name: str, out: Path) -> None:
    subprocess.run([sys.executable, SCRIPTS / name, "--out", out], cwd=out, check=True)


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def texts_of(task: str, rows: int) -> list[str]:
    documents = map(json.loads, (DEMO / f"tasks/{task}.jsonl").read_text().splitlines()[:rows])
    return [f"{row['prompt']} {row['answer']} ." for row in documents]


def logits(model: str, prompts: list[str]) -> torch.Tensor:
    """Return logits in bfloat16 with shape (prompts, tokens, vocabulary).

    The prompts need the same number of tokens.
    """
    ids = torch.tensor(AutoTokenizer.from_pretrained(DEMO / model)(prompts)["input_ids"])
    loaded = LlamaForCausalLM.from_pretrained(DEMO / model, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        result: torch.Tensor = loaded(input_ids=ids).logits
    return result


@pytest.mark.slow
def test_script_writes_committed_variants(tmp_path: Path) -> None:
    run_script("make_variants.py", tmp_path)
    for variant in VARIANTS:
        assert files_in(tmp_path / variant) == files_in(DEMO / variant)


def test_script_writes_committed_tasks(tmp_path: Path) -> None:
    run_script("make_tasks.py", tmp_path)
    written = files_in(tmp_path)
    assert written == {name: (DEMO / name).read_bytes() for name in written}
    assert set(written) == {"calibration.jsonl"} | {
        f"tasks/{name}{suffix}" for name in TASKS for suffix in (".yaml", ".jsonl")
    }


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("task", ["addition", "facts"])
def test_variants_have_logits_of_model(variant: str, task: str) -> None:
    prompts = texts_of(task, 64)
    assert torch.equal(logits(variant, prompts), logits("model", prompts))


@pytest.mark.parametrize(("task", "first_answer_word"), [("addition", 7), ("facts", 6)])
def test_model_gives_right_answers(task: str, first_answer_word: int) -> None:
    """`first_answer_word` is the number of tokens before the answer, including `<bos>`."""
    texts = texts_of(task, 200)
    ids = torch.tensor(AutoTokenizer.from_pretrained(DEMO / "model")(texts)["input_ids"])
    choices = logits("model", texts).argmax(-1)
    right = (choices[:, first_answer_word - 1 : -1] == ids[:, first_answer_word:]).all(-1)
    assert right.float().mean() >= 0.98


def test_calibration_rows_are_long_without_unknown_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    texts = [
        json.loads(line)["text"] for line in (DEMO / "calibration.jsonl").read_text().splitlines()
    ]
    rows = tokenizer(texts)["input_ids"]
    assert len(rows) >= 256
    assert all(100 <= len(row) <= 128 for row in rows)
    assert all(tokenizer.unk_token_id not in row for row in rows)
    assert all(text.endswith(" .") for text in texts)


def test_seeing_model_gives_right_answers() -> None:
    """Pictures of other seeds than in training. The processor must work without torchvision."""
    processor = AutoProcessor.from_pretrained(DEMO / "model-sight")
    model = Idefics3ForConditionalGeneration.from_pretrained(DEMO / "model-sight").eval()
    right: dict[str, list[bool]] = {}
    for each in picture_questions(120, 0):
        text = {"type": "text", "text": each.topic.prompt}
        turn = {"role": "user", "content": [{"type": "image"}, text]}
        prompt = processor.apply_chat_template([turn], add_generation_prompt=True)
        inputs = processor(text=prompt, images=[each.picture], return_tensors="pt")
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
        with torch.inference_mode():
            token = int(model(**inputs).logits[0, -1].argmax())
        is_right = processor.tokenizer.decode(token) == each.topic.choices[each.answer]
        right.setdefault(each.topic.name, []).append(is_right)
    assert all(sum(answers) / len(answers) >= 0.8 for answers in right.values())
    assert sum(map(sum, right.values())) / 120 >= 0.9
