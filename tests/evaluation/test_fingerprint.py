"""What could change a score, by name."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.reports.sample import engine
from vexport.errors import InputError
from vexport.evaluation.fingerprint import changed_names, changes, engine_fingerprint
from vexport.evaluation.pairs import gated_tasks
from vexport.evaluation.results import read_results

DEMO = Path(__file__).parents[2] / "scenarios" / "demo" / "model"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def test_a_chat_template_is_named_wherever_it_stands(model: Path) -> None:
    before = engine_fingerprint(model, engine())
    assert before["model's chat template"] == "none"
    (model / "chat_template.jinja").write_text("{{ messages }}")
    in_file = engine_fingerprint(model, engine())
    assert changed_names(before, in_file) == ["model", "model's chat template"]
    (model / "chat_template.jinja").unlink()
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": "{{ messages }}"}))
    in_settings = engine_fingerprint(model, engine())
    assert in_settings["model's chat template"] == in_file["model's chat template"]


def test_what_ran_the_model_is_named(model: Path) -> None:
    before = engine_fingerprint(model, engine())
    after = engine_fingerprint(model, replace(engine(), vllm="9.9", dtype="float16"))
    assert changed_names(before, after) == ["vllm", "dtype"]


def test_how_the_model_was_served_is_named(model: Path) -> None:
    one, two = (
        engine_fingerprint(model, replace(engine(), settings=settings))
        for settings in (
            {"tensor_parallel_size": "1", "kv_cache_dtype": "auto", "engine_args": "none"},
            {"tensor_parallel_size": "2", "kv_cache_dtype": "auto", "engine_args": '{"block_size": 32}'},
        )
    )
    assert changes(one, two, where=("when accepted", "now")) == (
        "tensor_parallel_size: 1 when accepted, 2 now",
        'engine_args: none when accepted, {"block_size": 32} now',
    )


def test_other_questions_come_with_what_else_differs(lm_eval_runs: Path) -> None:
    baseline, twin = (read_results(lm_eval_runs / name) for name in ("baseline", "twin"))
    task, samples = next(iter(twin.tasks.items()))
    key, sample = next(iter(samples.samples.items()))
    asked = replace(sample, hashes=(sample.hashes[0], "0" * 64, sample.hashes[2]))
    other = replace(
        twin,
        tasks={**twin.tasks, task: replace(samples, samples={**samples.samples, key: asked})},
        fingerprint={**baseline.fingerprint, "chat template": "new"},
    )
    named = replace(baseline, fingerprint={**baseline.fingerprint, "chat template": "old"})
    with pytest.raises(InputError, match=r"prompt_hash 000000000000.*what else differs: chat template"):
        gated_tasks(named, other, {})
