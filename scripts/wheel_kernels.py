"""Compare the dry loads by vLLM's CPU build and by its CUDA wheel: kernels and refusals.

    .venv/bin/python scripts/wheel_kernels.py WHEEL_PYTHON [--only PATTERN] [CHECKPOINT]...

WHEEL_PYTHON is the interpreter of an environment with vLLM's CUDA wheel of the same version.
Without a CHECKPOINT the script makes micro checkpoints: the demo's model in every scheme of
vexport, W4A8 as llm-compressor stores it, and all other quantization methods of the tests, some
with routed experts. `--only` selects them by name. Every cell of capability and tensor parallel
size is compared. The table lists the cells that differ. The exit code is 1 if there are any.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Folders to import from: vexport and its tests, and the scripts beside this script.
sys.path[:0] = map(str, (ROOT, ROOT / "scripts"))

from dry_cells import LayerCell, layer_cells  # noqa: E402

from tests.architectures.families import save_family  # noqa: E402
from tests.checks.quant_methods import (  # noqa: E402
    CHECKPOINTS,
    write,
    write_experts,
    write_gpt_oss,
)
from tests.models import save_llama, save_w4a8_in_bytes  # noqa: E402
from tests.mutations.edits import GROUP, Change, all_of, config, drop_if, spoiled  # noqa: E402
from vexport.formats.schemes import all_schemes  # noqa: E402

DEMO = ROOT / "scenarios" / "demo"
CAPABILITIES, SIZES = "75,80,86,89,90,100,103,120", "1,2"
# Schemes with static input scales, which need calibration text.
CALIBRATED = ("FP8", "NVFP4")
# Methods and schemes whose routed experts are compared as well.
OF_EXPERTS = ("fp8-block", "modelopt-nvfp4")
SCHEMES_OF_EXPERTS = (
    "NVFP4",
    "NVFP4A16",
    "MXFP4",
    "MXFP4A16",
    "MXFP8",
    "FP8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "W8A8",
    "W4AFP8",
    "W4A16",
)


def is_input_scale(name: str) -> bool:
    return name.endswith(".input_scale")


# Other group sizes of these schemes. vLLM's own kernels do not support groups of 16.
GROUPED: Mapping[str, tuple[str, ...]] = {
    "W4A16": ("CHANNEL", "G16", "G32", "G64", "G256"),
    "W4A16_ASYM": ("CHANNEL", "G16", "G32", "G64"),
    "W8A16": ("CHANNEL", "G16", "G32", "G64"),
}
# Arguments that vexport does not write: FP8 weights alone, and groups that no kernel supports.
CHANGED: Mapping[str, tuple[str, Change]] = {
    "FP8_TENSOR.A16": (
        "FP8",
        all_of(config((*GROUP,), input_activations=None), drop_if(is_input_scale)),
    ),
    "FP8_BLOCK128X128.A16": ("FP8_BLOCK", config((*GROUP,), input_activations=None)),
    "FP8_CHANNEL.A16": ("FP8_DYNAMIC", config((*GROUP,), input_activations=None)),
    "W4AFP8 in groups of 64": ("W4AFP8", config((*GROUP, "weights"), group_size=64)),
}
# Writes a checkpoint to a new folder.
Make = Callable[[Path], object]
# A cell's identity: checkpoint, kind of layer, tensor parallel size and capability.
Place = tuple[str, str, int, int]
# Status, precision and kernel.
Answer = tuple[str, str, str]


def makers(sources: Path) -> Mapping[str, Make]:
    """Return the checkpoints by name, each with a function that writes it.

    `sources` holds unquantized models, which are made when the first checkpoint needs them.
    """

    def llama() -> Path:
        path = sources / "llama"
        return path if path.is_dir() else save_llama(path)

    def family(name: str) -> Path:
        path = sources / name
        return path if path.is_dir() else save_family(name, path)

    def wide_experts() -> Path:
        path = sources / "wide experts"
        return path if path.is_dir() else save_family("qwen3-moe", path, moe_intermediate_size=256)

    def experts_in(scheme: str, out: Path) -> None:
        quantize(scheme, out, wide_experts())

    names = [each.name for each in all_schemes()]
    names += [f"{name}_{size}" for name, sizes in GROUPED.items() for size in sizes]
    made: dict[str, Make] = {name: partial(quantize, name) for name in names}
    for name in SCHEMES_OF_EXPERTS:
        made[f"{name} experts"] = partial(experts_in, name)
    for name, (scheme, change) in CHANGED.items():
        made[name] = partial(changed, scheme, change)
    made["NVFP4 ungated experts"] = lambda out: quantize("NVFP4", out, family("nemotron-h"))
    made["W4A8 in bytes"] = lambda out: save_w4a8_in_bytes(llama(), out)

    def dense(method: str, out: Path) -> object:
        return write(method, llama(), out)

    def experts(method: str, out: Path) -> object:
        return write_experts(method, family("qwen3-moe"), out)

    made |= {method: partial(dense, method) for method in CHECKPOINTS}
    made |= {f"{method} experts": partial(experts, method) for method in OF_EXPERTS}
    made["mxfp4 experts"] = lambda out: write_gpt_oss(family("gpt-oss"), out)
    return made


def changed(scheme: str, change: Change, out: Path) -> None:
    """Quantize the demo's model, and change the config."""
    quantize(scheme, out.with_name(f"{out.name} unchanged"))
    spoiled(out.with_name(f"{out.name} unchanged"), out, change)


