"""Promises of .github/SECURITY.md name existing tests.

Also tests of limits without another file.
"""

import json
import re
import time
from pathlib import Path

import pytest

from tests.calibration.test_rows import read, write_rows
from tests.command import ROOT
from tests.inference.replying import sending_raw
from tests.inference.test_endpoint_limits import FLOODS
from tests.texts import breaks
from vexport.calibration import data, file_rows
from vexport.checkpoint.index import MAX_HEADER_BYTES, read_header
from vexport.cli.entry import MAX_CHARACTERS, MAX_LINES
from vexport.engine import process
from vexport.errors import InputError
from vexport.foreign import LONGEST_LINE
from vexport.inference.endpoint import server
from vexport.inference.endpoint.server import Server
from vexport.records import Endpoint
from vexport.records.patterns import MOST_SECONDS
from vexport.reports.renderers import html, markdown, text
from vexport.rules.server import NO_RESPONSE
from vexport.scores.readers.parquet_rows import LARGEST_CONTENT

PAGE = (ROOT / ".github" / "SECURITY.md").read_text(encoding="utf-8")
NAMED_TESTS = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)


def test_named_tests_exist() -> None:
    assert len(NAMED_TESTS) > 40
    for file, name in NAMED_TESTS:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"\ndef {name}(" in text, f"{file}::{name}"


def test_each_promise_has_tests() -> None:
    """A promise is a line of the tables of trust and limits, or a paragraph with a bold name."""
    promises, table = PAGE.split("\n## Tests\n")
    rows = [line for line in promises.splitlines() if line.startswith("| ")]
    names = [row.split(" | ")[0][2:] for row in rows if " | yes | " not in row]
    names = [name for name in names if not name.startswith("what")]
    for title in ("What is run", "What is written"):
        (section,) = (each for each in PAGE.split("\n## ") if each.startswith(f"{title}\n"))
        paragraphs = re.split(r"\n- |\n\n", section.removeprefix(title).strip("\n- "))
        bold = [re.match(r"\*\*(.+)\.\*\* ", part) for part in paragraphs]
        assert None not in bold, title
    names += re.findall(r"(?m)^(?:- )?\*\*(.+?)\.\*\* ", promises)
    tested = re.findall(r"(?m)^\| (.+?) \| .*`tests/.*\|$", table)
    assert sorted(names) == sorted(tested)


def test_limits_equal_code() -> None:
    """Compare the limits on the page with the code."""
    shown = " ".join(PAGE.split())
    for words in (
        f"{MOST_SECONDS:g} s for all names",
        f"| {MAX_HEADER_BYTES // 10**6} MB",
        f"{LONGEST_LINE >> 20} MB each",
        f"{LONGEST_LINE >> 20} MB a line of JSON",
        f"{LARGEST_CONTENT >> 30} GB of rows in a parquet file",
        f"a file that is one JSON list {file_rows.LARGEST_LIST >> 30} GB",
        f"after {data.MAX_BROKEN_ROWS} broken rows",
        f"after {data.MAX_MULTIMODAL_ROWS:,} rows with images",
        f"{MAX_CHARACTERS} characters a line, {MAX_LINES} lines",
        f"| {text.MAX_FINDINGS} kinds in text and Markdown, {html.MAX_FINDINGS} in HTML",
        f"first contact {server._FIRST_CONTACT_ENDS:g} s",
        f"| {server._ANSWER_BYTES >> 20} MiB",
        f"its last {process._READ_BYTES >> 20} MB, {process._LONGEST_LINE:,} characters a line",
    ):
        assert words in shown, words
    assert markdown.MAX_FINDINGS == text.MAX_FINDINGS
    endpoint = Endpoint(url="http://localhost")
    assert f"{endpoint.request_timeout:g} s in all phases" in shown
    assert f"retries {endpoint.retry_seconds:g} s" in shown


def test_header_beyond_limit_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{")
        stream.truncate(MAX_HEADER_BYTES + 100)  # a hole
    start = time.process_time()
    with pytest.raises(InputError, match="header"):
        read_header(file)
    assert time.process_time() - start < 1


def test_reading_ends_after_broken_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("broken\n" * 100_000 + '{"text": "one plus two"}\n')
    more = f"{data.MAX_BROKEN_ROWS - 1} more rows"
    with pytest.raises(InputError, match=rf"rows.jsonl: line 1 and {more}"):
        read(file)


def test_reading_ends_after_images(tmp_path: Path) -> None:
    image = {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}
    rows = [image] * data.MAX_MULTIMODAL_ROWS + [{"text": "one plus two"}]
    with pytest.raises(InputError, match=f"{data.MAX_MULTIMODAL_ROWS:,} rows"):
        read(write_rows(tmp_path / "rows.jsonl", *rows))


def test_row_length_is_limited(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    with file.open("wb") as stream:
        stream.write(b'{"text": "' + b"one " * (LONGEST_LINE // 4) + b'"}\n')
    with pytest.raises(InputError, match="rows of at most 64 MB"):
        read(file)


def test_list_size_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_rows, "LARGEST_LIST", 1 << 20)
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"text": "one plus two " * 100_000}]))
    with pytest.raises(InputError, match="a JSON list of at most 1 MB"):
        read(file)


def test_first_contact_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit is shorter than the limits of a request and its retries."""
    monkeypatch.setattr(server, "_FIRST_CONTACT_ENDS", 1.0)
    with sending_raw(FLOODS["slow body"]) as (url, _):
        began = time.monotonic()
        with breaks(NO_RESPONSE):
            Server(Endpoint(url=url, request_timeout=300, retry_seconds=300))
        assert time.monotonic() - began < 8


def test_long_log_is_read_from_end(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    early, late = "ValueError: early", "RuntimeError: " + "late " * 10_000
    log.write_text(f"{early}\n" + "words\n" * 1_000_000)
    assert process.last_exception(log) is None
    log.write_text("words\n" * 1_000_000 + late + "\n")
    assert process.last_exception(log) == late[: process._LONGEST_LINE].rstrip()
