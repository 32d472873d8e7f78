"""Tables of tokens that are stored quantized: which classes of vLLM look tokens up in them.

Each answer was held against the dry load of vLLM 0.32, the one with zero points excepted.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.engine.sketches import LLAMA, Tensor, sketch
from vexport.checks import check_checkpoint
from vexport.records import Json

ROWS, COLUMNS, GROUP = 384, 256, 32
NAMED, OF_CLASS = "re:.*embed_tokens$", "Embedding"
TABLE: Mapping[str, Tensor | None] = {
    "model.embed_tokens.weight": None,
    "model.embed_tokens.weight_packed": ("I32", (ROWS, COLUMNS // 8)),
    "model.embed_tokens.weight_scale": ("BF16", (ROWS, COLUMNS // GROUP)),
    "model.embed_tokens.weight_shape": ("I64", (2,)),
}


def checkpoint(folder: Path, model: str, target: str, *, tied: bool, packed: bool, **weights: Json) -> Path:
    change = {**(TABLE if packed else {}), **({"lm_head.weight": None} if tied else {})}
    kind = model.removesuffix("ForCausalLM").lower()
    config = {**LLAMA, "architectures": [model], "model_type": kind, "tie_word_embeddings": tied}
    sketch(folder, config, "W4A16", change)
    content = json.loads((folder / "config.json").read_text())
    groups = content["quantization_config"]["config_groups"]
    args = {**groups["group_0"]["weights"], "group_size": GROUP, **weights}
    groups["table"] = {**groups["group_0"], "targets": [target], "weights": args}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def said(folder: Path) -> str:
    found = check_checkpoint(str(folder)).findings
    return " ".join(one.got for one in found if (one.check, one.where) == ("targets", "model.embed_tokens"))


@pytest.mark.parametrize(
    ("model", "target", "tied", "words"),
    [
        ("LlamaForCausalLM", NAMED, False, "gives its table no name"),
        ("LlamaForCausalLM", OF_CLASS, False, ""),
        ("LlamaForCausalLM", OF_CLASS, True, "tied"),
        ("Qwen3ForCausalLM", NAMED, False, ""),
        ("Qwen3ForCausalLM", NAMED, True, "tied"),
        ("Gemma2ForCausalLM", OF_CLASS, True, "without a quantization config"),
        ("MixtralForCausalLM", NAMED, False, "without a quantization config"),
    ],
)
def test_quantized_tables(tmp_path: Path, model: str, target: str, tied: bool, words: str) -> None:
    got = said(checkpoint(tmp_path / "table", model, target, tied=tied, packed=True))
    assert words in got
    assert bool(got) is bool(words)


@pytest.mark.parametrize(
    ("model", "target", "refused"),
    [
        ("LlamaForCausalLM", NAMED, False),
        ("LlamaForCausalLM", OF_CLASS, True),
        ("Qwen3ForCausalLM", NAMED, True),
        ("Gemma2ForCausalLM", OF_CLASS, False),
    ],
)
def test_targeted_tables_that_are_not_quantized(
    tmp_path: Path, model: str, target: str, refused: bool
) -> None:
    got = said(checkpoint(tmp_path / "table", model, target, tied=False, packed=False))
    assert got == ("an unquantized weight" if refused else "")


def test_other_numbers(tmp_path: Path) -> None:
    odd = checkpoint(tmp_path / "odd", "Qwen3ForCausalLM", NAMED, tied=False, packed=True, symmetric=False)
    assert "symmetric integers" in said(odd)
