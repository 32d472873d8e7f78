"""--overwrite replaces only files that vexport wrote."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.command import ROOT, vexport
from tests.models import Good
from tests.outputs.test_separate import tree
from tests.texts import assert_contains, assert_raises
from vexport.errors import CheckpointFailed, InputError
from vexport.files import write_text
from vexport.inference.fingerprint import write_fingerprint
from vexport.inference.repeated import Repeated, write_repeated
from vexport.outputs.manifest import MANIFEST, begin_manifest, record, recorded, unlisted_entries
from vexport.outputs.resumable import keep_as_failed, resumable_directory
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
    """Return a function that runs a command of COMMANDS with the output tmp_path/out.

    It returns the exit code and stderr.
    """
    places = {"MODEL": llama, "OUT": tmp_path / "out", "TASK": TASK, "NEW": tmp_path / "new.json"}

    def ran(command: str, *options: str) -> tuple[int, str]:
        scenario = tmp_path.parent / f"{tmp_path.name}.yaml"
        rule = "{match: Linear, scheme: FP8_DYNAMIC}"
        scenario.write_text(f"name: one\nsource: {llama}\nrules: [{rule}]\n")
        named = {**places, "GOOD": good("FP8_DYNAMIC"), "SCENARIO": scenario}
        done = vexport(*(named.get(word, word) for word in COMMANDS[command]), *options, "--quiet")
        return done.code, done.stderr

    return ran


def require_refusal(run: Run, command: str, root: Path, *words: str) -> None:
    """Check that the command fails with one line, even with --overwrite, and changes nothing."""
    before = tree(root)
    code, stderr = run(command, "--overwrite")
    assert code == 2, stderr
    (line,) = stderr.splitlines()
    assert all(word in line for word in words), line
    assert tree(root) == before


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["papers", "model", "peer", "results"])
def test_foreign_folder_is_refused(
    command: str, kind: str, run: Run, tmp_path: Path, llama: Path
) -> None:
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
    require_refusal(run, command, tmp_path, str(out), "vexport did not make", "choose another path")


@pytest.mark.parametrize("command", ["quantize", "repair"])
@pytest.mark.parametrize(
    "extra", ["notes.md", "plots/loss.svg", "model.safetensors/x", ".git/HEAD"]
)
def test_foreign_files_in_checkpoint_are_kept(
    command: str, extra: str, run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run(command)[0] == 0
    if extra.startswith("model."):
        (out / "model.safetensors").rename(out / "mine.safetensors")
    (out / extra).parent.mkdir(exist_ok=True)
    (out / extra).write_text("mine")
    require_refusal(
        run,
        command,
        tmp_path,
        str(out),
        "which vexport did not write",
        "move the other files elsewhere",
    )
    shutil.rmtree(out)
    assert run(command)[0] == 0
    assert run(command, "--overwrite")[0] == 0


def test_recipe_lists_all_files(good: Good) -> None:
    recipe = json.loads((good("W8A8") / "vexport.json").read_text())
    assert recipe["files"] == sorted(path.name for path in good("W8A8").iterdir())


FILES = ("report.json", "eval/baseline/vllm.log", "calibration/statistics.json")


def make_run_directory(root: Path, checkpoint: Path) -> Path:
    """Write a run directory with some of a run's files."""
    RunDirectory(root).begin(overwrite=False)
    for name in FILES:
        record(root / name)
        write_text(root / name, "{}")
    record(root / "checkpoint")
    shutil.copytree(checkpoint, root / "checkpoint")
    return root


def plant(root: Path, extra: str) -> None:
    """Put a user's file, link (`->` in `extra`) or empty folder (`/` at the end) into a folder."""
    name, is_link, target = extra.partition(" -> ")
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_link:
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    elif extra.endswith("/"):
        path.mkdir()
    else:
        path.write_text("mine")


