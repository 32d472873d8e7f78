"""The task `sight`: its documents, its scores, and `vexport eval` against servers."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.command import ROOT, Ran, vexport
from tests.inference import seeing
from tests.inference.replying import Sent, replying
from tests.texts import assert_contains
from vexport.inference.pictures import TOPICS, picture_questions
from vexport.inference.shipped import SHIPPED
from vexport.inference.shipped.base import ScoreRows, ShippedPart
from vexport.inference.shipped.sight import chosen
from vexport.rules import sight as rules

DEMO = ROOT / "scenarios" / "demo" / "model-sight"
SIGHT = SHIPPED["sight"]
PART = ShippedPart(task="sight", name="sight")
SEEING = {
    "exact_match": 1.0,
    "changes_with_picture": 1.0,
    "changes_without_picture": 1.0,
    "rejects_other_picture": 1.0,
}
BLIND = {**SEEING, "exact_match": 0.0, "changes_with_picture": 0.0}


def test_documents_are_balanced_and_depend_on_the_seed() -> None:
    documents = SIGHT.documents(PART)
    assert documents == SIGHT.documents(PART)
    assert len(documents) == 400
    targets = Counter((each.details["topic"], each.target) for each in documents)
    for topic in TOPICS:
        counts = [targets[topic.name, choice] for choice in topic.choices]
        assert max(counts) - min(counts) <= 1
    pictures = {each.details["picture"] for each in documents}
    assert len(pictures) == len(documents)
    others = {each.details["picture"]: each for each in documents}
    for document in documents:
        other = others[document.details["other_picture"]]
        assert other.question == document.question
        assert other.target != document.target
    other_seed = SIGHT.documents(ShippedPart(task="sight", name="sight", seed=1))
    assert pictures.isdisjoint(each.details["picture"] for each in other_seed)


def test_more_questions_keep_the_first() -> None:
    few, many = (
        [(each.topic.name, each.answer, each.picture.tobytes()) for each in picture_questions(n, 0)]
        for n in (20, 60)
    )
    assert many[:20] == few


@pytest.mark.parametrize(
    ("response", "choice"),
    [
        ("red", "red"),
        (" Red.\n", "red"),
        ("The shape is RED", "red"),
        ("red, or red?", "red"),
        ("red or blue", "red or blue"),
        ("reddish", "reddish"),
        ("", ""),
        ("I  cannot\nsee", "I cannot see"),
    ],
)
def test_choice_of_a_response(response: str, choice: str) -> None:
    assert chosen(response, ["red", "blue"]) == choice


@pytest.mark.parametrize(
    ("baseline", "candidate", "outcome", "rule"),
    [
        ([SEEING] * 40, [SEEING] * 40, None, ""),
        ([SEEING] * 40, [BLIND] * 40, "FAIL", rules.BLIND.id),
        ([SEEING] * 400, [SEEING] * 3 + [BLIND] * 397, "FAIL", rules.BLIND.id),
        ([SEEING] * 40, [SEEING] * 20 + [BLIND] * 20, None, ""),
        (
            [SEEING] * 40,
            [{**SEEING, "changes_without_picture": 0.0}] * 40,
            "FAIL",
            rules.BLIND.id,
        ),
        ([BLIND] * 40, [SEEING] * 40, "INCONCLUSIVE", rules.BLIND_BASELINE.id),
        ([BLIND] * 40, [BLIND] * 40, "INCONCLUSIVE", rules.BLIND_BASELINE.id),
        # Responses that vary, but are right as often with another picture.
        (
            [SEEING] * 40,
            [{**SEEING, "exact_match": 0.0, "rejects_other_picture": 0.0}, SEEING] * 20,
            "INCONCLUSIVE",
            rules.NOT_SEEN.id,
        ),
        # Too few documents to show anything.
        ([SEEING] * 2, [BLIND] * 2, "INCONCLUSIVE", rules.BLIND_BASELINE.id),
        # An accepted baseline may have only the metric that decides.
        ([{"exact_match": 1.0}] * 40, [BLIND] * 40, "FAIL", rules.BLIND.id),
    ],
)
def test_obstacles(
    baseline: ScoreRows, candidate: ScoreRows, outcome: str | None, rule: str
) -> None:
    found = SIGHT.obstacle(baseline, candidate, 0.05)
    assert (found and found.outcome) == outcome
    assert (found.reason.rule if found else "") == rule


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """Addresses of servers with the demo's questions: one sees, the others have faults."""
    answers = {
        "right": seeing.right,
        "blind": seeing.blind,
        "refusing": seeing.refusing_pictures,
        "guessing": seeing.guessing,
        "colours": seeing.wrong_colours,
    }
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(replying(seeing.SeeingServer(answer).reply))
            for name, answer in answers.items()
        }


