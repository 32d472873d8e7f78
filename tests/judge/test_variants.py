"""`vexport compare --serve` without engines: matrix, outcomes, exit codes, refusals and resume.

FakeEngine replaces vLLM. It copies real results of lm-eval.
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.command import ROOT, Ran, vexport
from tests.texts import assert_contains
from vexport.engine.installed import installed_text
from vexport.engine.messages import EngineFailure, SessionResult
from vexport.engine.session import EngineFault
from vexport.errors import EnvironmentFault, InputError, InputErrors, VexportError
from vexport.inference.answers import ServedSession
from vexport.inference.prompts import Prompts
from vexport.inference.response_sources import EngineSource, Questions
from vexport.outputs.manifest import record
from vexport.rules.engine import UNKNOWN_ARGUMENT
from vexport.run.directory import KIND
from vexport.run.stages.variants import folder_names, require_known_arguments
from vexport.scenario import Serve, Variants, read_scenario

DEMO = ROOT / "scenarios" / "demo"
MODEL = DEMO / "model"
SCHEMAS = ROOT / "vexport" / "reports"
OTHER_PYTHON = Path("other/bin/python")
pytestmark = pytest.mark.vllm


class FakeEngine:
    """Substitute for vLLM. A setting `load_format=NAME` gives the answers of the run NAME."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.requested: list[str] = []
        self.checked: list[Mapping[str, object]] = []
        self.dies_at = ""

    def problems(self, serves: list[Serve], python: Path | None) -> list[tuple[VexportError, ...]]:
        """Check settings like vLLM; see `problems`."""
        self.checked += [serve.given for serve in serves]
        return problems(serves, python)

    def get_responses(
        self, source: EngineSource, questions: Questions, folder: Path
    ) -> ServedSession:
        """Copy the results of a run, or fail like vLLM."""
        name = str(source.arguments.get("load_format", "baseline"))
        self.requested.append(name)
        if name == self.dies_at:
            raise KeyboardInterrupt
        kinds = {"crash": "crashed", "cpu": "unsupported", "refused": "refused"}
        failure = None
        if name in kinds:
            failure = EngineFailure(kind=kinds[name], message=f"no {name}", log_tail="")  # type: ignore[arg-type]
        if failure is not None and failure.kind != "refused":
            raise EngineFault("vLLM", failure)
        folder.mkdir(parents=True, exist_ok=True)
        if failure is None:
            for file in (self.runs / name).rglob("*"):
                copy = folder / file.relative_to(self.runs / name)
                if file.is_file():
                    record(copy)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, copy)
        result = SessionResult(
            checkpoint=source.checkpoint, platform="cpu", vllm="1.2.3", failure=failure
        )
        prompts = Prompts(natural=True, texts=(), tokens=())
        return ServedSession(result=result, prompts=prompts)


def problems(serves: list[Serve], python: Path | None) -> list[tuple[VexportError, ...]]:
    """Refuse the argument `nonsense`, and have too few GPUs for two devices."""
    unknown = InputError("vLLM's argument nonsense", got="unknown", need="known", fix="remove it")
    few = EnvironmentFault("vLLM's argument", got="1 GPU", need="2 GPUs", fix="add a GPU")
    return [
        (unknown,) if "nonsense" in serve.given else (few,) if serve.devices > 1 else ()
        for serve in serves
    ]


