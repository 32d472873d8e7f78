"""`check` also runs vLLM's loaders, and lists everything that it could not judge."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import copy, copytree
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import pytest

from tests.command import ROOT, vexport
from tests.models import Good
from tests.mutations.edits import QUANTIZATION, WHOLE, config, drop, spoiled
from tests.texts import assert_contains
from vexport.api import check
from vexport.checks import NAMES, NUMBERS
from vexport.engine.loader_check import with_load
from vexport.errors import EnvironmentFault
from vexport.files import unreadable_kind, write_text
from vexport.records import (
    LOADERS,
    CellStatus,
    CheckReport,
    Claim,
    DryLoadReport,
    Finding,
    MatrixCell,
    NotJudged,
)
from vexport.rules.book import Rule

UNKNOWN = NotJudged(what=NAMES, why="the layout of a class is not known")


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `check` run vLLM, which is its default for users."""
    monkeypatch.delenv("VEXPORT_NO_VERIFY")


@pytest.mark.vllm
@pytest.mark.usefixtures("with_vllm")
def test_check_runs_dry_load(good: Good, tmp_path: Path) -> None:
    """One checkpoint is sound, vLLM refuses the second, and the third needs a missing package."""
    change = config(WHOLE, quantization_config={"quant_method": "torchao"})
    other = spoiled(good("W8A8"), tmp_path / "torchao", change)
    refused = spoiled(good("W4A16"), tmp_path / "refused", config(QUANTIZATION))
    copy(ROOT / "scenarios" / "demo" / "model" / "tokenizer.json", refused)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"a": {}}}
    write_text(refused / "tokenizer_config.json", json.dumps(settings))
    answer = tmp_path / "answer.json"
    ran = vexport("check", good("W4A16"), refused, other, "-o", answer, "--strict")
    sound, wrong, unknown = json.loads(answer.read_text())
    assert (sound["ok"], sound["not_judged"]) == (True, [])
    judged_by = [each["judged_by"] for each in (sound, wrong, unknown)]
    assert judged_by == ["loaders", "loaders", "static"]
    refusals = [each["check"] for each in wrong["findings"] if each["severity"] == "error"]
    assert refusals == ["dry-load"]
    assert unknown["ok"]
    assert {each["what"] for each in unknown["not_judged"]} == {NAMES, NUMBERS, LOADERS}
    assert ran.code == 1
    assert "dry load: done" in ran.stderr


@pytest.mark.usefixtures("with_vllm")
def test_missing_vllm_is_not_judged(good: Good, tmp_path: Path) -> None:
    """It is a failure only with --strict. All output formats name it."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    command = ("check", good("W8A8"), "--vllm-python", python)
    ran = vexport(*command)
    assert ran.code == 0
    headline, reason, *_ = ran.stdout.splitlines()
    assert headline == f"PASS of the static rules  {good('W8A8')}"
    assert_contains(reason, LOADERS, "vLLM cannot be started")
    assert f"not judged: {LOADERS}: " in ran.stdout
    (answer,) = json.loads(vexport(*command, "--format", "json").stdout)
    assert (answer["ok"], answer["judged_by"]) == (True, "static")
    strict = vexport(*command, "--strict", "--format", "junit")
    assert (strict.code, len(strict.errors)) == (3, 1)
    cases = ElementTree.fromstring(strict.stdout).iter("testcase")
    assert [case.get("name") for case in cases if case.find("skipped") is not None] == [LOADERS]
    first, *_, notice = vexport(*command, "--format", "github").stdout.splitlines()
    assert first.startswith("::notice title=vexport check PASS of the static rules::")
    assert notice.startswith("::notice title=check%3A not judged::")
    chosen = vexport(*command, "--static", "--strict")
    assert (chosen.code, chosen.stdout.splitlines()[0]) == (0, f"PASS  {good('W8A8')}")


@pytest.mark.usefixtures("with_vllm")
def test_failure_has_plain_headline(good: Good, tmp_path: Path) -> None:
    """Missing loaders do not make an error of the static rules doubtful."""
    broken = spoiled(good("W8A8"), tmp_path / "broken", drop("model.norm.weight"))
    ran = vexport("check", broken, "--vllm-python", "/bin/false")
    assert (ran.code, ran.stdout.splitlines()[0]) == (1, f"FAIL  {broken}")


@pytest.mark.usefixtures("with_vllm")
def test_crash_of_vllm_is_fault_of_environment(good: Good, tmp_path: Path) -> None:
    """The interpreter has vLLM, but dies. An error of a checkpoint is more important."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\nkill -9 $$\n')
    python.chmod(0o755)
    ran = vexport("check", good("W8A8"), "--vllm-python", python)
    assert ran.code == 4
    assert_contains(ran.stdout, "PASS of the static rules", f"not judged: {LOADERS}")
    broken = spoiled(good("W8A8"), tmp_path / "broken", drop("model.norm.weight"))
    assert vexport("check", good("W8A8"), broken, "--vllm-python", python).code == 1
    with pytest.raises(EnvironmentFault):
        check(good("W8A8"), vllm_python=python)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def open_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # the path of a socket is limited to 108 bytes
        server.bind(path.name)
        os.chdir(here)


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def link_to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_null(path: Path) -> None:
    path.symlink_to("/dev/null")


