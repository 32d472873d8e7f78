"""Models of the hub: what is fetched, what is not, and why something cannot be had."""

from pathlib import Path

import pytest

from tests.hub.conftest import MODEL, Machine
from tests.hub.server import TOKEN, Hub, Repository

FP8 = ("--scheme", "FP8_DYNAMIC")


def test_only_what_is_needed_is_fetched_and_once(machine: Machine, hub: Hub) -> None:
    ran = machine.run("quantize", MODEL, "out", *FP8)
    assert ran.code == 0, ran.stderr
    assert f"download {MODEL} (MB): done" in ran.stderr
    assert (machine.folder / "out/config.json").is_file()
    assert (machine.folder / "out/README.md").is_file()
    weights = hub.repositories[MODEL].folder / "model.safetensors"
    assert hub.content("/model.safetensors") == weights.stat().st_size
    unwanted = ("pytorch_model.bin", "consolidated.safetensors", "model.gguf", "original/a.safetensors")
    assert not [path for path in hub.paths("GET") if path.endswith(unwanted)]
    hub.requests.clear()
    again = machine.run("quantize", MODEL, "again", *FP8, "--quiet")
    assert (again.code, again.stderr) == (0, "")
    assert not [path for path in hub.paths("GET") if "/resolve/" in path]


def test_a_local_folder_asks_the_hub_for_nothing(machine: Machine, hub: Hub, llama: Path) -> None:
    assert machine.run("quantize", llama, "out", *FP8).code == 0
    assert machine.run("check", "out", "--source", llama).code == 0
    assert not hub.requests


def test_a_download_that_is_cut_off_goes_on_where_it_was(machine: Machine, hub: Hub, tmp_path: Path) -> None:
    size, chunk = 25_000_000, 10 * 1024 * 1024  # huggingface_hub writes 10 MiB at once
    repository = tmp_path / "large"
    repository.mkdir()
    (repository / "config.json").write_text("{}")
    (repository / "model.safetensors").write_bytes(bytes(size))
    hub.repositories["acme/large"] = Repository(folder=repository)
    hub.cut["model.safetensors"] = 15_000_000
    ran = machine.python(
        "-c", "from vexport.checkpoint.source import resolve_source as r; print(r('acme/large'))"
    )
    assert ran.code == 0, ran.stderr
    assert (Path(ran.stdout.strip()) / "model.safetensors").stat().st_size == size
    parts = [one for one in hub.requests if one.path.endswith("/model.safetensors") and one.sent]
    assert [(one.range, one.sent) for one in parts] == [
        (None, 15_000_000),
        (f"bytes={chunk}-", size - chunk),
    ]


@pytest.mark.parametrize(
    ("state", "variables", "name", "code", "message"),
    [
        ({}, {}, "acme/lama", 2, "did you mean acme/llama?"),
        ({}, {}, "other/nothing", 2, "no such folder, and no model of that name on the hub"),
        ({}, {}, f"{MODEL}@v9", 2, "no revision 'v9' of it on the hub"),
        ({}, {"HF_TOKEN": "hf_bad"}, MODEL, 4, "set HF_TOKEN to a valid token, or unset it"),
        ({}, {"HF_HUB_OFFLINE": "1"}, MODEL, 4, "HF_HUB_OFFLINE=1 in the environment"),
        ({}, {"TRANSFORMERS_OFFLINE": "yes"}, MODEL, 4, "unset TRANSFORMERS_OFFLINE"),
        ({}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, MODEL, 4, "no connection to http://127.0.0.1:9"),
        ({"limited": True}, {}, MODEL, 4, "a rate limit (429), need fewer requests; try again in 1 s"),
        ({"gated": True}, {}, MODEL, 2, "and set HF_TOKEN"),
        ({"gated": True}, {"HF_TOKEN": TOKEN}, MODEL, 2, "with the account of your token"),
    ],
)
def test_the_cause_is_named(
    machine: Machine,
    hub: Hub,
    state: dict[str, bool],
    variables: dict[str, str],
    name: str,
    code: int,
    message: str,
) -> None:
    hub.limited = state.get("limited", False)
    hub.repositories[MODEL].gated = state.get("gated", False)
    ran = machine.run("quantize", name, "out", *FP8, **variables)
    assert ran.code == code
    (line,) = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
    assert not (machine.folder / "out").exists()
    if any("OFFLINE" in key for key in variables):
        assert not hub.requests


def test_a_download_whose_connection_is_reset_is_begun_again(machine: Machine, hub: Hub) -> None:
    hub.cut["model.safetensors"], hub.reset = 1000, True
    ran = machine.run("quantize", MODEL, "out", *FP8)
    assert ran.code == 0, ran.stderr
    assert len([path for path in hub.paths("GET") if path.endswith("/model.safetensors")]) == 2


def test_without_network_a_whole_copy_in_the_cache_is_used(machine: Machine, hub: Hub) -> None:
    assert machine.run("quantize", MODEL, "first", *FP8).code == 0
    gone = machine.run("quantize", MODEL, "second", *FP8, HF_ENDPOINT="http://127.0.0.1:9")
    assert gone.code == 0, gone.stderr
    assert "using the copy in the cache" in gone.stderr
    offline = machine.run("quantize", MODEL, "third", *FP8, HF_HUB_OFFLINE="1")
    assert offline.code == 0, offline.stderr
    (weights,) = (machine.folder / "cache").rglob("model.safetensors")
    weights.unlink()
    broken = machine.run("quantize", MODEL, "fourth", *FP8, HF_HUB_OFFLINE="1")
    assert broken.code == 4
    assert "no whole copy in the cache" in broken.stderr
