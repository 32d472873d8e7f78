"""Suites: their tasks are lm-eval's, their documents have the power that is promised, plan shows the cost."""

from pathlib import Path

import lm_eval
import pytest

from tests.command import vexport
from tests.evaluation.exact import exact_power
from vexport.errors import InputError
from vexport.reports.plan import TYPICAL_DISAGREEMENT, documents_needed
from vexport.scenario import DEFAULT_ALPHA, read_scenario
from vexport.scenario.evaluate import SUITES, Suite

TASKS = Path(lm_eval.__path__[0]) / "tasks"
SCENARIO = "name: a\nsource: {source}\nrules: [{{match: Linear, scheme: W8A8}}]\nevaluate: {{{evaluate}}}\n"


@pytest.mark.parametrize(("name", "suite"), SUITES.items())
def test_every_task_exists_and_has_documents_enough(name: str, suite: Suite) -> None:
    for task, documents in suite.tasks.items():
        files = TASKS.glob(f"{task.partition('_')[0]}*/*.yaml")
        assert any(f"task: {task}\n" in file.read_text() for file in files), (name, task)
        asked = min(documents, suite.limit or documents)
        power = exact_power(asked, TYPICAL_DISAGREEMENT, suite.margin, DEFAULT_ALPHA)
        assert power >= 0.8, (name, task, power)


def test_a_suite_stands_for_tasks_margin_and_limit(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO.format(source=llama, evaluate="suite: quick"))
    evaluate = read_scenario(path).evaluate
    assert evaluate is not None
    assert evaluate.tasks == ("arc_easy", "piqa", "winogrande")
    assert (evaluate.margin, evaluate.limit) == (0.02, 1000)
    shown = vexport("plan", path)
    assert shown.code == 0, shown.stderr
    assert "3,000 documents for each model" in shown.stdout
    assert "arc_easy 1,000, piqa 1,000, winogrande 1,000" in shown.stdout
    path.write_text(SCENARIO.format(source=llama, evaluate="suite: quick, margin: 0.05, limit: 200"))
    evaluate = read_scenario(path).evaluate
    assert evaluate is not None
    assert (evaluate.margin, evaluate.limit) == (0.05, 200)
    shown = vexport("plan", path)
    assert "600 documents" in shown.stdout
    condition = "for power 0.8 at margin 5.0%, alpha 0.05, if 5% of answers change"
    assert f"about 167 a task {condition}\n" in shown.stdout
    limited = evaluate.model_copy(update={"limit": 24})
    assert documents_needed(limited).endswith(f"{condition}; limit 24 asks fewer")
    path.write_text(SCENARIO.format(source=llama, evaluate="suite: code, limit: 0.1"))
    shown = vexport("plan", path)
    assert "humaneval 17, mbpp 50" in shown.stdout
    assert f"vexport run {path} --trust-remote-code" in shown.stdout
    evaluate = read_scenario(path).evaluate
    assert evaluate is not None
    assert evaluate.apply_chat_template is False


@pytest.mark.parametrize(
    ("evaluate", "words"),
    [
        ("suite: quik", "evaluate.suite"),
        ("suite: quick, tasks: [gsm8k]", "evaluate.tasks"),
        ("margin: 0.02", "evaluate.tasks"),
    ],
)
def test_what_is_no_suite_is_refused(llama: Path, tmp_path: Path, evaluate: str, words: str) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO.format(source=llama, evaluate=evaluate))
    with pytest.raises(InputError) as caught:
        read_scenario(path)
    assert words in str(caught.value)
