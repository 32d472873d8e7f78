"""Measure accuracy, time and memory of --rounding, next to llm-compressor's methods.

    scripts/real-model && scripts/bench/setup-peer
    .venv/bin/python scripts/bench/rounding.py [--scheme W4A16_G64]... [--method refit]...
        [--rows 64] [--skip 0] [--held-out 16] [--model real/SmolLM2-135M-Instruct]
        [--text real/text] [--folder DIR] [--show]

scripts/real-model makes a second model, too: --model real/gemma/gemma-3-270m. The text is the
folder `text` next to the model, unless --text names another. All methods calibrate on the same
rows: --rows rows after the first --skip.

A cell is a scheme and a method. The result of each cell is written to
DIR/MODEL/ROWS-SKIP/SCHEME-METHOD/score.json. Finished cells are skipped, so a benchmark can be
stopped at any time and cells can run separately. --show only prints: first the table of
vexport/docs/results.md, then all cells.

KL is the divergence of the checkpoint from the source. NLL is the checkpoint's. Both are means over
--held-out rows of text of the calibration's kind (`same`) and of another kind (`other`). Weights
are dequantized by compressed-tensors, inputs are rounded as the scheme requires, and transformers
runs the model. The number after the KL is the standard error of the mean over rows. score.json has
the KL of each row, too.

Times exclude imports. For vexport the time covers the whole command, from the source's files to the
written checkpoint. For llm-compressor it covers only `oneshot` (calibration and rounding). On a
busy machine compare the seconds of processor time. Memory is the largest resident set of the
process. Linux only.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from measure import OWN, PEER, ROOT, spent, timed

SCHEMES = (
    "W4A16_G64",
    "W4A16_G32",
    "W4A16_ASYM_G64",
    "NVFP4",
    "NVFP4A16",
    "MXFP4",
    "W8A8",
    "W3A16_G64",
)
OURS = ("nearest", "gptq", "refit")
# "peer-" and the names that `peer_recipe` accepts.
THEIRS = ("peer-gptq", "peer-gptq-mse", "peer-awq", "peer-awq-gptq", "peer-smoothquant-gptq")
DOMAINS = ("same", "other")
COLUMNS = (
    *("scheme", "method", "KL, same", "of peer", "KL, other", "of peer", "NLL, same", "NLL, other"),
    *("s", "CPU s", "time", "MB"),
)
SEQ_LEN = 512
MADE, SCORE, CHECKPOINT, ROWS = "made.json", "score.json", "checkpoint", "rows.jsonl"
Cells = Mapping[tuple[str, str], Mapping[str, Any]]
# The strength of llm-compressor's W8A8 example.
SMOOTHING = 0.8


def folder_of(options: argparse.Namespace, scheme: str, method: str) -> Path:
    rows = f"{options.rows}-{options.skip}"
    folder: Path = options.folder / options.model.name / rows / f"{scheme}-{method}"
    return folder


def make(options: argparse.Namespace, scheme: str, method: str, out: Path) -> dict[str, float]:
    """Quantize with a method. Return wall time and processor time in seconds, and memory in MB."""
    model, data = options.model.resolve(), out.with_name(ROWS)
    select_rows(options, data)
    if method in THEIRS:
        recipe = method.removeprefix("peer-")
        ran = timed(PEER, __file__, "--peer", model, out, scheme, recipe, data, options.rows)
    else:
        words = ("quantize", model, out, "--scheme", scheme, "--rounding", method, "--quiet")
        ran = timed(
            *OWN, *words, "--calibration", data, "--samples", options.rows, "--seq-len", SEQ_LEN
        )
    return {**ran.answer, "megabytes": ran.megabytes}


def select_rows(options: argparse.Namespace, out: Path) -> None:
    """Write the rows for calibration to a file."""
    text = options.text / "calibration.jsonl"
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
    last = options.skip + options.rows
    if last > len(lines):
        raise SystemExit(f"{text}: got {len(lines)} rows, need {last}")
    out.write_text("".join(lines[options.skip : last]), encoding="utf-8")


def run_peer(model_path: str, out: str, scheme: str, method: str, data: str, count: str) -> None:
    """Run a method of llm-compressor in its environment.

    Print the time of `oneshot`.
    """
    os.environ["LLMCOMPRESSOR_DISABLE_GPTQ_TRITON"] = "1"  # Triton needs a GPU

    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [row[:SEQ_LEN] for row in read_rows(Path(data), int(count))]
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    call = partial(
        oneshot,
        model=model,
        tokenizer=tokenizer,
        dataset=Dataset.from_list(
            [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
        ),
        recipe=peer_recipe(scheme, method.split("-")),
        num_calibration_samples=len(rows),
        max_seq_length=SEQ_LEN,
    )
    with torch.compiler.set_stance("force_eager"):
        seconds = spent(call)
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)
    print(json.dumps(seconds))


def peer_recipe(name: str, words: Sequence[str]) -> list[Any]:
    """Return the modifiers of a method. `_G64` in the scheme's name is the group size."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    preset, _, group = name.partition("_G")
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if group:
        scheme.weights.group_size = int(group)
    if "mse" in words:
        scheme.weights.observer = "memoryless_mse"
    recipe: list[Any] = []
    if "awq" in words:
        IntermediatesCache.pin_memory = lambda self, *names: None  # needs an accelerator
        recipe.append(AWQModifier())
    if "smoothquant" in words:
        recipe.append(SmoothQuantModifier(smoothing_strength=SMOOTHING))
    last = GPTQModifier if "gptq" in words else QuantizationModifier
    return [*recipe, last(config_groups={"group_0": scheme}, ignore=["lm_head"])]