KINDS: Mapping[Callable[[Path], None], str] = {
    make_pipe: "named pipe",
    open_socket: "socket",
    Path.mkdir: "a folder",
    link_to_itself: "points to itself",
    link_to_nothing: "a link to nothing",
    link_to_zero: "a device",
    link_to_null: "a device",
}
# The id of the Linux user without rights.
NOBODY_ID = 65534
OPENED_FILES = (
    "model.safetensors",
    "config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
)


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", OPENED_FILES)
def test_unreadable_files_start_no_dry_load(
    good: Good, tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    folder = tmp_path / "out"
    copytree(good("W8A8"), folder)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    ran = vexport("check", folder)
    assert ran.code == (2 if name == "config.json" else 1)
    assert f"{folder / name}" in ran.stdout + ran.stderr
    assert KINDS[make] in ran.stdout + ran.stderr
    assert "dry load" not in ran.stderr


@pytest.mark.parametrize("mode", [0o000, 0o644])
def test_unreadable_file(mode: int) -> None:
    """A child process without rights checks the file, because root can read all files."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        file.touch()
        file.chmod(mode)
        Path(folder).chmod(0o755)
        if (child := os.fork()) == 0:
            if os.geteuid() == 0:
                os.setuid(NOBODY_ID)
            os._exit(unreadable_kind(file) is not None)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (mode == 0)


@pytest.mark.usefixtures("with_vllm")
def test_pipe_as_shard_starts_no_dry_load(good: Good, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    copytree(good("W8A8"), folder)
    index = {"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}
    write_text(folder / "model.safetensors.index.json", json.dumps(index))
    make_pipe(folder / "more.safetensors")
    ran = vexport("check", folder)
    assert (ran.code, "named pipe" in ran.stdout, "dry load" in ran.stderr) == (1, True, False)
    # A file that the index does not name is not opened.
    (folder / "more.safetensors").rename(folder / "other.safetensors")
    copy(folder / "model.safetensors", folder / "more.safetensors")
    assert "named pipe" not in vexport("check", folder, "--static").stdout


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("with_vllm")
def test_dead_worker_affects_one_checkpoint(good: Good, tmp_path: Path) -> None:
    """The interpreter is killed if a request contains the checkpoint `bad`."""
    python = tmp_path / "python"
    killed = """[ -f "$3" ] && grep -q '/bad"' "$3" && kill -9 $$"""
    python.write_text(f'#!/bin/sh\n{killed}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    bad = copytree(good("W8A8"), tmp_path / "bad")
    wrong = spoiled(good("W8A8"), tmp_path / "wrong", config(WHOLE, hidden_act="nonsense"))
    answer = tmp_path / "answer.json"
    ran = vexport("check", good("W8A8"), bad, wrong, "--vllm-python", python, "-o", answer)
    assert ran.code == 1
    sound, dead, refused = json.loads(answer.read_text())
    assert [each["checkpoint"] for each in (sound, dead, refused)] == [
        str(good("W8A8")),
        str(bad),
        str(wrong),
    ]
    assert [each["what"] for each in sound["not_judged"]] == []
    assert [each["what"] for each in dead["not_judged"]] == [LOADERS]
    assert (sound["ok"], dead["ok"], refused["ok"]) == (True, True, False)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("with_vllm")
def test_dry_load_memory_is_limited(good: Good, tmp_path: Path) -> None:
    """transformers creates a name for each of a billion labels."""
    large = spoiled(good("W8A8"), tmp_path / "large", config(WHOLE, num_labels=1_000_000_000))
    wrong = spoiled(good("W8A8"), tmp_path / "wrong", config(WHOLE, hidden_act="nonsense"))
    answer = tmp_path / "answer.json"
    ran = vexport("check", large, wrong, "-o", answer)
    assert ran.code == 1
    unjudged, refused = json.loads(answer.read_text())
    (entry,) = [each for each in unjudged["not_judged"] if each["what"] == LOADERS]
    assert "4 GiB of memory" in entry["why"]
    assert [each["check"] for each in refused["findings"] if each["severity"] == "error"] == [
        "dry-load"
    ]


def test_check_imports_no_torch(good: Good) -> None:
    code = (
        "import sys; import vexport.api, vexport.engine.loader_check; "
        "vexport.api.check(sys.argv[1], static=True);"
    )
    code += "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-c", code, good("W8A8")], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"


def finding(claim: Claim, *, tp: Sequence[int] = (), sm: Sequence[int] = ()) -> Finding:
    return Finding.at(Rule("any/rule", claim=claim), "a.b", tp=tp, sm=sm)


def loaded(
    *findings: Finding, vllm: str = "0.32.1", status: CellStatus = "loads", cuda: bool = False
) -> DryLoadReport:
    cell = MatrixCell(tp=1, sm=90, status=status, reason="" if status == "loads" else "why")
    return DryLoadReport(
        checkpoint="a",
        ok=not findings,
        findings=findings,
        vllm=vllm,
        cuda=cuda,
        cells=(cell,),
        rows=(),
        blind_spots=(),
    )


@pytest.mark.parametrize(
    ("found", "load", "ok", "severities", "left"),
    [
        # The loaders decide about refusals, but about no numbers.
        (finding("refused"), loaded(), True, ["warning"], []),
        (finding("values"), loaded(), False, ["error"], []),
        # The same refusal is shown once. A refusal that the check does not find is added.
        (
            finding("refused"),
            loaded(finding("refused"), status="faulty"),
            False,
            ["error"],
            [NAMES],
        ),
        (
            finding("values"),
            loaded(finding("refused"), status="faulty"),
            False,
            ["error", "error"],
            [NAMES],
        ),
        # Without a result of the loaders for this version, the check's findings stay.
        (finding("refused"), loaded(status="not shown"), False, ["error"], [NAMES, LOADERS]),
        (finding("refused"), loaded(vllm="0.3.2"), False, ["error"], [NAMES, LOADERS]),
        # A claim about a GPU needs a load for this GPU by a CUDA build.
        (finding("refused", sm=(90,)), loaded(cuda=True), True, ["warning"], []),
        (finding("refused", sm=(90,)), loaded(), False, ["error"], []),
        (finding("refused", sm=(80, 90)), loaded(cuda=True), False, ["error"], []),
        (finding("refused", tp=(1,)), loaded(), True, ["warning"], []),
        (finding("refused", tp=(2,)), loaded(), False, ["error"], []),
    ],
)
def test_check_and_dry_load_are_merged(
    found: Finding, load: DryLoadReport, ok: bool, severities: list[str], left: list[str]
) -> None:
    report = CheckReport(
        checkpoint="a",
        ok=False,
        findings=(found,),
        not_judged=(UNKNOWN,),
        vllm="0.32",
    )
    joined = with_load(report, load, "any")
    assert (joined.ok, [each.severity for each in joined.findings]) == (ok, severities)
    assert [each.what for each in joined.not_judged] == left