def evaluated(candidates: list[str], baseline: str, folder: Path, *options: object) -> Ran:
    given = ["--baseline", baseline, "--tokenizer", DEMO, "--output-dir", folder, "--quiet"]
    return vexport("eval", *candidates, *given, "--task", "sight", *options, "--format", "json")


def test_blind_servers_fail(servers: dict[str, str], tmp_path: Path) -> None:
    names = ["right", "blind", "refusing", "colours"]
    ran = evaluated([servers[name] for name in names], servers["right"], tmp_path / "run")
    assert ran.code == 1, ran.stderr
    verdicts: list[dict[str, Any]] = json.loads(ran.stdout)
    assert [each["outcome"] for each in verdicts] == ["PASS", "FAIL", "FAIL", "FAIL"]
    seeing_verdict, blind, refusing, colours = verdicts
    assert seeing_verdict["tasks"][0]["documents"] == 400
    assert (blind["rule"], refusing["rule"]) == (rules.BLIND.id, rules.BLIND.id)
    assert "400 of 400 responses equal the responses without a picture" in blind["reason"]
    assert "400 of 400 responses do not depend on the picture" in refusing["reason"]
    assert colours["rule"] == "verdict/loss"
    assert "wrong" in colours["reason"]


def test_blind_baseline_is_inconclusive(servers: dict[str, str], tmp_path: Path) -> None:
    ran = evaluated([servers["right"]], servers["blind"], tmp_path / "run", "--limit", 40)
    assert ran.code == 3, ran.stderr
    assert rules.BLIND_BASELINE.id in ran.stdout


def test_guesses_are_not_seen(servers: dict[str, str], tmp_path: Path) -> None:
    options = ("--limit", 40, "--margin", "0.9")
    ran = evaluated([servers["guessing"]], servers["right"], tmp_path / "run", *options)
    assert ran.code in (1, 3), ran.stderr
    assert json.loads(ran.stdout)["outcome"] != "PASS"


def test_accepted_baseline_keeps_the_gate(servers: dict[str, str], tmp_path: Path) -> None:
    accepted = tmp_path / "accepted.json"
    given = ("--tokenizer", DEMO, "--quiet")
    first = ("--task", "sight", "--limit", 160, "--accept", accepted)
    ran = vexport("eval", servers["right"], *first, *given, "--output-dir", tmp_path / "first")
    assert ran.code == 0, ran.stderr
    for name, code in (("right", 0), ("blind", 1)):
        folder = tmp_path / name
        later = ("--against", accepted, *given, "--output-dir", folder)
        ran = vexport("eval", servers[name], *later)
        assert ran.code == code, ran.stderr


def test_text_server_is_refused(tmp_path: Path) -> None:
    server = seeing.SeeingServer()

    def reply(path: str, body: dict[str, object]) -> Sent:
        if path.endswith("/chat/completions") and "image_url" in json.dumps(body):
            words = "demo is not a multimodal model"
            return Sent(content={"error": {"message": words}}, status=400)
        return server.reply(path, body)

    with replying(reply) as url:
        ran = evaluated([url], url, tmp_path / "run", "--limit", 2)
    assert ran.code == 2
    assert_contains(ran.stderr, "not a multimodal model", "remove the task", rules.REFUSED.id)
