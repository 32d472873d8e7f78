"""Time and memory follow the size of the files, not the numbers or expressions in them."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest

from tests.command import Ran, vexport
from tests.evaluation.make import make_tasks
from vexport.checks.vllm.decoder import SIZES, missing_sizes
from vexport.errors import InputError
from vexport.reports.folding import fold
from vexport.types import Finding, Json
from vexport.types.patterns import MOST_SECONDS, Patterns, matches

Config = dict[str, object]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
BOMBS = (r"re:([a-z._0-9]+)+\$", r"re:(.*)*(.*)*(.*)*(.*)*(.*)*X", "re:(?=(.+)+Z)", r"re:(\w|\w\w|\.|_)+!")
NAME = "model.layers.0.self_attn.q_proj.weight_packed"
# A sound check of the micro model takes a tenth of that.
SOON = 10.0


@pytest.fixture
def check(good: Callable[[str], Path], tmp_path: Path) -> Callable[[Callable[[Config], object]], Ran]:
    """Check a copy of a sound checkpoint with a changed config; what takes too long fails."""

    def run(change: Callable[[Config], object]) -> Ran:
        folder = copytree(good("W4A16"), tmp_path / "changed")
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))
        start = time.process_time()
        ran = vexport("check", folder)
        assert time.process_time() - start < SOON
        return ran

    return run


def _quantization(config: Config) -> Config:
    value = config["quantization_config"]
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_slow_expression_is_stopped_and_named(bomb: str) -> None:
    start = time.thread_time()
    with pytest.raises(InputError, match="matches quickly") as caught:
        [matches(bomb, f"{NAME}.{number}" * 2) for number in range(100)]
    assert bomb[:20] in caught.value.where
    assert time.thread_time() - start < 2 * MOST_SECONDS


def test_what_is_no_expression_matches_nothing() -> None:
    broken = Patterns((r"re:(", "re:a{99999999999999999999}", f"re:{'(' * 5000}"))
    assert not broken.match(NAME)
    assert all(each.problem for each in broken.expressions)


def test_a_slow_expression_in_ignore_is_one_error(
    check: Callable[[Callable[[Config], object]], Ran],
) -> None:
    ran = check(lambda config: _quantization(config).update(ignore=["lm_head", BOMBS[0]]))
    assert ran.code == 1
    assert ran.stdout.count("the pattern") == 1


@pytest.mark.parametrize("pattern", [r"-:([a-z._0-9]+)+\$", "+:(.*)*(.*)*(.*)*(.*)*(.*)*X"])
def test_a_slow_expression_of_gptq_is_one_error(
    check: Callable[[Callable[[Config], object]], Ran], pattern: str
) -> None:
    ran = check(lambda config: config.update(quantization_config={**GPTQ, "dynamic": {pattern: {}}}))
    assert ran.code == 1
    assert ran.stdout.count("the pattern") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"text_config": {"num_hidden_layers": 10**9, "num_attention_heads": 4}},
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 10**9},
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "x", "n_routed_experts": 10**9},
        {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 10**9},
    ],
)
def test_numbers_beyond_the_tensors_are_one_error(
    check: Callable[[Callable[[Config], object]], Ran], changes: Config
) -> None:
    ran = check(lambda config: config.update(changes))
    assert ran.code == 1
    assert "1e+09 in a checkpoint of" in ran.stdout


@pytest.mark.parametrize("command", [("load", "--dry"), ("load",), ("eval", "--baseline")])
def test_no_vllm_is_started_for_them(command: tuple[str, ...], llama: Path, tmp_path: Path) -> None:
    """It would build layer after layer until its time is over."""
    folder = copytree(llama, tmp_path / "huge")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    more = (llama, "--task", make_tasks(tmp_path, 3)[0]) if "eval" in command else ()
    ran = vexport(*command, *more[:1], folder, *more[1:], "--quiet")
    assert (ran.code, len(ran.errors)) == (2, 1), ran
    assert f"{folder / 'config.json'}: num_hidden_layers: got 1e+09 in a checkpoint of" in ran.errors[0]


def test_layers_that_a_config_only_names_are_not_gone_through() -> None:
    """Which sizes are missing is asked of configs next to which no tensor is known."""
    config: dict[str, Json] = {**dict.fromkeys(SIZES, 8), "num_hidden_layers": 10**30}
    with_experts: dict[str, Json] = {**config, "intermediate_size": None, "moe_intermediate_size": 8}
    start = time.process_time()
    assert missing_sizes("Qwen3MoeForCausalLM", with_experts) == []
    dense: tuple[tuple[str, Json], ...]
    dense = ("mlp_only_layers", [3]), ("decoder_sparse_step", 2), ("moe_intermediate_size", None)
    for change in dense:
        assert missing_sizes("Qwen3MoeForCausalLM", {**with_experts, **dict([change])}) == [
            "intermediate_size"
        ]
    assert time.process_time() - start < SOON


def test_no_scheme_has_a_billion_bits(check: Callable[[Callable[[Config], object]], Ran]) -> None:
    def widen(config: Config) -> None:
        text = json.dumps(_quantization(config)).replace('"num_bits": 4', f'"num_bits": {10**9}')
        config["quantization_config"] = json.loads(text)

    ran = check(widen)
    assert ran.code == 1
    assert "num_bits 1000000000" in ran.stdout


def test_time_grows_with_the_names_in_ignore_and_not_faster() -> None:
    """From n to 4n names, in a list that is asked for each of 100 layers; generous, as machines are noisy."""

    def seconds(count: int) -> float:
        start = time.perf_counter()
        patterns = Patterns(tuple(f"layer.{number}" for number in range(count)))
        assert not any(patterns.match(f"{NAME}{number}") for number in range(100))
        return time.perf_counter() - start

    seconds(1000)
    small, large = (min(seconds(count) for _ in range(3)) for count in (20_000, 80_000))
    assert large < 12 * small + 0.05


def test_a_word_of_a_million_letters_is_read_once() -> None:
    """As the name of a class may be; looked at from each letter it would take hours."""
    letters = Finding(check="model", severity="error", where="a", expected="b", got="y" * 10**6, fix="c")
    start = time.perf_counter()
    assert [kind.count for kind in fold([letters, replace(letters, got="y" * 10**6 + " 2")])] == [1, 1]
    assert time.perf_counter() - start < SOON
