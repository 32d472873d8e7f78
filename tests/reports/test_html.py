"""The HTML page: one file without network or scripts.

Text from outside never becomes markup, and the page fits 400 px.
"""

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args
from urllib.parse import unquote

import pytest

from tests.reports import sample
from tests.texts import assert_contains
from vexport.records import CandidateKind, Finding, KindSize
from vexport.reports import document, render
from vexport.reports.accuracy import forests
from vexport.reports.layers import layer_kind
from vexport.reports.run_record import Report

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
    "--hide-scrollbars",
)
VOID = {"meta", "br", "input"}
MEASURE = """
  const root = page.documentElement;
  const over = [...page.querySelectorAll("section.card")].filter(one => one.scrollWidth > one.clientWidth);
  return root.clientWidth + " " + root.scrollWidth + (over.length ? " beyond its card" : "");"""
SAMPLES: tuple[Callable[[], Report], ...] = (
    sample.report,
    sample.full,
    sample.unloaded,
    sample.hostile,
)


class Page(HTMLParser):
    """Collects tags, attributes and text. It fails if a tag is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize("build", SAMPLES)
def test_page_is_well_formed_and_self_contained(build: Callable[[], Report]) -> None:
    text = render(build(), "html")
    page = Page(text)
    assert page.open == []
    assert page.tags.isdisjoint(
        {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    )
    names = {name for name, _ in page.attributes}
    anchors = {value for name, value in page.attributes if name == "id"}
    links = [value for name, value in page.attributes if name == "href"]
    assert set(links) == {f"#{anchor}" for anchor in anchors}
    assert names.isdisjoint({"src", "xlink:href", "srcset", "action", "data", "poster"})
    assert not [name for name in names if name.startswith("on")]
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in text


def test_page_escapes_hostile_text() -> None:
    page = Page(render(sample.report("FAIL"), "html"))
    river = " oster , and its river is the vell"
    assert {"2 3 1", "2 2 1", "baseline, right", "quantized, wrong", river} <= set(page.words)
    page = Page(render(sample.hostile(), "html"))
    shown = "".join(page.words)
    assert "<script>alert(1)</script>" in shown
    assert "{{ 7*7 }}" in shown
    assert r"\x1b[31mred" in shown


def test_page_shows_gaps_and_provenance() -> None:
    """Gaps are stages that did not run, and blind spots of the engine."""
    text = render(sample.unloaded(), "html")
    assert "Not run: " in text
    assert "not measured" in text
    continuations = "Greedy continuations"
    assert continuations not in text
    assert continuations in render(sample.report(), "html")
    report = sample.report()
    words = " ".join(" ".join(Page(render(report, "html")).words).split())
    engine = sample.load_of(report).engine
    assert engine is not None
    made = sample.made_of(report)
    assert made.calibration is not None
    provenance = (report.call.command, made.source.name, made.calibration.digest)
    assert all(text in words for text in (*engine.blind_spots, *provenance))


def test_forest_intervals_and_layer_groups() -> None:
    (chart,) = forests(sample.verdict("FAIL"))
    facts, addition = chart.tasks
    places = [
        addition.low,
        addition.difference,
        addition.high,
        -chart.scale.margin,
        facts.low,
        0.0,
        facts.high,
    ]
    assert [*map(chart.at, places)] == sorted(map(chart.at, places))
    labels = {label: at for at, label in chart.ticks}
    assert all(0 <= at <= 100 for at in labels.values())
    assert labels["0"] == chart.at(0)
    assert layer_kind("model.layers.3.mlp.experts.17.up_proj") == "mlp.experts.up_proj"
    assert layer_kind("lm_head") == "lm_head"


@pytest.mark.parametrize("kl", [math.inf, -math.inf, math.nan, 0.0, -1.0])
def test_non_finite_kl_is_drawn(kl: float) -> None:
    report = sample.full()
    assert report.drift is not None
    tokens = tuple(replace(token, kl=kl) for token in report.drift.worst[0].tokens)
    worst = replace(report.drift.worst[0], kl=kl, tokens=tokens)
    drift = replace(report.drift, mean_kl=kl, max_kl=kl, candidate_nll=kl, worst=(worst,))
    text = render(replace(report, drift=drift), "html")
    assert ('class="heat3"' in text) == (not math.isfinite(kl))
    for format_ in ("text", "markdown", "card", "json"):
        render(replace(report, drift=drift), format_)


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")
@pytest.mark.parametrize("build", SAMPLES)
def test_pages_fit_and_the_console_is_silent(build: Callable[[], Report], tmp_path: Path) -> None:
    done = _browse(_framed(render(build(), "html"), MEASURE, 400, 1280), tmp_path)
    assert sorted(_titles(done.stdout)) == ["1280 1280", "400 400"]
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")
def test_flips_are_filtered(tmp_path: Path) -> None:
    script = """
  const shown = kind => [...page.querySelectorAll(kind)].filter(one => one.checkVisibility()).length;
  return ["all", "lost", "gained"].map(choice => {
    page.querySelector(`[name=flips][value=${choice}]`).click();
    return shown(".pair.lost") + " " + shown(".pair.gained");
  }).join(";");"""
    done = _browse(_framed(render(sample.report("FAIL"), "html"), script, 1280), tmp_path)
    assert _titles(done.stdout) == ["2 2", "2 0", "0 2"]


def _browse(page: str, folder: Path, *, width: int = 1280) -> subprocess.CompletedProcess[str]:
    """Run Chromium on the page, in a window of this width.

    Its output has the document after its scripts, and the console's lines.
    """
    outer = folder / "outer.html"
    outer.write_text(page, encoding="utf-8")
    return subprocess.run(
        [
            str(CHROMIUM),
            *FLAGS,
            f"--window-size={width},900",
            f"--user-data-dir={folder / 'profile'}",
            "--dump-dom",
            outer.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )


def _titles(dom: str) -> list[str]:
    (title,) = re.findall(r"<title>([^<]*)</title>", dom)
    return str(title).rstrip(";").split(";")


def _framed(page: str, script: str, *widths: int) -> str:
    """Show the page in frames of these widths. The title collects the results of the script.

    Frames are needed, because a window is never narrower than 500 px.
    """
    source = json.dumps(page).replace("<", "\\u003c")
    return f"""<!DOCTYPE html><body><script>