def quantize(scheme: str, out: Path, source: Path = DEMO / "model") -> None:
    """Quantize a model, by default the demo's, rounded to nearest.

    Other models have no tokenizer, and are calibrated with token ids.
    """
    data = DEMO / "calibration.jsonl"
    if source != DEMO / "model":
        data = source.with_suffix(".jsonl")
        row = json.dumps({"input_ids": list(range(4, 68))})
        data.write_text(f"{row}\n" * 8)
    text = ("--calibration", data, "--samples", 8, "--seq-len", 64)
    words = ("--scheme", scheme, "--rounding", "nearest", "--no-verify", "--quiet")
    if vexport("quantize", source, out, *words, *(text if scheme in CALIBRATED else ())):
        sys.exit(f"{scheme}: quantize refuses the demo's model")


def vexport(*words: object) -> int:
    """Run a command of this tree's vexport. Return 0, or 1 if it refuses a checkpoint."""
    ran = subprocess.run(
        [sys.executable, "-m", "vexport", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if ran.returncode not in (0, 1):
        sys.exit(ran.stderr)
    return ran.returncode


def answers(
    checkpoints: Sequence[Path], file: Path, sizes: str, *words: object
) -> dict[Place, Answer]:
    """Load the checkpoints dry on every device. `words` are further options of the command."""
    where = ("--sm", CAPABILITIES, "--tp", sizes)
    vexport("load", *checkpoints, "--dry", *where, "-o", file, "--quiet", *words)
    reports: list[dict[str, Any]] = json.loads(file.read_text())
    return {
        _place(report, cell): (cell.status, cell.precision, cell.kernel)
        for report in reports
        for cell in layer_cells(report)
    }


def _place(report: Mapping[str, Any], cell: LayerCell) -> Place:
    return Path(report["checkpoint"]).name, cell.kind, cell.tp, cell.sm


def table(ours: Mapping[Place, Answer], wheels: Mapping[Place, Answer]) -> Iterable[str]:
    """Return the lines of a Markdown table of the cells that differ.

    Cells of a checkpoint with the same pair of results share a line.
    """
    lines: dict[tuple[str, Answer | None, Answer | None], list[Place]] = {}
    for place in sorted(ours.keys() | wheels.keys()):
        ours_here, wheels_here = ours.get(place), wheels.get(place)
        if ours_here != wheels_here:
            lines.setdefault((place[0], ours_here, wheels_here), []).append(place)
    if lines:
        yield "| checkpoint | layers | TP | SM | CPU build | CUDA wheel |"
        yield "|---|---|---|---|---|---|"
    for (checkpoint, ours_here, wheels_here), places in lines.items():
        _, kinds, sizes, capabilities = zip(*places, strict=True)
        layers = ", ".join(dict.fromkeys(kind or "the whole" for kind in kinds))
        devices = ["/".join(map(str, sorted(set(numbers)))) for numbers in (sizes, capabilities)]
        cells = (checkpoint, layers, *devices, _shown(ours_here), _shown(wheels_here))
        yield f"| {' | '.join(cells)} |"


def _shown(answer: Answer | None) -> str:
    return " ".join(filter(None, answer)) if answer else "no such layer"


def main() -> int:
    """Print the table. Return 1 if cells differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel_python", type=Path, help="The interpreter with vLLM's CUDA wheel.")
    parser.add_argument(
        "checkpoint", type=Path, nargs="*", help="Checkpoints to load [default: made here]."
    )
    parser.add_argument("--only", default="", help="Checkpoints whose name this pattern matches.")
    parser.add_argument("--tp", default=SIZES, help=f"Tensor parallel sizes [default: {SIZES}].")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.monotonic()
        checkpoints = [path.resolve() for path in options.checkpoint]
        for title, make in () if checkpoints else makers(folder / "sources").items():
            if re.search(options.only, title):
                make(folder / title)
                checkpoints.append(folder / title)
        made = time.monotonic()
        ours = answers(checkpoints, folder / "ours.json", options.tp)
        loaded = time.monotonic()
        wheel = ("--vllm-python", options.wheel_python.absolute())
        wheels = answers(checkpoints, folder / "wheel.json", options.tp, *wheel)
        ended = time.monotonic()
    for line in table(ours, wheels):
        print(line)
    differing = sum(ours.get(place) != wheels.get(place) for place in ours.keys() | wheels.keys())
    minutes = [f"{(end - begin) / 60:.1f}" for begin, end in ((start, made), (made, loaded))]
    print(
        f"{differing} of {len(ours)} cells of {len(checkpoints)} checkpoints differ. Minutes: "
        f"{minutes[0]} to make them, {minutes[1]} by the CPU build, {(ended - loaded) / 60:.1f} "
        "by the wheel"
    )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
