"""What a task reads is fetched before an engine starts."""

import json
from pathlib import Path

import pytest

from tests.hub.conftest import DATA, Machine
from tests.hub.server import Hub


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
def test_offline_all_missing_data_sets_are_named_at_once_and_what_was_downloaded_is_read(
    machine: Machine, llama: Path
) -> None:
    task = (machine.folder / "task.yaml").read_text()
    for name in ("tools", "cities"):
        other = task.replace("acme/sums", f"acme/{name}").replace("hub_sums", name)
        (machine.folder / f"{name}.yaml").write_text(other)
    tasks = ("--task", "task.yaml", "--task", "tools.yaml", "--task", "cities.yaml")
    evaluate = ("eval", llama, "--baseline", llama, *tasks)
    ran = machine.run(*evaluate, HF_HUB_OFFLINE="1")
    assert ran.code == 4, ran.stderr
    for name in ("sums", "tools", "cities"):
        assert f"error: dataset acme/{name}: " in ran.stderr
    assert machine.python("-c", DOWNLOAD).code == 0
    ran = machine.run(*evaluate, HF_HUB_OFFLINE="1")
    assert ran.code == 4, ran.stderr
    assert "dataset acme/tools: " in ran.stderr
    assert "dataset acme/sums" not in ran.stderr


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_evaluates_on_data_of_the_hub_and_a_local_model_asks_for_nothing(
    machine: Machine, hub: Hub
) -> None:
    model = Path(__file__).parents[2] / "scenarios/demo/model"
    ran = machine.run("eval", model, "--accept", "accepted.json", "--task", "task.yaml", "--limit", "5")
    assert ran.code == 0, ran.stderr
    assert f"task data {DATA}" in ran.stderr
    (results,) = (machine.folder / "runs/eval-model/candidate").glob("results_*.json")
    assert json.loads(results.read_text())["n-samples"]["hub_sums"]["effective"] == 5
    assert len([path for path in hub.paths("GET") if path.endswith("/test.jsonl")]) == 1
    asked = [path for path in hub.paths() if DATA not in path and path != "/api/agent-harnesses"]
    assert asked == []
