"""`vexport compare --versions`: rows, binary search, resume, exit codes and formats.

`Loads` replaces the dry load. Its environments have only the metadata of vLLM.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from tests.command import ROOT, Ran, vexport
from tests.texts import assert_contains
from tests.vllm_environments import environment_with
from vexport.engine.messages import EngineFailure
from vexport.engine.session import EngineFault
from vexport.names import SourceRef
from vexport.records import ComparedVariant, DryLoadReport, Finding, MatrixCell, MatrixRow
from vexport.rules import dry_load
from vexport.run.directory import KIND
from vexport.version import Version

MODEL = ROOT / "scenarios" / "demo" / "model"
SCHEMA = json.loads((ROOT / "vexport/reports/compare-versions.schema.json").read_text())
VERSIONS = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
pytestmark = pytest.mark.vllm


def good(version: str, kernel: str = "MarlinLinearKernel") -> DryLoadReport:
    cell = MatrixCell(tp=1, sm=90, status="loads", precision="W4A16", kernel=kernel)
    row = MatrixRow(
        name="model.layers.*.mlp.down_proj", count=3, scheme="W", stored="W4A16", cells=(cell,)
    )
    return DryLoadReport(
        checkpoint=str(MODEL),
        ok=True,
        findings=(),
        vllm=version,
        cuda=True,
        cells=(replace(cell, precision="", kernel=""),),
        rows=(row,),
        blind_spots=(),
    )


def refused(version: str) -> DryLoadReport:
    cell = MatrixCell(tp=1, sm=90, status="refused", reason="ValueError: no")
    finding = Finding.at(dry_load.REFUSED, "checkpoint", reason="ValueError: no")
    return replace(good(version), ok=False, findings=(finding,), cells=(cell,), rows=())


class Loads:
    """Substitute for the dry load: a report or an error for each version."""

    def __init__(self, results: Mapping[str, DryLoadReport | Exception]) -> None:
        self.results = results
        self.tried: list[str] = []

    def __call__(
        self, refs: Sequence[SourceRef], pythons: Sequence[Path], **settings: object
    ) -> list[DryLoadReport]:
        """Return the report of the interpreter's version, or raise its error."""
        version = pythons[0].parent.parent.name
        self.tried.append(version)
        result = self.results[version]
        if isinstance(result, DryLoadReport):
            return [result]
        raise result


Call = Callable[..., Ran]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Return a function that calls the command with results for each version."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pythons = [environment_with(tmp_path / version, version) for version in VERSIONS]

    def call(loads: Loads, *options: object) -> Ran:
        monkeypatch.setattr("vexport.run.versions_run.dry_load_checkpoints", loads)
        named = [word for python in pythons for word in ("--vllm-python", python)]
        run_dir = ("--run-dir", tmp_path / "run")
        versions = ("--versions", "0.30..0.33")
        return vexport("compare", MODEL, *versions, *named, *run_dir, *options, "--quiet")

    return call


def results(**changed: DryLoadReport | Exception) -> dict[str, DryLoadReport | Exception]:
    """Return a report for each version. `v31` is the report of vLLM 0.31."""
    others = {f"0.{name[1:]}.0": result for name, result in changed.items()}
    return {version: good(version) for version in VERSIONS} | others


def test_all_versions_are_alike(compare: Call, tmp_path: Path) -> None:
    loads = Loads(results(v32=good("0.32.0", "HummingLinearKernel")))
    ran = compare(loads, "--format", "json")
    assert ran.code == 0, ran.stderr
    report = json.loads(ran.stdout)
    jsonschema.validate(report, SCHEMA)
    assert [row["outcome"] for row in report["rows"]] == ["BASELINE", "SAME", "SAME", "SAME"]
    assert "HummingLinearKernel" in report["rows"][2]["reason"]
    assert all("CUDA wheel" in row["kl_not_judged"] for row in report["rows"][1:])
    assert loads.tried == [*VERSIONS]
    page = (tmp_path / "run" / "report.html").read_text()
    assert_contains(page, "HummingLinearKernel", "0.33.0")
    again = compare(loads)
    assert (again.code, loads.tried) == (0, [*VERSIONS])
    assert_contains(again.stdout, "PASS", "0.30.0 to 0.33.0", "changes/kernel")
    KIND.require_replaceable(tmp_path / "run", overwrite=True)  # the list of files is complete
    assert compare(loads, "--overwrite").code == 0
    assert loads.tried == [*VERSIONS] * 2


def test_first_version_that_refuses_in_every_form(compare: Call) -> None:
    loads = Loads(results(v32=refused("0.32.0"), v33=refused("0.33.0")))
    ran = compare(loads)
    assert ran.code == 1
    assert_contains(ran.stdout, "vLLM 0.32.0 is the first version that refuses it")
    cases = ElementTree.fromstring(compare(loads, "--format", "junit").stdout).iter("testcase")
    failed = {case.get("name"): case.find("failure") is not None for case in cases}
    assert failed == {
        "vLLM 0.30.0": False,
        "vLLM 0.31.0": False,
        "vLLM 0.32.0": True,
        "vLLM 0.33.0": True,
        "versions": True,
    }
    github = compare(loads, "--format", "github").stdout
    assert github.startswith("::error title=vexport FAIL")
    assert "changes/refused" in github
    assert "REFUSED" in compare(loads, "--format", "markdown").stdout


