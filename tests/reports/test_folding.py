"""Findings of one kind are folded, and consequences are counted at their cause. JSON has all."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.command import vexport
from tests.models import Good, write_tokenizer
from tests.mutations.edits import ARGUMENTS, GROUP, Change, config, drop_if, put, set_first, spoiled
from tests.texts import assert_contains
from vexport.records import CheckReport, Finding
from vexport.reports import render_checks
from vexport.reports.findings import fold, folded_places

MOST_LINES = 40


def finding(where: str, got: str = "3 NaN", check: str = "values") -> Finding:
    return Finding(
        check=check, severity="error", where=where, expected="numbers", got=got, fix="export again"
    )


@pytest.mark.parametrize(
    ("places", "folded"),
    [
        (["model.layers.3.mlp.up_proj"], "model.layers.3.mlp.up_proj"),
        ([f"model.layers.{n}.o_proj" for n in range(4)], "model.layers.0-3.o_proj"),
        ([f"model.layers.{n}.o_proj" for n in (0, 1, 5)], "model.layers.0-1,5.o_proj"),
        ([f"model.layers.{n}.o_proj" for n in range(0, 20, 2)], "model.layers.*.o_proj"),
        ([f"m.{n}.e.{e}.w" for n in range(2) for e in range(3)], "m.0-1.e.0-2.w"),
        (["m.0.e.0.w", "m.1.e.1.w"], "m.*.e.*.w"),
        (["m.0.mlp.up.w", "m.0.attn.q.w"], "m.0.{mlp.up, attn.q}.w"),
        ([f"m.{name}" for name in "abcdef"], "m.{a, b, c, d, and 2 more}"),
        (["a.b", "a.b.c"], "a.{b, b.c}"),
        (["model-00001-of-00002.safetensors"], "model-00001-of-00002.safetensors"),
        (["lm_head", "lm_head"], "lm_head"),
    ],
)
def test_folded_places(places: list[str], folded: str) -> None:
    """A folded name covers its places, and names no other place unless it has a `*`."""
    assert folded_places(places) == folded


def test_numbers_do_not_split_kinds() -> None:
    found = [
        finding("model.layers.0.a"),
        finding("model.layers.1.a", got="7 NaN"),
        finding("model.layers.1.a", got="7 zeros"),
        finding("model.layers.1.a", check="shapes"),
    ]
    assert [(kind.places, kind.count) for kind in fold(found)] == [
        ("model.layers.0-1.a", 2),
        ("model.layers.1.a", 1),
        ("model.layers.1.a", 1),
    ]
    assert_contains(fold(found)[0].finding.fix, "export again", "1 more")


SPOILED: Mapping[str, tuple[str, Change]] = {
    "bits": ("FP8_DYNAMIC", config(ARGUMENTS, num_bits=7, strategy="group", group_size=128)),
    "group size": ("W4A16", config(ARGUMENTS, group_size=48)),
    "format": ("W4A16", config(GROUP, format="int-quantized")),
    "targets": ("FP8_DYNAMIC", config(GROUP, targets=["re:nothing"])),
    "no scales": ("W8A8", drop_if(lambda name: name.endswith("weight_scale"))),
    "NaN": ("W8A8", put("model.layers.0.mlp.down_proj.weight_scale", set_first(float("nan")))),
}


def served(good: Path, folder: Path, change: Change) -> Path:
    """Write a changed copy with a tokenizer and a chat template. Only the change is found."""
    write_tokenizer(spoiled(good, folder, change))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def size(finding: dict[str, Any]) -> int:
    """Return the number of places of a finding, or 1 if the finding is about their cause."""
    places: list[str] = finding["places"]
    return len(places) if places and finding["where"].startswith(places[0]) else 1


@pytest.mark.parametrize("what", SPOILED)
def test_findings_fit_one_screen(what: str, good: Good, tmp_path: Path) -> None:
    """The text counts all findings, and `--all` lists them."""
    scheme, edit = SPOILED[what]
    broken = served(good(scheme), tmp_path / "broken", edit)
    ran = vexport("check", broken)
    everything = json.loads(vexport("check", broken, "--format", "json").stdout)[0]["findings"]
    assert ran.code == 1
    assert len(ran.stdout.splitlines()) < MOST_LINES
    counted = 0
    for line in ran.stdout.splitlines():
        words = line.split()
        counted += line.startswith(("error  ", "warning  ", "note  "))
        counted += int(words[1].replace(",", "")) if line.startswith("  and ") else 0
        counted += int(words[0].replace(",", "")) if "may follow" in line else 0
    assert counted == sum(map(size, everything))
    listed = vexport("check", broken, "--all").stdout
    text = " ".join(listed.split())
    assert all(finding["where"] in text for finding in everything)
    assert all(place in text for finding in everything for place in finding["places"])
    assert listed.count("\n  do ") == len(everything)


def test_consequences_are_counted_at_their_cause(good: Good, tmp_path: Path) -> None:
    broken = served(good("FP8_DYNAMIC"), tmp_path / "broken", SPOILED["bits"][1])
    text = vexport("check", broken).stdout
    assert text.index("floats of 7 bits") < text.index("may follow from it")
    assert "weight_packed" not in text
    found = json.loads(vexport("check", broken, "--format", "json").stdout)[0]["findings"]
    number = sum(map(size, found))
    line, *notices = vexport("check", broken, "--format", "github").stdout.splitlines()
    assert all("not judged" in notice for notice in notices)
    assert_contains(line, f"({number - 1} more findings")
    suites = ElementTree.fromstring(vexport("check", broken, "--format", "junit").stdout)
    details = {case.get("name"): case.findtext("failure") for case in suites.iter("testcase")}
    assert len((details["completeness"] or "").splitlines()) == 2


@pytest.mark.slow
def test_shown_findings_are_limited() -> None:
    """10,000 findings all differ in words, and half of them follow from a cause.

    Text and annotations show some of them and count the others. JSON has all.
    """
    words = [
        "".join("abcdefghij"[int(digit)] for digit in f"{number:04}") for number in range(5000)
    ]
    cause = replace(finding("quantization_config.ignore", check="config"), got="a wrong list")
    own = [finding(f"model.{word}", check="tokenizer") for word in words]
    own = [replace(each, got=f"{word} tokens") for each, word in zip(own, words, strict=True)]
    follow = [finding(f"model.{word}.weight", got=f"{word} scales") for word in words]
    report = CheckReport(checkpoint="a", ok=False, findings=(cause, *own, *follow))
    assert len(json.loads(render_checks([report], "json", ("files",)))[0]["findings"]) == 10_001
    for form in ("text", "github"):
        shown = render_checks([report], form, ("files",))
        assert len(shown) < 20_000
        end = shown[-500:]
        assert re.search(r"[\d,]{5} more\b", end), end
