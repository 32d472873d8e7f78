"""Committed scenarios, suites, and engine settings.

All errors of a scenario are reported at once.
"""

from pathlib import Path

import lm_eval
import pytest

from tests.command import vexport
from tests.models import save_llama
from tests.scores.make import exact_power
from tests.texts import assert_contains
from vexport.errors import InputError
from vexport.names import Folder
from vexport.quantize.auto import plan_scenario
from vexport.scenario import DEFAULT_ALPHA, Evaluate, Scenario, read_scenario
from vexport.scenario.evaluate import SUITES, TYPICAL_DISAGREEMENT, Suite
from vexport.scenario.section import ScenarioSection
from vexport.scenario.serve import Serve, with_options

TESTS = Path(__file__).parents[1]
FOLDER = TESTS.parent / "scenarios"
SCENARIOS = sorted([*FOLDER.glob("*.yaml"), *TESTS.glob("ladder/*.yaml")])
MINIMAL = "name: a\nsource: b\nrules: [{match: Linear, scheme: NVFP4}]\n"


def read(folder: Path, text: str) -> Scenario:
    path = folder / "scenario.yaml"
    path.write_text(text)
    return read_scenario(path)


def evaluated(folder: Path, text: str) -> Evaluate:
    evaluate = read(folder, f"{MINIMAL}evaluate: {{{text}}}\n").evaluate
    assert evaluate is not None
    return evaluate


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_committed_scenarios_parse(path: Path) -> None:
    assert read_scenario(path).name == path.stem


def test_scenario_sets_cache_and_unsupported_shapes(tmp_path: Path) -> None:
    """60 rows of a fused layer are no whole blocks.

    They are refused, or kept if the scenario sets it.
    """
    source = save_llama(tmp_path / "model", num_hidden_layers=1, intermediate_size=60)
    text = (
        f"name: a\nsource: {source}\nrules: [{{match: Linear, scheme: "
        f"FP8_BLOCK}}]\nkv_cache: fp8_per_head\n"
    )
    _, refused = plan_scenario(read(tmp_path, text))
    more = "on_unsupported_shape: keep\nserve: {tensor_parallel: [1, 2]}\n"
    _, kept = plan_scenario(read(tmp_path, text + more))
    assert [refusal.where for refusal in refused.refusals] == ["model.layers.0.mlp.gate_up_proj"]
    assert kept.refusals == ()
    assert {group.name for group in kept.groups} == {"model.layers.0.self_attn.o_proj"}
    assert [layer.heads for layer in kept.attention] == [2]


def problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    return str(caught.value).splitlines()


def test_paths_are_relative_to_scenario(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    scenario = read(tmp_path, MINIMAL.replace("source: b", "source: model"))
    assert scenario.source == Folder.at(tmp_path / "model")
    tasks = evaluated(tmp_path, "tasks: [t/a.yaml, gsm8k]").tasks
    assert tasks == (str(tmp_path / "t" / "a.yaml"), "gsm8k")
    (tmp_path / "drafter").mkdir()
    text = evaluated(tmp_path, "text: default, speculative: eagle3=drafter, tokenizer: model")
    assert text.speculative == f"eagle3={tmp_path / 'drafter'}"
    assert text.tokenizer == Folder.at(tmp_path / "model")
    on_hub = evaluated(tmp_path, "text: default, speculative: eagle3=nobody/drafter")
    assert on_hub.speculative == "eagle3=nobody/drafter"


def test_errors_name_nearest_key_and_line(
    tmp_path: Path,
) -> None:
    lines = problems(tmp_path, MINIMAL + "evalute: {}\ncalibration: {data: x, sampels: 3}\n")
    assert len(lines) == 2
    assert any("evalute" in line and "did you mean evaluate?" in line for line in lines)
    assert any("calibration.sampels" in line and "did you mean samples?" in line for line in lines)
    (line,) = problems(tmp_path, MINIMAL.replace("NVFP4", "nvpf4"))
    assert "rules.0.scheme" in line
    assert "did you mean NVFP4?" in line
    (line,) = problems(tmp_path, MINIMAL + "calibration: [\n")
    assert "scenario.yaml:5" in line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "evaluate: {tasks: [a], fewshot: 2}",
            ["evaluate.fewshot:", "unknown key 'fewshot'", "write evaluate.num_fewshot"],
        ),
        (
            "evaluate: {tasks: [a], chat_template: x}",
            ["evaluate.chat_template:", "write evaluate.apply_chat_template", "true, false"],
        ),
        ("evaluate: {tasks: [a], num_fewshots: 2}", ["(did you mean num_fewshot?)"]),
        (
            "evaluate: {tasks: [a], temperature: 0}",
            ["evaluate.temperature:", "move it to evaluate.gen_kwargs", "{temperature: ...}"],
        ),
        ("evaluate: {tasks: [a], max_model_len: 9}", ["move it to serve"]),
        ("num_fewshot: 2", ["move it to evaluate"]),
        ("evaluate: {text: a, endpoint: 'http://a/v1'}", ["need tasks"]),
        ("serve: {system_prompt: x}", ["write evaluate.system_instruction"]),
        ("evaluate: {suite: quik}", ["evaluate.suite"]),
        ("evaluate: {suite: quick, tasks: [gsm8k]}", ["evaluate.tasks"]),
        ("evaluate: {margin: 0.02}", ["evaluate.tasks"]),
        (
            "evaluate: {tasks: [a], gen_kwargs: {temprature: 0}}",
            ["not temprature", "(did you mean temperature?)"],
        ),
    ],
)
def test_unknown_key_names_remedy(text: str, parts: list[str], tmp_path: Path) -> None:
    (line,) = problems(tmp_path, f"{MINIMAL}{text}\n")
    assert_contains(line, *parts)


