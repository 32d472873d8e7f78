"""What tasks of the suites need besides documents is named, with what brings it, before an engine starts."""

from pathlib import Path

import pytest

from tests.command import vexport
from vexport.engine.messages import SessionRequest
from vexport.errors import InputErrors
from vexport.evaluation.task_data import fetch_task_data, missing
from vexport.records import silent

SCENARIO = (
    "name: a\nsource: {source}\nrules: [{{match: Linear, scheme: W8A8}}]\nevaluate: {{suite: {suite}}}\n"
)
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without anything of the hub, which is not reached."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk_data"))
    return tmp_path


def run(folder: Path, llama: Path, suite: str, *options: str) -> tuple[int, str]:
    path = folder / f"{suite}.yaml"
    path.write_text(SCENARIO.format(source=llama, suite=suite))
    ran = vexport("run", path, "--run-dir", folder / suite, "--quiet", *options)
    return ran.code, ran.stderr


def test_code_needs_trust_then_its_metric_and_its_documents(cut_off: Path, llama: Path) -> None:
    code, errors = run(cut_off, llama, "code")
    assert code == 2
    for task in ("humaneval", "mbpp"):
        assert f"task {task}: it runs Python that the model writes; add --trust-remote-code" in errors
    code, errors = run(cut_off, llama, "code", "--trust-remote-code")
    assert code == 4
    for task in ("humaneval", "mbpp"):
        assert f"task {task}: the metric code_eval is not in the cache" in errors
    assert "evaluate.load('code_eval')" in errors
    for name in ("openai/openai_humaneval", "google-research-datasets/mbpp"):
        assert name in errors
    assert "fetch it before with `hf download`" in errors


def test_chat_needs_nltk_and_documents(cut_off: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = cut_off / "shadow"
    shadow.mkdir()
    for name, text in {"langdetect": "", "immutabledict": "immutabledict = dict"}.items():
        (shadow / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(shadow), prepend=":")
    code, errors = run(cut_off, llama, "chat")
    assert code == 4
    assert "task ifeval: NLTK's punkt_tab, which cuts sentences, is missing" in errors
    assert "python -m nltk.downloader punkt_tab" in errors
    for name in ("google/IFEval", "openai/gsm8k", "truthfulqa/truthful_qa"):
        assert name in errors
    assert "fetch it before with `hf download`" in errors


def test_a_missing_package_is_named_with_the_extra_that_brings_it() -> None:
    fault = missing(ModuleNotFoundError("No module named 'langdetect'", name="langdetect"), "ifeval")
    assert fault is not None
    assert str(fault) == (
        "task ifeval: it scores with the module langdetect, which is missing; `pip install 'lm-eval[ifeval]'`"
    )
    assert missing(ValueError("a broken template"), "mine") is None


def test_documents_that_are_missing_and_a_metric_that_nobody_has_are_named(cut_off: Path) -> None:
    """Of generated text it may be the hub's; lm-eval itself would answer all documents, and then fail."""
    head = (
        "task: {name}\ndataset_path: json\ntest_split: test\n"
        "dataset_kwargs: {{data_files: {{test: {file}}}}}\n"
    )
    kinds = {
        "own": ("own.jsonl", "loglikelihood", "{metric: acc}"),
        "other": (
            cut_off / "other.jsonl",
            "generate_until",
            "{metric: exact_mtch, aggregation: mean, higher_is_better: true}",
        ),
    }
    for name, (file, kind, metric) in kinds.items():
        (cut_off / f"{name}.yaml").write_text(
            head.format(name=name, file=file)
            + f"output_type: {kind}\ndoc_to_text: '{{{{text}}}}'\ndoc_to_target: '{{{{answer}}}}'\n"
            + f"metric_list: [{metric}]\n"
        )
    (cut_off / "other.jsonl").write_text('{"text": "a", "answer": " b"}\n')
    request = SessionRequest(
        checkpoint=cut_off, tasks=("own", str(cut_off / "other.yaml")), include_paths=(cut_off,)
    )
    with pytest.raises(InputErrors) as caught:
        fetch_task_data(request, log=cut_off / "log", timeout=300, vllm_python=None, on_progress=silent)
    assert "task own: data_files: got no file own.jsonl" in str(caught.value)
    assert "task other: metric exact_mtch: lm-eval does not have it" in str(caught.value)
