"""vLLM reads the path of a model as a pattern of glob."""

import json
from pathlib import Path

import pytest

from tests.command import ROOT, vexport
from tests.models import Good
from tests.texts import assert_contains
from vexport.checkpoint.index import SINGLE_NAME, vllm_finds_weights
from vexport.records import LOADERS

SCENARIO = ROOT / "scenarios" / "demo-nvfp4.yaml"
TASK = ROOT / "scenarios" / "demo" / "tasks" / "addition.yaml"


@pytest.mark.parametrize(
    ("folder", "others", "is_found"),
    [
        ("model", ["model2"], True),
        ("model [v2]", [], False),
        ("runs[1]/model", [], False),
        # A name that also matches other names.
        ("model*", [], True),
        ("model*", ["model2"], False),
        ("v?/model", ["v1/model"], False),
        ("v?/model", ["v1/other"], True),
        # A bracket alone is a letter. A set in brackets may match itself.
        ("model[", ["model2"], True),
        ("model]", [], True),
        ("a[[]b", [], False),
    ],
)
@pytest.mark.parametrize("exists", [True, False])
def test_path_as_pattern(
    tmp_path: Path, folder: str, others: list[str], is_found: bool, exists: bool
) -> None:
    for name in (folder, *others) if exists else others:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / SINGLE_NAME).touch()
    assert vllm_finds_weights(tmp_path / folder) is is_found


@pytest.fixture
def bracketed(good: Good, tmp_path: Path) -> Path:
    folder = tmp_path / "model (v[2])"
    folder.symlink_to(good("W8A8"))
    return folder


def test_check_judges_statically(
    bracketed: Path, good: Good, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker is started, so that the test needs no vLLM."""
    monkeypatch.delenv("VEXPORT_NO_VERIFY")
    ran = vexport("check", bracketed, "--format", "json")
    (report,) = json.loads(ran.stdout)
    assert (ran.code, report["ok"], report["judged_by"]) == (0, True, "static")
    assert [each["what"] for each in report["not_judged"]] == [LOADERS]
    warnings = {each["where"] for each in report["findings"] if each["severity"] == "warning"}
    assert str(bracketed) in warnings
    assert vexport("check", bracketed, "--strict").code == 3


@pytest.mark.parametrize(
    "command",
    [
        ("load", "MODEL"),
        ("load", "MODEL", "--dry"),
        ("eval", "MODEL", "--baseline", "PLAIN", "--task", TASK),
        ("eval", "PLAIN", "--baseline", "MODEL", "--task", TASK),
        ("compare", "MODEL", "--serve", "{}", "--serve", "max_num_seqs=2", "--task", TASK),
        ("run", SCENARIO, "--run-dir", "runs[1]"),
        ("compare", "PLAIN", "--scenario", SCENARIO, "--schemes", "FP8,W4A16", "--run-dir", "r[2]"),
    ],
)
def test_commands_that_serve_refuse(
    command: tuple[str | Path, ...],
    bracketed: Path,
    good: Good,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"MODEL": bracketed, "PLAIN": good("W8A8")}
    ran = vexport(*(names.get(str(word), word) for word in command))
    assert (ran.code, len(ran.errors)) == (2, 1)
    assert_contains(ran.errors[0], "reads as a pattern")
    assert {path.name for path in tmp_path.iterdir()} == {bracketed.name}


@pytest.mark.vllm
def test_quantize_warns(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VEXPORT_NO_VERIFY")
    out = tmp_path / "out[1]"
    ran = vexport("quantize", llama, out, "--scheme", "W8A16", "--rounding", "nearest")
    assert ran.code == 0
    assert_contains(ran.stderr, f"warning: {out} will not load in vLLM", "pattern")
    assert (out / "config.json").is_file()
