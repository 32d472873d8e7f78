"""Settings of two lm-eval runs: which are compared, and how differences are shown."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from vexport.records import Json
from vexport.scores.settings import changes, changes_by_task, recorded_fingerprint

WHERE = ("before", "after")
ROOT = Path(__file__).parents[2]


def differences(old: Json, new: Json, *, models: tuple[str, str] = ("vllm", "vllm")) -> list[str]:
    """Return the differences of two runs with these `model_args`."""
    sides = (
        recorded_fingerprint({"config": {"model": model, "model_args": arguments}}, ["t"])
        for model, arguments in zip(models, (old, new), strict=True)
    )
    return [*changes(*sides, where=WHERE)]


BASE: Mapping[str, Json] = {"pretrained": "org/base"}


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("prefix_token_id", 2, "2"),
        ("truncation_side", "middle", "middle"),
        ("chat_template_args", {"tools": False}, '{"tools": false}'),
        ("max_length", 1024, "1024"),
        ("hf_overrides", {"rope_theta": 1}, '{"rope_theta": 1}'),
        ("not_an_argument_yet", "x", "x"),
    ],
)
def test_argument_of_one_side_is_shown(name: str, value: Json, shown: str) -> None:
    """An argument counts on either side, also if no list and no signature has it."""
    default = "left (default)" if name == "truncation_side" else "not given"
    given = {**BASE, name: value}
    assert differences(dict(BASE), given) == [f"{name}: {default} before, {shown} after"]
    assert differences(given, dict(BASE)) == [f"{name}: {shown} before, {default} after"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (-0.0, 0),
        ("3.0", 3),
        (False, "0"),
        (1.0, "true"),
        ("torch.float8_e4m3fn", "float8_e4m3fn"),
        ({"a": [{"b": 2.0}, "torch.half"], "c": True}, {"c": 1, "a": [{"b": "2"}, "half"]}),
        ('{"factor": 4.0}', {"factor": 4}),
        ("/data/adapter/", "/data/adapter"),
        (float("nan"), "nan"),
    ],
)
def test_spelling_of_a_value_is_no_change(one: Json, other: Json) -> None:
    """Values are compared by their meaning at every depth."""
    for name in ("prefix_token_id", "not_an_argument_yet"):
        assert differences({**BASE, name: one}, {**BASE, name: other}) == []
        assert differences({**BASE, name: other}, {**BASE, name: one}) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (True, 2),
        ({"a": 1}, {"a": 1.5}),
        ({"stop": [" 1"]}, {"stop": ["1"]}),
        ([1, 2], [2, 1]),
        ("torch.float16", "bfloat16"),
    ],
)
def test_other_value_is_a_change(one: Json, other: Json) -> None:
    assert len(differences({**BASE, "unheard_of": one}, {**BASE, "unheard_of": other})) == 1


def test_spelling_in_generation_arguments_is_no_change() -> None:
    """Arguments of all tasks and of a single task are compared by their meaning, too."""
    cases: list[tuple[Json, float, dict[str, Json]]] = [
        ("min_p=0.0,do_sample=1", 50.0, {"until": ["\n"], "top_k": 20.0}),
        ({"do_sample": True, "min_p": 0}, 50, {"top_k": 20, "until": ["\n"]}),
    ]
    sides = [
        recorded_fingerprint(
            {
                "config": {"model": "vllm", "gen_kwargs": given, "limit": limit},
                "configs": {"t": {"generation_kwargs": own}},
                "n-shot": {"t": 0},
            },
            ["t"],
        )
        for given, limit, own in cases
    ]
    assert [*changes(sides[0], sides[1], where=WHERE)] == []


@pytest.mark.parametrize("value", ["left", None])
def test_default_of_signature_is_compared(value: Json) -> None:
    """lm-eval's default is the same value as no value. A null is no other value than none given."""
    name = "truncation_side" if value else "tokenizer_revision"
    assert differences(dict(BASE), {**BASE, name: value}) == []


def test_slash_after_the_models_path_is_no_other_tokenizer() -> None:
    old: Json = {"pretrained": "/data/small/", "tokenizer": "/data/small"}
    assert differences(old, {"pretrained": "/data/large", "tokenizer": "/data/large/"}) == []
    (change,) = differences(old, {"pretrained": "/data/large", "tokenizer": "/data/other/"})
    assert change.startswith("tokenizer: ")


def test_default_depends_on_back_end() -> None:
    given = {**BASE, "max_batch_size": 3, "truncation": False}
    assert differences(dict(BASE), given, models=("hf", "huggingface")) == []
    (first, *_) = differences(dict(BASE), dict(BASE), models=("local-completions", "sglang"))
    assert first == "back end: local-completions before, sglang after"


