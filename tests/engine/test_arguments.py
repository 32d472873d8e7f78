"""Arguments of vLLM's engine. Types, names and heads are checked before an engine starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import JsonValue

from tests.command import vexport
from tests.mutations.edits import config, spoiled
from tests.texts import assert_contains
from vexport.engine.arguments import type_problem

DEMO = Path(__file__).parents[2] / "scenarios" / "demo" / "model"


@dataclass
class Section:
    """Argument with an object as value, like CompilationConfig."""

    mode: int = 0


@pytest.mark.parametrize(
    ("kind", "value", "need"),
    [
        (int, "3", "a whole number"),
        (int, True, "a whole number"),
        (bool, "yes", "true or false"),
        (int | None, 2.5, "a whole number"),
        (dict[str, Any], {"a": [1]}, ""),
        (Literal["auto", "fp8"], "fp8", ""),
        (Literal["auto", "fp8"], "fp9", "auto or fp8 (did you mean fp8?)"),
        (Literal["ray", "mp"] | str | type[Any] | None, "anything", ""),
        (Section | None, {"mode": 3}, ""),
    ],
)
def test_values_fit_declared_types(kind: object, value: JsonValue, need: str) -> None:
    assert type_problem(kind, value) == need


def test_unknown_key_of_section_is_named() -> None:
    assert_contains(type_problem(Section, {"mod": 3}), "Section", "'mod'", "did you mean mode?")


@pytest.mark.parametrize("command", ["load", "eval"])
def test_indivisible_heads_name_possible_ranks(command: str, tmp_path: Path) -> None:
    model = spoiled(
        DEMO, tmp_path / "model", config((), num_attention_heads=9, num_key_value_heads=3)
    )
    baseline = ("--baseline", DEMO, "--task", "gsm8k", "--output-dir", tmp_path / "o")
    options = () if command == "load" else baseline
    ran = vexport(command, model, *options, "--tp", "2")
    assert ran.code == 2
    (line,) = ran.errors
    assert_contains(line, "9 attention heads", "2 ranks", "--tp 1, 3 or 9")


@pytest.mark.vllm
def test_all_unknown_arguments_in_one_error() -> None:
    given = (
        "max_num_sqs=8",
        "kv_cache_dtype=fp9",
        'compilation_config={"mod": 3}',
        "block_size=big",
    )
    ran = vexport(
        "load",
        DEMO,
        "--quiet",
        *(part for argument in given for part in ("--engine-arg", argument)),
    )
    assert (ran.code, ran.stdout) == (2, "")
    found = {line.split("argument ")[1].partition(":")[0]: line for line in ran.errors}
    assert set(found) == {"max_num_sqs", "kv_cache_dtype", "compilation_config", "block_size"}
    assert "did you mean max_num_seqs?" in found["max_num_sqs"]
    assert "did you mean fp8?" in found["kv_cache_dtype"]
    assert "did you mean mode?" in found["compilation_config"]


@pytest.mark.vllm
def test_missing_ray_is_environment_fault() -> None:
    ran = vexport(
        "load", DEMO, "--quiet", "--tp", "2", "--engine-arg", "distributed_executor_backend=ray"
    )
    assert ran.code == 4
    assert ran.errors[0].endswith("[environment/module]")


@pytest.mark.vllm
def test_value_refused_at_engine_start_is_bad_input() -> None:
    ran = vexport("load", DEMO, "--quiet", "--engine-arg", "max_num_batched_tokens=0")
    assert (ran.code, ran.stdout) == (2, "")
    (line,) = ran.errors
    assert line.startswith("error: ")
    assert_contains(line, "max_num_batched_tokens: got 0")
