"""Stages of a run.

A stage reads the results of earlier stages. A second call reuses complete and partial results.
"""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest

from tests.calibration.seeing import picture, save_seeing, write_rows
from tests.command import vexport
from tests.models import save_llama, write_calibration
from tests.quantize.test_streaming import write_model
from tests.scores.make import make_tasks
from tests.texts import assert_raises
from vexport.checkpoint.index import folder_digest
from vexport.errors import InputError
from vexport.files import write_text
from vexport.formats.plan import Plan
from vexport.inference.options import CANDIDATE, EngineOptions
from vexport.inference.session_folder import clear_session
from vexport.names import Folder
from vexport.outputs.manifest import MANIFEST, record
from vexport.outputs.replaceable import locked_folder
from vexport.records import CalibrationRecord, CheckReport, silent
from vexport.run.directory import KIND, Digests, RunDirectory
from vexport.run.eval_run import evaluate_checkpoints
from vexport.run.run import Run
from vexport.run.scenario_run import run_scenario
from vexport.run.side import local_side
from vexport.run.stages.concluding import STAGES
from vexport.run.stages.making import (
    MAKING,
    Maker,
    calibrate,
    check,
    checked,
    plan_candidates,
    quantize,
)
from vexport.run.stages.serving import serve_candidate
from vexport.run.work import Stage, Work
from vexport.scenario import Calibration, Check, Evaluate, Serve, base_scenario, read_scenario
from vexport.scenario.evaluate import JudgementSettings, TransportSettings

SCENARIO = Path(__file__).parents[2] / "scenarios" / "demo-nvfp4.yaml"
MODEL_CODE = """from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def options_of(serve: Serve) -> EngineOptions:
    return EngineOptions(serve=serve, vllm_python=None, trust_remote_code=False, on_progress=silent)


@pytest.mark.parametrize("name", ["run", "eval"])
def test_concurrent_call_in_same_folder_is_refused(name: str, tmp_path: Path) -> None:
    """The second call is refused before it changes a file."""
    scenario = read_scenario(SCENARIO).model_copy(update={"serve": Serve()})
    options, folder = options_of(scenario.serve), tmp_path / "out"
    KIND.begin(folder)
    assert scenario.evaluate is not None
    settings = scenario.evaluate.model_copy(update={"baseline": scenario.source})
    calls: dict[str, Callable[[], object]] = {
        "run": lambda: run_scenario(scenario, folder, options, overwrite=False),
        "eval": lambda: evaluate_checkpoints((scenario.source,), settings, folder, options),
    }
    with (
        locked_folder(folder, "--run-dir"),
        assert_raises(InputError, "another process"),
    ):
        calls[name]()
    assert {entry.name for entry in folder.iterdir()} == {KIND.mark, MANIFEST}


@pytest.fixture
def run(tmp_path: Path) -> Maker:
    scenario = read_scenario(SCENARIO)
    return Maker(scenario, RunDirectory(tmp_path), options_of(scenario.serve))


def checking_stage(source: str, made: list[str]) -> Stage[CheckReport]:
    """Return a stage with one input, which appends to `made` each time that it runs."""

    def make(run: Work) -> CheckReport:
        made.append(source)
        return CheckReport(checkpoint=source, ok=True, findings=())

    return Stage("check", CheckReport, make, "check.json", digest=lambda run: {"source": source})


def test_finished_stage_is_reused(run: Maker) -> None:
    made: list[str] = []
    check = checking_stage("a", made)
    run.do(check)
    again = Maker(run.scenario, RunDirectory(run.folder), run.options)
    again.do(checking_stage("a", made))
    assert made == ["a"]
    assert again.result(check) == run.result(check)
    with pytest.raises(InputError, match="another source"):
        again.do(checking_stage("b", made))
    assert made == ["a"]


def test_stage_reads_earlier_results(run: Maker) -> None:
    """A skipped stage has no result. A stage that comes later cannot be read."""
    check = checking_stage("a", [])
    read = Stage("read", CheckReport, lambda run: run.get(check))
    with pytest.raises(AssertionError, match="check comes later"):
        run.do(read)
    run.do(Stage("check", CheckReport, check.compute, when=lambda run: False))
    run.do(read)
    assert run.get(read) is None
    run.do(check)
    run.do(read)
    assert run.result(read).checkpoint == "a"


def test_failed_stage_leaves_no_record(run: Maker) -> None:
    stages = (plan_candidates, *MAKING, *STAGES)
    assert len({stage.name for stage in stages}) == len(stages)

    def fail(run: Work) -> Plan:
        raise InputError("plan", got="a refusal", need="none", fix="keep the layer")

    with pytest.raises(InputError):
        run.do(Stage("plan", Plan, fail, digest=lambda run: {"rules": "1"}))
    assert not (run.folder / "stages.json").exists()
    assert run.directory.seconds == {}


def test_model_with_python_code_is_rounded(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source", num_hidden_layers=1)
    (source / "own.py").write_text(MODEL_CODE)
    config = json.loads((source / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (source / "config.json").write_text(
        json.dumps({**config, "model_type": "own-llama", "auto_map": own})
    )
    data = write_calibration(tmp_path / "text.jsonl")
    rule = {"match": "Linear", "scheme": "W4A16_G64", "rounding": "gptq"}
    text = {
        "name": "own",
        "source": str(source),
        "rules": [{"match": "lm_head", "scheme": "keep"}, rule],
    }
    scenario = tmp_path / "own.yaml"
    scenario.write_text(json.dumps({**text, "calibration": {"data": str(data), "samples": 4}}))
    read = read_scenario(scenario)
    options = replace(options_of(read.serve), trust_remote_code=True)
    maker = Maker(read, RunDirectory(tmp_path / "run"), options)
    maker.folder.mkdir()
    maker.do(plan_candidates, *MAKING[: MAKING.index(check)])
    assert "model.layers.0.mlp.down_proj.weight_packed" in maker.result(quantize).tensors


def session_digests(settings: Evaluate, model: Path, folder: Path) -> Digests:
    """Return the digests of the inputs of a candidate's session."""
    options = options_of(Serve())
    side = local_side(CANDIDATE, model, options, name="model", label="model", folder=CANDIDATE)
    run = Run(RunDirectory(folder), options, [side], name="model", evaluate=settings)
    assert serve_candidate.digest is not None
    return serve_candidate.digest(run)


