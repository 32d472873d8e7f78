"""Every command in an installation without extras: it works, or says in one line which extra it needs."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.command import ALL_COMMANDS, Ran
from tests.packaging.environment import ROOT, linked, run
from tests.reports.sample import report
from vexport.files import to_json

DEMO = ROOT / "scenarios" / "demo"
PEER = ROOT / "tests" / "peer"
PLAIN, QUANTIZED = PEER / "llama", PEER / "llama-W4A16"
WORKS = ""
Call = tuple[Sequence[object], str]
# What each command is called with, and what it lacks: nothing, or the extra that it must name.
CALLS: Mapping[str, Sequence[Call]] = {
    "demo": [((), WORKS), (("here",), WORKS)],
    "run": [((ROOT / "scenarios" / "demo-nvfp4.yaml", "--run-dir", "run"), "vllm")],
    "plan": [((PLAIN, "--scheme", "NVFP4A16"), WORKS), ((ROOT / "scenarios" / "demo-nvfp4.yaml",), WORKS)],
    "quantize": [((PLAIN, "fp8-dynamic", "--scheme", "FP8_DYNAMIC"), "quantize")],
    "check": [
        ((QUANTIZED, "--tp", "1", "--sm", "90"), WORKS),
        ((QUANTIZED, "--source", PLAIN), "quantize"),
    ],
    "repair": [
        (("damaged-config", "repaired"), WORKS),
        (("damaged-values", "unrepaired"), "quantize"),
        ((QUANTIZED, "with-source", "--source", PLAIN), "quantize"),
    ],
    "load": [((QUANTIZED,), "vllm"), ((QUANTIZED, "--dry"), "vllm")],
    "compare": [((PLAIN, "--schemes", "W4A16"), "vllm")],
    "eval": [((QUANTIZED, "--baseline", PLAIN, "--task", "gsm8k"), "vllm")],
    "verdict": [(("results", "results"), WORKS)],
    "report": [(("finished",), WORKS), (("finished", "--format", "html"), WORKS)],
    "list": [
        (("schemes",), WORKS),
        (("observers",), WORKS),
        (("checks",), WORKS),
        (("architectures",), WORKS),
    ],
    "explain": [((), WORKS), (("NVFP4",), WORKS), (("completeness",), WORKS), (("margin",), WORKS)],
}
# Seconds of the processor. Importing torch takes more.
AT_ONCE = 3.0


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has what the plain installation has."""
    return linked(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where commands are called: damaged checkpoints, lm-eval's results and a finished run."""
    damage(tmp_path / "damaged-config", "ignore", [])
    damage(
        tmp_path / "damaged-values", "kv_cache_scheme", {"num_bits": 8, "type": "float", "strategy": "tensor"}
    )
    results = {
        "configs": {"sums": {"task": "sums", "output_type": "generate_until"}},
        "results": {"sums": {"exact_match,none": 0.9, "exact_match_stderr,none": 0.01}},
        "n-samples": {"sums": {"original": 2, "effective": 2}},
        "higher_is_better": {"sums": {"exact_match": True}},
    }
    samples = [
        {
            "doc_id": number,
            "doc": {"a": number},
            "target": "1",
            "arguments": {"gen_args_0": {"arg_0": f"{number} + 1 =", "arg_1": {"until": ["."]}}},
            "resps": [["1"]],
            "filtered_resps": ["1"],
            "filter": "none",
            "metrics": ["exact_match"],
            "doc_hash": f"{number:064x}",
            "prompt_hash": f"{number:064x}",
            "target_hash": f"{number:064x}",
            "exact_match": 1.0,
        }
        for number in range(2)
    ]
    for name, text in {
        "results/samples_sums_2026-01-01T00-00-00.000000.jsonl": "".join(
            f"{json.dumps(sample)}\n" for sample in samples
        ),
        "results/results_2026-01-01T00-00-00.000000.json": json.dumps(results),
        "finished/report.json": to_json(report()),
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def damage(copy: Path, key: str, value: object) -> None:
    """A copy of a checkpoint whose quantization config is not right any more."""
    shutil.copytree(QUANTIZED, copy)
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"][key] = value
    (copy / "config.json").write_text(json.dumps(config))


def test_every_command_has_a_call() -> None:
    assert set(CALLS) == set(ALL_COMMANDS)


def test_the_plain_installation_has_neither_torch_nor_numba(plain: Path) -> None:
    code = "from importlib.util import find_spec; print([*map(find_spec, ('torch', 'numba', 'vllm'))])"
    found = subprocess.run([plain, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[None, None, None]\n"


@pytest.mark.parametrize(("name", "call"), [(name, call) for name, calls in CALLS.items() for call in calls])
def test_without_extras(plain: Path, folder: Path, name: str, call: Call) -> None:
    arguments, extra = call
    start = os.times()
    ran = run(plain, name, *arguments, folder=folder)
    assert_ended(ran, extra)
    end = os.times()
    seconds = end.children_user + end.children_system - start.children_user - start.children_system
    assert extra == WORKS or seconds < AT_ONCE


def assert_ended(ran: Ran, extra: str) -> None:
    """Passed, or one line that says how to install an extra."""
    if extra == WORKS:
        assert ran.code in (0, 3), ran.stderr
        assert ran.stdout
        return
    assert ran.code == 4, ran
    (line,) = ran.errors
    assert re.search(rf"`pip install 'vexport\[{extra}\]( @ file:[^']*)?'`", line), line
    assert "internal" not in line
