"""Record the text of each finding and each error that the tests produce, and compare records.

    scripts/test --record-texts before.json
    .venv/bin/python -m tests.recorded_texts before.json after.json

A record has the texts as they were, without the places. `comparable` removes the parts that differ
between two sessions or that a test chooses: paths, numbers, quoted values, and dotted names.

The committed snapshots in `tests/texts/` have one file for each family of rules. Each text is the
template of its rule. A fact in words, such as a reason, is shown in its place. If a template has
more than `MOST` such texts, as for the errors of another program, any words are accepted.

- `--record-texts FILE` writes a record of the session.
- `--check-texts` fails the session if a text is not in the snapshot of its family. Part of the
  tests may run.
- `--update-texts` adds the session's texts to the snapshots. If all tests ran and passed, it also
  removes texts that no test produces any more.

Texts of worker processes are recorded if the process of the test makes an error or a finding of
them. Tests that need other hardware or software (`ELSEWHERE`) are not recorded.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import unified_diff
from functools import wraps
from itertools import chain
from pathlib import Path
from string import Formatter
from types import FrameType

import pytest

from vexport.errors import EnvironmentFaults, InputErrors, VexportError, visible
from vexport.records import Finding
from vexport.rules import all_rules

ROOT = Path(__file__).parent.parent
SNAPSHOTS = ROOT / "tests" / "texts"
# Packages that make errors and findings for others: the caller decides the family.
MAKERS = ("errors", "records", "rules")
# Markers of tests that run only on some machines.
ELSEWHERE = ("gpu", "browser", "cuda_wheel")
RECORD, CHECK, UPDATE = "--record-texts", "--check-texts", "--update-texts"

# Largest number of texts in a snapshot that differ only in a template's facts in words.
MOST = 8
# A fact has words if it has at least so many.
FEWEST_WORDS = 3

# Texts for snapshots by family. The second text of a pair is the first without facts in words.
Texts = Mapping[str, frozenset[tuple[str, str]]]
# Texts of the files by family.
Snapshots = Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True, order=True)
class Produced:
    """A text that a test produced.

    `rule` is the id of the rule, or empty without one. `kind` is the error's class with its exit
    code, or the finding's severity with its claim. `pinned` and `template` are the text for a
    snapshot, with and without facts in words. They are empty for a finding whose facts are not
    known, such as from a report that was read.
    """

    family: str
    rule: str
    kind: str
    got: str
    need: str
    do: str
    pinned: str = ""
    template: str = ""

    @property
    def comparable(self) -> str:
        """The text, without the parts that differ between sessions or that a test chooses."""
        parts = {"got": self.got, "need": self.need, "do": self.do}
        lines = [f"  {name}: {masked(text)}" for name, text in parts.items() if text]
        return "\n".join([self.kind, *lines])


_QUOTED = r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\""""
MASKS = (
    (re.compile(rf"(?<![\w])(?:{_QUOTED})"), "'...'"),
    (re.compile(r"\b[a-z]+://[^\s,;)\]]+"), "URL"),
    (re.compile(r"(?<![\w.~-])(?:\.{0,2}/|~/)?(?:[\w.+@=:{}|-]+/)+[\w.+@=:{}|*-]*[\w*]"), "PATH"),
    (re.compile(r"(?<![\w.~-])/[\w.+@=:-]*\w"), "PATH"),
    (re.compile(r"(?<![\w#*])[\w#*]+(?:\.[\w#*]+){2,}"), "NAME"),
    (re.compile(r"\b[0-9a-f]{12,}\b"), "DIGEST"),
    (re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)*(?:e[-+]?\d+)?(?!\w)"), "#"),
    (re.compile(r"\s+"), " "),
)


def masked(text: str) -> str:
    for pattern, word in MASKS:
        text = pattern.sub(word, text)
    return text.strip()


