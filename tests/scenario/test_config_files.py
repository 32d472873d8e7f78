"""Limits of YAML files. All readers apply them: scenarios, recipes and tasks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import vexport
from vexport.config_files import MOST_BYTES, MOST_LEVELS, load_yaml
from vexport.errors import InputError
from vexport.inference.tasks import MOST_INCLUDES, read_task
from vexport.scenario import read_scenario
from vexport.scenario.llmcompressor import read_recipe

READERS: dict[str, Callable[[Path], object]] = {
    "scenario": read_scenario,
    "recipe": read_recipe,
    "task": lambda path: read_task(path, trust=False),
}


def bomb(key: str) -> str:
    """Return nine levels of nine aliases: less than 1,000 bytes for 400 million values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    return "\n".join([*lines, f"{key}: *a8", ""])


HOSTILE: dict[str, tuple[str | bytes, str]] = {
    "aliases": (bomb("name"), r"yaml:2: .*the alias \*a0"),
    "merge": ("a: &a {b: 1}\nc: {<<: *a}", r"yaml:2: .*the alias \*a"),
    "itself": ("&a [*a]", r"the alias \*a"),
    "keys": ("&a {*a : 1}", r"the alias \*a"),
    "deep": ("[" * 100_000, "100 levels"),
    "many": ("[" + "1," * 100_000 + "]", "100,000 values"),
    "scalar": ("name: " + "x" * 20_000_000, "got more than 4 MB"),
    "digits": ("name: " + "1" * 5000, "a number of 5,000 digits"),
    "base 60": ("name: " + ":".join(["1"] * 100_000), "a number of 199,999 digits"),
    "int": ('name: !!int ""', "a value that does not fit its tag"),
    "bool": ("name: !!bool maybe", "a value that does not fit its tag"),
    "timestamp": ("name: !!timestamp never", "a value that does not fit its tag"),
    "python": ("name: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    "latin": (b"name: \xe9", "utf-8"),
    "control": ("name: \x01", "control characters are not allowed"),
    "two": ("a: 1\n---\nb: 1\n", "but found another document"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_yaml_is_an_input_error(kind: str, reader: str, tmp_path: Path) -> None:
    content, words = HOSTILE[kind]
    path = tmp_path / "hostile.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=words) as refused:
        READERS[reader](path)
    assert str(refused.value).startswith(str(path))
    assert len(str(refused.value)) < 600


def test_largest_yaml_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("[" * (MOST_LEVELS - 1) + "x" * (MOST_BYTES // 2) + "]" * (MOST_LEVELS - 1))
    assert isinstance(load_yaml(path, "a list"), list)
    path.write_text("&unused [" + "x," * 99_999 + "]\n")
    assert isinstance(load_yaml(path, "a list"), list)


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: x\r\n")
    assert load_yaml(path, "a scenario") == {"name": "x"}


@pytest.mark.parametrize("shape", ["chain", "list"])
def test_includes_are_limited(shape: str, tmp_path: Path) -> None:
    def write(number: int) -> Path:
        for each in range(number + 1):
            text = (
                f"include: {each + 1}.yaml\n" if shape == "chain" and each < number else "task: t\n"
            )
            (tmp_path / f"{each}.yaml").write_text(text)
        if shape == "list":
            includes = [f"{each}.yaml" for each in range(1, number + 1)]
            (tmp_path / "0.yaml").write_text(f"include: {includes}\n")
        return tmp_path / "0.yaml"

    assert read_task(write(MOST_INCLUDES), trust=False) == {"task": "t"}
    with pytest.raises(InputError, match=f"more than {MOST_INCLUDES} includes"):
        read_task(write(MOST_INCLUDES + 1), trust=False)


def test_commands_refuse_alias_bombs(tmp_path: Path, llama: Path) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(bomb("name"))
    for words in (("plan", path), ("plan", llama, "--recipe", path), ("run", path)):
        ran = vexport(*words, "--quiet")
        assert ran.code == 2, ran.stderr
        assert f"{path}:" in ran.errors[0]
