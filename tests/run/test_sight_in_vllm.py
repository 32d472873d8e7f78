"""The task `sight` in vLLM's engine, with the demo's model that sees."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.command import vexport
from tests.inference.test_picture_tasks import write_files
from tests.judge.faults import DEMO
from tests.models import quantize
from tests.texts import assert_contains
from vexport.rules import sight as rules

MODEL = DEMO / "model-sight"
pytestmark = [pytest.mark.vllm, pytest.mark.slow]
Tensors = dict[str, torch.Tensor]


def damaged(folder: Path, out: Path, damage: Callable[[Tensors], None]) -> Path:
    """Copy a checkpoint with changed tensors."""
    shutil.copytree(folder, out)
    (out / "vexport.json").unlink(missing_ok=True)
    tensors = load_file(out / "model.safetensors")
    damage(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def zero_tower(tensors: Tensors) -> None:
    for name in tensors:
        if ".vision_model." in name:
            tensors[name] = torch.zeros_like(tensors[name])


def write_sums(folder: Path) -> Path:
    """Write a text task that the model can do without a picture."""
    rows = [
        {"question": f"What is {a} plus {b} ? Answer with one number.", "sum": str(a + b)}
        for a in range(10)
        for b in range(10)
    ]
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    file = folder / "sums.yaml"
    file.write_text(
        "task: sums\ndataset_path: json\ndataset_kwargs: {data_files: {test: sums.jsonl}}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: question\n"
        "doc_to_target: sum\nmetric_list: [{metric: exact_match}]\n"
        "generation_kwargs: {until: [], max_gen_toks: 4, do_sample: false}\n"
        "filter_list: [{name: sum, filter: [{function: remove_whitespace}, "
        "{function: take_first}]}]\n"
    )
    return file


def test_only_sight_finds_a_zeroed_tower(tmp_path: Path) -> None:
    sound = quantize(MODEL, tmp_path / "sound", "FP8_DYNAMIC")
    zeroed = damaged(sound, tmp_path / "zeroed", zero_tower)
    tasks = f"sight,{write_sums(tmp_path)}"
    limits = ("--margin", "0.05", "--no-attribution", "--output-dir", tmp_path / "out")
    ran = vexport(
        *("eval", sound, zeroed, "--baseline", MODEL, "--task", tasks, "--quiet"),
        *(*limits, "--format", "json"),
    )
    assert ran.code == 1, ran.stderr
    verdicts: list[dict[str, Any]] = json.loads(ran.stdout)
    assert [each["outcome"] for each in verdicts] == ["PASS", "FAIL"]
    sight, sums = verdicts[0]["tasks"]
    assert sight["baseline"]["value"] > 0.9
    assert sums["baseline"]["value"] > 0.9
    outcomes = [(each["task"], each["outcome"]) for each in verdicts[1]["tasks"]]
    assert outcomes == [("sight", "FAIL"), ("sums", "PASS")]
    assert verdicts[1]["rule"] == rules.BLIND.id
    assert "do not depend on the picture" in verdicts[1]["reason"]


def test_text_model_is_refused(tmp_path: Path) -> None:
    ran = vexport("eval", DEMO / "model", "--baseline", DEMO / "model", "--task", "sight")
    assert ran.code == 2
    assert_contains(ran.stderr, "LlamaForCausalLM", "the task sight", rules.TEXT_MODEL.id)


def test_task_with_pictures_gets_the_responses_of_sight(tmp_path: Path) -> None:
    task = write_files(tmp_path / "tasks", 60)
    begun = tmp_path / "tasks/begun.yaml"
    begun.write_text(task.read_text().replace("looks\n", "begun\n") + "gen_prefix: 'It is'\n")
    named = ("--task", f"looks,{begun},sight", "--include-path", task.parent, "--limit", 60)
    given = ("--baseline", MODEL, "--no-attribution", "--output-dir", tmp_path / "out", "--quiet")
    ran = vexport("eval", MODEL, *named, *given, "--margin", "0.2", "--format", "json")
    assert ran.code in (0, 3), ran.stderr
    tasks = {each["task"]: each for each in json.loads(ran.stdout)["tasks"]}
    assert tasks["looks"]["baseline"]["value"] > 0.9
    assert tasks["looks"]["baseline"]["value"] == tasks["sight"]["baseline"]["value"]
    assert (tasks["looks"]["outcome"], tasks["looks"]["documents"]) == ("PASS", 60)
    assert tasks["begun"]["documents"] == 60


@pytest.mark.parametrize("is_named", [False, True])
def test_text_model_is_refused_by_a_task_with_pictures(is_named: bool, tmp_path: Path) -> None:
    task = write_files(tmp_path / "tasks", 2)
    named = ("--task", task.stem if is_named else task, "--include-path", task.parent)
    folders = ("--baseline", DEMO / "model", "--output-dir", tmp_path / "out")
    ran = vexport("eval", DEMO / "model", *named, *folders)
    assert ran.code == 2
    assert_contains(ran.stderr, "the task looks", rules.TEXT_MODEL.id)
