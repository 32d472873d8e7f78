"""Time and memory depend on the size of the files, not on numbers or expressions in them."""

import time
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from tests.command import Ran, vexport
from tests.models import Good
from tests.mutations.edits import QUANTIZATION, WHOLE, Change, config, spoiled
from tests.scores.make import make_tasks
from tests.texts import assert_contains
from vexport.errors import InputError
from vexport.records import Json
from vexport.records.patterns import MOST_SECONDS, matches

SLOW_PATTERNS = (r"re:([a-z._0-9]+)+\$", "re:(?=(.+)+Z)")
TENSOR_NAME = "model.layers.0.self_attn.q_proj.weight_packed"
# Seconds. The check of a sound micro model takes a tenth.
TIME_LIMIT = 10.0


@pytest.fixture
def check(good: Good, tmp_path: Path) -> Callable[[Change], Ran]:
    """Check a copy of a sound checkpoint with a changed config. Fail if it takes too long."""

    def run(change: Change) -> Ran:
        folder = spoiled(good("W4A16"), tmp_path / "changed", change)
        start = time.process_time()
        ran = vexport("check", folder)
        assert time.process_time() - start < TIME_LIMIT
        return ran

    return run


@pytest.mark.slow
def test_slow_expression_is_stopped() -> None:
    start = time.thread_time()
    with pytest.raises(InputError, match="matches quickly") as caught:
        [matches(SLOW_PATTERNS[1], f"{TENSOR_NAME}.{number}" * 2) for number in range(100)]
    assert SLOW_PATTERNS[1][:20] in caught.value.where
    assert time.thread_time() - start < 2 * MOST_SECONDS


@pytest.mark.slow
def test_slow_ignore_pattern_is_one_error(check: Callable[[Change], Ran]) -> None:
    ran = check(config(QUANTIZATION, ignore=["lm_head", SLOW_PATTERNS[0]]))
    assert ran.code == 1
    assert ran.stdout.count("the pattern") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"text_config": {"num_hidden_layers": 10**9, "num_attention_heads": 4}},
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": 10**9,
        },
    ],
)
def test_huge_sizes_are_one_error(check: Callable[[Change], Ran], changes: dict[str, Json]) -> None:
    ran = check(config(WHOLE, **changes))
    assert ran.code == 1
    assert "1e+09 in a checkpoint of" in ran.stdout


@pytest.mark.parametrize("command", [("load", "--dry"), ("load",), ("eval", "--baseline")])
def test_huge_sizes_start_no_vllm(command: tuple[str, ...], llama: Path, tmp_path: Path) -> None:
    """vLLM would build one layer after another until its timeout."""
    folder = copytree(llama, tmp_path / "huge")
    config(WHOLE, num_hidden_layers=10**9)(folder)
    more = (llama, "--task", make_tasks(tmp_path, 3)[0]) if "eval" in command else ()
    ran = vexport(*command, *more[:1], folder, *more[1:], "--quiet")
    assert (ran.code, len(ran.errors)) == (2, 1), ran
    assert_contains(ran.errors[0], f"{folder / 'config.json'}: num_hidden_layers:", "1e+09")
