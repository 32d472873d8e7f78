"""The commands that are disturbed, on micro models, and what of their results has to be the same again."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from calling import ROOT, Ended

from vexport.types import Json

DEMO = ROOT / "scenarios" / "demo"
# Every stage that a run can have, short; `limit` leaves enough answers for some to be under way.
SCENARIO = f"""\
name: faults
source: {DEMO}/model
rules:
  - {{match: lm_head, scheme: keep}}
  - {{match: Linear, scheme: W8A8}}
calibration: {{data: {DEMO}/calibration.jsonl, samples: 32, seq_len: 64}}
serve: {{compute: [cpu, sm90], timeout: 600}}
evaluate:
  tasks: [{DEMO}/tasks/addition.yaml, {DEMO}/tasks/facts_choice.yaml]
  limit: 300
  margin: 0.5
"""
# No stage but those in vLLM, and of a length that shows a hang.
LEAN = SCENARIO.replace("W8A8", "FP8_DYNAMIC").replace(
    "compute: [cpu, sm90], timeout: 600", "timeout: TIMEOUT"
)
LEAN = "\n".join(line for line in LEAN.splitlines() if not line.startswith("calibration")) + "\n"
TIMEOUT = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A call: its arguments for a folder to write in, what it left there, and what stands there before."""

    arguments: Callable[[Path], Sequence[object]]
    result: Callable[[Path, Ended], Json]
    prepare: Callable[[Path], None] = lambda folder: None


def report(folder: Path, ended: Ended) -> Json:
    """The report of a run."""
    return json.loads((folder / "out" / "report.json").read_text()) if ended.code < 2 else None


def printed(folder: Path, ended: Ended) -> Json:
    """The answer as JSON."""
    return json.loads(ended.stdout) if ended.stdout else None


def written(folder: Path, ended: Ended) -> Json:
    """The files of a checkpoint, by their digests; not the recipe, which names folders."""
    files = [file for file in sorted((folder / "out").glob("*")) if file.name != "vexport.json"]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


def compared(folder: Path, ended: Ended) -> Json:
    """The reports of a comparison's runs."""
    reports = sorted((folder / "out" / "schemes").glob("*/report.json"))
    return {file.parent.name: json.loads(file.read_text()) for file in reports}


def write_scenario(folder: Path) -> None:
    """The scenario of `run`."""
    (folder / "scenario.yaml").write_text(SCENARIO)


def write_lean(folder: Path) -> None:
    """The scenario of `compare` and of engines that are disturbed."""
    (folder / "scenario.yaml").write_text(LEAN.replace("TIMEOUT", "600"))


def write_gptq(folder: Path) -> None:
    """A checkpoint as GPTQModel packs it, to convert."""
    code = "from tests.checks.quant_methods import write; from pathlib import Path; import sys;"
    code += "write('gptq', Path(sys.argv[1]), Path(sys.argv[2]))"
    subprocess.run([sys.executable, "-c", code, DEMO / "model-x8", folder / "gptq"], check=True)


def quantized(folder: Path) -> None:
    """A checkpoint to load."""
    arguments = ["quantize", DEMO / "model", folder / "w8a8", "--scheme", "W8A8", "--rounding", "nearest"]
    arguments += ["--smoothing", "0", "--overwrite", "-q", "--calibration", DEMO / "calibration.jsonl"]
    subprocess.run([sys.executable, "-m", "vexport", *map(str, arguments)], check=True)


TASKS = ("--task", DEMO / "tasks" / "addition.yaml", "--limit", "300", "--margin", "0.5", "--timeout", "600")
COMMANDS = {
    "plan": Command(
        arguments=lambda folder: ("plan", DEMO / "model", "--scheme", "NVFP4", "--format", "json"),
        result=printed,
    ),
    "quantize": Command(
        arguments=lambda folder: (
            *("quantize", DEMO / "model-x8", folder / "out", "--scheme", "W4A16_G64"),
            *("--calibration", DEMO / "calibration.jsonl", "--samples", "8", "--seq-len", "32"),
        ),
        result=written,
    ),
    "convert": Command(
        arguments=lambda folder: ("convert", folder / "gptq", folder / "out"),
        result=written,
        prepare=write_gptq,
    ),
    "run": Command(
        arguments=lambda folder: ("run", folder / "scenario.yaml", "--run-dir", folder / "out"),
        result=report,
        prepare=write_scenario,
    ),
    "lean run": Command(
        arguments=lambda folder: ("run", folder / "scenario.yaml", "--run-dir", folder / "out"),
        result=report,
        prepare=write_lean,
    ),
    "compare": Command(
        arguments=lambda folder: (
            *("compare", DEMO / "model", "--schemes", "W8A8,FP8_DYNAMIC", "--run-dir", folder / "out"),
            *("--scenario", folder / "scenario.yaml"),
        ),
        result=compared,
        prepare=write_lean,
    ),
    "eval": Command(
        arguments=lambda folder: (
            *("eval", folder / "w8a8", "--baseline", DEMO / "model", *TASKS),
            *("--output-dir", folder / "out", "--format", "json"),
        ),
        result=printed,
        prepare=quantized,
    ),
    "load": Command(
        arguments=lambda folder: ("load", folder / "w8a8", "--format", "json", "--timeout", "600"),
        result=printed,
        prepare=quantized,
    ),
}


def fresh(folder: Path, command: Command) -> None:
    """An empty folder with what the command needs."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command.prepare(folder)