def test_first_version_that_loads_by_bisection(compare: Call) -> None:
    loads = Loads(results(v30=refused("0.30.0")))
    ran = compare(loads, "--bisect", "--format", "json")
    assert ran.code == 1, ran.stderr
    report = json.loads(ran.stdout)
    assert report["first"] == "0.31.0"
    assert_contains(report["reason"], "0.31.0 is the first version that loads", "ValueError: no")
    assert sorted(loads.tried) == [*VERSIONS]
    same = Loads(results())
    ran = compare(same, "--bisect", "--overwrite")
    assert (ran.code, same.tried) == (0, ["0.30.0", "0.33.0"])
    assert_contains(ran.stdout, "NOT TRIED", "0.31.0 to 0.32.0 not tried")


def test_faults_of_the_environment(compare: Call) -> None:
    failure = EngineFailure(kind="crashed", message="signal 11", log_tail="")
    loads = Loads(results(v31=EngineFault("dry load in vLLM", failure)))
    ran = compare(loads)
    assert ran.code == 4
    assert_contains(ran.stdout, "INCONCLUSIVE", "vLLM 0.31.0 could not be judged", "signal 11")
    # The version is tried again, and the others are not.
    loads.results = results(v31=good("0.31.0"))
    loads.tried.clear()
    assert (compare(loads).code, loads.tried) == (0, ["0.31.0"])
    unknown = replace(good("0.33.0").cells[0], status="not shown", reason="it needs a GPU")
    finding = Finding.at(dry_load.NOT_SHOWN, "checkpoint", reason="it needs a GPU")
    lost = replace(good("0.33.0"), ok=False, findings=(finding,), cells=(unknown,), rows=())
    ran = compare(Loads(results(v33=lost)), "--overwrite")
    assert ran.code == 3
    assert_contains(ran.stdout, "vLLM 0.33.0 could not be judged")


def test_log_probabilities_of_cpu_builds(compare: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: dict[Version, ComparedVariant | str] = {
        (0, 31): ComparedVariant(setting="default", outcome="PASS", mean_kl=0.0),
        (0, 32): "the engine crashed",
        (0, 33): ComparedVariant(setting="default", outcome="PASS", mean_kl=0.02),
    }

    def text(trials: object, baseline: Version, version: Version) -> ComparedVariant | str:
        assert baseline == (0, 30)
        return texts[version]

    monkeypatch.setattr("vexport.run.versions_run._Trials._text", text)
    cpu = {version: replace(good(version), cuda=False) for version in VERSIONS}
    ran = compare(Loads(cpu), "--format", "json")
    assert ran.code == 1, ran.stderr
    report = json.loads(ran.stdout)
    jsonschema.validate(report, SCHEMA)
    assert [row["outcome"] for row in report["rows"]] == ["BASELINE", "SAME", "SAME", "DIFFERS"]
    assert [row["mean_kl"] for row in report["rows"]] == [None, 0.0, None, 0.02]
    assert report["rows"][2]["kl_not_judged"] == "the engine crashed"
    assert report["first"] == "0.33.0"
    assert_contains(report["reason"], "KL 0.02", "at most 0.003")


def test_interrupted_call_resumes(compare: Call) -> None:
    class Stop(Loads):
        def __call__(
            self, refs: Sequence[SourceRef], pythons: Sequence[Path], **settings: object
        ) -> list[DryLoadReport]:
            if pythons[0].parent.parent.name == "0.32.0":
                raise KeyboardInterrupt
            return super().__call__(refs, pythons, **settings)

    assert compare(Stop(results())).code == 130
    loads = Loads(results())
    assert (compare(loads).code, loads.tried) == (0, ["0.32.0", "0.33.0"])


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--versions", "0.29,0.31"), 2, "0.30, 0.31, 0.32 and 0.33"),
        (("--versions", "0.31"), 2, "a single version"),
        (("--versions", "0.30..0.33"), 4, "--install"),
        (("--versions", "0.30..0.33", "--task", "gsm8k"), 2, "--task"),
        (("--versions", "0.30..0.33", "--schemes", "W4A16"), 2, "--schemes"),
        (("--versions", "0.30..0.33", "--serve", "{}"), 2, "--serve"),
        (("--versions", "0.30..0.33", "--scenario", "x.yaml"), 2, "--scenario"),
        (("--schemes", "W4A16", "--bisect"), 2, "without --versions"),
        (("--install",), 2, "without --versions"),
    ],
)
def test_wrong_calls(
    options: Sequence[str],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    ran = vexport("compare", MODEL, *options, "--quiet")
    assert (ran.code, ran.stdout) == (code, "")
    assert words in ran.stderr
    assert not [*tmp_path.iterdir()]
