"""What a task reads is fetched before an engine starts."""

import json
from pathlib import Path

import pytest

from tests.hub.conftest import DATA, Machine
from tests.hub.server import Hub, Repository


@pytest.mark.vllm  # it is not started, but looked for
@pytest.mark.slow
def test_no_engine_starts_without_the_data(machine: Machine, hub: Hub, llama: Path) -> None:
    hub.repositories[DATA].gated = True
    ran = machine.run("eval", llama, "--baseline", llama, "--task", "task.yaml")
    assert ran.code == 2, ran.stderr
    assert f"dataset {DATA}: " in ran.stderr
    assert "gated" in ran.stderr
    assert "baseline: load" not in ran.stderr
    assert not (machine.folder / "runs").exists()


DOWNLOAD = "from huggingface_hub import snapshot_download as get; get('acme/sums', repo_type='dataset')"


@pytest.mark.vllm  # it is not started, but looked for
@pytest.mark.slow
def test_offline_missing_data_sets_are_named_and_downloaded_ones_read(machine: Machine, llama: Path) -> None:
    task = (machine.folder / "task.yaml").read_text()
    for name in ("tools", "cities"):
        other = task.replace("acme/sums", f"acme/{name}").replace("hub_sums", name)
        (machine.folder / f"{name}.yaml").write_text(other)
    tasks = ("--task", "task.yaml", "--task", "tools.yaml", "--task", "cities.yaml")
    evaluate = ("eval", llama, "--baseline", llama, *tasks)
    assert machine.python("-c", DOWNLOAD).code == 0
    ran = machine.run(*evaluate, HF_HUB_OFFLINE="1")
    assert ran.code == 4, ran.stderr
    for name in ("tools", "cities"):
        assert f"error: dataset acme/{name}: " in ran.stderr
    assert "dataset acme/sums" not in ran.stderr


@pytest.mark.vllm
@pytest.mark.slow
def test_data_of_the_hub_are_evaluated_and_a_local_model_asks_for_nothing(machine: Machine, hub: Hub) -> None:
    model = Path(__file__).parents[2] / "scenarios/demo/model"
    ran = machine.run("eval", model, "--accept", "accepted.json", "--task", "task.yaml", "--limit", "5")
    assert ran.code == 0, ran.stderr
    assert f"task data {DATA}" in ran.stderr
    (results,) = (machine.folder / "runs/eval-model/candidate").glob("results_*.json")
    assert json.loads(results.read_text())["n-samples"]["hub_sums"]["effective"] == 5
    assert len([path for path in hub.paths("GET") if path.endswith("/test.jsonl")]) == 1
    asked = [path for path in hub.paths() if DATA not in path and path != "/api/agent-harnesses"]
    assert asked == []


CHATS = "acme/chats"


@pytest.fixture
def chats(hub: Hub, tmp_path: Path) -> Hub:
    """A data set with a split of training and one of test rows."""
    folder = tmp_path / "chats"
    folder.mkdir()
    for split, first in (("train", 3), ("test", 50)):
        rows = [{"ids": [first + number] * 4, "id": number} for number in range(20)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hub.repositories[CHATS] = Repository(folder=folder, kind="datasets")
    return hub


def quantize(
    machine: Machine, llama: Path, data: str, **variables: str
) -> tuple[int, str, dict[str, object]]:
    """Exit code, stderr and what the recipe says of the calibration."""
    out = machine.folder / "out"
    call = ("quantize", llama, out, "--scheme", "FP8", "--calibration", data, "--samples", "5", "--quiet")
    ran = machine.run(*call, **variables)
    recipe = json.loads((out / "vexport.json").read_text()) if ran.code == 0 else {}
    return ran.code, ran.stderr, recipe


@pytest.mark.slow
def test_a_data_set_is_read_by_split_and_column(machine: Machine, chats: Hub, llama: Path) -> None:
    code, stderr, recipe = quantize(machine, llama, f"{CHATS}:test:ids")
    assert code == 0, stderr
    assert isinstance(recipe["scenario"], dict)
    assert recipe["scenario"]["calibration"]["data"] == f"{CHATS}:test:ids"
    assert recipe["calibration"] == {**recipe["calibration"], "rows": "1-5", "tokens": 20}  # type: ignore[dict-item]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "variables", "words"),
    [
        (f"{CHATS}:train:text", {}, "no column text, but ids, id"),
        (f"{CHATS}:valid", {}, "name them: ORG/NAME:SPLIT:COLUMN"),
    ],
)
def test_what_cannot_be_had_is_one_error_with_a_remedy(
    machine: Machine, chats: Hub, llama: Path, data: str, variables: dict[str, str], words: str
) -> None:
    code, stderr, _ = quantize(machine, llama, data, **variables)
    assert code in (2, 4)
    assert words in stderr
    assert "Traceback" not in stderr
    assert not (machine.folder / "out").exists()
