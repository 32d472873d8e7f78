"""Contract of the command line: exit codes, one line per error, and no partial files."""

import json
from pathlib import Path

import pytest

from tests.command import ALL_COMMANDS, vexport
from tests.texts import assert_contains


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("check MISSING", ["MISSING", "no such folder"]),
        ("load MISSING", ["MISSING", "no such folder"]),
        ("plan MISSING --scheme FP8", ["MISSING", "no such folder"]),
        ("plan s3://BUCKET/MODEL --scheme FP8", ["s3://BUCKET/MODEL: got a URL", "to a folder"]),
        ("quantize MISSING OUT --scheme FP8", ["MISSING", "no such folder"]),
        ("check EMPTY", ["EMPTY", "no config.json"]),
        ("plan EMPTY --scheme FP8", ["EMPTY", "no config.json"]),
        ("quantize LLAMA OUT --scheme NVFP5", ["NVFP5", "did you mean NVFP4"]),
        ("quantize LLAMA OUT --scheme FP8_DYNAMIC --observer mimax", ["mimax", "minmax"]),
        (
            "quantize LLAMA OUT --scheme FP8 --calibration BROKEN",
            ["BROKEN: line 2", "invalid JSON, column"],
        ),
        ("quantize LLAMA OUT --scheme FP8 --calibration MISSING", ["MISSING"]),
        ("quantize LLAMA OUT --scheme FP8_DYNAMIC --ignore [", ["["]),
        ("quantize LLAMA OUT --scheme FP8_DYNAMIC --ignore re:[", ["--ignore", "re:["]),
        ("quantize LLAMA LLAMA --scheme FP8_DYNAMIC", ["the same path as SOURCE", "another OUT"]),
        ("quantize LLAMA OUT", ["--scheme"]),
        ("quantize", ["SOURCE"]),
        ("nonsense", ["nonsense"]),
        ("check LLAMA --format xml", ["xml", "junit"]),
        ("run MISSING.yaml", ["MISSING.yaml", "no such file"]),
        ("eval LLAMA --baseline LLAMA --task MISSING --output-dir OUT", ["MISSING"]),
        ("eval LLAMA --baseline MISSING --task TASK --output-dir OUT", ["MISSING", "folder"]),
        ("report EMPTY", ["EMPTY", "vexport run"]),
        ("verdict EMPTY EMPTY", ["EMPTY"]),
        ("compare LLAMA --schemes W4A17", ["W4A17"]),
    ],
)
def test_bad_input_is_one_line_code_2(
    arguments: str, words: list[str], llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "BROKEN").write_text('{"input_ids": [5, 6, 7]}\n{"input_ids": [5, 6\n')
    task = Path(__file__).parents[2] / "scenarios" / "demo" / "tasks" / "addition.yaml"
    places = {name: tmp_path / name for name in ("EMPTY", "BROKEN", "MISSING", "OUT")}
    places |= {"LLAMA": llama, "TASK": task}
    before = sorted(tmp_path.iterdir())
    ran = vexport(*(places.get(argument, argument) for argument in arguments.split()))
    assert ran.code == 2, ran
    assert ran.stdout == ""
    (line,) = ran.errors
    for word in words:
        assert word in line, line
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("words", [("verdict",), ("load", "--dry"), ("report",)])
def test_missing_inputs_are_named(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = vexport(*words, "A", "B")
    assert ran.code == 2
    assert all(f"{name}: " in line for name, line in zip("AB", ran.errors, strict=True))


def test_missing_vllm_is_exit_4(tmp_path: Path) -> None:
    """The error comes before the run writes a file."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nexec python3 -I -S "$@"\n')
    python.chmod(0o755)
    scenario = Path(__file__).parents[2] / "scenarios" / "demo-nvfp4.yaml"
    ran = vexport(
        "run", scenario, "--run-dir", tmp_path / "run", "--vllm-python", python, "--quiet"
    )
    assert ran.code == 4
    (line,) = ran.errors
    assert "python -m pip install vllm" in line
    assert "--vllm-python" in line
    assert not (tmp_path / "run").exists()


def test_mismatched_torchvision_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision was built for another torch. transformers hides its message in another error."""

    def broken(root: Path) -> None:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'PreTrainedModel'.") from error

    monkeypatch.setattr("vexport.checks.read_index", broken)
    ran = vexport("check", llama)
    assert ran.code == 4
    (line,) = ran.errors
    assert_contains(line, "torchvision::nms")
    assert_contains(line, "pip uninstall torchvision torchaudio torchcodec")


def test_traceback_needs_debug(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vexport.checks.read_index", lambda root: 1 / 0)
    ran = vexport("check", llama)
    assert ran.code == 4
    assert "division by zero" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert "--debug" in ran.errors[0]
    assert "Traceback" in vexport("check", llama, "--debug").stderr


def test_progress_goes_to_stderr(llama: Path, tmp_path: Path) -> None:
    ran = vexport("quantize", llama, tmp_path / "out", "--scheme", "W8A8")
    first, *_ = ran.stderr.splitlines()
    assert first == f"import libraries, read {llama} ..."
    assert "quantize (bytes)" in ran.stderr
    assert "quantize (bytes)" not in ran.stdout
    assert "W8A8" in ran.stdout
    assert json.loads(vexport("plan", llama, "--scheme", "W8A8", "--format", "json").stdout)[
        "groups"
    ]


def test_options_from_files(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call overrides the file, and a command's table overrides shared options.

    A list becomes several values, or one joined value.
    """
    monkeypatch.chdir(tmp_path)
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[tool.vexport]\nformat = "json"\n[tool.vexport.plan]\ntp = [1, 3]\nignore = '
        '["re:.*o_proj"]\n'
    )
    call = ("plan", llama, "--scheme", "FP8_DYNAMIC")
    refused = vexport(*call)  # three ranks cannot share the layers
    assert refused.code == 2
    plan = json.loads(refused.stdout)
    assert not any("o_proj" in group["name"] for group in plan["groups"])
    assert vexport(*call, "--tp", "1").code == 0
    (tmp_path / "vexport.toml").write_text("[plan]\n")
    assert not vexport(*call).stdout.startswith("{")
    (tmp_path / "vexport.toml").unlink()
    project.write_text('tool.vexport = "x"\n')
    assert "got 'x', need a table" in vexport(*call).stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[plan]\ntpp = 1\n", "vexport.toml: plan.tpp: got an unknown option"),
        ("[plam]\ntp = 1\n", "(did you mean plan?)"),
        ("trust-remote-code = true\n", "only valid on the command line"),
        ("[eval]\nvllm-python = 'x'\n", "only valid on the command line"),
        ("[plan\n", "need valid TOML"),
        ("[plan]\ntp = -1\n", "vexport.toml: Invalid value for '--tp'"),
        ("[check]\ntp = true\n", "vexport.toml: check.tp: got True, need"),
        ("[check]\ntp = [[1]]\n", "vexport.toml: check.tp: got [[1]], need"),
        ("[check]\nstrict = 'yes'\n", "vexport.toml: check.strict: got 'yes', need"),
        ("check.tp.a = 1\n", "vexport.toml: check.tp: got {'a': 1}, need"),
        ("check.tp = 0x" + "f" * 5000, "vexport.toml: check.tp: got a int"),
        ("check.a = " + "[" * 50_000, "vexport.toml: got values"),
        ("a." * 50_000 + "a = 1", "vexport.toml:1: got a key of more than 20 parts"),
        ("#" * 1_000_001, "vexport.toml: got more than 1 MB"),
        ("[check]\noutput = '../x.json'\n", "vexport.toml: check.output: an option"),
        ("[check]\noutput-file = 'x.json'\n", "vexport.toml: check.output-file: an option"),
        ("[eval]\noutput-dir = 'x'\naccept = 'y'\n", "only valid on the command line"),
        ("run-dir = '../x'\n", "only valid on the command line"),
        ("[compare]\nserve = ['a=1']\n", "only valid on the command line"),
    ],
    ids=lambda text: text[:20],
)
def test_options_file_is_restricted(
    content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vexport.toml").write_text(content)
    ran = vexport("plan", "MODEL", "--scheme", "FP8_DYNAMIC")
    assert ran.code == 2
    assert message in ran.errors[0]


def test_vllm_flags_become_engine_arguments() -> None:
    words = (
        "load",
        "MODEL",
        "--max-num-seqs",
        "4",
        "--gpu-memory-utilization",
        "0.5",
        "--dtype",
        "float16",
    )
    context = ALL_COMMANDS["load"].make_context("load", list(words[1:]))
    expected = {"max_num_seqs": 4, "gpu_memory_utilization": 0.5, "dtype": "float16"}
    assert context.params["engine_args"] == expected
    ran = vexport(*words, "--engine-arg", "max_num_seqs=8")
    assert ran.code == 2
    assert_contains(ran.errors[0], "max_num_seqs", "4 and 8")
