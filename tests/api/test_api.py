"""Functions of the API do the same as the commands, and return their results."""

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import vexport.api
from tests.command import ALL_COMMANDS
from tests.command import vexport as call
from tests.models import Good
from tests.test_layers import HEAVY, loaded_by
from vexport.api import (
    Calibration,
    Engine,
    Evaluate,
    Rule,
    Serve,
    check,
    evaluate,
    load,
    quantize,
    verdict,
)
from vexport.cli.settings import SETTINGS
from vexport.errors import InputError

TYPES = {each.__name__: each for each in (Calibration, Engine, Evaluate, Rule, Serve)}
DEMO = Path(__file__).parents[2] / "scenarios" / "demo" / "model"


@pytest.mark.slow
def test_quantize_and_check_equal_commands(llama: Path, calibration: Path, tmp_path: Path) -> None:
    data = Calibration(data=str(calibration), samples=4)
    answer = quantize(llama, tmp_path / "a", scheme="NVFP4", calibration=data, ignore=["down_proj"])
    assert (answer.schemes, answer.calibration_rows) == (("NVFP4",), 4)
    options = (
        "--calibration",
        calibration,
        "--samples",
        "4",
        "--ignore",
        "down_proj",
        "--format",
        "json",
    )
    ran = call("quantize", llama, tmp_path / "b", "--scheme", "NVFP4", *options)
    assert json.loads(ran.stdout)["calibration_digest"] == answer.calibration_digest
    by_function, by_command = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")
    )
    assert by_function == by_command
    assert check(tmp_path / "a", tp=(1, 2), sm=(90,)).ok
    (tmp_path / "a" / "model.safetensors").unlink()
    assert not check(tmp_path / "a").ok
    for name, drafter in (("none", ""), ("a", "eagle3=none")):
        with pytest.raises(InputError):
            check(tmp_path / name, speculative=drafter)


def test_rules_instead_of_scheme(llama: Path, tmp_path: Path) -> None:
    rules = [Rule(match="down_proj", scheme="W8A8"), Rule(match="Linear", scheme="FP8_DYNAMIC")]
    assert set(quantize(llama, tmp_path / "a", rules=rules).schemes) == {"W8A8", "FP8_DYNAMIC"}
    with pytest.raises(ValueError, match="scheme, recipe and rules"):
        quantize(llama, tmp_path / "b")
    # The micro model has no tokenizer for the packaged data.
    with (
        pytest.warns(match="no calibration data was given"),
        pytest.raises(InputError, match="no usable tok"),
    ):
        quantize(llama, tmp_path / "b", scheme="FP8")
    with pytest.raises(ValueError, match="no baseline"):
        evaluate(llama, Evaluate(tasks=("a",)), tmp_path / "results")


def test_verdict_of_missing_folders_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        verdict(tmp_path / "a", tmp_path / "b")
    with pytest.raises(InputError, match="margin"):
        verdict(tmp_path, tmp_path, margin=2)


def test_import_is_light() -> None:
    """`dir` lists a function for each command and the types of arguments, but no helpers."""
    assert not loaded_by("import vexport.api") & {*HEAVY, "numba", "pydantic"}
    commands = ALL_COMMANDS.keys() - {"demo"}
    assert commands <= set(dir(vexport.api))
    assert all(callable(getattr(vexport.api, name)) for name in dir(vexport.api))
    others = set(dir(vexport.api)) - commands - TYPES.keys()
    assert others == {
        "compare_variants",
        "compare_versions",
        "entries",
        "evaluate",
        "evaluate_all",
        "explain_all",
        "history",
        "load_all",
        "load_with_log",
        "plan_schemes",
        "startup_log",
    }
    with pytest.raises(AttributeError, match="quantise"):
        vexport.api.quantise  # noqa: B018


@pytest.mark.parametrize("module", ["planning", "checking", "loading", "reading", "repairing"])
def test_functions_without_extras_import_none(module: str) -> None:
    extras = {"torch", "numba", "transformers", "compressed_tensors", "safetensors", "datasets"}
    assert not loaded_by(f"import vexport.api.{module}") & extras


def test_functions_have_arguments_of_commands() -> None:
    """Arguments may also be fields of a type that the function accepts.

    Options for output, its format and the exit code are excluded.
    """
    printed = {"format_", "output_file", "quiet", "verbose", "debug", "every", "strict"}
    printed |= {"history"}  # chooses the table of `report`
    printed |= {"others"}  # of `compare`: only for an error with the right command
    renamed = {
        "cards": "gpu",
        "output_dir": "folder",
        "scenario_file": "scenario",
        "no_verify": "verify",
    }
    renamed |= {
        "tp": "tensor_parallel_size",
        "chat_template": "apply_chat_template",
        "checkpoints": "checkpoint",
        "run_dirs": "run_dir",
        "dtype": "engine_args",
    }
    for command in ALL_COMMANDS.values():
        if command.name and command.name != "demo":
            function = getattr(vexport.api, command.name)
            known = set(signature(function).parameters)
            types = [TYPES[name] for name in TYPES if name in str(signature(function))]
            known |= {name for each in types for name in signature(each).parameters}
            if command.name == "plan":  # a GPU changes what is shown, or the table of schemes
                known |= signature(vexport.api.plan_schemes).parameters.keys() | {"sm"}
            if command.name == "load":  # with --log
                known |= signature(vexport.api.load_with_log).parameters.keys()
            if command.name == "compare":  # with --serve
                variants = signature(vexport.api.compare_variants).parameters
                known |= {*variants, *signature(Evaluate).parameters}
                known |= signature(vexport.api.compare_versions).parameters.keys()
            if Engine in types:
                known |= signature(Serve).parameters.keys()
            parameters = {parameter.name for parameter in command.params} - printed
            if "has_text" in known:  # a plan only depends on whether there will be text
                parameters -= set(SETTINGS["calibration"])
            assert {
                name for name in parameters if not {name, renamed.get(name)} & known
            } == set(), command.name


