"""Models on the hub: downloaded files, skipped files, and errors of downloads."""

import json
from pathlib import Path

import pytest

from tests.hub.conftest import MODEL, Machine
from tests.hub.server import TOKEN, Hub, Repository
from tests.texts import assert_contains
from vexport.checkpoint.hub import side_files
from vexport.checkpoint.source import resolve_source
from vexport.errors import InputError
from vexport.names import HubName
from vexport.scenario import read_scenario

pytestmark = pytest.mark.slow
FP8 = ("--scheme", "FP8_DYNAMIC")


def test_needed_files_are_downloaded_once(machine: Machine, hub: Hub) -> None:
    ran = machine.run("quantize", MODEL, "out", *FP8)
    assert ran.code == 0, ran.stderr
    assert (machine.folder / "out/config.json").is_file()
    assert (machine.folder / "out/README.md").is_file()
    recipe = json.loads((machine.folder / "out/vexport.json").read_text())
    assert recipe["source"] == f"{MODEL}@{hub.repositories[MODEL].commit}"
    assert "model.safetensors" in recipe["files"]
    weights = hub.repositories[MODEL].folder / "model.safetensors"
    assert hub.content("/model.safetensors") == weights.stat().st_size
    unwanted = (
        "pytorch_model.bin",
        "consolidated.safetensors",
        "model.gguf",
        "original/a.safetensors",
    )
    assert not [path for path in hub.paths("GET") if path.endswith(unwanted)]
    hub.requests.clear()
    again = machine.python("-m", "vexport", "quantize", MODEL, "again", *FP8, "--quiet")
    assert (again.code, again.stderr) == (0, "")
    assert not [path for path in hub.paths("GET") if "/resolve/" in path]


def test_local_folder_needs_no_hub(machine: Machine, hub: Hub, llama: Path) -> None:
    assert machine.run("quantize", llama, "out", *FP8).code == 0
    assert machine.run("check", "out").code == 0
    assert not hub.requests


def test_interrupted_download_resumes(machine: Machine, hub: Hub, tmp_path: Path) -> None:
    size, chunk = 25_000_000, 10 * 1024 * 1024  # huggingface_hub writes 10 MiB at once
    repository = tmp_path / "large"
    repository.mkdir()
    (repository / "config.json").write_text("{}")
    (repository / "model.safetensors").write_bytes(bytes(size))
    hub.repositories["acme/large"] = Repository(folder=repository)
    hub.cut["model.safetensors"] = 15_000_000
    with machine.connected():
        assert (
            resolve_source(HubName(id="acme/large")) / "model.safetensors"
        ).stat().st_size == size
    parts = [
        request
        for request in hub.requests
        if request.path.endswith("/model.safetensors") and request.sent
    ]
    assert [(request.range, request.sent) for request in parts] == [
        (None, 15_000_000),
        (f"bytes={chunk}-", size - chunk),
    ]


@pytest.mark.parametrize(
    ("gated", "variables", "name", "code", "message"),
    [
        (False, {}, "other/nothing", 2, "RepositoryNotFoundError: 401"),
        (False, {}, f"{MODEL}@v9", 2, "RevisionNotFoundError: 404"),
        (False, {"HF_TOKEN": "hf_bad"}, MODEL, 4, "401"),
        (False, {"HF_ENDPOINT": "http://127.0.0.1:9"}, MODEL, 4, "Connection refused"),
        (True, {"HF_TOKEN": TOKEN}, MODEL, 2, "GatedRepoError: 403"),
    ],
)
def test_hub_errors_are_one_line(
    machine: Machine,
    hub: Hub,
    gated: bool,
    variables: dict[str, str],
    name: str,
    code: int,
    message: str,
) -> None:
    hub.repositories[MODEL].gated = gated
    ran = machine.run("quantize", name, "out", *FP8, **variables)
    assert ran.code == code
    (line,) = ran.errors
    assert line.startswith(f"error: model {name}: ")
    assert_contains(line, "hub", message)
    assert not (machine.folder / "out").exists()


def test_plan_reads_only_headers(machine: Machine, hub: Hub) -> None:
    weights = hub.repositories[MODEL].folder / "model.safetensors"
    ran = machine.run("plan", MODEL, *FP8)
    assert ran.code == 0, ran.stderr
    assert f"{MODEL}@{hub.repositories[MODEL].commit}: LlamaForCausalLM" in ran.stdout
    (read,) = [request for request in hub.requests if request.path.endswith("/model.safetensors")]
    assert (read.method, read.range) == ("GET", "bytes=0-99999")
    assert read.sent <= 100_000 < weights.stat().st_size
    local = machine.run("plan", hub.repositories[MODEL].folder, *FP8)
    assert (
        local.stdout.splitlines()[1:-1] == ran.stdout.splitlines()[1:-1]
    )  # the model's names differ
    assert ran.stdout.splitlines()[-1].split()[:4] == ["next", "vexport", "quantize", MODEL]
    hub.requests.clear()
    hub.ranges = False
    whole = machine.run("plan", MODEL, *FP8)
    assert whole.stdout == ran.stdout
    assert hub.content("/model.safetensors") >= weights.stat().st_size


