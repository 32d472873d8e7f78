"""Compare time and memory of calibration on pictures with text of the same length.

    .venv/bin/python scripts/bench/pictures.py [--rows 16] [--scheme NVFP4]

The model is a Qwen3-VL of random weights: 12 decoder layers of width 1024, and a tower of 12 layers
of width 512, with four patches per token. Each row has one picture of 240 to 272 tokens. `text` has
random tokens instead, in the same number. Each runs in a separate process. Seconds begin after
reading the rows. `tower` is the part before the first decoder layer. On a machine that is busy with
other work, compare CPU seconds, with OMP_NUM_THREADS=1 and NUMBA_NUM_THREADS=1. Memory is the peak
of the process, including its libraries, which `before` counts.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from measure import ROOT, Ran, resident_mb, spent, timed

sys.path.insert(0, str(ROOT))

from tests.architectures.families import Family  # noqa: E402
from tests.calibration.seeing import (  # noqa: E402
    FIRST_SPECIAL,
    SEEING,
    address,
    picture,
    question,
    save_with_processor,
    write_rows,
)

KINDS = ("text", "pictures")
SEQ_LEN = 1024
WIDTH, TOWER_WIDTH, LAYERS = 1024, 512, 12
TEXT_SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 3 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
TOWER_SIZES = {
    "hidden_size": TOWER_WIDTH,
    "intermediate_size": 4 * TOWER_WIDTH,
    "num_heads": 8,
    "depth": LAYERS,
    "out_hidden_size": WIDTH,
    "deepstack_visual_indexes": [3, 6, 9],
    "num_position_embeddings": 48**2,
}
# Number of pixels that the processor accepts.
PIXELS = {"shortest_edge": 2**16, "longest_edge": 2**24}


def write_model(folder: Path) -> None:
    micro = SEEING["qwen3-vl"]
    family = Family(
        micro.family.model_type,
        {**micro.family.text, **TEXT_SIZES},
        towers={"vision_config": TOWER_SIZES},
        values=micro.family.values,
    )
    image_processor = {**micro.image_processor, "size": PIXELS}
    save_with_processor(replace(micro, family=family, image_processor=image_processor), folder)


def write_pictures(file: Path, rows: int) -> None:
    write_rows(
        file,
        [
            question(
                address(picture(512 + 32 * (number % 3), 480, number)),
                text="what is it? " * 8,
                answer="a box " * 20,
            )
            for number in range(rows)
        ],
    )


def run(kind: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Calibrate in this process, and return time and memory."""
    from vexport.calibration import Samples, calibrate, read_samples
    from vexport.calibration.walk import LayerWalk
    from vexport.names import Folder
    from vexport.plan.source import plan_source, scheme_rules
    from vexport.records import CalibrationData
    from vexport.scenario import Planning

    data = CalibrationData(name=str(folder / "rows.jsonl"), samples=options.rows, seq_len=SEQ_LEN)
    model = folder / "model"
    samples = read_samples(data, model, vocab_size=FIRST_SPECIAL + 128, with_pictures=True)
    if kind == "text":
        draw = random.Random(0)
        ids = tuple(tuple(draw.randrange(FIRST_SPECIAL) for _ in row) for row in samples.token_ids)
        samples = Samples(token_ids=ids, rows=samples.rows)
    rules = scheme_rules(Planning(scheme=options.scheme, observer="memoryless_minmax"))
    index, plan = plan_source(Folder.at(model), rules)
    walk = LayerWalk(index)
    before = resident_mb("VmRSS")
    start = time.process_time()
    tower = [0.0]

    def on_progress(stage: str, done: int, total: int) -> None:
        if stage.startswith("calibrate") and done == 0:
            tower.append(time.process_time() - start)

    took = spent(lambda: calibrate(walk, plan, samples, on_progress=on_progress))
    return {**took, "tower": tower[-1], "before": before, "tokens": samples.tokens}


def measure(kind: str, folder: Path, options: argparse.Namespace) -> Ran:
    """Measure a run in a separate process."""
    sizes = ("--rows", options.rows, "--scheme", options.scheme)
    return timed(sys.executable, __file__, "--run", kind, "--folder", folder, *sizes)


def main() -> None:
    """Measure both and print a table, or measure a single run and print its JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--scheme", default="NVFP4")
    parser.add_argument("--run", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options.run, options.folder, options)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        write_pictures(folder / "rows.jsonl", options.rows)
        for kind in KINDS:
            ran = measure(kind, folder, options)
            took = ran.answer
            print(
                f"{kind:8} {took['tokens']:,} tokens: {took['seconds']:.1f} s, "
                f"CPU {took['cpu']:.1f} s, of which tower {took['tower']:.1f} s, "
                f"memory {ran.megabytes:,.0f} MB, of which before {took['before']:,.0f} MB"
            )


if __name__ == "__main__":
    main()
