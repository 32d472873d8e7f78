"""Work follows the size of what is read: calls of functions at n and at 4n, which no busy machine changes."""

import json
import re
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import copytree
from types import FrameType

import numpy as np
import pytest

from tests.command import vexport
from tests.packaging.environment import ROOT
from vexport.calibration.data import first_texts, read_samples
from vexport.checkpoint.header import read_header
from vexport.checkpoint.smoothed import SMOOTHING, encode, smoothing_of
from vexport.checks.vllm import render
from vexport.engine.failures import last_exception, log_tail
from vexport.errors import InputErrors
from vexport.evaluation.results import read_results
from vexport.reports.folding import fold
from vexport.scenario import read_scenario
from vexport.types import Finding
from vexport.types.calibration_data import CalibrationData
from vexport.types.patterns import Patterns

PEER = ROOT / "tests" / "peer" / "llama-W4A16"
PAGE = ROOT / "vexport" / "docs" / "robustness.md"
N = 300
# Of four times the input; 4 is linear, 16 would be quadratic.
MOST = 4.8
Grow = Callable[[Path, int], Callable[[], object]]


def header(folder: Path, n: int) -> Callable[[], object]:
    """A header of n tensors."""
    entries = {
        f"model.layers.{number}.weight": {
            "dtype": "F32",
            "shape": [1],
            "data_offsets": [4 * number, 4 * number + 4],
        }
        for number in range(n)
    }
    text = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * n))
    return lambda: read_header(folder / "model.safetensors")


def ignored(folder: Path, n: int) -> Callable[[], object]:
    """A checkpoint whose config ignores n layers by name."""
    copy = copytree(PEER, folder / "checkpoint")
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["ignore"] += [f"model.layers.{number}.other" for number in range(n)]
    (copy / "config.json").write_text(json.dumps(config))
    return lambda: vexport("check", copy)


def groups(folder: Path, n: int) -> Callable[[], object]:
    """Results in which n groups contain each other, all the way round."""
    names = [f"group{number}" for number in range(n)]
    chain = {name: [other, "sums"] for name, other in zip(names, [*names[1:], names[0]], strict=True)}
    content = {
        "configs": {"sums": {"task": "sums", "output_type": "generate_until"}},
        "results": {"sums": {"exact_match,none": 0.9}, names[0]: {"exact_match,none": 0.9}},
        "n-samples": {"sums": {"original": 9, "effective": 9}},
        "groups": {names[0]: {"exact_match,none": 0.9}},
        "group_subtasks": chain,
    }
    (folder / "results_2026-01-01T00-00-00.000000.json").write_text(json.dumps(content))
    return lambda: read_results(folder)


def exponents(folder: Path, n: int) -> Callable[[], object]:
    """The exponents of n norms, each taken back in its layer."""
    up, down = (encode(np.array([number, -number], np.int8)) for number in (1, -1))
    tensors = {
        f"model.layers.{number}.{name}.weight": {"rows": rows, "columns": columns}
        for number in range(n)
        for name, rows, columns in (("norm", up, ""), ("linear", "", down))
    }
    (folder / SMOOTHING).write_text(json.dumps({"tensors": tensors}))
    return lambda: smoothing_of(folder)


def findings(folder: Path, n: int) -> Callable[[], object]:
    """Findings of n kinds and places."""
    made = [
        Finding(
            check="values",
            severity="error",
            where=f"a.{'x' * (number % 97)}.{number}.w",
            expected="numbers",
            got=f"{'abcdefgh'[number % 8]} NaN",
            fix="export again",
        )
        for number in range(n)
    ]
    return lambda: fold(made)


def rules(folder: Path, n: int) -> Callable[[], object]:
    """A scenario of n rules."""
    lines = "".join(f"  - {{match: layer{number}, scheme: keep}}\n" for number in range(n))
    (folder / "a.yaml").write_text(
        f"name: a\nsource: .\nrules:\n{lines}  - {{match: Linear, scheme: W4A16}}\n"
    )
    return lambda: read_scenario(folder / "a.yaml")


def unknown_keys(folder: Path, n: int) -> Callable[[], object]:
    """A scenario of n keys that do not exist: all are found, some are told."""
    (folder / "a.yaml").write_text("".join(f"key{number}: 1\n" for number in range(n)))
    return lambda: vexport("plan", folder / "a.yaml")


def rows(folder: Path, n: int) -> Callable[[], object]:
    """Calibration text of n rows, of which four are asked for."""
    (folder / "rows.jsonl").write_text('{"text": "a few words"}\n' * n)
    data = CalibrationData(name=str(folder / "rows.jsonl"), samples=4, seq_len=8)
    return lambda: first_texts(data, 4)


