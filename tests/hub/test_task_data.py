"""Data of tasks and of calibration, which are downloaded from the hub before an engine starts."""

import json
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from tests.hub.conftest import DATA, Machine
from tests.hub.server import Hub, Repository
from tests.texts import assert_contains

CITIES, CHATS = "acme/cities", "acme/chats"
MODEL = Path(__file__).parents[2] / "scenarios" / "demo" / "model"


@pytest.mark.vllm
@pytest.mark.slow
def test_task_data_are_downloaded_first(machine: Machine, hub: Hub) -> None:
    hub.repositories[CITIES] = Repository(
        folder=hub.repositories[DATA].folder, kind="datasets", gated=True
    )
    task = (machine.folder / "task.yaml").read_text()
    for name in ("cities", "tools"):
        other = task.replace(DATA, f"acme/{name}").replace("hub_sums", name)
        (machine.folder / f"{name}.yaml").write_text(other)
    evaluate = ("eval", MODEL, "--accept", "accepted.json", "--limit", "5", "--task", "task.yaml")
    ran = machine.python(
        "-m", "vexport", *evaluate, "--task", "cities.yaml", "--task", "tools.yaml"
    )
    assert ran.code == 2, ran.stderr
    assert f"task data {DATA}" in ran.stderr
    assert [name for name in (DATA, CITIES, "acme/tools") if f"dataset {name}: " in ran.stderr] == [
        CITIES,
        "acme/tools",
    ]
    assert "gated" in ran.stderr
    assert not (machine.folder / "runs").exists()
    assert (
        len([path for path in hub.paths("GET") if DATA in path and path.endswith("/test.jsonl")])
        == 1
    )
    assert not [path for path in hub.paths() if "/demo/model" in path]

    hub.repositories[CITIES].gated = False
    cache = machine.folder / "cache" / "hub"
    snapshot_download(
        CITIES, repo_type="dataset", cache_dir=cache, endpoint=hub.url
    )  # like `hf download`
    hub.requests.clear()
    ran = machine.python("-m", "vexport", *evaluate, "--task", "cities.yaml", HF_HUB_OFFLINE="1")
    assert ran.code == 0, ran.stderr
    (results,) = (machine.folder / "runs/eval-model/candidate").glob("results_*.json")
    samples = json.loads(results.read_text())["n-samples"]
    assert {name: sample["effective"] for name, sample in samples.items()} == {
        "hub_sums": 5,
        "cities": 5,
    }
    assert not hub.requests


@pytest.mark.slow
def test_dataset_split_and_column(
    machine: Machine, hub: Hub, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "chats", machine.folder / "out"
    folder.mkdir()
    for split, first in (("train", 3), ("test", 50)):
        rows = [{"ids": [first + number] * 4, "id": number} for number in range(20)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hub.repositories[CHATS] = Repository(folder=folder, kind="datasets")
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.url)
    options = ("--scheme", "FP8", "--samples", "5", "--quiet")
    for name, code, parts in (
        (f"{CHATS}:train:text", 2, ("no column text", "ids, id")),
        (f"{CHATS}:valid", 2, ("ORG/NAME:SPLIT:COLUMN",)),
        (f"{CHATS}:test:ids", 0, ()),
    ):
        ran = machine.run("quantize", llama, out, *options, "--calibration", name)
        assert ran.code == code, ran.stderr
        assert_contains(ran.stderr, *parts)
    recipe = json.loads((out / "vexport.json").read_text())
    assert recipe["scenario"]["calibration"]["data"] == f"{CHATS}:test:ids"
    assert (recipe["calibration"]["rows"], recipe["calibration"]["tokens"]) == ("1-5", 20)
