#!/usr/bin/env python3
"""Write the reference of rules, vexport/docs/rulebook.md, from the rule book.

Run it after a change of a rule.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import groupby
from pathlib import Path

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
PAGE = Path(__file__).parent.parent / "vexport" / "docs" / "rulebook.md"
HEAD = """# Rule book

<!-- scripts/generate_rules.py writes this page. -->

Each finding and each error ends with the ID of its rule. `vexport explain ID` shows one rule.
Words in capitals stand for the facts of a case. Rules on the files of a checkpoint can be
[ignored](check.md#ignored-rules).
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


def main() -> None:
    write_text(PAGE, page())
    print(f"{PAGE}: {len(all_rules())} rules")


if __name__ == "__main__":
    main()
