"""The tasks `sight` and `tool-calls` against a real `vllm serve`, compared with an engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import vexport
from tests.inference.shipped.chained import TOOL, make_model
from tests.judge.faults import DEMO
from tests.run.served import serving
from tests.texts import assert_contains
from vexport.rules import sight, tools

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
SEEING = DEMO / "model-sight"


def responses(folder: Path) -> list[tuple[object, object, object]]:
    (file,) = folder.glob("samples_sight_*")
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted((row["prompt_hash"], row["doc_id"], row["resps"]) for row in rows)


def test_server_sees_like_engine(tmp_path: Path) -> None:
    out = tmp_path / "out"
    limits = ("--limit", 40, "--margin", "0.2", "--no-attribution", "--quiet", "--format", "json")
    with serving(tmp_path / "server.log", SEEING) as url:
        given = ("--baseline", SEEING, "--task", "sight", "--output-dir", out)
        ran = vexport("eval", url, *given, *limits)
    assert ran.code == 0, ran.stderr
    (task,) = json.loads(ran.stdout)["tasks"]
    assert task["outcome"] == "PASS"
    assert task["candidate"]["value"] == task["baseline"]["value"] > 0.9
    assert responses(out / "candidate") == responses(out / "baseline")


def test_server_calls_tools_like_engine(tmp_path: Path) -> None:
    """The server's model breaks from 40 tools on, and takes no pictures."""
    sound = make_model(tmp_path / "sound", breaks=False)
    broken = make_model(tmp_path / "broken", breaks=True)
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([TOOL]))
    given = ("--baseline", sound, "--task", "tool-calls-10,tool-calls-40", "--tools", file)
    options = ("--gen-kwargs", "max_gen_toks=16", "--no-attribution", "--quiet")
    limits = ("--limit", 200, "--tool-call-parser", "hermes", "--format", "json")
    parser = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with serving(tmp_path / "server.log", broken, *parser) as url:
        ran = vexport("eval", url, *given, *options, *limits, "--output-dir", tmp_path / "out")
        blind = vexport("eval", url, "--baseline", url, "--task", "sight", "--limit", 2, "--quiet")
    assert ran.code == 1, ran.stderr
    below, above = json.loads(ran.stdout)["tasks"]
    assert (below["outcome"], below["candidate"]["value"]) == ("PASS", 1)
    assert (above["outcome"], above["candidate"]["value"]) == ("FAIL", 0)
    assert above["faults"] == {"malformed": 200}
    assert blind.code == 2, blind.stderr
    assert_contains(blind.stderr, "not a multimodal model", sight.REFUSED.id)


def test_server_without_a_parser_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", breaks=False)
    with serving(tmp_path / "server.log", model) as url:
        given = ("--baseline", url, "--task", "tool-calls-1", "--limit", 2, "--quiet")
        ran = vexport("eval", url, *given, "--output-dir", tmp_path / "out")
    assert ran.code == 2, ran.stderr
    assert_contains(ran.stderr, "--enable-auto-tool-choice", tools.REFUSED.id)
