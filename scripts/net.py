#!/usr/bin/env python3
"""Guard a refactoring: record vexport's files and output before, and compare them afterwards.

    .venv/bin/python scripts/net.py record before.json
    .venv/bin/python scripts/net.py compare before.json

The record has every scheme on every micro family, without calibration text. It has `gptq`, `refit`
and calibrated scales on three families, the findings of `check` on spoiled checkpoints, and a run's
report. It has the help of each command, its JSON on the demo, and the exit code and message of
wrong calls. It has the JSON schemas, and the JSON of `verdict`, `eval --against` and `report` on
pairs of results (`scripts/judged.py`). Weights, config.json and its `ignore` are on separate lines.
Floats depend on the processor: a record is valid only on the machine that made it.

`--only PART...` records or compares some parts: written, rounded, checked, helped, answered,
refused, schemas, judged, run. `record --only` keeps the other parts of an existing file.
`--corpus FOLDER` also judges the results in a folder, with the calls that its calls.json lists.

`compare --made FILE` compares with another record instead of a new one. `compare --flat` compares
the keys and values of JSON whatever their nesting. `compare --without-texts` ignores prose. It
compares exit codes, options, the keys and numbers of JSON, and the check, severity and place of
findings.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "VEXPORT_NO_VERIFY": "1"}

import argparse  # noqa: E402
import hashlib  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Collection, Iterator, Mapping  # noqa: E402
from difflib import unified_diff  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from shutil import copytree, rmtree  # noqa: E402
from tempfile import TemporaryDirectory  # noqa: E402

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from judged import calls  # noqa: E402

from tests.architectures.families import FAMILIES, save_family  # noqa: E402
from tests.command import ALL_COMMANDS, vexport  # noqa: E402
from tests.models import save_llama, write_calibration  # noqa: E402
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
# Lines of a report that differ between any two runs.
TIMED = ("time ", "report:", "rounding ")
# Words in the names of keys with values that differ between any two calls.
VOLATILE = {"seconds", "created", "time", "date", "digest", "started", "version"}
# Keys of JSON with texts that are also compared with `--without-texts`.
COUNTING_TEXTS = ("check", "severity", "where", "outcome", "status", "scheme", "schema", "kernel")
# A date and time in an ISO format, or as lighteval and lm-eval write it into names of files.
MOMENT = re.compile(r"20\d\d-\d\d-\d\d[T ]\d\d[:-]\d\d(?:[:-]\d\d(?:[.]\d+)?)?(?:[+]00:00)?")
ANSWERED = (
    "plan MODEL --scheme NVFP4",
    "plan SCENARIO",
    "quantize MODEL ROOT/fp8 --scheme FP8_DYNAMIC",
    "quantize MODEL ROOT/int4 --scheme W4A16_G64",
    "check ROOT/fp8 MODEL --source MODEL --tp 1,2 --sm 80,90,100 --static",
    "repair ROOT/fp8 ROOT/repaired",
    "load ROOT/fp8",
    "load ROOT/fp8 --dry --tp 1,2 --sm 80,90",
    "eval ROOT/fp8 --baseline MODEL --task TASK --limit 100 --output-dir ROOT/eval",
    "eval ROOT/int4 --baseline ROOT/eval/baseline --task TASK --limit 100 --margin 0.2",
    "verdict ROOT/eval/baseline ROOT/eval/candidate",
    "compare MODEL --schemes FP8_DYNAMIC,W8A8 --scenario ROOT/net.yaml --run-dir ROOT/compared",
    "report ROOT/compared/FP8_DYNAMIC",
    "report ROOT/compared/FP8_DYNAMIC ROOT/compared/W8A8",
    "list schemes",
    "list observers",
    "list roundings",
    "list checks",
    "list architectures",
    "explain NVFP4",
)
REFUSED = (
    "plan",
    "plan MISSING --scheme FP8",
    "plan LLAMA --scheme NVFP5",
    "plan LLAMA --scheme FP8 --tp 0",
    "plan LLAMA --scheme FP8 --tp a",
    "plan LLAMA --scheme FP8 --gpu L41S",
    "plan SCENARIO --scheme FP8",
    "plan LLAMA --scheme FP8 --run-dir OUT",
    "quantize LLAMA OUT",
    "quantize MISSING OUT --scheme FP8",
    "quantize LLAMA LLAMA --scheme FP8_DYNAMIC",
    "quantize LLAMA OUT --scheme FP8_DYNAMIC --observer mimax",
    "quantize LLAMA OUT --scheme FP8 --calibration BROKEN",
    "quantize LLAMA OUT --scheme FP8 --calibration MISSING",
    "quantize LLAMA OUT --scheme FP8 --calibration TEXT --samples 0",
    "quantize LLAMA OUT --scheme FP8 --calibration TEXT --seq-len -1",
    "quantize LLAMA OUT --scheme FP8_DYNAMIC --ignore re:[",
    "quantize LLAMA OUT --scheme W4A16 --group-size 0",
    "quantize LLAMA OUT --scheme W4A16 --group-size word",
    "quantize LLAMA OUT --scheme W4A16 --rounding down",
    "quantize LLAMA OUT --scheme FP8_DYNAMIC --kv-cache fp4",
    "quantize LLAMA OUT --scheme FP8_DYNAMIC --recipe MISSING",
    "check EMPTY",
    "check MISSING",
    "check LLAMA --format xml",
    "check LLAMA --tp 1,x",
    "check LLAMA --sm 10",
    "check LLAMA --vllm 0.1",
    "load MISSING",
    "load LLAMA --speculative MISSING",
    "load LLAMA --engine-arg a",
    "eval LLAMA",
    "eval LLAMA --baseline LLAMA",
    "eval LLAMA --baseline MISSING --task TASK --output-dir OUT",
    "eval LLAMA --baseline LLAMA --task MISSING --output-dir OUT",
    "eval LLAMA --baseline LLAMA --task TASK --margin 2",
    "eval LLAMA --baseline LLAMA --task TASK --margin other=0.1",
    "eval LLAMA --baseline LLAMA --task TASK --limit 0",
    "eval LLAMA --baseline LLAMA --task TASK --seeds 0",
    "eval LLAMA --baseline LLAMA --task TASK --alpha 1",
    "eval LLAMA --baseline LLAMA --task TASK --num-fewshot -1",
    "eval LLAMA --baseline LLAMA --text MISSING",
    "run MISSING.yaml",
    "run LLAMA",
    "compare LLAMA --schemes W4A17",
    "compare LLAMA",
    "compare LLAMA --serve a",
    "report EMPTY",
    "report MISSING",
    "verdict EMPTY EMPTY",
    "verdict MISSING MISSING",
    "repair EMPTY OUT",
    "repair LLAMA OUT",
    "list nothing",
    "explain nothing",
    "nonsense",
)
# Wrong lines of a scenario.
SCENARIOS = (
    "rules: []",
    "rules: [{match: Linear, scheme: FP9}]",
    "rules: [{match: 're:[', scheme: FP8}]",
    "rules: [{match: Linear, schema: FP8}]",
    "rules: [{match: Linear, scheme: FP8_DYNAMIC}]\ncalibration: {samples: 0, data: x}",
    "rules: [{match: Linear, scheme: FP8_DYNAMIC}]\ncalibration: {sampels: 1, data: x}",
    "rules: [{match: Linear, scheme: FP8_DYNAMIC}]\ncalibration: {seq_len: a, data: x}",
    "rules: [{match: Linear, scheme: FP8_DYNAMIC}]\nserve: {tensor_parallel: [0]}",
    "rules: [{match: Linear, scheme: FP8_DYNAMIC}]\nserve: {compute: [sm1000]}",
    "rules: [{match: Linear, scheme: FP8_DYNAMIC}]\nserve: {max_model_len: -1}",
    "rules: [{match: Linear, scheme: FP8_DYNAMIC}]\nevaluate: {tasks: []}",
    "rules: [{match: Linear, scheme: FP8_DYNAMIC}]\nevaluate: {tasks: [a], margin: 2}",
    "rules: [{match: Linear, scheme: FP8_DYNAMIC}]\nevaluate: {tasks: [a], alpha: 0}",
    "rules: [{match: Linear, scheme: FP8_DYNAMIC}]\nevaluate: {tasks: [a], seeds: 0}",
    "rules: [{match: Linear, scheme: FP8_DYNAMIC}]\nevaluate: {tasks: [a], limit: -1}",
    "rules: [{match: Linear, scheme: FP8_DYNAMIC}]\ngates: {}",
    "rules: [{match: Linear, scheme: auto}]\nauto: {bits: 0}",
    "rules: [{match: Linear, scheme: W4A16, group_size: 0}]",
    "rules: [{match: Linear, scheme: W4A16, rounding: down}]",
    "rules: [{match: Linear, scheme: FP8_DYNAMIC, observer: mimax}]",
)
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
    """Write every scheme on every family, without data."""
    for family in FAMILIES:
        source = save_family(family, root / family)
        for scheme in scheme_names():
            yield from quantized(f"quantize {family} {scheme}", source, "--scheme", scheme)
        rmtree(source)


def rounded(root: Path) -> Lines:
    """Write checkpoints with calibration, with and without rounding."""
    text = write_calibration(root / "text.jsonl")
    for family in ROUNDED_FAMILIES:
        source = save_family(family, root / family)
        for scheme, how in ROUNDED:
            options = ("--scheme", scheme, "--rounding", how, "--calibration", text, "--samples", 4)
            yield from quantized(f"quantize {family} {scheme} {how}", source, *options)


def checked(root: Path) -> Lines:
    """Record the findings on spoiled checkpoints, without the prose, and on sound checkpoints."""
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
        )  # their digests show every change of weights
        ran = vexport("check", folder, "--tp", "1,2", "--sm", "80,90,100", "--format", "json")
        found = [item for report in json.loads(ran.stdout) for item in report["findings"]]
        lines = sorted(f"{item['severity']} {item['check']} {item['where']}" for item in found)
        yield (
            f"check {good}: {name}",
            "\n".join([f"exit {ran.code}", *lines]).replace(str(root), "ROOT"),
        )
        rmtree(folder)


def helped(root: Path) -> Lines:
    """Record the help of each command."""
    yield "help", vexport("--help").stdout
    for name in sorted(ALL_COMMANDS):
        yield f"help {name}", vexport(name, "--help").stdout


def steady(value: object, key: str = "", digits: int = 3) -> object:
    """Return JSON without times, sizes of the machine and the last digits of floats."""
    if VOLATILE & {*key.split("_")}:
        return "-"
    if isinstance(value, dict):
        return {name: steady(part, name, digits) for name, part in value.items()}
    if isinstance(value, list):
        return [steady(part, key, digits) for part in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def answered(root: Path) -> Lines:
    """Record the JSON of each command on the demo."""
    demo = REPOSITORY / "scenarios" / "demo"
    places = {
        "MODEL": demo / "model",
        "TASK": demo / "tasks" / "facts_choice.yaml",
        "SCENARIO": REPOSITORY / "scenarios" / "demo-nvfp4.yaml",
        "ROOT": root,
    }
    (root / "net.yaml").write_text(RUN.format(demo=demo))
    for call in ANSWERED:
        words = call.split()
        for name, place in places.items():
            words = [word.replace(name, str(place)) for word in words]
        ran = vexport(*words, "--format", "json", "--quiet")
        found = json.dumps(steady(json.loads(ran.stdout or "null")), indent=1)
        text = f"exit {ran.code}\n{found}"
        for name, place in places.items():
            text = text.replace(str(place), name)
        yield f"json {call}", text


def refused(root: Path) -> Lines:
    """Record the exit code and the message of wrong calls."""
    places = {
        "LLAMA": save_llama(root / "llama"),
        "EMPTY": root / "empty",
        "BROKEN": root / "broken.jsonl",
        "TEXT": write_calibration(root / "text.jsonl"),
        "TASK": REPOSITORY / "scenarios" / "demo" / "tasks" / "facts_choice.yaml",
        "SCENARIO": root / "scenario.yaml",
        "OUT": root / "out",
        "MISSING": root / "missing",
    }
    places["EMPTY"].mkdir()
    places["BROKEN"].write_text('{"text": "a"}\n{"text"\n')
    for call in REFUSED:
        words = call.split()
        for name, place in places.items():
            words = [word.replace(name, str(place)) for word in words]
        yield f"refused {call}", output_of(words, places)
    for lines in SCENARIOS:
        text = f"name: a\nsource: {places['LLAMA']}\n{lines}\n"
        places["SCENARIO"].write_text(text)
        yield f"refused scenario {lines}", output_of(["plan", str(places["SCENARIO"])], places)


def output_of(words: list[str], places: Mapping[str, Path]) -> str:
    """Return the exit code of a call, and its output on stderr."""
    ran = vexport(*words)
    text = f"exit {ran.code}\n{ran.stderr}"
    for name, place in places.items():
        text = text.replace(str(place), name)
    return text


def schemas(root: Path) -> Lines:
    """Record the JSON schemas of results and scenarios."""
    for file in sorted((REPOSITORY / "vexport").rglob("*.schema.json")):
        yield f"schema {file.name}", file.read_text()


def judged(root: Path, corpus: Path | None) -> Lines:
    """Record the JSON of verdicts, reports and histories on pairs of results.

    Their numbers are exact to nine digits.
    """
    places = {"ROOT": root, "CORPUS": corpus or root, "REPOSITORY": REPOSITORY}
    for name, words in calls(root, corpus):
        ran = vexport(*words, "--format", "json", "--quiet")
        is_json = ran.stdout.startswith(("{", "["))
        out = json.loads(ran.stdout) if is_json else ran.stdout.splitlines()
        found = {"found": out, "said": ran.stderr.splitlines()}
        text = f"exit {ran.code}\n{json.dumps(steady(found, digits=9), indent=1)}"
        for place, folder in places.items():
            text = text.replace(str(folder), place)
        yield f"json judged {name}", MOMENT.sub("MOMENT", text)


def start_run(root: Path) -> subprocess.Popen[str]:
    """Start a run of the demo's model, parallel to this process."""
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


