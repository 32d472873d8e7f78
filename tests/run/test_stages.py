"""STAGES says what each stage reads, and a stage is done once from the same inputs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import save_llama, write_calibration
from vexport.errors import InputError
from vexport.outputs import written_alone
from vexport.records import CheckReport, Plan, silent
from vexport.run.directory import KIND as RUN
from vexport.run.evaluating import RESULTS, EvalJob, evaluate_checkpoints
from vexport.run.making import PLAN, plan, write
from vexport.run.serving import EngineOptions
from vexport.run.stages import STAGES, run_scenario
from vexport.run.state import Run, Stage
from vexport.scenario import Serve, read_scenario

SCENARIO = Path(__file__).parents[2] / "scenarios" / "demo-nvfp4.yaml"
OWN_CODE = """from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("name", ["run", "eval"])
def test_a_second_call_in_the_same_folder_is_refused(name: str, tmp_path: Path) -> None:
    """Before it has touched what the first one writes."""
    scenario, kind = read_scenario(SCENARIO), {"run": RUN, "eval": RESULTS}[name]
    scenario = scenario.model_copy(update={"serve": Serve()})
    options = EngineOptions(
        serve=scenario.serve, vllm_python=None, trust_remote_code=False, on_progress=silent
    )
    folder = tmp_path / "out"
    kind.begin(folder)
    assert scenario.evaluate is not None
    settings = scenario.evaluate.model_copy(update={"baseline": scenario.source})
    calls: dict[str, Callable[[], object]] = {
        "run": lambda: run_scenario(scenario, folder, options, overwrite=False),
        "eval": lambda: evaluate_checkpoints(
            EvalJob(checkpoints=(scenario.source,), settings=settings, folder=folder, options=options)
        ),
    }
    with written_alone(folder, "--run-dir"), pytest.raises(InputError, match="another process is writing it"):
        calls[name]()
    assert [entry.name for entry in folder.iterdir()] == [kind.mark]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    scenario = read_scenario(SCENARIO)
    options = EngineOptions(
        serve=scenario.serve, vllm_python=None, trust_remote_code=False, on_progress=silent
    )
    return Run(scenario, tmp_path, options)


def checking(source: str, made: list[str]) -> Stage[CheckReport]:
    """A stage made from one input, which notes that it was done."""

    def make(run: Run) -> CheckReport:
        made.append(source)
        return CheckReport(checkpoint=source, ok=True, findings=())

    return Stage("check", CheckReport, make, "check.json", digest=lambda run: {"source": source})


def test_every_stage_reads_what_earlier_ones_leave() -> None:
    for number, stage in enumerate(STAGES):
        assert set(stage.reads) <= set(STAGES[:number]), stage.name
    assert len({stage.name for stage in STAGES}) == len(STAGES)


def test_what_was_finished_from_the_same_inputs_is_read_from_its_file(run: Run) -> None:
    made: list[str] = []
    check = checking("a", made)
    run.do(check)
    again = Run(run.scenario, run.folder, run.options)
    again.do(checking("a", made))
    assert made == ["a"]
    assert again.result(check) == run.result(check)
    with pytest.raises(InputError, match="the run began with another source"):
        again.do(checking("b", made))
    assert made == ["a"]


def test_a_stage_cannot_read_what_it_does_not_declare(run: Run) -> None:
    check = checking("a", [])
    run.do(check)
    with pytest.raises(AssertionError, match="check is not declared as read"):
        run.do(Stage("hidden", CheckReport, lambda run: run.get(check)))
    run.do(Stage("open", CheckReport, lambda run: run.get(check), reads=(check,)))


def test_a_stage_that_fails_leaves_no_record(run: Run) -> None:
    def fail(run: Run) -> Plan:
        raise InputError("plan", got="a refusal", need="none", fix="keep the layer")

    with pytest.raises(InputError):
        run.do(Stage("plan", Plan, fail, digest=lambda run: {"rules": "1"}))
    assert not (run.folder / "stages.json").exists()
    assert run.directory.seconds == {}


def test_weights_of_a_model_with_its_own_code_are_rounded(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source", num_hidden_layers=1)
    (source / "own.py").write_text(OWN_CODE)
    config = json.loads((source / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (source / "config.json").write_text(json.dumps({**config, "model_type": "own-llama", "auto_map": own}))
    data = write_calibration(tmp_path / "text.jsonl")
    rule = {"match": "Linear", "scheme": "W4A16_G64", "rounding": "gptq"}
    text = {"name": "own", "source": str(source), "rules": [{"match": "lm_head", "scheme": "keep"}, rule]}
    scenario = tmp_path / "own.yaml"
    scenario.write_text(json.dumps({**text, "calibration": {"data": str(data), "samples": 4}}))
    read = read_scenario(scenario)
    options = EngineOptions(serve=read.serve, vllm_python=None, trust_remote_code=True, on_progress=silent)
    run = Run(read, tmp_path / "run", options)
    run.folder.mkdir()
    run.keep(PLAN, plan(run))
    assert "model.layers.0.mlp.down_proj.weight_packed" in write(run).tensors