def test_evaluate_keys_equal_lm_evals(tmp_path: Path) -> None:
    evaluate = evaluated(
        tmp_path,
        "tasks: [a], num_fewshot: 2, apply_chat_template: rag, fewshot_as_multiturn: false, "
        "system_instruction: Be brief., gen_kwargs: {temperature: 0, until: [x], do_sample: "
        "false}, "
        "max_gen_toks: 9, think_end_token: </think>, enable_thinking: true, include_path: more, "
        "batch_size: 8, limit: 0.5",
    )
    assert evaluate.include_path == (tmp_path / "more",)
    assert evaluate.gen_kwargs == {"temperature": 0, "until": ["x"], "do_sample": False}
    settings = (evaluate.num_fewshot, evaluate.apply_chat_template, evaluate.fewshot_as_multiturn)
    assert settings == (2, "rag", False)
    assert (evaluate.limit, evaluate.batch_size, evaluate.think_end_token) == (0.5, 8, "</think>")


def test_missing_template_ends_run_early(tmp_path: Path) -> None:
    path, demo = tmp_path / "scenario.yaml", FOLDER / "demo"
    path.write_text(
        f"name: a\nsource: {demo / 'model'}\nrules: [{{match: Linear, scheme: FP8_DYNAMIC}}]\n"
        f"evaluate: {{tasks: [{demo / 'tasks' / 'addition.yaml'}], apply_chat_template: true}}\n"
    )
    ran = vexport("run", path, "--run-dir", tmp_path / "run")
    assert ran.code == 2
    assert_contains(ran.stderr, "baseline: chat template: ", "[prompts/no-template]")
    assert not (tmp_path / "run" / "checkpoint").exists()


TASKS = Path(lm_eval.__path__[0]) / "tasks"


@pytest.mark.parametrize(("name", "suite"), SUITES.items())
def test_suite_tasks_have_enough_documents(name: str, suite: Suite) -> None:
    """Each task exists in lm-eval, and its documents give a power of 0.8 at the suite's margin."""
    for task, documents in suite.tasks.items():
        files = TASKS.glob(f"{task.partition('_')[0]}*/*.yaml")
        assert any(f"task: {task}\n" in file.read_text() for file in files), (name, task)
        judged = min(documents, suite.limit or documents)
        power = exact_power(judged, TYPICAL_DISAGREEMENT, suite.margin, DEFAULT_ALPHA)
        assert power >= 0.8, (name, task, power)


def test_suite_sets_tasks_margin_and_limit(tmp_path: Path) -> None:
    quick = evaluated(tmp_path, "suite: quick")
    assert quick.tasks == ("arc_easy", "piqa", "winogrande")
    assert (quick.margin, quick.limit) == (0.02, 1000)
    less = evaluated(tmp_path, "suite: quick, margin: 0.05, limit: 200")
    assert (less.margin, less.limit) == (0.05, 200)
    assert evaluated(tmp_path, "suite: code, limit: 0.1").apply_chat_template is False


CONDITION = ("power 0.8", "margin 5.0%", "alpha 0.05", "5% of responses")


@pytest.mark.parametrize(
    ("evaluate", "parts"),
    [
        ("suite: quick", ["3,000 documents", "arc_easy 1,000, piqa 1,000, winogrande 1,000"]),
        ("suite: quick, margin: 0.05, limit: 200", ["600 documents", "167 a task", *CONDITION]),
        ("suite: quick, margin: 0.05, limit: 24", [*CONDITION, "limit 24 uses fewer"]),
        (
            "suite: code, limit: 0.1",
            ["humaneval 17, mbpp 50", "vexport run SCENARIO --trust-remote-code"],
        ),
    ],
)
def test_plan_counts_documents(
    llama: Path, tmp_path: Path, evaluate: str, parts: list[str]
) -> None:
    text = MINIMAL.replace("source: b", f"source: {llama}")
    path = tmp_path / "scenario.yaml"
    path.write_text(f"{text}evaluate: {{{evaluate}}}\n")
    shown = vexport("plan", path)
    assert shown.code == 0, shown.stderr
    assert_contains(shown.stdout.replace(str(path), "SCENARIO"), *parts)
    if "limit: 200" in evaluate:
        assert "uses fewer" not in shown.stdout


