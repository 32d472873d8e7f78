"""Makes rows of token ids from the documentation in two sdists; scripts/real-model runs it.

    .venv-real/bin/python scripts/real_model/text.py MODEL FOLDER_OF_SDISTS OUT

OUT gets calibration.jsonl (256 rows), same.jsonl (64 rows of other files of the same documentation) and
other.jsonl (64 rows of the other one), each row 512 token ids, and SOURCES. Only paragraphs of prose count:
no code, tables, directives or headings, markup removed. OUT is there whole or not at all.
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
from pathlib import Path

from transformers import AutoTokenizer

SEQ_LEN = 512
CALIBRATION, SAME, OTHER = "calibration", "same", "other"
ROWS = {CALIBRATION: 256, SAME: 64, OTHER: 64}
# Of what sdist, which files of it.
DJANGO = ("django", re.compile(r"/docs/(faq|howto|internals|intro|misc|ref|topics)/.*\.txt$"))
SYMPY = ("sympy", re.compile(r"/doc/src/.*\.(rst|md)$"))
# A share of the calibration's documentation is not calibrated on.
HELD_OUT_FILES = 0.2
SHORTEST = 80
ROLE = re.compile(r":[\w:+-]+:`~?([^`<]*?)\s*(?:<[^`]*>)?`")
LINK = re.compile(r"`([^`<]+?)\s*<[^`>]*>`_+")
MARKDOWN_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)|\{[\w:-]+\}(?=`)")
EMPHASIS = re.compile(r"`+|\*\*?|\b_\b|`_+")
WORD = re.compile(r"[A-Za-z]+")


def read_documents(sdists: Path, package: str, names: re.Pattern[str]) -> dict[str, str]:
    """The documents of a sdist by name, in the order of their names."""
    (file,) = sdists.glob(f"{package}-*.tar.gz")
    documents = {}
    with tarfile.open(file) as archive:
        for member in archive:
            if member.isfile() and names.search(member.name):
                stream = archive.extractfile(member)
                assert stream is not None
                documents[member.name] = stream.read().decode("utf-8")
    return dict(sorted(documents.items()))


def paragraphs(document: str) -> Iterator[str]:
    """The paragraphs of prose of a document in reStructuredText or Markdown."""
    fenced = re.sub(r"^```.*?^```", "", document, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n", fenced):
        if block[:1].isalpha() or block[:1] in ":`*":
            text = plain(" ".join(block.split()))
            if is_prose(text):
                yield text


def plain(text: str) -> str:
    """Without markup; `::` before an example becomes a colon."""
    for pattern in (ROLE, LINK):
        text = pattern.sub(r"\1", text)
    text = MARKDOWN_LINK.sub(lambda found: found[1] or "", text)
    return EMPHASIS.sub("", text).replace("::", ":").strip()


def is_prose(text: str) -> bool:
    """Long enough, a sentence, and mostly words."""
    letters = sum(len(word) for word in WORD.findall(text))
    return len(text) >= SHORTEST and text[-1] in ".:!?" and text[0].isupper() and letters > 0.7 * len(text)


def rows_of(documents: Sequence[str], tokenizer: AutoTokenizer, count: int) -> list[list[int]]:
    """Rows of SEQ_LEN tokens, none of two documents, so many of them drawn at random."""
    rows = []
    for document in documents:
        ids: list[int] = tokenizer("\n".join(paragraphs(document)))["input_ids"]
        rows += [ids[first : first + SEQ_LEN] for first in range(0, len(ids) - SEQ_LEN + 1, SEQ_LEN)]
    if len(rows) < count:
        raise SystemExit(f"text: got {len(rows)} rows of {SEQ_LEN} tokens, need {count}")
    return random.Random(0).sample(rows, count)


def split(documents: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The documents to calibrate on, and those held out."""
    shuffled = list(documents.values())
    random.Random(0).shuffle(shuffled)
    held_out = round(len(shuffled) * HELD_OUT_FILES)
    return shuffled[held_out:], shuffled[:held_out]


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder with the list of sources that becomes `out` when the block ends without error, or nothing."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield partial
        shutil.copy(Path(__file__).with_name("texts.txt"), partial / "SOURCES")
        partial.chmod(0o755)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_rows(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """A line of JSON for each row."""
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Read the sdists and write the rows."""
    model, sdists, out = (Path(word).absolute() for word in sys.argv[1:])
    if out.is_dir():
        return
    tokenizer = AutoTokenizer.from_pretrained(model)
    calibration, same = split(read_documents(sdists, *DJANGO))
    texts = {CALIBRATION: calibration, SAME: same, OTHER: list(read_documents(sdists, *SYMPY).values())}
    with new_folder(out) as folder:
        for name, documents in texts.items():
            write_rows(
                folder / f"{name}.jsonl",
                [{"input_ids": row} for row in rows_of(documents, tokenizer, ROWS[name])],
            )


if __name__ == "__main__":
    main()
