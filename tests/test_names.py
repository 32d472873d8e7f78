from pathlib import Path

import pytest

from tests.texts import breaks
from vexport.names import (
    ACCEPTED_KEY,
    AcceptedFile,
    Folder,
    HubName,
    ModelRef,
    ResultFiles,
    Server,
    parse_model,
    parse_source,
    user_path,
    user_text,
)
from vexport.rules import usage

RESULTS = "results_2026-01-01T00-00-00.000000.json"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "ref"),
    [
        ("Qwen/Qwen3-0.6B", HubName(id="Qwen/Qwen3-0.6B")),
        ("org/model@refs/pr/1", HubName(id="org/model", revision="refs/pr/1")),
        ("http://host:8000/v1", Server("http://host:8000/v1")),
        ("ftp://host/model", Server("ftp://host/model")),
        ("model", Folder("model", Path("model"))),
        ("./org/model", Folder("./org/model", Path("org/model"))),
    ],
)
def test_parse_names_of_nothing_here(here: Path, name: str, ref: ModelRef) -> None:
    assert parse_source(name) == ref
    assert parse_model(name) == ref
    assert str(ref) == name


def test_existing_folder_wins_over_hub(here: Path) -> None:
    (here / "org" / "model").mkdir(parents=True)
    assert parse_source("org/model") == Folder("org/model", Path("org/model"))


def test_home_folder(here: Path) -> None:
    assert parse_source("~/model") == Folder("~/model", here / "home" / "model")
    (here / "~model").mkdir()
    assert user_path("~model") == Path("~model")
    with breaks(usage.NO_USER):
        user_path("~nobody-here/model")
    missing = Folder("~nobody-here/model", Path("~nobody-here/model"))
    assert parse_source("~nobody-here/model") == parse_model("~nobody-here/model") == missing


def test_results_and_accepted_files(here: Path) -> None:
    folder = here / "responses" / "model"
    folder.mkdir(parents=True)
    (folder / RESULTS).write_text("{}")
    (folder / "run_2026-01-01T00-00-00.000000.json").write_text("{}")
    for name in ("responses", f"responses/model/{RESULTS}", "responses/model/run.json"):
        assert parse_model(name) == ResultFiles(name, Path(name))
    (here / "responses" / "config.json").write_text("{}")
    assert isinstance(parse_model("responses"), Folder)
    (here / "accepted.json").write_text(f'{{"{ACCEPTED_KEY}": 1}}')
    (here / "damaged.json").write_text("{")
    assert parse_model("accepted.json") == AcceptedFile("accepted.json", Path("accepted.json"))
    assert isinstance(parse_model("damaged.json"), Folder)
    assert isinstance(parse_source("accepted.json"), Folder)


@pytest.mark.parametrize(
    ("name", "title", "file_name"),
    [
        ("runs/OUT/", "OUT", "OUT"),
        (".", "work", "work"),
        ("org/model@refs/pr/1", "model@refs/pr/1", "model@refs-pr-1"),
        ("http://host:8000/v1", "host:8000", "host-8000"),
    ],
)
def test_title_and_file_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, title: str, file_name: str
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    ref = parse_source(name)
    assert (ref.title, ref.file_name) == (title, file_name)


def test_empty_name_is_refused() -> None:
    with breaks(usage.NAME):
        parse_model("")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("gsm8k", "gsm8k"),
        ("./sums.yaml", "./sums.yaml"),
        ("~/a=b.yaml", "{home}/a=b.yaml"),
        ("eagle3=~/draft", "eagle3={home}/draft"),
        ("eagle3=acme/draft", "eagle3=acme/draft"),
    ],
)
def test_home_folder_in_text(here: Path, text: str, path: str) -> None:
    assert user_text(text) == path.format(home=here / "home")