@pytest.mark.parametrize("section", [Evaluate, Serve])
def test_every_setting_is_in_the_class_for_what_it_shapes(section: type[ScenarioSection]) -> None:
    """Digests, accepted baselines and lm-eval's arguments are lists of the base classes' fields."""
    shapes = [base.model_fields for base in section.__bases__ if issubclass(base, ScenarioSection)]
    assert sorted(key for fields in shapes for key in fields) == sorted(section.model_fields)


SERVED = "name: n\nsource: {source}\nrules: [{{match: Linear, scheme: NVFP4A16}}]\nserve: {serve}\n"
DEMO = Path(__file__).parents[2] / "scenarios" / "demo" / "model"


def served(folder: Path, serve: str) -> Serve:
    return read(folder, SERVED.format(source=DEMO, serve=serve)).serve


def test_vllm_arguments_of_both_models(tmp_path: Path) -> None:
    serve = served(
        tmp_path,
        "{tensor_parallel_size: 2, kv_cache_dtype: fp8, engine_args: {block-size: 32, "
        "max_num_seqs: 8,"
        " enable_prefix_caching: false}}",
    )
    own = {"tensor_parallel_size": 2, "max_num_seqs": 8, "kv_cache_dtype": "fp8"}
    assert serve.given == {**own, "block_size": 32, "enable_prefix_caching": False}
    assert (serve.devices, serve.dry_ranks, serve.planned_ranks) == (2, (2,), (2,))
    serve = served(
        tmp_path,
        "{kv_cache_dtype: fp8, pipeline_parallel_size: 2, engine_args: {quantization: fp8, "
        "block_size: 32}}",
    )
    assert set(serve.arguments(is_baseline=True)) == {"pipeline_parallel_size", "block_size"}
    assert serve.arguments(is_baseline=False) == serve.given
    old, new = (
        served(tmp_path, f"{{{key}: [1, 4]}}") for key in ("tensor_parallel", "dry_tensor_parallel")
    )
    assert old == new
    assert (new.dry_ranks, new.ranks) == ((1, 4), 1)
    serve = served(tmp_path, "{tensor_parallel_size: 4, dry_tensor_parallel: [1, 2]}")
    assert (serve.dry_ranks, serve.planned_ranks) == ((1, 2), (1, 2, 4))


def test_all_contradictions_and_refusals_at_once(tmp_path: Path) -> None:
    serve = (
        "{tensor_parallel_size: 2, gpu_memory_utilization: 1.5, engine_args: "
        "{tensor_parallel_size: 4, "
        "logprobs_mode: raw_logits, seed: 3, model: x, load_format: dummy}}"
    )
    lines = problems(tmp_path, SERVED.format(source=DEMO, serve=serve))
    found = {line.partition("serve.")[2].partition(":")[0]: line for line in lines}
    assert list(found) == [
        "gpu_memory_utilization",
        *(f"engine_args.{name}" for name in ("tensor_parallel_size", "logprobs_mode", "seed")),
        *(f"engine_args.{name}" for name in ("model", "load_format")),
    ]
    assert "got 4, need 2" in found["engine_args.tensor_parallel_size"]
    assert "log-probabilities" in found["engine_args.logprobs_mode"]
    assert "need evaluate.seed" in found["engine_args.seed"]


def test_options_override_serve_section() -> None:
    serve = Serve(
        tensor_parallel_size=4, max_num_seqs=8, engine_args={"block_size": 16, "dtype": "float32"}
    )
    changed = with_options(
        serve, {"tensor_parallel_size": 2}, {"block_size": 32, "gpu_memory_utilization": 0.5}
    )
    own = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "max_num_seqs": 8}
    assert changed.given == {**own, "block_size": 32, "dtype": "float32"}


def test_engine_arguments_without_engine() -> None:
    """A dry load starts no engine, so that prompts to continue are refused."""
    ran = vexport("load", DEMO, "--dry", "--canaries")
    assert ran.code == 2
    assert "remove --dry, which starts no engine" in ran.stderr
    mode = vexport("load", DEMO, "--engine-arg", "enforce_eager=true")
    assert mode.code == 2
    assert "need --mode in its place" in mode.stderr


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("README.md", "# Title: a\n\nA text: with keys: and values\n"),
        ("config.json", '{"dtype": "bfloat16"}'),
    ],
)
def test_other_file_is_no_scenario(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    ran = vexport("run", file)
    (line,) = ran.errors
    assert ran.code == 2
    assert_contains(line, name, "not a scenario", "source and rules", "vexport demo")
