#!/usr/bin/env python3
"""A net below a refactoring: what vexport writes and says, recorded before and compared after.

    .venv/bin/python scripts/net.py record before.json
    .venv/bin/python scripts/net.py compare before.json

Every scheme on every micro family, data-free; `gptq`, `refit` and calibrated scales on three
families; the findings of `check` on spoiled checkpoints; a run's report. Weights, config.json and
its `ignore` are lines of their own. Floats depend on the processor: a record is good on the machine
that made it.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "VEXPORT_NO_VERIFY": "1"}

import hashlib  # noqa: E402
import json  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator, Mapping  # noqa: E402
from difflib import unified_diff  # noqa: E402
from pathlib import Path  # noqa: E402
from shutil import copytree, rmtree  # noqa: E402
from tempfile import TemporaryDirectory  # noqa: E402

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.architectures.families import FAMILIES, save_family  # noqa: E402
from tests.command import vexport  # noqa: E402
from tests.models import write_calibration  # noqa: E402
from tests.mutations.good import GOOD, write_good  # noqa: E402
from tests.mutations.kinds import mutations  # noqa: E402
from tests.mutations.recorded import read_records  # noqa: E402
from vexport.formats.schemes import scheme_names  # noqa: E402

Lines = Iterator[tuple[str, str]]
ROUNDED_FAMILIES = ("llama", "qwen3-moe", "deepseek-v3")
ROUNDED = (
    *((scheme, how) for scheme in ("NVFP4", "W4A16") for how in ("gptq", "refit")),
    ("FP8", "nearest"),
)
SPOILED_ONE_IN = 7
# Lines of a report that no two runs have in common.
TIMED = ("time ", "report:", "rounding ")
RUN = """name: net
source: {demo}/model
rules:
  - {{match: lm_head, scheme: keep}}
  - {{match: Linear, scheme: FP8_DYNAMIC}}
serve: {{dry_tensor_parallel: [1, 2], compute: [cpu, sm90]}}
evaluate: {{tasks: ["{demo}/tasks/facts_choice.yaml"], margin: 0.2, limit: 100}}
"""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def quantized(what: str, source: Path, *options: object) -> Lines:
    out = source.parent / "out"
    ran = vexport("quantize", source, out, "--quiet", *options)
    if ran.code:
        yield f"{what}: weights", f"exit {ran.code}"
        return
    weights = [digest(file.read_bytes()) for file in sorted(out.glob("*.safetensors*"))]
    config = json.loads((out / "config.json").read_text())
    ignored = config["quantization_config"].pop("ignore")
    yield f"{what}: weights", " ".join(weights)
    yield f"{what}: config", digest(json.dumps(config).encode())
    yield f"{what}: ignore", "\n".join(ignored)
    rmtree(out)


def written(root: Path) -> Lines:
    """Every scheme on every family, without data."""
    for family in FAMILIES:
        source = save_family(family, root / family)
        for scheme in scheme_names():
            yield from quantized(f"quantize {family} {scheme}", source, "--scheme", scheme)
        rmtree(source)


def rounded(root: Path) -> Lines:
    """What is calibrated, with and without rounding."""
    text = write_calibration(root / "text.jsonl")
    for family in ROUNDED_FAMILIES:
        source = save_family(family, root / family)
        for scheme, how in ROUNDED:
            options = ("--scheme", scheme, "--rounding", how, "--calibration", text, "--samples", 4)
            yield from quantized(f"quantize {family} {scheme} {how}", source, *options)


def checked(root: Path) -> Lines:
    """What is found in spoiled checkpoints, without the prose, and in sound ones."""
    write_good(root)
    records = read_records()[::SPOILED_ONE_IN]
    spoiled = [
        (record.good, record.name) for record in records if record.name in mutations(record.good)
    ]
    for good, name in [*((good, "nothing") for good in GOOD), *spoiled]:
        folder = copytree(root / good, root / "spoiled")
        if name in mutations(good):
            mutations(good)[name](folder)
        (folder / "vexport.json").unlink(
            missing_ok=True
        )  # whose digests find every change of weights
        ran = vexport("check", folder, "--tp", "1,2", "--sm", "80,90,100", "--format", "json")
        found = [item for report in json.loads(ran.stdout) for item in report["findings"]]
        told = sorted(f"{item['severity']} {item['check']} {item['where']}" for item in found)
        yield (
            f"check {good}: {name}",
            "\n".join([f"exit {ran.code}", *told]).replace(str(root), "ROOT"),
        )
        rmtree(folder)


def start_run(root: Path) -> subprocess.Popen[str]:
    """Start a run of the demo's model, next to what this process does."""
    scenario = root / "net.yaml"
    scenario.write_text(RUN.format(demo=REPOSITORY / "scenarios" / "demo"))
    call = [
        sys.executable,
        "-m",
        "vexport",
        "run",
        str(scenario),
        "--run-dir",
        str(root / "run"),
        "--quiet",
    ]
    return subprocess.Popen(call, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def record() -> Mapping[str, str]:
    made: dict[str, str] = {}
    with TemporaryDirectory(prefix="vexport-net-") as folder:
        run = start_run(Path(folder))
        for part in (written, rounded, checked):
            root = Path(folder) / part.__name__
            root.mkdir()
            made |= part(root)
            print(f"{part.__name__}: {len(made)} in all", file=sys.stderr, flush=True)
        report, _ = run.communicate()
    untimed = (line for line in report.splitlines() if not line.startswith(TIMED))
    lines = [line.replace(folder, "ROOT") for line in untimed]
    return made | {"run": "\n".join([f"exit {run.returncode}", *lines])}


def main(action: str, file: str) -> int:
    """Record, or compare and print what differs; 1 if anything does that is still made."""
    made = record()
    if action == "record":
        Path(file).write_text(json.dumps(made, indent=1) + "\n")
        return 0
    before: dict[str, str] = json.loads(Path(file).read_text())
    changed = [name for name in before if name in made and before[name] != made[name]]
    for name in changed:
        old, new = before[name].splitlines(), made[name].splitlines()
        print(
            name,
            *(f"  {line}" for line in list(unified_diff(old, new, lineterm="", n=0))[3:]),
            sep="\n",
        )
    gone, added = len(before.keys() - made.keys()), len(made.keys() - before.keys())
    print(f"{len(changed)} of {len(before)} differ, {gone} are gone, {added} are new")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