def test_files_of_index_are_read(machine: Machine, hub: Hub, tmp_path: Path) -> None:
    """A plan and a check read all files that the index names."""
    source = hub.repositories[MODEL].folder
    made = machine.run("quantize", source, tmp_path / "sharded", *FP8, "--max-shard-size", "100KB")
    assert made.code == 0, made.stderr
    hub.repositories["tests/sharded"] = Repository(folder=tmp_path / "sharded")
    names = sorted(file.name for file in (tmp_path / "sharded").glob("*.safetensors"))
    assert len(names) > 1
    for command in (("plan", "tests/sharded", *FP8), ("check", "tests/sharded")):
        hub.requests.clear()
        assert machine.run(*command).code in (0, 2)
        read = {
            request.path.rpartition("/")[2]
            for request in hub.requests
            if request.path.endswith(".safetensors")
        }
        assert sorted(read) == names


def test_revision_is_recorded(machine: Machine, hub: Hub) -> None:
    hub.repositories[MODEL].branches = ("main", "v1", "refs/pr/2")
    commit = hub.repositories[MODEL].commit
    for name, options in ((MODEL, ("--revision", "v1")), (f"{MODEL}@{commit}", ())):
        ran = machine.run("plan", name, *FP8, *options, "--format", "json")
        assert ran.code == 0, ran.stderr
        assert json.loads(ran.stdout)["source"] == f"{MODEL}@{commit}"
    twice = machine.run("plan", f"{MODEL}@v1", *FP8, "--revision", "v2")
    assert (twice.code, "two revisions, 'v1' and 'v2'" in twice.stderr) == (2, True)
    folder = machine.run("plan", hub.repositories[MODEL].folder, *FP8, "--revision", "v2")
    assert (folder.code, "the revision 'v2' of a folder" in folder.stderr) == (2, True)


def test_revision_in_scenario(tmp_path: Path) -> None:
    text = (
        "name: s\nsource: acme/llama\nrevision: v1\nrules: [{match: Linear, scheme: FP8_DYNAMIC}]\n"
    )
    (tmp_path / "s.yaml").write_text(text)
    assert read_scenario(tmp_path / "s.yaml").source == HubName(id="acme/llama", revision="v1")
    (tmp_path / "s.yaml").write_text(text.replace("acme/llama", "."))
    with pytest.raises(InputError, match="the revision 'v1' of a folder"):
        read_scenario(tmp_path / "s.yaml")


def test_hub_checkpoint_is_checked(machine: Machine, hub: Hub) -> None:
    ran = machine.run("check", MODEL)
    assert ran.code == 0, ran.stderr
    assert f"PASS  {MODEL}\n" in ran.stdout
    (machine.folder / "runs").mkdir()
    mistake = machine.run("check", "runs/nope", HF_ENDPOINT="http://127.0.0.1:9")
    assert mistake.code == 2
    assert_contains(mistake.stderr, "runs/nope", "no such folder", "hub")


def test_cached_copy_is_used_offline(machine: Machine, hub: Hub) -> None:
    assert machine.run("quantize", MODEL, "first", *FP8).code == 0
    unreachable = machine.run("quantize", MODEL, "second", *FP8, HF_ENDPOINT="http://127.0.0.1:9")
    assert unreachable.code == 0, unreachable.stderr
    assert "using the copy in the cache" in unreachable.stderr
    offline = machine.run("quantize", MODEL, "third", *FP8, HF_HUB_OFFLINE="1")
    assert offline.code == 0, offline.stderr
    (weights,) = (machine.folder / "cache").rglob("model.safetensors")
    weights.unlink()
    broken = machine.run("quantize", MODEL, "fourth", *FP8, HF_HUB_OFFLINE="1")
    assert broken.code == 4
    assert "offline mode is enabled" in broken.stderr


@pytest.mark.parametrize(
    "name", ["/etc/x.json", "../x.json", "a/../../x.json", "//x.json", ".x.json"]
)
def test_unsafe_file_names_are_ignored(name: str) -> None:
    assert side_files([name, "config.json", "a/tokenizer.json"]) == [
        "a/tokenizer.json",
        "config.json",
    ]
