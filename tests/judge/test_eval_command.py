"""`vexport eval` and `vexport verdict` on the command line: refusals before an engine starts."""

import json
import re
from pathlib import Path

import pytest

from tests.command import vexport
from tests.scores.make import results_file
from tests.texts import assert_contains
from vexport.judge.accepting import accept_results
from vexport.scenario import DEFAULT_KL_LIMIT, DEFAULT_NLL_LIMIT


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--task t", ["--baseline SOURCE", "--against FILE"]),
        ("--task t --baseline b --against a.json", ["--baseline SOURCE", "--against FILE"]),
        ("--task t --against a.json --kl-limit 0.2", ["--kl-limit", "without --baseline"]),
        ("--task t --accept a.json --nll-limit 0.2", ["--nll-limit", "without --baseline"]),
        ("--task t --baseline b --kl-limit 0", ["Invalid value for '--kl-limit'"]),
        ("--task t --baseline b --gate gsm8k=", ["[TASK=]METRIC", "FILTER]"]),
        ("--task t --baseline b --gate acc --gate f1", ["given twice"]),
        ("--baseline b", ["--task NAME_OR_YAML", "--text DATA"]),
        ("--baseline b --task t --text x.txt", ["--task NAME_OR_YAML", "--text DATA"]),
        ("--baseline b --task t --text-rows 9", ["--text-rows", "without --text"]),
        ("--against a.json --text x.txt", ["--text: need --baseline SOURCE alone"]),
        ("--baseline b --accept a.json --text x.txt", ["--text: need --baseline SOURCE alone"]),
    ],
)
def test_conflicting_options_are_refused(
    options: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = vexport("eval", "model", *options.split())
    assert done.code == 2
    assert_contains(done.stderr, *parts)
    assert not list(tmp_path.iterdir())


def test_help_shows_default_limits() -> None:
    """The defaults in the help text equal the scenario's defaults."""
    shown = " ".join(vexport("eval", "--help").stdout.split())
    limits = {"--kl-limit": DEFAULT_KL_LIMIT, "--nll-limit": DEFAULT_NLL_LIMIT}
    for option, limit in limits.items():
        assert re.search(rf"{option} NATS [^\[]*\[default: {limit:g}\]", shown)


def test_accept_keeps_foreign_file(llama: Path, tmp_path: Path) -> None:
    """`--accept` refuses to overwrite a file that is not an accepted baseline."""
    (tmp_path / "notes.md").write_text("mine")
    done = vexport("eval", llama, "--task", "t", "--accept", tmp_path / "notes.md")
    assert done.code == 2
    assert "notes.md" in done.errors[0]
    assert (tmp_path / "notes.md").read_text() == "mine"


def test_verdict_takes_gate_or_accepted_baseline(lm_eval_runs: Path, tmp_path: Path) -> None:
    folders = (lm_eval_runs / "baseline", lm_eval_runs / "twin")
    done = vexport("verdict", *folders, "--gate", "choices=acc_norm,none", "--format", "json")
    assert done.code == 0
    tasks = {task["task"]: task for task in json.loads(done.stdout)["tasks"]}
    assert tasks["choices"]["metric"] == "acc_norm"
    assert [metric["metric"] for metric in tasks["choices"]["also"]] == ["acc"]
    accept_results(lm_eval_runs / "baseline", tmp_path / "accepted.json", {})
    done = vexport("verdict", tmp_path / "accepted.json", lm_eval_runs / "worse")
    assert done.code == 1
    assert "FAIL" in done.stdout


def test_non_deterministic_engine_exits_with_4(copies: Path) -> None:
    repeated = results_file(copies / "baseline").with_name("repeat.json")
    repeated.write_text('{"documents": 200, "changed": 9}')
    done = vexport("verdict", copies / "baseline", copies / "twin")
    assert done.code == 4
    assert_contains(done.stderr, "9 of 200 responses")