class Recorder:
    """A plugin of pytest that collects the texts of a session, in each of its processes."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.produced: set[Produced] = set()
        self.is_recording = False
        self.is_partial = bool(config.option.keyword or config.option.markexpr)
        self.is_partial |= config.args != config.getini("testpaths")
        self.new: list[str] = []

    def add(self, made: VexportError | Finding) -> None:
        # Several problems are recorded one by one. The base class only formats a finding.
        if isinstance(made, InputErrors | EnvironmentFaults) or type(made) is VexportError:
            return
        package = raising_package(sys._getframe(1)) if self.is_recording else ""
        if package:
            self.produced.add(produced(made, package))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.is_recording = not any(map(item.get_closest_marker, ELSEWHERE))
        try:
            return (yield)
        finally:
            self.is_recording = False

    def pytest_deselected(self) -> None:
        self.is_partial = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Take the texts of a worker process of xdist."""
        output = getattr(node, "workeroutput", {})
        self.produced |= {Produced(*parts) for parts in output.get("texts", ())}
        self.is_partial |= output.get("texts_are_partial", True)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["texts"] = sorted(map(parts_of, self.produced))
            self.config.workeroutput["texts_are_partial"] = self.is_partial
            return
        if file := self.config.getoption(RECORD):
            write_record(Path(file), self.produced)
        if self.config.getoption(UPDATE):
            is_whole = not self.is_partial and session.exitstatus == 0
            update_snapshots(texts_of(self.produced), is_whole=is_whole)
        elif self.config.getoption(CHECK):
            self.new = list(new_texts(read_snapshots(), texts_of(self.produced)))
            if self.new and session.exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.new:
            terminalreporter.section("texts that are not in tests/texts", red=True)
            terminalreporter.write_line("\n".join(self.new))
            terminalreporter.write_line(f"{UPDATE} adds them; review the change of the files")


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(RECORD, metavar="FILE", help="write the texts of findings and errors")
    parser.addoption(CHECK, action="store_true", help="fail if a text is not in tests/texts")
    parser.addoption(UPDATE, action="store_true", help="add the texts to tests/texts")


def start(config: pytest.Config) -> None:
    """Record the texts of this process if an option needs them."""
    if any(map(config.getoption, (RECORD, CHECK, UPDATE))):
        recorder = Recorder(config)
        config.pluginmanager.register(recorder)
        VexportError.__init__ = then(VexportError.__init__, recorder.add)  # type: ignore[method-assign]
        Finding.__init__ = then(Finding.__init__, recorder.add)  # type: ignore[method-assign]


def then(
    make: Callable[..., None], add: Callable[[VexportError | Finding], None]
) -> Callable[..., None]:
    """Return a constructor that also adds what it has made."""

    @wraps(make)
    def made(self: VexportError | Finding, *arguments: object, **named: object) -> None:
        make(self, *arguments, **named)
        add(self)

    return made


def raising_package(frame: FrameType | None) -> str:
    """Return the package of vexport that made an error or a finding.

    Return "" if a test made it, or if it is a copy of a finding, such as of a test's.
    """
    is_copy = False
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        is_copy |= frame.f_code.co_name == "replace"
        if file.is_relative_to(ROOT) and file != Path(__file__):
            folder, *rest = file.relative_to(ROOT).parts
            package = rest[0].removesuffix(".py")
            if folder == "tests" or (is_copy and package == "records"):
                return ""
            if folder == "vexport" and package not in MAKERS:
                return package
        frame = frame.f_back
    return ""


def produced(made: VexportError | Finding, package: str) -> Produced:
    """Return the text of an error or a finding."""
    rule: str = getattr(made, "rule", "")
    if isinstance(made, Finding):
        family, kind = made.check or package, f"{made.severity} {made.claim or ''}".strip()
        texts = made.got, made.expected, made.fix
    else:
        family, kind = package, f"{type(made).__name__} (exit {made.exit_code})"
        texts = made.got, made.need, made.fix
    made_text = Produced(rule.partition("/")[0] or family, rule, kind, *texts)
    needed = all_rules()[rule].facts if rule in all_rules() else frozenset()
    is_copy = isinstance(made, Finding) and not needed <= made.facts.keys()
    return replace(made_text, **({} if is_copy else pinned(made_text, made.facts)))


def pinned(made: Produced, facts: Mapping[str, object]) -> Mapping[str, str]:
    """Return the text for a snapshot, with and without facts in words.

    The text of an error from another process, whose facts are not known, is only masked.
    """
    rule = all_rules().get(made.rule)
    if rule is None:
        return {}
    sentences = rule.sentences(facts) if rule.facts <= facts.keys() else None
    words = {name: text for name in rule.facts & facts.keys() if (text := in_words(facts[name]))}
    texts: dict[str, str] = {}
    for name, shown in (("pinned", words), ("template", dict.fromkeys(words, "..."))):
        parts = []
        for part in ("got", "need", "do"):
            text = getattr(made, part)
            is_rules = sentences is not None and text == getattr(sentences, part)
            text = outlined(getattr(rule, part), shown) if is_rules else masked(text)
            parts += [f"  {part}: {text}"] if text else []
        texts[name] = "\n".join([f"{made.rule} {made.kind}", *parts])
    return texts