def test_entries_explain_and_plan(llama: Path) -> None:
    assert {row["observer"] for row in vexport.api.entries("observers")} >= {"minmax", "mse"}
    section = vexport.api.explain("minmax")
    assert section.text.startswith("## minmax")
    assert section in vexport.api.explain_all()
    found = vexport.api.plan(llama, scheme="FP8", observer="mse", input_observer="minmax")
    assert {group.observers for group in found.groups} == {"mse, inputs minmax"}
    assert {row.scheme for row in vexport.api.plan_schemes(llama).schemes} > {"FP8", "W4A16"}
    scenario = DEMO.parents[1] / "demo-nvfp4.yaml"
    assert vexport.api.plan(scenario).schemes == ("NVFP4",)
    with pytest.raises(ValueError, match="next to"):
        vexport.api.plan(scenario, scheme="FP8")


def test_api_starts_no_watchdog(llama: Path) -> None:
    """The command line ends its process if a disk does not respond. The API does not.

    `check` does not import vLLM or lm-eval into its process.
    """
    code = (
        "import sys, threading, vexport.api as api; api.check(sys.argv[1]); "
        "print(threading.enumerate()); "
        "print([name for name in ('vllm', 'lm_eval') if name in sys.modules])"
    )
    arguments = [sys.executable, "-c", code, str(llama)]
    ran = subprocess.run(arguments, capture_output=True, text=True, check=True)
    threads, loaded = ran.stdout.splitlines()
    assert "MainThread" in threads
    assert "reads" not in threads
    assert loaded == "[]"


@pytest.mark.parametrize(
    ("given", "tp", "sm"),
    [
        ({"sm": 89}, (), (89,)),
        ({"sm": "sm_86"}, (), (86,)),
        ({"sm": ["A100", 12.0, "9.0,90"]}, (), (80, 120, 90)),
        ({"tp": 4}, (4,), ()),
        ({"tp": "1, 2"}, (1, 2), ()),
        ({"tp": (size for size in ("2", 4))}, (2, 4), ()),
        ({"gpu": "L4,l40s"}, (), (89,)),
        ({"gpu": "T4", "sm": 75}, (), (75,)),
        ({"vllm": "v0.31.1"}, (), ()),
    ],
)
def test_devices_are_parsed_as_on_command_line(
    good: Good, given: dict[str, Any], tp: tuple[int, ...], sm: tuple[int, ...]
) -> None:
    report = check(good("W4A16"), static=True, **given)
    assert (report.tp, report.sm) == (tp or (1,), sm)
    assert [each.check for each in report.findings if each.check == "internal"] == []


WRONG: Mapping[str, tuple[object, ...]] = {
    "sm": (42, "ninety", [[90]], {"sm": 90}, True, None, b"90", [None], 90.5, object(), "٩٠"),
    "tp": (0, -1, "two", 1.5, True, [""], None, 10**30, "9" * 5000),
    "gpu": ("H1000", 3, None, ("L4", 7.5)),
    "vllm": ("newest", 33, 0.33, (1,), ("0", "x"), ""),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_wrong_devices_are_input_errors(good: Good, key: str, value: object) -> None:
    if not (key == "vllm" and value is None):
        with pytest.raises(InputError, match=f"^check: {key}: "):
            check(good("W4A16"), static=True, **{key: value})  # type: ignore[arg-type]
    if key in ("tp", "gpu") or key == "sm" and value is not None:
        with pytest.raises(InputError, match=f"^load: {key}: "):
            load(good("W4A16"), dry=True, **{key: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [2, "1,2", ("1", 2), [2]])
def test_plan_takes_sizes_like_check(llama: Path, tp: Any) -> None:
    assert not vexport.api.plan(llama, scheme="FP8_DYNAMIC", tp=tp).refusals


@pytest.mark.parametrize("value", [b"folder", None, 5, ["folder"]])
def test_other_values_than_names_are_input_errors(tmp_path: Path, value: Any) -> None:
    functions = (
        check,
        load,
        vexport.api.report,
        partial(vexport.api.plan, scheme="FP8_DYNAMIC"),
        partial(vexport.api.repair, out=tmp_path / "out"),
    )
    for function in functions:
        with pytest.raises(InputError, match="need a name or a path"):
            function(value)


def test_plan_takes_number_or_name_of_gpu(llama: Path) -> None:
    for gpu in (89, "sm89", "L40S"):
        table = vexport.api.plan_schemes(llama, gpu=gpu)
        assert table.gpu is not None
        assert table.gpu.sm == 89
    for given in ({"gpu": "9.0"}, {"gpu": ("H100",)}, {"tp": "1, 2"}, {"tp": 4}):
        assert (vexport.api.plan_schemes(llama, **given).gpu is None) == ("tp" in given)
    for wrong in ({"gpu": 42}, {"gpu": "H100,L4"}, {"gpu": ()}, {"tp": "two"}, {"tp": 0}):
        with pytest.raises(InputError):
            vexport.api.plan_schemes(llama, **wrong)