@pytest.mark.parametrize(
    "extra",
    [
        *(
            "notes.md",
            "figures/a.png",
            "mine.yaml",
            "report.docx",
            "report.json.bak",
            ".report.json.mine",
        ),
        *("eval/mine/notes.txt", "eval/baseline/notes.txt", "calibration/notes.txt", "eval/empty/"),
        *(
            "checkpoint/README.md",
            "checkpoint/plots/loss.svg",
            "checkpoint/empty/",
            "checkpoint/a -> ../b",
        ),
        *(
            ".checkpoint.partial/new/a.txt",
            ".checkpoint.partial/aside/b/c.txt",
            ".checkpoint.partial/d",
        ),
        *(
            "report.md -> ../elsewhere",
            "eval/candidate -> ../..",
            "eval/baseline/vllm.log -> /dev/null",
        ),
    ],
)
def test_foreign_files_in_run_directory_are_kept(extra: str, tmp_path: Path, good: Good) -> None:
    root = make_run_directory(tmp_path / "run", good("W8A8"))
    plant(root, extra)
    before = tree(root)
    RunDirectory(root).begin(overwrite=False)
    named = extra.partition(" -> ")[0].rstrip("/").removeprefix("checkpoint/")
    with pytest.raises(InputError, match=rf"'{named}', which vexport did not write"):
        RunDirectory(root).begin(overwrite=True)
    assert tree(root) == before


def interrupt_checkpoint(out: Path) -> None:
    """Leave the working folder of a checkpoint with a shard and a rounded layer."""
    with (
        suppress(KeyboardInterrupt),
        resumable_directory(out, input_digest="x", overwrite=True) as folder,
    ):
        for file in (folder / "model.safetensors", folder.parent / "aside" / "layer-0000.json"):
            record(file)
            file.write_text("half")
        raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["new/notes.txt", "new/sub/model.safetensors", "aside/notes.txt"])
def test_foreign_files_in_unfinished_work_are_kept(name: str, tmp_path: Path, good: Good) -> None:
    root = make_run_directory(tmp_path / "run", good("W8A8"))
    interrupt_checkpoint(root / "checkpoint")
    mine = root / ".checkpoint.partial" / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    before = tree(root)
    with assert_raises(InputError, f".checkpoint.partial/{name}'", "did not write"):
        RunDirectory(root).begin(overwrite=True)
    with pytest.raises(InputError, match=name):
        interrupt_checkpoint(root / "checkpoint")
    assert tree(root) == before