def expressions(folder: Path, n: int) -> Callable[[], object]:
    """A pattern that is asked for n names."""
    patterns = Patterns((r"re:.*layers\.\d+\.(mlp|attn)$", "lm_head"))
    return lambda: [patterns.match(f"model.layers.{number}.mlp") for number in range(n)]


def layers(folder: Path, n: int) -> Callable[[], object]:
    """A config that tells of n thousand layers, next to the tensors of two."""
    return lambda: vexport("check", checkpoint_with(folder, "num_hidden_layers", 1000 * n))


def bits(folder: Path, n: int) -> Callable[[], object]:
    """A config that tells of n thousand bits."""
    copy = copytree(PEER, folder / "checkpoint")
    text = (copy / "config.json").read_text().replace('"num_bits": 4', f'"num_bits": {1000 * n}')
    (copy / "config.json").write_text(text)
    return lambda: vexport("check", copy)


def aliases(folder: Path, n: int) -> Callable[[], object]:
    """A scenario in which one list stands n times."""
    uses = ", ".join(["*a"] * n)
    (folder / "a.yaml").write_text(f"name: &a [1, 2, 3]\nsource: [{uses}]\n")
    return lambda: vexport("plan", folder / "a.yaml")


def message(folder: Path, n: int) -> Callable[[], object]:
    """An error about a name of n hundred letters, every other one a command to a terminal."""
    return lambda: vexport("plan", folder, "--scheme", "\x1bx" * (50 * n))


def log(folder: Path, n: int) -> Callable[[], object]:
    """A log of an engine with n exceptions."""
    (folder / "vllm.log").write_text("ValueError: no\n  ^^^\nRuntimeError: Engine core failed\n" * n)
    return lambda: (log_tail(folder / "vllm.log"), last_exception(folder / "vllm.log"))


def turns(folder: Path, n: int) -> Callable[[], object]:
    """A chat template, asked for a conversation of n turns."""
    text = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
    said: list[dict[str, object]] = [{"role": "user", "content": "hello"}] * n
    return lambda: render.render(render.compiled(text), said, {})


def broken_rows(folder: Path, n: int) -> Callable[[], object]:
    """Calibration data of which no row can be read."""
    (folder / "rows.jsonl").write_text("{\n" * n)
    data = CalibrationData(name=str(folder / "rows.jsonl"), samples=4, seq_len=8)

    def read() -> None:
        with pytest.raises(InputErrors):
            read_samples(data, PEER, vocab_size=8)

    return read


def checkpoint_with(folder: Path, key: str, value: int) -> Path:
    """A sound checkpoint with another value in its config."""
    copy = copytree(PEER, folder / "checkpoint")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, key: value}))
    return copy


def calls_of(work: Callable[[], object]) -> int:
    """How many functions are called, in Python and in C."""
    count = 0

    def tell(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(tell)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


# What grows, and the rows of the documents' table of bounds that it is about.
GROWS: Mapping[Grow, tuple[str, ...]] = {
    expressions: ("regular expressions of a config or a rule",),
    layers: ("layers and experts of a config",),
    bits: ("`num_bits`",),
    header: ("header of a safetensors file",),
    aliases: ("values of a scenario, aliases counted in full",),
    unknown_keys: ("problems of one scenario that are listed",),
    rules: (),
    ignored: (),
    groups: ("groups of lm-eval results",),
    exponents: ("exponents of a smoothing",),
    message: ("a message on stderr",),
    findings: ("kinds of findings: text, Markdown", "kinds of findings: HTML"),
    log: ("log of an engine that is read for its cause",),
    turns: ("a chat template: `check`", "a chat template: calibration, evaluation"),
    rows: ("text of a calibration row",),
    broken_rows: ("broken rows of calibration data",),
}


def test_every_bound_of_the_documents_has_a_test_of_growth() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Bounds")[2].partition("\n\nThe tests")[0]
    rows = re.findall(r"^\| (.+?) \| .+ \|$", table, re.MULTILINE)[1:]
    assert len(rows) > 10
    assert sorted(row for about in GROWS.values() for row in about) == sorted(rows)


@pytest.mark.parametrize("grow", GROWS, ids=lambda grow: grow.__name__)
@pytest.mark.fault("inputs four times as large: at most 4.8 times the calls of functions")
def test_four_times_the_input_is_four_times_the_work(grow: Grow, tmp_path: Path) -> None:
    counts = []
    for name, n in (("warm", 2), ("small", N), ("large", 4 * N)):  # the first one imports
        (tmp_path / name).mkdir()
        counts.append(calls_of(grow(tmp_path / name, n)))
    print(f"{grow.__name__}: {counts[1]:,} calls for {N}, {counts[2]:,} for {4 * N}")
    assert counts[2] < MOST * counts[1]
