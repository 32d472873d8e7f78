"""Commands detect a Git LFS pointer instead of a file before they start any work."""

import json
from pathlib import Path
from shutil import copytree

import pytest

from tests.command import vexport
from tests.models import Good
from tests.texts import assert_contains

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 2336927755\n"
TASK = Path(__file__).parent.parent / "scenarios" / "demo" / "tasks" / "addition.yaml"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("config.json", ("plan", "MODEL", "--scheme", "FP8_DYNAMIC")),
        ("model.safetensors", ("quantize", "MODEL", "OUT", "--scheme", "FP8_DYNAMIC")),
        ("tokenizer.json", ("load", "MODEL")),
        ("model.safetensors", ("load", "MODEL", "--dry")),
        ("config.json", ("repair", "MODEL", "OUT")),
        ("model.safetensors", ("check", "GOOD", "--source", "MODEL")),
        (
            "model.safetensors",
            ("eval", "GOOD", "--baseline", "MODEL", "--task", TASK, "--output-dir", "OUT"),
        ),
    ],
)
def test_pointers_are_named(
    name: str, arguments: tuple[object, ...], good: Good, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    copytree(good("W8A8"), model)
    (model / name).write_text(POINTER)
    places = {"MODEL": model, "GOOD": good("W8A8"), "OUT": tmp_path / "out"}
    ran = vexport(*(places.get(str(argument), argument) for argument in arguments), "--quiet")
    assert (ran.code, ran.stdout) == (2, "")
    (error,) = ran.errors
    assert error.startswith(f"error: {model / name}: ")
    assert_contains(error, "Git LFS pointer", "`git lfs pull`", "`lfs: true`")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_many_pointers_are_one_finding(good: Good, tmp_path: Path) -> None:
    model = tmp_path / "model"
    copytree(good("W8A8"), model)
    for number in range(1, 4):
        (model / f"model-{number}-of-3.safetensors").write_text(POINTER)
    (model / "logo.png").write_text(POINTER)
    assert "Git LFS pointer" in vexport("check", model).stdout
    ran = vexport("check", model, "--format", "json")
    assert ran.code == 1
    (finding,) = json.loads(ran.stdout)[0]["findings"]
    assert finding["where"] == f"{model / 'model-1-of-3.safetensors'} (and 2 more files)"
    assert finding["got"] == "a Git LFS pointer"
