#!/usr/bin/env python3
"""A net below a refactoring: what vexport writes and says, as digests, recorded before and compared after.

    .venv/bin/python scripts/net.py record before.json
    .venv/bin/python scripts/net.py compare before.json

Every scheme on every micro family, with other observers, calibrated, with a KV cache: the digest of what is
written. `check` of the recorded spoiled checkpoints and the dry load: findings without the prose. Calibrated
scales depend on the processor: a record is good on the machine that made it.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, rmtree
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.architectures.families import FAMILIES, save_family  # noqa: E402
from tests.command import vexport  # noqa: E402
from tests.models import save_llama, write_calibration  # noqa: E402
from tests.mutations.good import GOOD, write_good  # noqa: E402
from tests.mutations.recorded import read_records  # noqa: E402
from tests.mutations.table import mutations  # noqa: E402

Record = dict[str, str]
SCHEMES = (
    *(
        "NVFP4A16",
        "MXFP4",
        "MXFP4A16",
        "MXFP8",
        "MXFP8A16",
        "FP8_DYNAMIC",
        "FP8_BLOCK",
        "W8A8",
        "W4A8",
        "W4AFP8",
    ),
    *("W4A16", "W4A16_ASYM", "W8A16", "W2A16", "W3A16", "W5A16", "W6A16", "W7A16"),
)
CALIBRATED = ("NVFP4", "FP8", "W4A16")
OBSERVERS = ("memoryless_mse", "nvfp4_expanded_mse", "imatrix_mse")
CALIBRATED_FAMILIES = ("llama", "qwen3-moe", "deepseek-v3", "qwen3-next", "gemma3-vision")
SPOILED_ONE_IN = 4
MIXED = """name: mixed
source: {source}
rules:
  - {{match: "re:.*layers[.]0[.].*", scheme: keep}}
  - {{match: down_proj, scheme: FP8_DYNAMIC}}
  - {{match: "re:.*mlp.*", scheme: W4A16}}
  - {{match: lm_head, scheme: W8A16}}
  - {{match: Linear, scheme: NVFP4A16, observer: memoryless_mse}}
"""


def folder_digest(folder: Path) -> str:
    """SHA-256 over the weights, the index and config.json of a folder, shortened to 16 digits."""
    whole = hashlib.sha256()
    for file in sorted(folder.glob("*")):
        if file.suffix == ".safetensors" or file.name in ("config.json", "model.safetensors.index.json"):
            whole.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()[:16]


def quantized(source: Path, *options: object) -> str:
    """The digest of what `quantize` writes, or its exit code."""
    out = source.parent / "out"
    ran = vexport("quantize", source, out, "--quiet", *options)
    told = folder_digest(out) if ran.code == 0 else f"exit {ran.code}"
    rmtree(out, ignore_errors=True)
    return told


def written(root: Path) -> Iterator[tuple[str, str]]:
    """(what, digest) of every checkpoint that is written."""
    text = write_calibration(root / "text.jsonl")
    for family in FAMILIES:
        source = save_family(family, root / family)
        for scheme in SCHEMES:
            yield f"quantize {family} {scheme}", quantized(source, "--scheme", scheme)
        if family in CALIBRATED_FAMILIES:
            given = ("--calibration", text, "--samples", 4)
            for scheme in CALIBRATED:
                told = quantized(source, "--scheme", scheme, *given, "--kv-cache", "fp8")
                yield f"quantize {family} {scheme} kv", told
            for observer in OBSERVERS:
                told = quantized(source, "--scheme", "NVFP4A16", "--observer", observer, *given)
                yield f"quantize {family} NVFP4A16 {observer}", told
            told = quantized(source, "--scheme", "W4A16", "--observer", "imatrix_mse", *given)
            yield f"quantize {family} W4A16 imatrix_mse", told
        rmtree(source)


def planned(root: Path) -> Iterator[tuple[str, str]]:
    """(what, digest) of plans, of one scheme and of mixed rules."""
    for family in FAMILIES:
        source = save_family(family, root / family)
        scenario = root / "mixed.yaml"
        scenario.write_text(MIXED.format(source=source))
        for what, call in (("W4A16", (source, "--scheme", "W4A16")), ("mixed", (scenario,))):
            ran = vexport("plan", *call, "--format", "json")
            told = ran.stdout.replace(str(root), "ROOT")
            yield f"plan {family} {what}", f"{ran.code} {hashlib.sha256(told.encode()).hexdigest()[:16]}"
        rmtree(source)


def findings(stdout: str) -> str:
    """The findings of a report without their prose."""
    reports = json.loads(stdout)
    told = [
        [item["check"], item["severity"], item["where"]] for report in reports for item in report["findings"]
    ]
    return json.dumps(sorted(told))


def checked(root: Path) -> Iterator[tuple[str, str]]:
    """(what, findings) of spoiled checkpoints."""
    write_good(root / "good")
    for record in read_records()[::SPOILED_ONE_IN]:
        folder = root / "spoiled"
        copytree(root / "good" / record.good, folder)
        mutations(record.good)[record.name](folder)
        ran = vexport("check", folder, "--tp", "1,2", "--sm", "80,90,100", "--format", "json")
        told = findings(ran.stdout) if ran.stdout.startswith("[") else ran.stdout
        yield f"check {record.good}: {record.name}", f"{ran.code} {told}".replace(str(root), "ROOT")
        rmtree(folder)


def dry(root: Path) -> Iterator[tuple[str, str]]:
    """(what, findings) of dry loads of all sound checkpoints."""
    write_good(root / "good")
    for name in GOOD:
        call = ("load", "--dry", root / "good" / name, "--tp", "1,2", "--sm", "75,80,89,90,100")
        ran = vexport(*call, "--format", "json", "--quiet")
        yield f"dry {name}", f"{ran.code} {findings(ran.stdout)}".replace(str(root), "ROOT")


def mixed(root: Path) -> Iterator[tuple[str, str]]:
    """(what, digest) of a scenario's checkpoint with several schemes, a shard a tensor or so."""
    source = save_llama(root / "llama")
    for size in ("100KB", "5GB"):
        yield f"shards {size}", quantized(source, "--scheme", "NVFP4A16", "--max-shard-size", size)


def record() -> Record:
    """Everything."""
    made: Record = {}
    with TemporaryDirectory(prefix="vexport-net-") as folder:
        for part in (written, planned, checked, mixed, dry):
            root = Path(folder) / part.__name__
            root.mkdir()
            for name, told in part(root):
                made[name] = told
            print(f"{part.__name__}: {len(made)} in all", file=sys.stderr, flush=True)
            rmtree(root)
    return made


def main(action: str, file: str) -> int:
    """Record, or compare and print what differs; 1 if anything does."""
    made = record()
    if action == "record":
        Path(file).write_text(json.dumps(made, indent=1) + "\n")
        return 0
    before: Record = json.loads(Path(file).read_text())
    changed = [name for name in before | made if before.get(name) != made.get(name)]
    for name in changed:
        print(f"{name}\n  before {before.get(name, 'nothing')}\n  after  {made.get(name, 'nothing')}")
    print(f"{len(changed)} of {len(before)} differ")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
