"""Each rule has one name, and each use of a rule passes the facts of its templates."""

import ast
import runpy
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

import vexport.rules
from vexport.errors import InputError
from vexport.records import Finding
from vexport.rules import all_rules
from vexport.rules.book import Rule

PACKAGE = Path(vexport.rules.__file__).parent.parent
# Arguments of `Finding.at` that are no facts.
NO_FACTS = {"places", "tp", "sm"}


def tables() -> Iterator[tuple[str, str, Rule]]:
    """Yield each rule with the names of its module and of its constant."""
    for module in iter_modules(vexport.rules.__path__):
        for name, value in vars(import_module(f"vexport.rules.{module.name}")).items():
            if isinstance(value, Rule):
                yield module.name, name, value


def uses() -> Iterator[tuple[str, Rule, set[str]]]:
    """Yield each place that passes facts to a rule, the rule, and the names of the facts."""
    known = {(module, name): rule for module, name, rule in tables()}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            first = node.args[0]
            if isinstance(first, ast.Attribute) and first.attr == "as_warning":
                first = first.value
            if not isinstance(first, ast.Attribute) or not isinstance(first.value, ast.Name):
                continue
            module = aliases(tree).get(first.value.id, first.value.id)
            rule = known.get((module, first.attr))
            if rule is not None and all(each.arg for each in node.keywords):
                facts = {each.arg for each in node.keywords if each.arg} - NO_FACTS
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", rule, facts


def aliases(tree: ast.Module) -> dict[str, str]:
    """Return the tables that a module imports, by the names that it gives them."""
    return {
        alias.asname or alias.name: alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "vexport.rules"
        for alias in node.names
    }


def test_ids_are_made_of_the_names_of_tables_and_rules() -> None:
    found = list(tables())
    for module, name, rule in found:
        family, _, own = rule.id.partition("/")
        assert family.replace("-", "_") == module
        assert own == name.lower().replace("_", "-")
    assert len(all_rules()) == len(found)


def test_each_rule_is_defined_once() -> None:
    for path in sorted((PACKAGE / "rules").glob("*.py")):
        names = [
            target.id
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        assert sorted(names) == sorted(set(names)), path.name


def test_each_rule_says_something_and_what_to_do() -> None:
    for _, _, rule in tables():
        assert rule.got or rule.need, rule.id
        # "got no such file, need a file" is not English: a clause has no need.
        assert not (rule.need and rule.got.startswith(("no ", "it "))), rule.id


def test_each_use_passes_the_facts_of_the_templates() -> None:
    for place, rule, facts in uses():
        assert facts == rule.facts, f"{place}: {rule.id}"


BOOKS = Rule("a/b", got="{count:# book} of {names:and}", need="{most:# entry/entries}")
QUOTES = Rule("a/b", got="{value!r}", do="{names:or}")


@pytest.mark.parametrize(
    ("rule", "facts", "text"),
    [
        (BOOKS, {"count": 1, "names": ["A"], "most": 1000}, "1 book of A|1,000 entries|"),
        (
            BOOKS,
            {"count": 2, "names": ["A", "B", "C"], "most": 1},
            "2 books of A, B and C|1 entry|",
        ),
        (QUOTES, {"value": "x", "names": ("p", "q")}, "'x'||p or q"),
    ],
)
def test_facts_become_words(rule: Rule, facts: dict[str, object], text: str) -> None:
    made = rule.sentences(facts)
    assert f"{made.got}|{made.need}|{made.do}" == text


def test_a_fact_with_braces_is_shown_as_it_is() -> None:
    assert Rule("a/b", got="{value}").sentences({"value": "{x}"}).got == "{x}"


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (Rule("a/b", got="no such folder", do="make it"), "here: no such folder; make it"),
        (Rule("a/b", need="a list", do="write one"), "here: need a list; write one"),
        (Rule("a/b", got="1", need="2", do="add"), "here: got 1, need 2; add"),
        (Rule("a/b", got="1", need="2"), "here: got 1, need 2"),
    ],
)
def test_a_part_may_be_left_out(rule: Rule, line: str) -> None:
    assert str(InputError.of(rule, "here")) == line
    assert str(Finding.at(rule, "here")) == f"{line} [a/b]"


def test_outline_separates_facts_from_words() -> None:
    rule = Rule("a/b", got="0x{byte:02x} in {a}{b}", need="{count:# row}", do="correct it{hint}")
    outline = rule.outline
    assert (outline.got, outline.need) == ("0xBYTE in A B", "COUNT rows")
    assert outline.do == "correct it HINT"


def test_loaders_show_a_refusal_by_default() -> None:
    assert Rule("a/b", claim="refused").shown_by_loaders == ("refused",)
    assert Rule("a/b", "warning", "refused").shown_by_loaders == ()
    assert Rule("a/b", claim="values").shown_by_loaders == ()
    assert Rule("a/b", claim="refused", loader_faults=()).shown_by_loaders == ()


def test_reference_has_all_rules() -> None:
    generator = runpy.run_path(str(PACKAGE.parent / "scripts" / "generate_rules.py"))
    page = (PACKAGE / "docs" / "rulebook.md").read_text(encoding="utf-8")
    assert page == generator["page"](), "run scripts/generate_rules.py"
    findings = (PACKAGE / "docs" / "findings.md").read_text(encoding="utf-8")
    assert findings == generator["findings"](findings).rstrip() + "\n"