def test_spellings_are_equal() -> None:
    """lm-eval records text of the command line or JSON, depending on the call."""
    text = "pretrained=org/base,add_bos_token=True,max_gen_toks=512.0,think_end_token=None"
    plain = {**BASE, "add_bos_token": True, "max_gen_toks": 512}
    assert differences(text, plain) == []


def test_other_differences_share_a_line() -> None:
    arguments: dict[str, Json] = {
        "dtype": "float16",
        "seed": 7,
        "max_model_len": 99,
        "enforce_eager": True,
    }
    assert differences(dict(BASE), {**BASE, **arguments}) == [
        "max_model_len: not given before, 99 after",
        "dtype: auto (default) before, float16 after; seed: 1234 (default) before, 7 after; "
        "enforce_eager: not given before, true after",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        {"expert_parallel_size": 8, "dp_size": 2},
        {"max_num_seqs": 4, "batch_size": "auto:4"},
        {"mem_fraction_static": 0.5, "device": "cuda:1"},
        {"base_url": "http://other:8000", "api_key": "sk-1"},
        {"revision": "abc", "pretrained": "org/other"},
    ],
)
def test_exempt_settings_are_not_compared(arguments: dict[str, Json]) -> None:
    assert differences(dict(BASE), {**BASE, **arguments}) == []


def test_credentials_are_not_stored() -> None:
    arguments: Json = {
        "model": "m",
        "auth_token": "s3cret",
        "header": {"Authorization": "s3cret"},
        "base_url": "http://user:s3cret@host",
    }
    content: dict[str, Json] = {"config": {"model": "local-completions", "model_args": arguments}}
    assert "s3cret" not in str(recorded_fingerprint(content, ["t"]))


@pytest.mark.parametrize(
    ("old", "new", "count"),
    [
        ({}, {"tokenizer": "org/base"}, 0),
        ({}, {"pretrained": "org/base-w4a16", "tokenizer": "org/base-w4a16"}, 0),
        ({}, {"pretrained": "org/base-w4a16", "tokenizer": "org/base"}, 0),
        ({"tokenizer": "other"}, {"pretrained": "org/base-w4a16", "tokenizer": "other"}, 0),
        ({}, {"tokenizer": "other"}, 1),
        ({"tokenizer": "other"}, {"tokenizer": "org/base"}, 1),
    ],
)
def test_tokenizer_of_the_model_is_no_setting(
    old: dict[str, Json], new: dict[str, Json], count: int
) -> None:
    assert len(differences({**BASE, **old}, {**BASE, **new})) == count


def test_generation_arguments_are_compared() -> None:
    cases: list[tuple[Json, Json]] = [
        ("temperature=0,top_p=0.9", {"until": ["x"]}),
        ({"temperature": 0, "top_p": 0.9}, {"until": ["x"]}),
        (None, {"until": ["x"]}),
        (None, None),
    ]
    sides = []
    for given, own in cases:
        content: dict[str, Json] = {
            "config": {"model": "vllm", "gen_kwargs": given},
            "n-shot": {"t": 0},
            "configs": {"t": {"generation_kwargs": own}},
        }
        sides.append(recorded_fingerprint(content, ["t"]))
    assert [*changes(sides[0], sides[1], where=WHERE)] == []
    (overridden,) = changes(sides[1], sides[2], where=WHERE)
    assert overridden.startswith("gen kwargs:")
    assert overridden.endswith("the tasks' own after")
    (own,) = changes(sides[2], sides[3], where=WHERE)
    assert own == 'gen kwargs of t: {"until": ["x"]} before, not given after'


def test_difference_of_some_tasks_names_them() -> None:
    same, other = {"argument a": "1"}, {"argument a": "2"}
    sides = {"x": (same, same), "y": (same, other), "z": (same, other)}
    assert [*changes_by_task(sides, where=WHERE)] == ["y, z: a: 1 before, 2 after"]
    del sides["x"]
    assert [*changes_by_task(sides, where=WHERE)] == ["a: 1 before, 2 after"]


def test_table_is_of_the_installed_lm_eval(tmp_path: Path) -> None:
    """The recorded defaults are those of lm-eval's signatures."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("vllm")
    script = ROOT / "scripts" / "generate_lm_eval.py"
    command = [sys.executable, str(script), "--out", str(tmp_path / "new.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    table = ROOT / "vexport" / "scores" / "generated" / "lm_eval.json"
    assert (tmp_path / "new.json").read_text() == table.read_text()
