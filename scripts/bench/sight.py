"""Quantize the demo's model that sees with text and with pictures, and measure both.

    .venv/bin/python scripts/bench/sight.py OUT
    vexport eval OUT/*-* --baseline scenarios/demo/model-sight --task sight --no-attribution

Each scheme is calibrated with 256 questions about pictures, with the same questions without their
pictures, and with 100 sums. The script prints the KL divergence from the source in nats, at the
answers to questions about other pictures and to the sums. transformers computes it, with
dequantized weights and rounded inputs. Training, calibration, measurement and the task draw
pictures from different seeds.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import torch
from measure import DEMO

from vexport.calibration import Samples, read_samples
from vexport.engine.reference import load_dequantized
from vexport.inference.pictures import PictureQuestion, data_address, picture_questions
from vexport.numerics.metrics import kl_divergence
from vexport.records import CalibrationData

SOURCE = DEMO / "model-sight"
SCHEMES = ("W4A16", "NVFP4")
CALIBRATION, MEASURED = "calibration", "measured"  # seeds of pictures
QUESTIONS, MEASURED_QUESTIONS = 256, 400
# A row ends with the answer, the end of the text, and a space that has no token.
ANSWER_FROM_END = 2
LONGEST_ROW = 128
Row = Mapping[str, object]


def row(question: object, answer: str) -> Row:
    """Return a conversation in OpenAI's form."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def with_picture(asked: PictureQuestion) -> Row:
    picture = {"type": "image_url", "image_url": {"url": data_address(asked.picture)}}
    parts = [picture, {"type": "text", "text": asked.topic.prompt}]
    return row(parts, asked.topic.choices[asked.answer])


def without_picture(asked: PictureQuestion) -> Row:
    return row(asked.topic.prompt, asked.topic.choices[asked.answer])


def sums() -> Iterator[Row]:
    """Yield all sums of two digits."""
    for first, second in product(range(10), repeat=2):
        question = f"What is {first} plus {second} ? Answer with one number."
        yield row(question, str(first + second))


def write_rows(out: Path) -> tuple[Mapping[str, Path], Mapping[str, Path]]:
    """Write the files of calibration, and the files for the KL divergence."""
    asked = [*picture_questions(QUESTIONS, CALIBRATION)]
    measured = picture_questions(MEASURED_QUESTIONS, MEASURED)
    rows = {
        "pictures": map(with_picture, asked),
        "questions": map(without_picture, asked),
        "sums": sums(),
        "measured": map(with_picture, measured),
    }
    files = {name: out / f"{name}.jsonl" for name in rows}
    for name, file in files.items():
        file.write_text("".join(f"{json.dumps(each)}\n" for each in rows[name]), encoding="utf-8")
    measured_files = {"pictures": files.pop("measured"), "sums": files["sums"]}
    return files, measured_files


def quantize(scheme: str, rows: Path, out: Path) -> None:
    command = ("quantize", SOURCE, out, "--scheme", scheme, "--calibration", rows)
    options = ("--samples", QUESTIONS, "--seq-len", LONGEST_ROW, "--overwrite")
    words = map(str, (sys.executable, "-m", "vexport", *command, *options))
    subprocess.run([*words], check=True)


def samples_of(file: Path) -> Samples:
    chosen = CalibrationData(name=str(file), samples=MEASURED_QUESTIONS, seq_len=LONGEST_ROW)
    vocabulary = json.loads((SOURCE / "config.json").read_text())["text_config"]["vocab_size"]
    return read_samples(chosen, SOURCE, vocab_size=vocabulary, with_pictures=True)


@torch.inference_mode()
def logprobs_of_answers(checkpoint: Path, samples: Samples) -> torch.Tensor:
    """Return the log-probabilities of the answers' first tokens [rows, vocabulary]."""
    model = load_dequantized(checkpoint)
    found = []
    for number, ids in enumerate(samples.token_ids):
        sample = samples.pictures_of(number)
        inputs = {} if sample is None else dict(sample.inputs())
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
        logits = model(input_ids=torch.tensor([ids]), use_cache=False, **inputs).logits[0]
        found.append(logits[-ANSWER_FROM_END - 1].float().log_softmax(-1))
    return torch.stack(found)


def print_divergences(checkpoints: Sequence[Path], files: Mapping[str, Path]) -> None:
    samples = {name: samples_of(file) for name, file in files.items()}
    source = {name: logprobs_of_answers(SOURCE, each) for name, each in samples.items()}
    for checkpoint in checkpoints:
        words = [f"{checkpoint.name:16}"]
        for name, each in samples.items():
            divergence = kl_divergence(source[name], logprobs_of_answers(checkpoint, each))
            words.append(f"KL on {name} {divergence.mean():.4f}")
        print("  ".join(words))


def main() -> None:
    """Write rows and checkpoints to a folder, and print the KL divergences."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    files, measured = write_rows(out)
    checkpoints = []
    for scheme, (name, file) in product(SCHEMES, files.items()):
        checkpoint = out / f"{scheme}-{name}"
        quantize(scheme, file, checkpoint)
        checkpoints.append(checkpoint)
    with torch.compiler.set_stance("force_eager"):
        print_divergences(checkpoints, measured)


if __name__ == "__main__":
    main()
