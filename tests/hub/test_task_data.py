"""What a task reads is fetched before an engine starts."""

import json
from pathlib import Path

import pytest

from tests.hub.conftest import DATA, Machine
from tests.hub.server import Hub

CAUSE = """
from vexport.checkpoint.hub.failures import diagnose
from vexport.checkpoint.hub.names import HubName
from vexport.errors import VexportError

cause = diagnose(OSError(), HubName(id="acme/sums"), "dataset")
print(cause.exit_code if cause else None, cause)
"""


@pytest.mark.vllm  # it is not started, but looked for
@pytest.mark.slow
def test_no_engine_starts_without_the_data(machine: Machine, hub: Hub, llama: Path) -> None:
    hub.repositories[DATA].gated = True
    ran = machine.run("eval", llama, "--baseline", llama, "--task", "task.yaml")
    assert ran.code == 2, ran.stderr
    assert f"dataset {DATA}: " in ran.stderr
    assert f"accept them at {hub.url}/datasets/{DATA}" in ran.stderr
    assert "baseline: load" not in ran.stderr
    assert not (machine.folder / "runs").exists()


@pytest.mark.parametrize(
    ("change", "variables", "message"),
    [
        ("missing", {}, "2 dataset acme/sums: got no dataset of that name on the hub"),
        ("gated", {"HF_TOKEN": "hf_good"}, "with the account of your token"),
        ("limited", {}, "4 dataset acme/sums: got a rate limit (429)"),
        ("", {"HF_DATASETS_OFFLINE": "1"}, "unset HF_DATASETS_OFFLINE"),
        ("", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "got no connection to http://127.0.0.1:9"),
        ("", {}, "None None"),
    ],
)
def test_the_cause_of_a_failed_download_is_named(
    machine: Machine, hub: Hub, change: str, variables: dict[str, str], message: str
) -> None:
    hub.repositories[DATA].gated = change == "gated"
    hub.limited = change == "limited"
    if change == "missing":
        del hub.repositories[DATA]
    ran = machine.python("-c", CAUSE, **variables)
    assert message in ran.stdout, ran.stderr


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
    assert (
        "3 data sets of the tasks: dataset acme/sums, dataset acme/tools, dataset acme/cities" in ran.stderr
    )
    for name in ("sums", "tools", "cities"):
        assert f"`hf download --repo-type dataset acme/{name}`" in ran.stderr
    assert machine.python("-c", DOWNLOAD).code == 0
    ran = machine.run(*evaluate, HF_HUB_OFFLINE="1")
    assert ran.code == 4, ran.stderr
    assert "2 data sets of the tasks: dataset acme/tools, dataset acme/cities" in ran.stderr
    assert "acme/sums`" not in ran.stderr


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