def read_rows(file: Path, count: int) -> list[list[int]]:
    return [
        json.loads(line)["input_ids"]
        for line in file.read_text(encoding="utf-8").splitlines()[:count]
    ]


def run_score(model: str, checkpoint: str, text: str, count: str) -> None:
    """Print KL to the source and NLL over held-out rows, by domain, in nats per token."""
    import torch
    from transformers import AutoModelForCausalLM

    from vexport.engine.reference import load_dequantized
    from vexport.numerics.metrics import divergence_of_logits

    score: dict[str, dict[str, float]] = {"kl": {}, "kl_error": {}, "nll": {}}
    kl_rows: dict[str, list[float]] = {}
    source = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    candidate = load_dequantized(Path(checkpoint))
    # compressed-tensors compiles its FP4 rounding, which would need a C++ compiler.
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        for domain in DOMAINS:
            divergences, losses = [], []
            for row in read_rows(Path(text) / f"{domain}.jsonl", int(count)):
                ids = torch.tensor([row])
                logits = candidate(ids).logits.float()
                divergences.append(
                    divergence_of_logits(source(ids).logits.float(), logits) / len(row)
                )
                losses.append(float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])))
            score["kl"][domain] = statistics.mean(divergences)
            score["kl_error"][domain] = statistics.stdev(divergences) / len(divergences) ** 0.5
            score["nll"][domain] = statistics.mean(losses)
            kl_rows[domain] = divergences
    print(json.dumps({**score, "kl_rows": kl_rows}))


def fill(options: argparse.Namespace, scheme: str, method: str) -> None:
    """Make and measure a checkpoint, unless this is done.

    The checkpoint is deleted after measuring.
    """
    folder, start = folder_of(options, scheme, method), time.perf_counter()
    if not (folder / MADE).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write(folder / MADE, make(options, scheme, method, folder / CHECKPOINT))
    if not (folder / SCORE).is_file():
        words = (options.model, folder / CHECKPOINT, options.text, options.held_out)
        write(folder / SCORE, timed(sys.executable, __file__, "--score", *words).answer)
    shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
    print(f"{scheme} {method}: {time.perf_counter() - start:.0f} s", file=sys.stderr)


def write(path: Path, value: object) -> None:
    """Write a JSON file, whole or not at all."""
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)


def best_peer(cells: Cells, scheme: str) -> Mapping[str, Any] | None:
    """Return the cell of llm-compressor's recipe with the lowest KL on the calibration's kind."""
    peers = [cells[scheme, name] for name in THEIRS if (scheme, name) in cells]
    return min(peers, key=lambda cell: float(cell["kl"][DOMAINS[0]]), default=None)