@pytest.fixture
def fake(lm_eval_runs: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine(lm_eval_runs)
    monkeypatch.setattr(
        EngineSource, "get_responses", lambda self, *given: engine.get_responses(self, *given)
    )
    monkeypatch.setattr("vexport.run.stages.variants.find_problems", engine.problems)
    monkeypatch.setattr("vexport.run.stages.serving.local_sessions", lambda run: None)
    return engine


def compare(fake: FakeEngine, folder: Path, *options: object, settings: tuple[str, ...]) -> Ran:
    task = fake.runs / "tasks" / "sums.yaml"
    served = [word for setting in settings for word in ("--serve", setting)]
    call = ("compare", MODEL, *served, "--task", task, "--run-dir", folder)
    return vexport(*call, "--quiet", *options)


def rows_of(ran: Ran) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(ran.stdout)
    return rows


@pytest.mark.parametrize(
    ("settings", "outcomes", "code"),
    [
        (("{}", "load_format=twin"), ("BASELINE", "PASS"), 0),
        (("{}", "load_format=worse", "load_format=twin"), ("BASELINE", "FAIL", "PASS"), 1),
        (("{}", "load_format=refused", "load_format=twin"), ("BASELINE", "REFUSED", "PASS"), 1),
        (("{}", "load_format=cpu", "load_format=twin"), ("BASELINE", "REFUSED", "PASS"), 1),
        (("{}", "nonsense=1", "load_format=twin"), ("BASELINE", "REFUSED", "PASS"), 1),
        (
            ("{}", "load_format=doubtful", "load_format=twin"),
            ("BASELINE", "INCONCLUSIVE", "PASS"),
            3,
        ),
        (("{}", "load_format=crash", "load_format=twin"), ("BASELINE", "NO ANSWER", "PASS"), 4),
        (("{}", "tensor_parallel_size=2"), ("BASELINE", "NO ANSWER"), 4),
        (("{}", "load_format=crash", "load_format=worse"), ("BASELINE", "NO ANSWER", "FAIL"), 1),
        (("{}", "tensor_parallel_size=3"), ("BASELINE", "REFUSED"), 1),
        (("nonsense=1", "{}"), ("REFUSED",), 1),
        (("load_format=refused", "{}"), ("REFUSED",), 1),
        (("load_format=cpu", "{}"), ("REFUSED",), 1),
    ],
)
def test_outcomes_and_exit_codes(
    settings: tuple[str, ...],
    outcomes: tuple[str, ...],
    code: int,
    fake: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "tensor_parallel_size=3" in settings:  # the heads of the demo model cannot be split
        monkeypatch.setattr(
            "vexport.run.stages.variants.find_problems", lambda serves, _: [()] * len(serves)
        )
    ran = compare(fake, tmp_path / "run", "--format", "json", settings=settings)
    rows = rows_of(ran)
    assert tuple(row["outcome"] for row in rows) == outcomes, ran.stderr
    assert ran.code == code
    schema = json.loads((SCHEMAS / "compare-serve.schema.json").read_text())
    jsonschema.validate(rows, schema)
    for row in rows[1:]:
        assert row["reason"]
        assert (row["worst"] is not None) == (row["outcome"] in ("PASS", "FAIL", "INCONCLUSIVE"))
    assert len(ran.errors) == (1 if code else 0)
    assert fake.requested.count("baseline") == (1 if outcomes[0] == "BASELINE" else 0)


def test_crash_of_baseline_is_environment_fault(fake: FakeEngine, tmp_path: Path) -> None:
    ran = compare(fake, tmp_path / "run", settings=("load_format=crash", "{}"))
    assert ran.code == 4
    assert "the engine stopped" in ran.errors[0]
    assert fake.requested == ["crash"]


def test_refused_baseline_ends_comparison(fake: FakeEngine, tmp_path: Path) -> None:
    ran = compare(fake, tmp_path / "run", settings=("nonsense=1", "load_format=twin"))
    assert ran.code == 1
    assert "vLLM refuses the first variant" in ran.errors[0]
    assert "nonsense=1" in ran.errors[0]
    assert fake.requested == []


def test_second_call_runs_missing_variants(fake: FakeEngine, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = ("{}", "load_format=twin", "load_format=worse")
    fake.dies_at = "worse"
    ended = compare(fake, folder, settings=settings)
    assert ended.code == 130
    assert fake.requested == ["baseline", "twin", "worse"]
    fake.dies_at = ""
    fake.requested.clear()
    resumed = compare(fake, folder, "--format", "json", settings=settings)
    assert (resumed.code, fake.requested) == (1, ["worse"])
    again = compare(fake, folder, "--format", "json", settings=settings)
    assert (again.stdout, fake.requested) == (resumed.stdout, ["worse"])
    more = ("{}", "load_format=doubtful", *settings[1:])
    extended = compare(fake, folder, "--format", "json", settings=more)
    assert fake.requested == ["worse", "doubtful"], "another order, and one variant more"
    assert [row["outcome"] for row in rows_of(extended)][1:] == ["INCONCLUSIVE", "PASS", "FAIL"]
    whole = compare(fake, tmp_path / "whole", "--format", "json", settings=settings)
    assert whole.stdout.replace(str(tmp_path / "whole"), str(folder)) == resumed.stdout
    other = compare(fake, folder, settings=("load_format=twin", "{}"))
    assert other.code == 2
    assert "another `serve`" in other.errors[0]
    KIND.require_replaceable(folder, overwrite=True)  # the list of files is complete


def test_refused_variants_are_not_tried_again(
    fake: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    settings = (
        "{}",
        "load_format=cpu",
        "nonsense=1",
        "load_format=crash",
        "tensor_parallel_size=2",
    )
    outcomes = ["BASELINE", "REFUSED", "REFUSED", "NO ANSWER", "NO ANSWER"]
    first = compare(fake, folder, "--format", "json", settings=settings)
    assert [row["outcome"] for row in rows_of(first)] == outcomes
    assert fake.requested == ["baseline", "cpu", "crash"]
    fake.requested.clear()
    fake.checked.clear()
    again = compare(fake, folder, "--format", "json", settings=settings)
    assert (again.code, again.stdout) == (first.code, first.stdout)
    assert fake.requested == ["crash"], "the environment may be in order now"
    assert fake.checked == [{"load_format": "crash"}, {"tensor_parallel_size": 2}]
    KIND.require_replaceable(folder, overwrite=True)  # the list of files is complete
    fake.requested.clear()
    monkeypatch.setattr("vexport.run.side.installed_text", lambda python: "9.9.9")
    other = compare(fake, folder, "--format", "json", settings=settings)
    assert other.code == 2, "the responses of the baseline are from another version"
    anew = compare(fake, folder, "--overwrite", "--format", "json", settings=settings)
    assert anew.stdout == first.stdout
    assert fake.requested == ["baseline", "cpu", "crash"]


def test_refused_baseline_is_not_tried_again(
    fake: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("load_format=cpu", "load_format=twin")
    first = compare(fake, tmp_path / "run", settings=settings)
    again = compare(fake, tmp_path / "run", settings=settings)
    assert (first.code, first.errors) == (again.code, again.errors)
    assert first.code == 1
    assert fake.requested == ["cpu"]
    monkeypatch.setattr("vexport.run.side.installed_text", lambda python: "9.9.9")
    compare(fake, tmp_path / "run", settings=settings)
    assert fake.requested == ["cpu", "cpu"], "another version of vLLM may accept it"


def test_all_formats_show_variants(fake: FakeEngine, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    hostile = json.dumps({"nonsense": "<script>alert(1)</script>"})
    settings = ("{}", "load_format=worse", hostile)
    text = compare(fake, folder, settings=settings)
    assert text.stdout.startswith("FAIL  model\n")
    assert "load_format=worse" in text.stdout
    assert text.stdout.endswith(f"report: {folder}/report.html\n")
    for name in ("report.html", "report.md", "report.json", "junit.xml"):
        content = (folder / name).read_text(encoding="utf-8")
        assert "load_format=worse" in content.replace("\\", "")
        if name != "report.json":
            assert "<script>" not in content
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "REFUSED" in page
    assert "Settings and versions of vLLM" in page
    report = json.loads((folder / "report.json").read_text())
    jsonschema.validate(report, json.loads((SCHEMAS / "report.schema.json").read_text()))
    assert [row["outcome"] for row in report["variants"]] == ["BASELINE", "FAIL", "REFUSED"]
    for form, sign in (("junit", "<testsuites"), ("github", "::error"), ("markdown", "## FAIL")):
        assert sign in compare(fake, folder, "--format", form, settings=settings).stdout
    shown = vexport("report", folder)
    assert shown.code == 1
    assert "load_format=worse" in shown.stdout


def test_versions_are_tried_with_each_setting(
    fake: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {None: "0.32.0", OTHER_PYTHON: "0.31.0"}
    monkeypatch.setattr("vexport.run.stages.variants.installed_text", versions.__getitem__)
    monkeypatch.setattr("vexport.run.variants_run.require_vllm", lambda python: None)
    monkeypatch.setattr("vexport.engine.session.require_vllm", lambda python=None: None)
    settings = ("load_format=twin", "load_format=worse")
    options = ("--vllm-python", OTHER_PYTHON, "--format", "json")
    ran = compare(fake, tmp_path / "run", *options, settings=settings)
    assert [(row["setting"], row["vllm_python"], row["outcome"]) for row in rows_of(ran)] == [
        ("load_format=twin", "", "BASELINE"),
        ("load_format=twin", str(OTHER_PYTHON), "PASS"),
        ("load_format=worse", "", "FAIL"),
        ("load_format=worse", str(OTHER_PYTHON), "FAIL"),
    ]
    assert len({row["folder"] for row in rows_of(ran)}) == 4
    alone = compare(fake, tmp_path / "alone", *options, settings=())
    assert [row["setting"] for row in rows_of(alone)] == ["default", "default"]
    assert alone.code == 0


def test_interpreter_of_variable_is_used(
    fake: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VEXPORT_VLLM_PYTHON", str(tmp_path / "none"))
    ran = compare(fake, tmp_path / "run", settings=("{}", "load_format=twin"))
    assert ran.code == 4
    assert f"{tmp_path / 'none'}: vLLM cannot be started" in ran.errors[0]
    assert fake.requested == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--schemes", "FP8", "--serve", "a=1"), "remove one of the two"),
        (("NEW",), f"`vexport eval NEW --baseline {MODEL}`"),
        (("--schemes", "FP8", "--task", "a"), "--scenario FILE"),
        (("--schemes", "FP8", "--format", "junit"), "--format: got junit"),
        ((), "--serve KEY=VALUE"),
        (("--serve", "a=1", "--task", "a"), "need a second variant"),
        (("--serve", "a=1", "--serve", "a=2"), "--task NAME_OR_YAML"),
        (("--serve", "a", "--serve", "a=2"), "neither KEY=VALUE"),
        (("--serve", "{1", "--serve", "a=2"), "not a JSON object"),
        (("--serve", '{"a": 1, "a": 2}', "--serve", "a=2"), "'a' twice"),
        (("--serve", '{"a": NaN}', "--serve", "a=2"), "NaN"),
        (("--serve", "seed=1", "--serve", "a=2"), "--serve seed=1: seed"),
        (("--serve", "{}", "--serve", "max_model_len=x"), "--serve max_model_len=x"),
        (("--serve", "a=1", "--serve", "a=2", "--task", "a", "--text", "b"), "tasks"),
    ],
)
def test_invalid_usage_is_refused(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    ran = vexport("compare", MODEL, *options, "--run-dir", tmp_path / "run")
    assert ran.code == 2
    assert message in ran.errors[0]
    assert not (tmp_path / "run").exists()


def test_server_and_missing_checkpoint_are_refused(tmp_path: Path) -> None:
    task = DEMO / "tasks" / "facts.yaml"
    settings = ("--serve", "{}", "--serve", "max_num_seqs=2", "--task", task)
    for name, message in (("http://a:1/v1", "checkpoint/server"), (tmp_path / "no", "no such")):
        ran = vexport("compare", name, *settings, "--run-dir", tmp_path / "run")
        assert ran.code == 2
        assert message in ran.errors[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProblems:
    """Checks of vLLM by interpreters in `lacking`, which do not have the arguments in `names`."""

    names: tuple[str, ...]
    lacking: tuple[Path | None, ...]

    def find(self, serves: list[Serve], python: Path | None) -> list[tuple[VexportError, ...]]:
        return [
            tuple(
                InputError.of(UNKNOWN_ARGUMENT, name, version="0.32", hint=" (meant block_size)")
                for name in self.names
                if name in serve.given and python in self.lacking
            )
            for serve in serves
        ]


def test_unknown_argument_is_an_error_before_any_engine(
    fake: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelled argument is no row, also if an earlier variant could be served."""
    engine = EngineProblems(names=("blok_size",), lacking=(None,))
    monkeypatch.setattr("vexport.run.stages.variants.find_problems", engine.find)
    ran = compare(fake, tmp_path / "run", settings=("{}", "blok_size=32"))
    assert ran.code == 2
    assert_contains(ran.errors[0], "setting blok_size=32", "meant block_size", UNKNOWN_ARGUMENT.id)
    assert fake.requested == []


def test_argument_of_a_newer_version_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument counts as known if any compared vLLM has it."""
    new = Path("new/bin/python")
    settings = [{"blok_size": 1}, {"other": 2}]
    variants = Variants.model_validate({"serve": settings, "vllm_python": [new]})
    for lacking, refused in (((None,), False), ((None, new), True)):
        engine = EngineProblems(names=("blok_size",), lacking=lacking)
        monkeypatch.setattr("vexport.run.stages.variants.find_problems", engine.find)
        with pytest.raises(InputError, match="blok_size") if refused else nullcontext():
            require_known_arguments(variants.matrix(Serve(), None))


def test_options_of_eval_apply_to_all_variants(fake: FakeEngine, tmp_path: Path) -> None:
    options = ("--engine-arg", "block_size=32", "--max-num-seqs", "3", "--num-fewshot", "0")
    ran = compare(
        fake,
        tmp_path / "run",
        *options,
        *("--system-instruction", "Add.", "--margin", "0.2", "--format", "json"),
        settings=("{}", "load_format=twin"),
    )
    assert [row["outcome"] for row in rows_of(ran)] == ["BASELINE", "PASS"], ran.stderr
    shared = {"max_num_seqs": 3, "block_size": 32}
    assert fake.checked == [shared, {**shared, "load_format": "twin"}]


def test_matrix_order_and_names() -> None:
    variants = Variants.model_validate(
        {
            "serve": [{"kv-cache-dtype": "auto"}, {"engine_args": {"block_size": 32}}, {}],
            "vllm_python": ["a/bin/python"],
        }
    )
    matrix = variants.matrix(Serve(max_num_seqs=4), None)
    assert [(each.setting, each.has_other_vllm) for each in matrix] == [
        ("kv_cache_dtype=auto", False),
        ("kv_cache_dtype=auto", True),
        ('engine_args={"block_size": 32}', False),
        ('engine_args={"block_size": 32}', True),
        ("default", False),
        ("default", True),
    ]
    assert matrix[0].serve.given == {"max_num_seqs": 4, "kv_cache_dtype": "auto"}
    assert matrix[2].serve.given == {"max_num_seqs": 4, "block_size": 32}
    names = folder_names([*matrix, *matrix])
    assert len(set(names)) == len(names)
    assert names[0].startswith("kv_cache_dtype=auto-")
    assert folder_names(matrix[::-1]) == folder_names(matrix)[::-1]
    assert all("/" not in name and " " not in name for name in names)


def scenario(folder: Path, variants: object, **more: object) -> Path:
    content: Mapping[str, object] = {
        "name": "served",
        "source": str(MODEL),
        "rules": [{"match": "Linear", "scheme": "FP8_DYNAMIC"}],
        "evaluate": {"tasks": [str(DEMO / "tasks" / "facts.yaml")]},
        "variants": variants,
        **more,
    }
    path = folder / "served.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("variants", "more", "place"),
    [
        ([{"a": 1}], {}, "variants"),
        ({"serve": [{}, {"model": "b"}]}, {}, "variants.serve.1"),
        ({"serve": [{}, {"gpu_memory_utilization": 2}]}, {}, "variants.serve.1.gpu"),
        ({"srve": []}, {}, "variants.srve"),
        ([{}, {"a": 1}], {"evaluate": None}, "evaluate"),
    ],
)
def test_invalid_variants_in_scenario_are_refused(
    variants: object, more: Mapping[str, object], place: str, tmp_path: Path
) -> None:
    with pytest.raises(InputErrors, match=place):
        read_scenario(scenario(tmp_path, variants, **more))


def test_code_in_scenario_needs_trust(tmp_path: Path) -> None:
    for variants, message in (
        ({"vllm_python": ["env/bin/python"]}, "variants.vllm_python"),
        ([{}, {"worker_cls": "a.b"}], "variants.serve.1.worker_cls"),
    ):
        path = scenario(tmp_path, variants)
        for call in (("run", path), ("compare", MODEL, "--scenario", path)):
            ran = vexport(*call, "--run-dir", tmp_path / "run")
            assert ran.code == 2
            assert message in ran.errors[0]
    read = read_scenario(scenario(tmp_path, {"vllm_python": ["env/bin/python"]}))
    assert read.variants is not None
    assert read.variants.vllm_python == (tmp_path / "env" / "bin" / "python",)


def test_scenario_sets_variants(fake: FakeEngine, tmp_path: Path) -> None:
    tasks = [str(fake.runs / "tasks" / "sums.yaml")]
    path = scenario(
        tmp_path,
        [{}, {"load_format": "doubtful"}],
        evaluate={"tasks": tasks, "margin": 0.2},
        serve={"max_num_seqs": 7},
    )
    call = ("compare", MODEL, "--scenario", path, "--run-dir", tmp_path / "run", "--quiet")
    ran = vexport(*call)
    assert "variants.serve.1.load_format: got 'doubtful', need one of auto" in ran.stderr
    trusted = (*call, "--trust-remote-code")
    ran = vexport(*trusted, "--format", "json")
    assert [row["outcome"] for row in rows_of(ran)] == ["BASELINE", "PASS"], ran.stderr
    strict = vexport(*trusted, "--margin", "0.001", "--format", "json")
    assert strict.code in (1, 3), "the command line wins"
    assert fake.requested == ["baseline", "doubtful"]
    assert installed_text() != ""
