#!/usr/bin/env python3
"""Make the README's picture of a report from a run of the demo.

    scripts/demo
    .venv/bin/python scripts/report_picture.py runs/demo-nvfp4

The picture is the top of RUN_DIR/report.html in Chromium. The verdict is stored in the picture as
text, and the script writes it into the README below the picture, so that both have the same
numbers. `tests/test_documents.py` compares them.
"""

import argparse
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / ".github" / "report.png"
README = ROOT / "README.md"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1000, 1180
SIGNATURE = b"\x89PNG\r\n\x1a\n"
KEYWORD = b"Description"
CAPTION = re.compile(r"(?<=\(\.github/report\.png\)\n\n)_.*?_\n", re.DOTALL)


def main() -> int:
    """Write the picture and its caption, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--browser", help="Chromium's program.")
    arguments = parser.parse_args()
    browser = arguments.browser or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"report_picture: none of {', '.join(BROWSERS)} is installed", file=sys.stderr)
        return 4
    report = json.loads((arguments.run_dir / "report.json").read_text(encoding="utf-8"))
    caption = caption_of(report)
    PICTURE.write_bytes(with_text(screenshot(browser, arguments.run_dir / "report.html"), caption))
    text = README.read_text(encoding="utf-8")
    README.write_text(CAPTION.sub(f"_{caption}_\n", text), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {caption}")
    return 0


def caption_of(report: dict[str, object]) -> str:
    """Return a sentence with the outcome and its reason: `PASS: all 4 tasks lose less ...`."""
    return f"{report['outcome']}: {report['reason']}."


def screenshot(browser: str, page: Path) -> bytes:
    """Return a PNG of the top of a page, in the light theme."""
    with tempfile.TemporaryDirectory(prefix="vexport-picture-") as folder:
        picture = Path(folder) / "report.png"
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--hide-scrollbars",
                "--blink-settings=preferredColorScheme=1",
                f"--user-data-dir={folder}/profile",
                f"--window-size={WIDTH},{HEIGHT}",
                f"--screenshot={picture}",
                page.resolve().as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )
        return picture.read_bytes()


def chunks(picture: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the kind and the data of each chunk of a PNG."""
    at = len(SIGNATURE)
    while at < len(picture):
        (length,) = struct.unpack(">I", picture[at : at + 4])
        yield picture[at + 4 : at + 8], picture[at + 8 : at + 8 + length]
        at += 12 + length


def with_text(picture: bytes, text: str) -> bytes:
    """Return a PNG with a text as its description, instead of an earlier description."""
    described = KEYWORD + b"\0" + text.encode("latin-1", "replace")
    kept = [each for each in chunks(picture) if not each[1].startswith(KEYWORD)]
    kept.insert(1, (b"tEXt", described))  # the first chunk is the header
    return SIGNATURE + b"".join(_chunk(kind, data) for kind, data in kept)


def text_of(picture: bytes) -> str:
    """Return the description of a PNG, or an empty text."""
    for kind, data in chunks(picture):
        if kind == b"tEXt" and data.startswith(KEYWORD + b"\0"):
            return data[len(KEYWORD) + 1 :].decode("latin-1")
    return ""


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)


if __name__ == "__main__":
    sys.exit(main())