for (const width of {list(widths)}) {{
  const frame = document.createElement("iframe");
  frame.style.cssText = `border:0;width:${{width}}px;height:800px`;
  frame.srcdoc = {source};
  frame.onload = () => {{
    const page = frame.contentDocument;
    document.title += (() => {{{script}}})() + ";";
  }};
  document.body.append(frame);
}}
</script>"""


@pytest.mark.parametrize("format", ["html", "markdown", "text"])
def test_levels_are_explained(format: str) -> None:
    text = " ".join(" ".join(Page(render(sample.report("FAIL"), format)).words).split())
    assert "corrected for 2 tasks (Holm)" in text
    if format != "text":
        assert_contains(text, "97.5% to 95%", "all bounds together", "95%")


def test_page_links_to_existing_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "eval" / "candidate").mkdir(parents=True)
    for name in ("report.json", "junit.xml", "eval/candidate/vllm.log", "unknown.txt"):
        (folder / name).write_text("", encoding="utf-8")
    page = Page(render(sample.full(), "html", folder=folder))
    links = [
        value for name, value in page.attributes if name == "href" and not value.startswith("#")
    ]
    assert links == [
        "checkpoint/",
        "report.json",
        "junit.xml",
        "eval/candidate/vllm.log",
        "eval/candidate/",
    ]
    moved = folder.rename(tmp_path / "moved")
    assert all((moved / unquote(link)).exists() for link in links)
    assert str(tmp_path) not in render(sample.full(), "html", folder=moved)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (sample.report, "vllm serve runs/demo-nvfp4/checkpoint"),
        (lambda: sample.report("FAIL"), "Keep the layers that lose most"),
        (lambda: sample.report("INCONCLUSIVE"), "Evaluate about 2,900 documents of"),
        (sample.unloaded, "Correct the findings in the report"),
    ],
)
def test_page_names_next_step(build: Callable[[], Report], words: str) -> None:
    shown = " ".join(" ".join(Page(render(build(), "html")).words).split())
    assert words in shown


def test_sizes_by_kind_of_layer() -> None:
    sizes = (
        KindSize(kind="mlp", source_bytes=2_000_000, output_bytes=600_000),
        KindSize(kind="embed_tokens", source_bytes=800_000, output_bytes=800_000),
    )
    page = Page(render(sample.with_made(sample.report(), sizes=sizes), "html"))
    words = [word.strip() for word in page.words if word.strip()]
    start = words.index("mlp")
    assert words[start : start + 4] == ["mlp", "2.00 MB", "600 kB", "30%"]
    assert words[start + 4 : start + 8] == ["embed_tokens", "800 kB", "800 kB", "100%"]


def with_findings(report: Report, *findings: Finding) -> Report:
    check = replace(sample.made_of(report).check, findings=findings)
    return sample.with_made(report, check=check)


def test_findings_of_one_kind_are_one_row() -> None:
    many = tuple(
        replace(sample.finding("error", where=f"model.layers.{n}.mlp.up_proj"), check="values")
        for n in range(120)
    )
    cause = replace(
        sample.finding("error", where="config.json: quantization_config"), check="config"
    )
    base = sample.unloaded()
    text = render(with_findings(base, *many), "html")
    assert "model.layers.0-119.mlp.up_proj" in text
    assert "119 more like it" in text
    assert text.count("0.00217, 0.00217 and 0.00304</div>") == 1
    text = render(with_findings(base, cause, *many), "html")
    assert "120 more findings may follow from it" in text
    assert "model.layers.0-119" not in text


def test_finding_without_need_has_no_row_for_it() -> None:
    base = sample.unloaded()
    found = replace(sample.finding("error"), expected="", got="width 320 is no multiple of 128")
    page = render(with_findings(base, found), "html")
    cells = dict(re.findall(r'<td data-label="(\w+)" class="([^"]*)"><div>', page))
    assert "empty" in cells["Need"]
    assert "empty" not in cells["Got"] + cells["Do"]
    assert "#findings td.empty { display: none; }" in page


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
@pytest.mark.parametrize("width", [500, 800, 1280])
def test_words_of_findings_are_not_broken(width: int, tmp_path: Path) -> None:
    """A word has one line, so its range has one rectangle, also next to long values."""
    base = sample.unloaded()
    found = sample.finding("warning")
    long = replace(found, got=f"digest {'0' * 300}", expected="arguments", fix="quantize again")
    page = render(with_findings(base, long), "html")
    script = """<script>onload = () => {
      let broken = [];
      for (const cell of document.querySelectorAll('#findings td[data-label] > div')) {
        const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
        for (let node; (node = walker.nextNode());)
          for (const word of node.data.matchAll(/[a-z]{3,}/gi)) {
            const range = document.createRange();
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            if (range.getClientRects().length > 1) broken.push(word[0]);
          }
      }
      document.title = 'broken: ' + broken.join(' ') + ' end';
    }</script>"""
    page = page.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    ran = _browse(page.replace("</body>", f"{script}</body>"), tmp_path, width=width)
    assert "<title>broken:  end</title>" in ran.stdout


def test_document_parts_have_macros() -> None:
    macros = (Path(document.__file__).parent / "templates" / "parts.html").read_text(
        encoding="utf-8"
    )
    names = {kind.__name__.lower() for kind in get_args(document.Part)} - {"findinglist"}
    assert names <= set(re.findall(r"\{% macro (\w+)\(", macros))


def test_backticks_become_code_except_in_responses() -> None:
    made = replace(sample.report("FAIL"), reason="use `scheme: auto` <b>")
    page = render(made, "html")
    assert "<code>scheme: auto</code> &lt;b&gt;" in page
    assert made.verdict is not None
    (flip, *_) = made.verdict.tasks[1].changes.flips
    tasks = [
        replace(task, changes=replace(task.changes, flips=(replace(flip, candidate="`code`"),)))
        for task in made.verdict.tasks
    ]
    quoted = replace(made, verdict=replace(made.verdict, tasks=tuple(tasks)))
    assert "<pre>`code`</pre>" in render(quoted, "html")


@pytest.mark.parametrize("kind", ["unquantized", "server", "candidate"])
def test_columns_name_the_candidate(kind: CandidateKind) -> None:
    made = sample.report("FAIL")
    assert made.verdict is not None
    verdict = replace(made.verdict, candidate=kind)
    for format_ in ("html", "text", "markdown"):
        words = Page(render(replace(made, verdict=verdict), format_)).words
        assert_contains(" ".join(words), "Documents", kind.capitalize(), "Recovery")
        assert "Baseline Quantized" not in " ".join(words)


def test_greedy_continuations_without_baseline() -> None:
    """Without a baseline that ran, there is no box for it."""
    assert sample.load().canaries
    made = replace(sample.report(), baseline=None)
    labels = [words for words in Page(render(made, "html")).words if "ended by" in words]
    assert labels
    assert not any(label.startswith("baseline") for label in labels)