PARTS = (written, rounded, checked, helped, answered, refused, schemas)


def record(only: Collection[str], corpus: Path | None) -> Mapping[str, str]:
    made: dict[str, str] = {}
    with TemporaryDirectory(prefix="vexport-net-") as folder:
        run = start_run(Path(folder)) if "run" in only else None
        parts = {part.__name__: part for part in PARTS} | {"judged": partial(judged, corpus=corpus)}
        for name, part in parts.items():
            if name not in only:
                continue
            root = Path(folder) / name
            root.mkdir()
            made |= part(root)
            print(f"{name}: {len(made)} in all", file=sys.stderr, flush=True)
        if run is None:
            return made
        report, _ = run.communicate()
    untimed = (line for line in report.splitlines() if not line.startswith(TIMED))
    lines = [line.replace(folder, "ROOT") for line in untimed]
    return made | {"run": "\n".join([f"exit {run.returncode}", *lines])}


def main() -> int:
    """Record, or compare and print the differences.

    Return 1 if a recorded part that still exists differs.
    """
    names = [part.__name__ for part in PARTS] + ["judged", "run"]
    parser = argparse.ArgumentParser(description="Record what vexport writes and says, or compare.")
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--corpus", type=Path, help="further results for `judged`")
    parser.add_argument("--made", type=Path, help="compare with this record, without a new one")
    parser.add_argument("--flat", action="store_true", help="ignore the nesting of JSON")
    parser.add_argument("--without-texts", action="store_true", help="compare no prose")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART")
    options = parser.parse_args()
    is_made = options.action == "compare" and options.made
    made = read(options.made) if is_made else record(options.only, options.corpus)
    if options.action == "record":
        is_part = options.only != names and options.file.exists()
        others = read(options.file) if is_part else {}
        options.file.write_text(json.dumps({**others, **made}, indent=1) + "\n")
        return 0
    before = read(options.file)
    if options.without_texts:
        before = {name: without_texts(name, text) for name, text in before.items()}
        made = {name: without_texts(name, text) for name, text in made.items()}
    if options.flat:
        before, made = ({name: flat(name, each[name]) for name in each} for each in (before, made))
    return compare(before, made, whole=options.only == names, is_flat=options.flat)


