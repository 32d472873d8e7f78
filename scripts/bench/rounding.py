"""Accuracy, time and memory of --rounding on a real model, next to llm-compressor's methods on the same rows.

    scripts/real-model && scripts/bench/setup-peer
    .venv/bin/python scripts/bench/rounding.py [--scheme W4A16_G64]... [--method refit]... [--rows 64]
        [--held-out 16] [--model real/SmolLM2-135M-Instruct] [--text real/text] [--folder DIR] [--show]

A cell is a scheme and a method. It is quantized, measured, and kept as DIR/ROWS/SCHEME-METHOD/score.json:
what is there is not done again, so that a run can be stopped anywhere and cells can be run one by one;
--show only prints. KL is that of the source to the checkpoint, NLL the checkpoint's own, both the mean over
--held-out rows of text of the calibration's kind (`same`) and of another kind (`other`), computed by
transformers with the weights dequantized by compressed-tensors and inputs rounded as the scheme says; after
the KL stands the standard error of the mean over rows.

Imports count on neither side. Of ours the whole command counts, from the source's files to the written
checkpoint; of the peer's `oneshot` alone (calibration and rounding). On a busy machine compare the seconds of
processor time. Memory is the largest resident set of the process. Linux only.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import OWN, PEER, ROOT, timed

HERE = Path(__file__).resolve().parent
SCHEMES = ("W4A16_G64", "W4A16_G32", "W4A16_ASYM_G64", "NVFP4", "NVFP4A16", "MXFP4", "W8A8", "W3A16_G64")
OURS = ("nearest", "gptq", "refit")
# As rounding_peer.py knows them.
THEIRS = ("peer-gptq", "peer-gptq-mse", "peer-awq", "peer-awq-gptq", "peer-smoothquant-gptq")
DOMAINS = ("same", "other")
COLUMNS = (
    *("scheme", "method", "KL, same", "of peer", "KL, other", "of peer", "NLL, same", "NLL, other"),
    *("s", "CPU s", "time", "MB"),
)
SEQ_LEN = 512
MADE, SCORE, CHECKPOINT = "made.json", "score.json", "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A measured cell: what it took to make, by name; `kl`, `kl_error` and `nll` by domain, nats a token."""

    scheme: str
    method: str
    made: dict[str, float]
    kl: dict[str, float]
    kl_error: dict[str, float]
    nll: dict[str, float]
    source_nll: dict[str, float]


def folder_of(options: argparse.Namespace, scheme: str, method: str) -> Path:
    folder: Path = options.folder / str(options.rows) / f"{scheme}-{method}"
    return folder


def make(options: argparse.Namespace, scheme: str, method: str, out: Path) -> dict[str, float]:
    """Quantize with one method: seconds of the wall and of processor time, MB."""
    model, data = options.model.resolve(), options.text.resolve() / "calibration.jsonl"
    if method in THEIRS:
        recipe = method.removeprefix("peer-")
        ran = timed(PEER, HERE / "rounding_peer.py", model, out, scheme, recipe, data, options.rows)
    else:
        words = ("quantize", model, out, "--scheme", scheme, "--rounding", method, "--quiet")
        ran = timed(*OWN, *words, "--calibration", data, "--samples", options.rows, "--seq-len", SEQ_LEN)
    return {**ran.answer, "megabytes": ran.megabytes}


def fill(options: argparse.Namespace, scheme: str, method: str) -> None:
    """Make and measure a checkpoint as far as that was not done; it goes when it is measured."""
    folder, start = folder_of(options, scheme, method), time.perf_counter()
    if not (folder / MADE).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write(folder / MADE, make(options, scheme, method, folder / CHECKPOINT))
    if not (folder / SCORE).is_file():
        words = (options.model, folder / CHECKPOINT, options.text, options.folder, options.held_out)
        write(folder / SCORE, timed(sys.executable, HERE / "rounding_score.py", *words).answer)
    shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
    print(f"{scheme} {method}: {time.perf_counter() - start:.0f} s", file=sys.stderr)


def write(path: Path, value: object) -> None:
    """A JSON file, whole or not at all."""
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)


def read_cell(options: argparse.Namespace, scheme: str, method: str) -> Cell | None:
    folder = folder_of(options, scheme, method)
    if not (folder / SCORE).is_file():
        return None
    made, score = (json.loads((folder / name).read_text(encoding="utf-8")) for name in (MADE, SCORE))
    return Cell(scheme=scheme, method=method, made=made, **score)


def markdown(cells: Sequence[Cell]) -> str:
    """A row a cell; `of peer` is the KL as a share of the peer's best recipe's, `time` the
    processor time as one of its GPTQ's."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for cell in cells:
        peers = [other for other in cells if other.scheme == cell.scheme and other.method in THEIRS]
        gptq = [peer.made["cpu"] for peer in peers if peer.method == "peer-gptq"]
        words = [cell.scheme, cell.method]
        for domain in DOMAINS:
            best = min((peer.kl[domain] for peer in peers), default=None)
            words.append(f"{cell.kl[domain]:.4f} ± {cell.kl_error[domain]:.4f}")
            words.append(f"{cell.kl[domain] / best:.2f}" if best else "-")
        words += [f"{cell.nll[domain]:.3f}" for domain in DOMAINS]
        words += [f"{cell.made['seconds']:.0f}", f"{cell.made['cpu']:.0f}"]
        words.append(f"{cell.made['cpu'] / gptq[0]:.2f}" if gptq else "-")
        words.append(f"{cell.made['megabytes']:.0f}")
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="--rounding next to llm-compressor's methods on a real model."
    )
    parser.add_argument("--scheme", action="append", choices=SCHEMES, help="A scheme; repeatable.")
    parser.add_argument("--method", action="append", choices=[*OURS, *THEIRS], help="A method; repeatable.")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=16)
    parser.add_argument("--model", type=Path, default=ROOT / "real" / "SmolLM2-135M-Instruct")
    parser.add_argument("--text", type=Path, default=ROOT / "real" / "text")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "vexport-bench-rounding")
    parser.add_argument("--show", action="store_true", help="Print what is there, run nothing.")
    options = parser.parse_args()
    chosen = [(s, m) for s in options.scheme or SCHEMES for m in options.method or (*OURS, *THEIRS)]
    for scheme, method in chosen if not options.show else ():
        fill(options, scheme, method)
    found = (read_cell(options, scheme, method) for scheme, method in chosen)
    print(markdown([cell for cell in found if cell is not None]))


if __name__ == "__main__":
    # What runs below finds this tree's package, wherever it is called from.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    main()