def page_table(cells: Cells) -> str:
    """Return the table of the results page: a row for each scheme, the KL on both texts.

    `share` is the KL of refit as a share of the KL of llm-compressor's best recipe.
    """
    rows = []
    for scheme in dict.fromkeys(scheme for scheme, _ in cells):
        peer, refit = best_peer(cells, scheme), cells.get((scheme, "refit"))
        shown = [cells.get((scheme, "nearest")), peer, refit]
        share = ", ".join(shares_of(refit, peer)) if refit and peer else "-"
        rows.append([scheme, *(divergences_of(cell) if cell else "-" for cell in shown), share])
    return table(("", "nearest", "llm-compressor's best", "refit", "share"), rows)


def cell_table(cells: Cells) -> str:
    """Return a table with a row for each cell.

    `of peer` is the KL as a share of the KL of the peer's best recipe. `time` is the processor time
    as a share of the time of this recipe.
    """
    rows = []
    for (scheme, method), cell in cells.items():
        peer = best_peer(cells, scheme)
        shares = shares_of(cell, peer) if peer else ["-" for _ in DOMAINS]
        row = [scheme, method]
        for domain, share in zip(DOMAINS, shares, strict=True):
            row += [f"{cell['kl'][domain]:.4f} ± {cell['kl_error'][domain]:.4f}", share]
        row += [f"{cell['nll'][domain]:.3f}" for domain in DOMAINS]
        row += [f"{cell['seconds']:.0f}", f"{cell['cpu']:.0f}"]
        row.append(f"{cell['cpu'] / peer['cpu']:.2f}" if peer else "-")
        row.append(f"{cell['megabytes']:.0f}")
        rows.append(row)
    return table(COLUMNS, rows)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---" for _ in columns], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shares_of(cell: Mapping[str, Any], peer: Mapping[str, Any]) -> list[str]:
    """Return a cell's KL as a share of the KL of a peer's cell, for each text."""
    return [f"{cell['kl'][domain] / peer['kl'][domain]:.2f}" for domain in DOMAINS]


def divergences_of(cell: Mapping[str, Any]) -> str:
    """Return the KL on each text, as exact as its standard error."""
    return ", ".join(with_error(cell["kl"][domain], cell["kl_error"][domain]) for domain in DOMAINS)


def with_error(mean: float, error: float) -> str:
    """Return a mean and its standard error, both to the error's first digit."""
    decimals = max(0, -math.floor(math.log10(error))) if error > 0 else 4
    return f"{mean:.{decimals}f} ± {error:.{decimals}f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="--rounding next to llm-compressor's methods on a real model."
    )
    parser.add_argument("--scheme", action="append", choices=SCHEMES, help="A scheme; repeatable.")
    parser.add_argument(
        "--method", action="append", choices=[*OURS, *THEIRS], help="A method; repeatable."
    )
    parser.add_argument("--rows", type=int, default=64, help="Rows for calibration.")
    parser.add_argument("--skip", type=int, default=0, help="Rows before these.")
    parser.add_argument("--held-out", type=int, default=16)
    parser.add_argument("--model", type=Path, default=ROOT / "real" / "SmolLM2-135M-Instruct")
    parser.add_argument("--text", type=Path, help="Default: the folder `text` next to the model.")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "vexport-bench-rounding"
    )
    parser.add_argument("--show", action="store_true", help="Print what is there, run nothing.")
    options = parser.parse_args()
    options.text = options.text or options.model.parent / "text"
    cells = {}
    for scheme in options.scheme or SCHEMES:
        for method in options.method or (*OURS, *THEIRS):
            if not options.show:
                fill(options, scheme, method)
            files = [folder_of(options, scheme, method) / name for name in (MADE, SCORE)]
            if files[1].is_file():
                made, score = (json.loads(file.read_text(encoding="utf-8")) for file in files)
                cells[scheme, method] = {**made, **score}
    print(page_table(cells), cell_table(cells), sep="\n\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        run_peer(*sys.argv[2:])
    elif sys.argv[1:2] == ["--score"]:
        run_score(*sys.argv[2:])
    else:
        # Child processes import the package from this tree, from any working folder.
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        )
        main()