def read(file: Path) -> Mapping[str, str]:
    found: Mapping[str, str] = json.loads(file.read_text())
    return found


def flat(name: str, text: str) -> str:
    """Return a recorded JSON as sorted lines of keys and values."""
    if not name.startswith("json "):
        return text
    code, _, content = text.partition("\n")
    return "\n".join([code, *sorted(leaves(json.loads(content)))])


def leaves(value: object, key: str = "") -> Iterator[str]:
    """Yield each value of JSON that is no object or list, with its key."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, key)
    elif value is not None:
        yield f"{key}: {value}"


def without_texts(name: str, text: str) -> str:
    """Return a recorded text without its prose."""
    kind = name.partition(" ")[0]
    if kind == "help":
        return "\n".join(sorted(set(re.findall(r"--[a-z][a-z-]*", text))))
    if kind == "json":
        code, _, content = text.partition("\n")
        return f"{code}\n{json.dumps(bare(json.loads(content)), indent=1)}"
    return text.partition("\n")[0] if kind in ("refused", "run") else text


def bare(value: object, key: str = "") -> object:
    """Return JSON with its keys and numbers.

    Keep only those texts of findings that are compared.
    """
    if isinstance(value, dict):
        return {name: bare(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [bare(part, key) for part in value]
    return "text" if isinstance(value, str) and key not in COUNTING_TEXTS else value


def compare(
    before: Mapping[str, str], made: Mapping[str, str], *, whole: bool, is_flat: bool
) -> int:
    changed = [name for name in before if name in made and before[name] != made[name]]
    for name in changed:
        old = before[name].splitlines()
        new = made[name].splitlines()
        print(name)
        if is_flat and name.startswith("json "):
            lines = [f"-{line}" for line in (Counter(old) - Counter(new)).elements()]
            lines += [f"+{line}" for line in (Counter(new) - Counter(old)).elements()]
        else:
            lines = list(unified_diff(old, new, lineterm="", n=0))[3:]
        for line in lines:
            print(f"  {line}")
    gone = len(before.keys() - made.keys()) if whole else 0
    added = len(made.keys() - before.keys())
    print(f"{len(changed)} of {len(before)} differ, {gone} are gone, {added} are new")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
