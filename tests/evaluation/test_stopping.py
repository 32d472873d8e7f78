"""Evaluations that stop when they are decided: the order, the looks, the real lm-eval, the error rates."""

import json
from pathlib import Path

import numpy as np
import pytest
from rich.progress import Progress

from tests.evaluation.make import make_group, make_tasks, run_lm_eval
from vexport.cli.terminal import BarDisplay, PlainDisplay
from vexport.errors import InputError
from vexport.evaluation.accepted import accept_results
from vexport.evaluation.results import read_results
from vexport.evaluation.stopping import Reference, SequentialTest, Stopping, look_line, stopping_rule
from vexport.evaluation.tasks import resolve_tasks
from vexport.evaluation.verdict import decide
from vexport.files import to_json
from vexport.types import PROGRESS_DETAIL, Look, Verdict

DOCUMENTS, MARGIN, ALPHA = 800, 0.02, 0.05


def rule(documents: int = DOCUMENTS, *, tasks: int = 1, unit: str = "", seed: int = 0) -> Stopping:
    """Tasks that the baseline answers all right."""
    references = {
        f"task{number}": Reference(
            unit=unit or f"task{number}",
            metric="acc",
            filter="none",
            sign=1,
            scores=dict.fromkeys(range(documents), 1.0),
        )
        for number in range(tasks)
    }
    return Stopping(margin=MARGIN, alpha=ALPHA, seed=seed, tasks=references)


def drive(stopping: Stopping, rates: dict[str, float], seed: int = 0) -> tuple[Look, ...]:
    """Read to the end with a candidate that errs on a share of each task's documents."""
    rng = np.random.default_rng(seed)
    answers = {
        name: dict(enumerate((rng.random(len(task.scores)) >= rates.get(name, 0.0)).astype(float)))
        for name, task in stopping.tasks.items()
    }
    race = SequentialTest(stopping)
    while True:
        documents = race.more()
        looks = race.look({name: {i: answers[name][i] for i in found} for name, found in documents.items()})
        if race.decided:
            return looks


def test_an_easy_case_reads_a_fraction() -> None:
    (same,) = drive(rule(14042), {})
    (worse,) = drive(rule(14042), {"task0": 0.2})
    assert (same.outcome, worse.outcome) == ("PASS", "FAIL")
    assert max(same.read, worse.read) < 14042 / 4


def test_a_case_on_the_margin_is_read_to_the_end() -> None:
    (look,) = drive(rule(400), {"task0": MARGIN}, seed=3)
    assert (look.outcome, look.read, look.of) == ("INCONCLUSIVE", 400, 400)


def test_on_the_margin_wrong_answers_are_rare() -> None:
    """100 evaluations of 800 documents: 5 % + 3 standard errors (6.5 points) at most, each."""
    outcomes = [drive(rule(800, seed=seed), {"task0": MARGIN}, seed)[0].outcome for seed in range(100)]
    assert outcomes.count("PASS") / 100 <= ALPHA + 0.065
    assert outcomes.count("FAIL") / 100 <= ALPHA + 0.065


def test_one_failing_task_ends_all_and_a_settled_task_is_not_read_on() -> None:
    looks = {look.task: look for look in drive(rule(tasks=2), {"task1": 0.3})}
    assert looks["task1"].outcome == "FAIL"
    looks = {look.task: look for look in drive(rule(3000, tasks=2), {"task1": 0.01}, seed=5)}
    assert looks["task0"].outcome == "PASS"
    assert looks["task0"].read < looks["task1"].read


def test_the_order_is_random_fixed_by_the_seed_and_grows() -> None:
    race, again, other = SequentialTest(rule()), SequentialTest(rule()), SequentialTest(rule(seed=1))
    first = race.more()
    assert first == again.more()
    assert first != other.more()
    assert len(first["task0"]) == 100
    assert max(first["task0"]) > DOCUMENTS / 2
    race.look({"task0": {i: 1.0 - (i % 40 == 0) for i in first["task0"]}})
    assert set(race.more()["task0"]) > set(first["task0"])


def test_a_groups_documents_come_from_all_its_tasks_at_the_first_look() -> None:
    found = SequentialTest(rule(300, tasks=20, unit="group")).more()
    assert min(len(documents) for documents in found.values()) >= 1
    assert sum(map(len, found.values())) >= 100


