"""The real vLLM, with the real lm-eval around the engine that already stands."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.evaluation.make import make_model, make_tasks
from vexport.engine.messages import SessionRequest
from vexport.evaluation.results import read_results
from vexport.evaluation.tasks import resolve_tasks
from vexport.files import to_json
from vexport.verdict import decide

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.xdist_group("lm_eval")]

Evaluated = tuple[Path, list[dict[str, object]]]

DOCUMENTS = 150
TRUNCATING = 'generation_kwargs: {until: ["."], max_gen_toks: 300'
LEAKING = "doc_to_text: \"{{ ''.__class__.__mro__ }}\""


def in_vllm(requests: Sequence[SessionRequest], folder: Path) -> list[dict[str, object]]:
    """Run the requests on one engine, in a process of its own; what came of each."""
    files = [folder / f"request{number}.json" for number in range(len(requests))]
    for file, request in zip(files, requests, strict=True):
        file.write_text(to_json(request))
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder / "home"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    command = [
        sys.executable,
        "-m",
        "tests.evaluation.in_vllm",
        str(folder / "outcomes.json"),
        *map(str, files),
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    outcomes: list[dict[str, object]] = json.loads((folder / "outcomes.json").read_text())
    return outcomes


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """Two runs of the same tasks (`first`, `second`), then tasks that must be refused."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("vllm")
    model = make_model(folder / "model")
    sums, choices, _ = make_tasks(folder / "tasks", DOCUMENTS)
    text = Path(sums).read_text()
    (folder / "tasks/long.yaml").write_text(
        text.replace("task: sums", "task: long").replace(
            'generation_kwargs: {until: ["."], max_gen_toks: 2', TRUNCATING
        )
    )
    (folder / "tasks/leak.yaml").write_text(
        text.replace("task: sums", "task: leak").replace('doc_to_text: "{{a}} + {{b}} ="', LEAKING)
    )
    tasks = {"first": [sums, choices], "second": [sums, choices]}
    tasks |= {name: [str(folder / f"tasks/{name}.yaml")] for name in ("long", "leak")}
    requests = [
        SessionRequest(
            checkpoint=model,
            name=name,
            tasks=tuple(task.spec for task in resolve_tasks(given, folder=folder / "resolved")),
            output=folder / name,
            max_model_len=64,
            limit=DOCUMENTS - 10,
            repeat=name == "second",
        )
        for name, given in tasks.items()
    ]
    return folder, in_vllm(requests, folder)


def test_lm_evals_own_files_are_written_and_read(evaluated: Evaluated) -> None:
    folder, outcomes = evaluated
    assert outcomes[0]["error"] is None
    results = read_results(folder / "first")
    assert {name: len(task.samples) for name, task in results.tasks.items()} == {"sums": 140, "choices": 140}
    content = json.loads(results.file.read_text())
    assert content["config"]["model_args"]["pretrained"] == str(folder / "model")
    assert {content["config"][f"{name}_seed"] for name in ("random", "numpy", "torch", "fewshot")} == {0}


def test_progress_ends_at_the_number_of_requests(evaluated: Evaluated) -> None:
    progress = evaluated[1][0]["progress"]
    assert isinstance(progress, list)
    assert ["sums", 140, 140] in progress
    assert ["choices", 420, 420] in progress


def test_the_same_model_twice_gives_the_same_answers(evaluated: Evaluated) -> None:
    folder, _ = evaluated
    verdict = decide(folder / "first", folder / "second", margin=0.02, alpha=0.05)
    assert verdict.outcome == "PASS"
    assert verdict.method.endswith("; asked again, 0 of 200 answers changed")
    assert all(
        task.changed_wrong == task.right_to_wrong == task.wrong_to_right == 0 for task in verdict.tasks
    )


def test_a_prompt_that_does_not_fit_is_an_error(evaluated: Evaluated) -> None:
    error = str(evaluated[1][2]["error"])
    assert error.startswith("InputError: task long, document 0: got a prompt of 4 tokens and 300 to generate")
    assert not (evaluated[0] / "long").exists()


def test_a_template_that_reaches_for_python_is_refused(
    evaluated: Evaluated,
) -> None:
    assert "access to attribute '__class__' of 'str' object is unsafe" in str(evaluated[1][3]["error"])


def test_nothing_is_left_in_the_home_folder(evaluated: Evaluated) -> None:
    home = evaluated[0] / "home"
    assert not list(home.glob(".cache/huggingface/datasets/json*"))
