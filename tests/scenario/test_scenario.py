"""Scenarios: all of those in the repository parse; everything wrong in one is reported at once."""

from pathlib import Path

import pytest

from tests.command import vexport
from tests.models import save_llama
from vexport.errors import InputError
from vexport.scenario import read_scenario
from vexport.sensitivity.auto import plan_scenario

FOLDER = Path(__file__).parents[2] / "scenarios"
SCENARIOS = sorted([*FOLDER.glob("*.yaml"), *FOLDER.glob("ladder/*.yaml")])
MINIMAL = "name: a\nsource: b\nrules: [{match: Linear, scheme: NVFP4}]\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_committed_scenarios_parse(path: Path) -> None:
    assert read_scenario(path).name == path.stem


def test_a_scenario_decides_about_cache_and_shapes(tmp_path: Path) -> None:
    """60 rows of a merged layer are no blocks: refused, or kept where the scenario says so."""
    source = save_llama(tmp_path / "model", num_hidden_layers=1, intermediate_size=60)
    text = (
        f"name: a\nsource: {source}\nrules: [{{match: Linear, scheme: FP8_BLOCK}}]\nkv_cache: fp8_per_head\n"
    )
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    _, refused = plan_scenario(read_scenario(path))
    path.write_text(text + "on_unsupported_shape: keep\nserve: {tensor_parallel: [1, 2]}\n")
    _, kept = plan_scenario(read_scenario(path))
    assert [refusal.where for refusal in refused.refusals] == ["model.layers.0.mlp.gate_up_proj"]
    assert kept.refusals == ()
    assert {group.name for group in kept.groups} == {"model.layers.0.self_attn.o_proj"}
    assert [layer.heads for layer in kept.attention] == [2]


def problems(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_scenario(path)
    return str(caught.value).splitlines()


def test_paths_are_relative_to_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = tmp_path / "scenario.yaml"
    path.write_text(MINIMAL.replace("source: b", "source: model") + "evaluate: {tasks: [t/a.yaml, gsm8k]}\n")
    scenario = read_scenario(path)
    assert scenario.source == str(tmp_path / "model")
    assert scenario.evaluate is not None
    assert scenario.evaluate.tasks == (str(tmp_path / "t" / "a.yaml"), "gsm8k")


def test_unknown_keys_name_the_nearest(tmp_path: Path) -> None:
    lines = problems(tmp_path, MINIMAL + "evalute: {}\ncalibration: {data: x, sampels: 3}\n")
    assert len(lines) == 2
    assert any("evalute" in line and "did you mean evaluate?" in line for line in lines)
    assert any("calibration.sampels" in line and "did you mean samples?" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("evaluate: {tasks: [a], fewshot: 2}", "evaluate.fewshot: got the unknown key 'fewshot'"),
        ("speed: {}", "remove it: time it with `vllm bench serve`"),
        ("evaluate: {tasks: [a], fewshot: 2}", "write evaluate.num_fewshot"),
        ("evaluate: {tasks: [a], chat_template: x}", "write evaluate.apply_chat_template (true, false"),
        ("evaluate: {tasks: [a], num_fewshots: 2}", "(did you mean num_fewshot?)"),
        ("evaluate: {tasks: [a], temperature: 0}", "move it to evaluate.gen_kwargs: {temperature: ...}"),
        ("evaluate: {tasks: [a], max_model_len: 9}", "move it to serve"),
        ("num_fewshot: 2", "move it to evaluate"),
        ("evaluate: {text: a, endpoint: 'http://a/v1'}", "with tasks alone: text is read here"),
        ("serve: {system_prompt: x}", "write evaluate.system_instruction"),
        ("evaluate: {tasks: [a], gen_kwargs: {temprature: 0}}", "not temprature (did you mean temperature?)"),
    ],
)
def test_an_unknown_key_says_where_it_goes(text: str, fix: str, tmp_path: Path) -> None:
    (line,) = problems(tmp_path, f"{MINIMAL}{text}\n")
    assert fix in line


def test_how_models_are_asked_has_the_names_of_lm_eval(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(
        MINIMAL
        + "evaluate: {tasks: [a], num_fewshot: 2, apply_chat_template: rag, fewshot_as_multiturn: false, "
        "system_instruction: Be brief., gen_kwargs: {temperature: 0, until: [x], do_sample: false}, "
        "max_gen_toks: 9, think_end_token: </think>, enable_thinking: true, include_path: more, "
        "batch_size: 8, limit: 0.5}\n"
    )
    evaluate = read_scenario(path).evaluate
    assert evaluate is not None
    assert evaluate.include_path == (tmp_path / "more",)
    assert evaluate.gen_kwargs == {"temperature": 0, "until": ["x"], "do_sample": False}
    asked = (evaluate.num_fewshot, evaluate.apply_chat_template, evaluate.fewshot_as_multiturn)
    assert asked == (2, "rag", False)
    assert (evaluate.limit, evaluate.batch_size, evaluate.think_end_token) == (0.5, 8, "</think>")


def test_a_template_that_a_model_lacks_ends_a_run_before_any_work(tmp_path: Path) -> None:
    path, demo = tmp_path / "scenario.yaml", FOLDER / "demo"
    path.write_text(
        f"name: a\nsource: {demo / 'model'}\nrules: [{{match: Linear, scheme: FP8_DYNAMIC}}]\n"
        f"evaluate: {{tasks: [{demo / 'tasks' / 'addition.yaml'}], apply_chat_template: true}}\n"
    )
    ran = vexport("run", path, "--run-dir", tmp_path / "run")
    assert ran.code == 2
    assert "baseline: chat template: got none, need one, to be applied" in ran.stderr
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_an_unknown_scheme_names_the_nearest(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, MINIMAL.replace("NVFP4", "nvpf4"))
    assert "rules.0.scheme" in line
    assert "did you mean NVFP4?" in line


def test_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, MINIMAL + "calibration: [\n")
    assert "scenario.yaml:5" in line