def in_words(fact: object) -> str:
    """Return the comparable words of a fact, or "" if it is a value, a name or a list of names."""
    texts = fact if isinstance(fact, list | tuple) else [fact]
    words = [masked(visible(text)) for text in texts if isinstance(text, str)]
    return ", ".join(words) if any(len(text.split()) >= FEWEST_WORDS for text in words) else ""


def outlined(template: str, words: Mapping[str, str]) -> str:
    """Return the template with the facts that are words."""
    text = ""
    for literal, name, spec, conversion in Formatter().parse(template):
        text += literal
        if name is not None:
            ending = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            shown = words.get(name, "") if not conversion else ""
            text += f"<{shown}>" if shown else f"{{{name}{ending}}}"
    return text


def parts_of(text: Produced) -> tuple[str, ...]:
    """Return the fields as xdist sends them: halves of surrogate pairs are escaped."""
    parts: Iterable[str] = (getattr(text, field.name) for field in fields(text))
    return tuple(part.encode("utf-8", "backslashreplace").decode() for part in parts)


def texts_of(produced: Iterable[Produced]) -> Texts:
    texts: dict[str, set[tuple[str, str]]] = {}
    for each in produced:
        if each.pinned:
            texts.setdefault(each.family, set()).add((each.pinned, each.template))
    return {family: frozenset(found) for family, found in texts.items()}


def write_record(file: Path, produced: Iterable[Produced]) -> None:
    """Write the texts of a session as JSON, with a line for each."""
    lines = [json.dumps(asdict(each)) for each in sorted(produced)]
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def read_record(path: Path) -> dict[str, str]:
    """Read a record, or all records in a folder: comparable texts, and the family of each."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    rows = (Produced(**row) for file in files for row in json.loads(file.read_text()))
    return {row.comparable: row.family for row in rows}


def read_snapshots() -> Snapshots:
    files = SNAPSHOTS.glob("*.txt")
    return {file.stem: frozenset(file.read_text().strip().split("\n\n")) for file in files}


def update_snapshots(texts: Texts, *, is_whole: bool) -> None:
    """Add texts to the snapshots. If the texts are of all tests, remove all other texts."""
    before = {} if is_whole else read_snapshots()
    SNAPSHOTS.mkdir(exist_ok=True)
    if is_whole:
        for file in SNAPSHOTS.glob("*.txt"):
            file.unlink()
    for family, found in texts.items():
        known = before.get(family, frozenset())
        snapshot = sorted(known | snapshot_of(unknown(found, known)))
        (SNAPSHOTS / f"{family}.txt").write_text("\n\n".join(snapshot) + "\n")


def snapshot_of(found: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Return the texts, or the template of texts that are too many."""
    texts: dict[str, set[str]] = {}
    for text, template in found:
        texts.setdefault(template, set()).add(text)
    kept = ({template} if len(each) > MOST else each for template, each in texts.items())
    return frozenset(chain.from_iterable(kept))


def unknown(found: Iterable[tuple[str, str]], known: frozenset[str]) -> set[tuple[str, str]]:
    return {texts for texts in found if known.isdisjoint(texts)}


def new_texts(known: Snapshots, found: Texts) -> Iterator[str]:
    """Yield the lines of a diff for each family with texts that are not known."""
    for family in sorted(found):
        before = known.get(family, frozenset())
        new = snapshot_of(unknown(found[family], before))
        if new:
            yield f"== {family}"
            yield from list(
                unified_diff(lines_of(before), lines_of(before | new), lineterm="", n=1)
            )[2:]


def lines_of(texts: Iterable[str]) -> list[str]:
    """Return one line for each text, so that a diff has whole texts."""
    return [text.replace("\n", " |") for text in sorted(texts)]


def main(arguments: list[str]) -> int:
    """Print the texts that appeared and disappeared between two records."""
    before, after = (read_record(Path(each)) for each in arguments)
    for sign, texts, others in (("-", before, after), ("+", after, before)):
        changed = sorted((texts[text], text) for text in texts.keys() - others.keys())
        for family, text in changed:
            print(f"{sign} {family}: {lines_of([text])[0]}")
    gone, new = len(before.keys() - after.keys()), len(after.keys() - before.keys())
    print(f"{new} texts appeared, and {gone} of {len(before)} disappeared")
    return 1 if gone or new else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
