"""`vexport explain`: every scheme, observer, check and finding has a section, wrong names get a hint."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.command import vexport
from vexport.reports.catalog import all_sections, checks, find_section, observers, schemes

ROOT = Path(__file__).parent.parent.parent
LISTED = [next(iter(row.values())) for rows in (schemes(), observers(), checks()) for row in rows]


def test_what_is_listed_or_reported_has_a_section() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "vexport").rglob("*.py")]
    findings = {name for text in sources for name in re.findall(r'\bcheck="([\w -]+)"', text)}
    assert len(findings) > 5
    for name in {*LISTED, *findings}:
        assert len(find_section(name).text.split()) > 5, name


def test_names_are_of_one_section_each() -> None:
    names = Counter(name.casefold() for section in all_sections() for name in section.names)
    assert [name for name, count in names.items() if count > 1] == []


def test_a_section_is_printed_as_it_stands() -> None:
    ran = vexport("explain", "fp8-block")
    page = (ROOT / "vexport" / "docs" / "schemes.md").read_text(encoding="utf-8")
    assert ran.code == 0
    assert ran.stdout.strip() in re.sub(r"<!-- explains: .+? -->\n*", "", page)
    answer = json.loads(vexport("explain", "INCONCLUSIVE", "--format", "json").stdout)
    assert (answer["page"], "would settle" in answer["text"]) == ("statistics", True)
    assert "\nstatistics: " in vexport("explain").stdout


def test_a_scheme_with_arguments_has_the_section_of_its_format() -> None:
    assert vexport("explain", "w4a16_g64").stdout == vexport("explain", "W4A16").stdout


@pytest.mark.parametrize(("name", "meant"), [("nvfp5", "NVFP4"), ("completness", "completeness")])
def test_an_unknown_name_gets_the_nearest(name: str, meant: str) -> None:
    ran = vexport("explain", name)
    assert (ran.code, ran.stdout) == (2, "")
    (line,) = ran.errors
    assert f"did you mean {meant}?" in line
