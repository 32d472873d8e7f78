#!/usr/bin/env python3
"""Write the reference of rules, vexport/docs/rulebook.md, from the rule book.

Also write the IDs of each check's rules into the check's section of vexport/docs/findings.md. Run
it after a change of a rule.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path
from textwrap import fill

from vexport.files import write_text
from vexport.rules import all_rules
from vexport.rules.book import Claim, Rule

# What a rule claims, in words.
CLAIMS: Mapping[Claim | None, str] = {
    "refused": "vLLM refuses the checkpoint",
    "values": "vLLM loads it with wrong values",
    "precision": "vLLM runs the layers in another precision or kernel than stored",
    None: "",
}
PAGES = Path(__file__).parent.parent / "vexport" / "docs"
PAGE, FINDINGS = PAGES / "rulebook.md", PAGES / "findings.md"
# Families of the rules of sections that do not have the family's name.
FAMILIES: Mapping[str, Sequence[str]] = {"files": ("checkpoint", "file")}
SECTION = re.compile(r"^## (\w+)\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
# The paragraph of a section that this script writes.
IDS = "**Rules:**"
HEAD = """# Rule book

<!-- scripts/generate_rules.py writes this page. -->

Each finding and each error shows the ID of its rule in brackets. `vexport explain ID` shows one
rule. Words in capitals stand for the facts of a case. Some facts, such as HINT and MORE, are empty
in most cases. Rules on the files of a checkpoint can be [ignored](check.md#ignored-rules).
"""


def page() -> str:
    return "\n".join([HEAD, *_families()])


def _families() -> Iterator[str]:
    for family, rules in groupby(all_rules().values(), key=lambda rule: rule.family):
        purpose = (import_module(f"vexport.rules.{family.replace('-', '_')}").__doc__ or "").strip()
        yield f"## {family} (rules)\n\n{purpose}\n"
        for rule in rules:
            yield f"### {rule.id}\n\n{rule_text(rule)}\n"


def rule_text(rule: Rule) -> str:
    """Return a rule in Markdown. Words in capitals stand for the facts of a case."""
    sentences, severity = rule.outline, "note" if rule.severity == "info" else rule.severity
    entries = (
        ("severity", severity),
        ("claim", CLAIMS[rule.claim]),
        ("found", sentences.got),
        ("needed", sentences.need),
        ("remedy", sentences.do),
    )
    return "\n".join(f"- **{name}**: {text}" for name, text in entries if text)


def findings(text: str) -> str:
    """Return the page of findings with the IDs of each check's rules."""
    return SECTION.sub(_with_ids, text)


def _with_ids(section: re.Match[str]) -> str:
    families = FAMILIES.get(section[1], (section[1],))
    ids = [rule.id for rule in all_rules().values() if rule.family in families]
    if not ids:
        return section[0]
    links = ", ".join(f"[{family}](rulebook.md#{family}-rules)" for family in families)
    listed = ", ".join(f"`{id_}`" for id_ in ids)
    paragraph = fill(
        f"{IDS} {links}: {listed}", width=120, break_on_hyphens=False, break_long_words=False
    )
    return f"{section[0].partition(IDS)[0].rstrip()}\n\n{paragraph}\n\n"


def main() -> None:
    write_text(PAGE, page())
    write_text(FINDINGS, findings(FINDINGS.read_text(encoding="utf-8")).rstrip() + "\n")
    print(f"{PAGE}: {len(all_rules())} rules")


if __name__ == "__main__":
    main()