def test_foreign_files_are_not_published(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def write() -> None:
        with resumable_directory(out, input_digest="x", overwrite=True) as folder:
            record(folder / "config.json")
            (folder / "config.json").write_text("{}")
            (folder / "notes.txt").write_text("mine")

    with pytest.raises(InputError, match=r"notes\.txt"):
        write()
    assert not out.exists()
    assert (tmp_path / ".out.partial" / "new" / "notes.txt").read_text() == "mine"


def test_run_directory_is_emptied(tmp_path: Path, good: Good) -> None:
    root = make_run_directory(tmp_path / "run", good("W8A8"))
    (root / ".report.json.0123abcd").write_text("left by a killed call")
    interrupt_checkpoint(root / "checkpoint")
    (partial,) = root.glob(".*.partial")
    assert {path.name for path in partial.iterdir()} == {".made-from", MANIFEST, "new", "aside"}
    RunDirectory(root).begin(overwrite=True)
    assert {path.name for path in root.iterdir()} == {".vexport-run", MANIFEST}
    assert recorded(root) == frozenset()


def test_folder_without_manifest_is_kept(tmp_path: Path, good: Good) -> None:
    root = make_run_directory(tmp_path / "run", good("W8A8"))
    (root / MANIFEST).unlink()
    before = tree(root)
    RunDirectory(root).begin(overwrite=False)
    with pytest.raises(InputError, match=rf"mv {root} {root}.old"):
        RunDirectory(root).begin(overwrite=True)
    assert tree(root) == before


def test_demo_replaces_only_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    assert vexport("demo", folder).code == 0
    assert vexport("demo", folder).code == 2
    (folder / "demo-nvfp4.yaml").write_text("changed")
    assert vexport("demo", folder, "--overwrite").code == 0
    (folder / "demo" / "mine.txt").write_text("mine")
    before = tree(folder)
    ran = vexport("demo", folder, "--overwrite")
    assert ran.code == 2
    assert_contains(ran.errors[0], "'demo/mine.txt'", "did not write")
    assert tree(folder) == before


WRITER = """
import itertools, sys
from pathlib import Path
from vexport.files import write_text
from vexport.outputs.manifest import record
root = Path(sys.argv[1])
for number in itertools.count():
    record(root / f"folder/{number}.json")
    write_text(root / f"folder/{number}.json", "{}")
    print(number, flush=True)
"""


@pytest.mark.parametrize("files", [1, 20, 60])
def test_killed_call_leaves_no_unlisted_file(files: int, tmp_path: Path) -> None:
    root = tmp_path / "run"
    RunDirectory(root).begin(overwrite=False)
    command = [sys.executable, "-c", WRITER, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as writer:
        assert writer.stdout is not None
        for _ in range(files):
            writer.stdout.readline()
        writer.kill()
    assert len(list((root / "folder").iterdir())) >= files
    RunDirectory(root).begin(overwrite=True)
    assert {path.name for path in root.iterdir()} == {".vexport-run", MANIFEST}


def test_incomplete_line_of_manifest_is_ignored(tmp_path: Path) -> None:
    RunDirectory(tmp_path).begin(overwrite=False)
    record(tmp_path / "one")
    with (tmp_path / MANIFEST).open("ab") as manifest:
        manifest.write(b'"tw')
    record(tmp_path / "a\nb")
    assert recorded(tmp_path) == {"one", "a\nb"}


FAILURE = CheckpointFailed("OUT", got="a refusal", need="", fix="export it again")


def fail_once(out: Path) -> CheckpointFailed:
    """Return the error of a failing call that writes a checkpoint."""
    try:
        with resumable_directory(out, input_digest="x", overwrite=True) as folder:
            record(folder / "config.json")
            (folder / "config.json").write_text("{}")
            raise keep_as_failed(folder, out, FAILURE)
    except CheckpointFailed as failure:
        return failure


def test_failed_output_is_replaced_by_next(tmp_path: Path) -> None:
    for _ in range(2):
        assert "the checkpoint is kept as" in str(fail_once(tmp_path / "z"))
    assert json.loads((tmp_path / "z.failed" / "vexport.json").read_text())["failed"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["z.failed"]


@pytest.mark.parametrize("kind", ["sound", "extra", "file", "link", "broken link", "papers"])
def test_failed_call_keeps_foreign_files(kind: str, tmp_path: Path, good: Good) -> None:
    failed = tmp_path / "z.failed"
    if kind == "sound":
        shutil.copytree(good("W8A8"), failed)
    elif kind == "extra":
        fail_once(tmp_path / "z")
        (failed / "notes.txt").write_text("mine")
    elif kind == "file":
        failed.write_text("mine")
    elif kind == "link":
        failed.symlink_to(good("W8A8"))
    elif kind == "broken link":
        failed.symlink_to("nowhere")
    else:
        failed.mkdir()
        (failed / "thesis.txt").write_text("mine")
    before = tree(tmp_path)
    assert_contains(str(fail_once(tmp_path / "z")), "a refusal", "not kept", str(failed))
    assert tree(tmp_path) == before


def test_named_templates_are_replaced(tmp_path: Path, llama: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(llama, source)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("x")
    words = (
        "quantize",
        source,
        tmp_path / "out",
        "--scheme",
        "FP8_DYNAMIC",
        "--no-verify",
        "--overwrite",
    )
    for _ in range(2):
        assert vexport(*words).code == 0
    (tmp_path / "out" / "additional_chat_templates" / "mine.jinja").write_text("mine")
    (error,) = vexport(*words).errors
    assert_contains(error, "'additional_chat_templates/mine.jinja'", "did not write")


def test_session_files_are_listed(tmp_path: Path) -> None:
    begin_manifest(tmp_path)
    folder = tmp_path / "eval" / "baseline"
    folder.mkdir(parents=True)
    write_fingerprint(folder, {"vllm": "0.32.0"})
    write_repeated(folder, Repeated(documents=1, changed=0))
    assert unlisted_entries(tmp_path, tmp_path) == []
    assert len(recorded(tmp_path)) == 2
