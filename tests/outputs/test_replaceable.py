"""--overwrite replaces what vexport wrote, and nothing that is someone else's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import vexport
from tests.models import Good
from tests.outputs.test_separate import tree
from vexport.errors import InputError
from vexport.run.directory import RunDirectory

COMMANDS = {
    "quantize": ("quantize", "MODEL", "OUT", "--scheme", "FP8_DYNAMIC"),
    "repair": ("repair", "GOOD", "OUT"),
    "eval": ("eval", "GOOD", "--task", "TASK", "--accept", "NEW", "--output-dir", "OUT"),
    "run": ("run", "SCENARIO", "--run-dir", "OUT"),
}
TASK = Path(__file__).parents[2] / "scenarios" / "demo" / "tasks" / "addition.yaml"
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, llama: Path, good: Good) -> Run:
    """Runs a command of COMMANDS that writes to tmp_path/out; its exit code and stderr."""
    places = {"MODEL": llama, "OUT": tmp_path / "out", "TASK": TASK, "NEW": tmp_path / "new.json"}

    def ran(command: str, *options: str) -> tuple[int, str]:
        scenario = tmp_path.parent / f"{tmp_path.name}.yaml"
        rule = "{match: Linear, scheme: FP8_DYNAMIC}"
        scenario.write_text(f"name: one\nsource: {llama}\nrules: [{rule}]\n")
        named = {**places, "GOOD": good("FP8_DYNAMIC"), "SCENARIO": scenario}
        done = vexport(*(named.get(word, word) for word in COMMANDS[command]), *options, "--quiet")
        return done.code, done.stderr

    return ran


def refused(run: Run, command: str, root: Path, *words: str) -> None:
    """The command is refused with one line, also with --overwrite, and nothing has changed."""
    before = tree(root)
    code, stderr = run(command, "--overwrite")
    assert code == 2, stderr
    (line,) = stderr.splitlines()
    assert all(word in line for word in words), line
    assert tree(root) == before


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["papers", "model", "peer", "results"])
def test_folder_of_others_is_refused(command: str, kind: str, run: Run, tmp_path: Path, llama: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    if kind != "papers":
        shutil.copytree(llama, out, dirs_exist_ok=True)
    if kind == "peer":
        config = json.loads((out / "config.json").read_text())
        scheme = {"quant_method": "compressed-tensors", "version": "0.17.0", "config_groups": {}}
        (out / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    if kind == "results":
        (out / "candidate").mkdir()
        (out / "candidate" / "cv.pdf").write_text("a person's life")
    refused(run, command, tmp_path, str(out), "vexport did not make", "choose another path")


@pytest.mark.parametrize("command", ["quantize", "repair"])
@pytest.mark.parametrize("extra", ["notes.md", "plots/loss.svg", "model.safetensors/x", ".git/HEAD"])
def test_what_a_person_put_in_a_checkpoint_stays(command: str, extra: str, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(command)[0] == 0
    if extra.startswith("model."):
        (out / "model.safetensors").rename(out / "mine.safetensors")
    (out / extra).parent.mkdir(exist_ok=True)
    (out / extra).write_text("mine")
    refused(run, command, tmp_path, str(out), "which vexport did not write", "move that elsewhere")
    shutil.rmtree(out)
    assert run(command)[0] == 0
    assert run(command, "--overwrite")[0] == 0


def test_a_recipe_names_all_files(good: Good) -> None:
    recipe = json.loads((good("W8A8") / "vexport.json").read_text())
    assert recipe["files"] == sorted(path.name for path in good("W8A8").iterdir())


@pytest.mark.parametrize("extra", ["notes.md", "figures/a.png", "mine.yaml", "checkpoint/README.md"])
def test_what_a_person_put_into_a_run_directory_stays(extra: str, tmp_path: Path, good: Good) -> None:
    root = tmp_path / "run"
    RunDirectory(root).begin(overwrite=False)
    shutil.copytree(good("W8A8"), root / "checkpoint")
    for name in ("report.json", "scenario.yaml"):
        (root / name).write_text("{}")
    (root / extra).parent.mkdir(exist_ok=True)
    (root / extra).write_text("mine")
    before = tree(root)
    RunDirectory(root).begin(overwrite=False)
    with pytest.raises(InputError, match="which vexport did not write"):
        RunDirectory(root).begin(overwrite=True)
    assert tree(root) == before
    (root / extra).unlink()
    shutil.rmtree(root / "figures", ignore_errors=True)
    RunDirectory(root).begin(overwrite=True)
    assert [path.name for path in root.iterdir()] == [".vexport-run"]