def test_scores_that_are_not_in_the_unit_range_cannot_be_bet_on(lm_eval_runs: Path, tmp_path: Path) -> None:
    accept_results(lm_eval_runs / "baseline", tmp_path / "a.json", {})
    content = json.loads((tmp_path / "a.json").read_text())
    content["tasks"] = {"near": content["tasks"]["near"]}
    line = content["tasks"]["near"]["outcomes"][0]
    content["tasks"]["near"]["outcomes"][0] = line.replace(" 1.0", " 7.0", 1)
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"need scores in \[0, 1\] to stop early"):
        stopping_rule(tmp_path / "a.json", {}, margin=MARGIN, alpha=ALPHA, seed=0)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory, vllm_imported_once: None) -> Path:
    """A baseline without errors, read whole; candidates that stop early, over two tasks and a group."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("early")
    sums, choices, _ = make_tasks(folder / "tasks", DOCUMENTS)
    Path(sums).write_text(f"{Path(sums).read_text()}num_fewshot: 2\nfewshot_split: test\n")
    group = make_group(folder / "group", 12, 50)
    tasks = [task.spec for task in resolve_tasks([sums, choices, group], folder=folder / "resolved")]
    run_lm_eval(tasks, {folder / "baseline": []})
    (folder / "rule.json").write_text(
        to_json(stopping_rule(folder / "baseline", {}, margin=MARGIN, alpha=ALPHA, seed=0))
    )
    candidates = {folder / "same": [], folder / "worse": range(0, DOCUMENTS, 4)}
    run_lm_eval(tasks, candidates, rule=folder / "rule.json")
    return folder


def compare(folder: Path, name: str) -> Verdict:
    return decide(folder / "baseline", folder / name, margin=MARGIN, alpha=ALPHA, early=True)


def test_lm_eval_writes_only_what_was_read_under_its_own_numbers(evaluated: Path) -> None:
    whole, early = read_results(evaluated / "baseline"), read_results(evaluated / "same")
    assert set(early.tasks) == set(whole.tasks)
    assert early.groups == whole.groups
    for name, task in early.tasks.items():
        assert 0 < len(task.samples) < len(whole.tasks[name].samples)
        for key, sample in task.samples.items():
            assert sample.hashes == whole.tasks[name].samples[key].hashes
    assert "= " in next(iter(early.tasks["sums"].samples.values())).prompt  # an example comes first
    assert early.summaries["sums"][0].documents == len(early.tasks["sums"].samples)


@pytest.mark.parametrize(("name", "outcome"), [("same", "PASS"), ("worse", "FAIL")])
def test_the_verdict_is_that_of_the_bets(evaluated: Path, name: str, outcome: str) -> None:
    verdict = compare(evaluated, name)
    assert verdict.outcome == outcome
    assert "bets that may stop at any document" in verdict.method
    units = {task.task: task for task in verdict.tasks}
    assert set(units) == {"sums", "choices", "subjects"}
    assert units["sums"].documents < DOCUMENTS / 1.5
    assert units["subjects"].clusters is None
    last = {look.task: look for look in verdict.looks}
    assert set(last) == set(units)
    for name, task in units.items():
        assert (last[name].read, last[name].outcome) == (task.documents, task.outcome)
        assert last[name].low == pytest.approx(task.low)


def test_the_interval_narrows_and_is_drawn_against_the_margin(evaluated: Path) -> None:
    looks = [look for look in compare(evaluated, "same").looks if look.task == "sums"]
    widths = [look.high - look.low for look in looks]
    assert widths == sorted(widths, reverse=True)
    assert [look.read for look in looks] == sorted({look.read for look in looks})
    line = look_line(looks[-1], MARGIN)
    assert line.startswith("reading sums")
    assert line.endswith("margin -2.00, decided: PASS")
    drawn = line[line.index("[") + 1 : line.index("]")]
    assert (drawn.index("!"), drawn.index("|"), len(drawn)) == (12, 16, 33)
    assert "=" not in drawn[:12]


def test_a_terminal_moves_one_line_a_task_and_a_log_has_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    looks = [
        Look(task="sums", read=read, of=800, low=-1 / read, high=1 / read, outcome="INCONCLUSIVE")
        for read in (100, 200)
    ]
    lines = [look_line(look, MARGIN) for look in looks]
    plain, bars = PlainDisplay(), Progress()
    for display in (plain, BarDisplay(bars)):
        for line, look in zip([*lines, lines[-1]], [*looks, looks[-1]], strict=True):
            display(line, look.read, look.of)
    assert capsys.readouterr().err.splitlines() == [
        f"{line.replace(PROGRESS_DETAIL, ' ')}, {look.read} of 800"
        for line, look in zip(lines, looks, strict=True)
    ]
    (task,) = bars.tasks
    assert (task.completed, task.total) == (200, 800)
    assert "-0.50 to +0.50 points" in task.description


def test_without_being_told_that_it_stopped_documents_are_missed(evaluated: Path) -> None:
    with pytest.raises(InputError, match="need the same documents"):
        decide(evaluated / "baseline", evaluated / "same", margin=MARGIN, alpha=ALPHA)


def test_an_accepted_baseline_is_paired_with_what_was_read(evaluated: Path, tmp_path: Path) -> None:
    file = tmp_path / "accepted.json"
    accept_results(evaluated / "baseline", file, {})
    against = decide(file, evaluated / "worse", margin=MARGIN, alpha=ALPHA, early=True)
    assert against.outcome == "FAIL"
    assert {t.task: t.documents for t in against.tasks} == {
        t.task: t.documents for t in compare(evaluated, "worse").tasks
    }
    assert stopping_rule(file, {}, margin=MARGIN, alpha=ALPHA, seed=0) == stopping_rule(
        evaluated / "baseline", {}, margin=MARGIN, alpha=ALPHA, seed=0
    )