@pytest.mark.parametrize("file", ["additions.jsonl", "score.py", "near.yaml"])
def test_session_depends_on_files_of_a_task(file: str, llama: Path, tmp_path: Path) -> None:
    """The session's digest covers the task file, and the documents and code that the task names."""
    make_tasks(tmp_path / "tasks", 3)
    settings = Evaluate(tasks=(str(tmp_path / "tasks" / "near.yaml"),))
    before = session_digests(settings, llama, tmp_path / "run")
    changed = tmp_path / "tasks" / file
    changed.write_text(changed.read_text() + "\n")
    after = session_digests(settings, llama, tmp_path / "run")
    assert [name for name in after if after[name] != before[name]] == ["content of the tasks"]


def test_changed_pictures_of_calibration_are_noticed(tmp_path: Path) -> None:
    """The picture keeps its name, its size and its time."""
    source = save_seeing("llava", tmp_path / "model")
    for number in range(2):
        picture(60, 60, number).save(tmp_path / f"{number}.bmp")
    row = {"image": "0.bmp", "question": "what is it?", "answer": "a box"}
    data = write_rows(tmp_path / "rows.jsonl", [row])
    scenario = base_scenario(Folder.at(source), "FP8", None).model_copy(
        update={"calibration": Calibration(data=str(data), samples=1, seq_len=128)}
    )

    def calibrated() -> CalibrationRecord:
        directory = RunDirectory(tmp_path / "run")
        directory.begin(overwrite=False)
        maker = Maker(scenario, directory, options_of(Serve()))
        maker.do(plan_candidates, calibrate)
        return maker.result(calibrate)

    assert calibrated() == calibrated()
    file = tmp_path / "0.bmp"
    before = file.stat()
    file.write_bytes((tmp_path / "1.bmp").read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    with assert_raises(InputError, "another ", "0.bmp"):
        calibrated()


def test_changed_limit_is_named(run: Maker, tmp_path: Path, llama: Path) -> None:
    """The error for a run directory with other settings names the changed setting."""
    old, new = (
        session_digests(Evaluate(tasks=("arc_easy",), limit=limit), llama, tmp_path / "run")
        for limit in (8, 9)
    )
    run.directory.finish("serve candidate", old, {}, 1.0)
    assert run.directory.is_done("serve candidate", old)
    with pytest.raises(InputError, match="an earlier run with another `limit`"):
        run.directory.is_done("serve candidate", new)


def test_only_judgement_and_transport_keep_responses(
    run: Maker, tmp_path: Path, llama: Path
) -> None:
    """Settings of the verdict and of requests do not run a model again. All others do."""
    asked = Evaluate(tasks=("arc_easy",))
    old = session_digests(asked, llama, tmp_path / "run")
    kept = {*JudgementSettings.model_fields, *TransportSettings.model_fields}
    digested = {key for key in Evaluate.model_fields if f"`{key}`" in old}
    assert digested == Evaluate.model_fields.keys() - kept
    run.directory.finish("serve candidate", old, {}, 1.0)
    others = asked.model_copy(update={"margin": 0.5, "kl_limit": 1.0, "concurrency": 2})
    assert run.directory.is_done("serve candidate", session_digests(others, llama, tmp_path))
    others = asked.model_copy(update={"max_gen_toks": 9})
    with pytest.raises(InputError, match="an earlier run with another `max_gen_toks`"):
        run.directory.is_done("serve candidate", session_digests(others, llama, tmp_path))


def test_answers_survive_unfinished_session(tmp_path: Path) -> None:
    """Clearing a session keeps its answers, and refuses to delete files of the user."""
    session = tmp_path / "candidate"
    KIND.begin(tmp_path)
    for name in ("tasks/one/one.yaml", "vllm.log", "answers-12.jsonl"):
        record(session / name)
        write_text(session / name, "kept\n")
    (session / ".vllm.log.0123abcd").write_text("of a killed call")
    (session / "tasks" / "notes.txt").write_text("mine")
    with assert_raises(InputError, "candidate/tasks/notes.txt'", "did not write"):
        clear_session(session, tmp_path)
    assert (session / "vllm.log").exists()
    (session / "tasks" / "notes.txt").unlink()
    clear_session(session, tmp_path)
    assert [path.name for path in session.iterdir()] == ["answers-12.jsonl"]


def flip_last_bit(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def edit_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"version": "1.0"}')


@pytest.mark.parametrize(
    "change",
    [lambda model: flip_last_bit(model / "model-00001-of-00002.safetensors"), edit_tokenizer],
)
def test_changed_checkpoints_are_refused(change: Callable[[Path], object], tmp_path: Path) -> None:
    """A stage notices changes in its source and in the checkpoint that it wrote."""
    source = write_model(tmp_path / "source", hidden=64, layers=1)
    made = copytree(source, tmp_path / "run" / "checkpoint")
    inputs = {"source": folder_digest(source)}
    RunDirectory(tmp_path / "run").finish("calibrate", inputs, {}, 1.0)
    RunDirectory(tmp_path / "run").finish("quantize", inputs, {}, 1.0, made)
    for file in (*source.iterdir(), *made.iterdir()):
        file.chmod(0o640)
    (source / "README.md").write_text("Read me.")
    assert RunDirectory(tmp_path / "run").is_done("quantize", inputs)
    change(made)
    with assert_raises(InputError, str(made), "changed"):
        RunDirectory(tmp_path / "run").is_done("quantize", inputs)
    assert RunDirectory(tmp_path / "run").is_done("calibrate", inputs)
    change(source)
    with assert_raises(InputError, "another source"):
        RunDirectory(tmp_path / "run").is_done("calibrate", {"source": folder_digest(source)})


def test_ignored_rules_do_not_belong_to_the_stored_check(tmp_path: Path, llama: Path) -> None:
    """Another list of ignored rules needs no new check."""
    rule = "tokenizer/no-tokenizer"
    plain = base_scenario(Folder.at(llama), "FP8_DYNAMIC", None)
    KIND.begin(tmp_path / "run")
    for ignored in ((), (rule,)):
        scenario = plain.model_copy(update={"check": Check(ignore_rules=ignored)})
        maker = Maker(scenario, RunDirectory(tmp_path / "run"), options_of(scenario.serve))
        maker.do(plan_candidates, *MAKING[: MAKING.index(check) + 1])
        report = checked(maker)
        assert rule in {each.rule for each in maker.result(check).findings}
        assert [each.rule for each in report.ignored] == [*ignored]
        assert (rule in {each.rule for each in report.findings}) is not bool(ignored)


@pytest.mark.vllm
def test_compare_with_one_failed_scheme_is_error(tmp_path: Path) -> None:
    call, missing = (
        ("--schemes", "W4A16", "--scenario", SCENARIO, "--run-dir"),
        tmp_path / "missing",
    )
    ran = vexport("compare", missing, *call, tmp_path / "c")
    assert ran.code == 2
    assert f"{missing}: no such folder" in ran.errors[-1]
    foreign = tmp_path / "W4A16"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    ran = vexport("compare", SCENARIO.parent / "demo" / "model", *call, tmp_path, "--overwrite")
    assert ran.code == 2
    assert "did not make" in ran.stderr
    assert (foreign / "notes.txt").exists()
