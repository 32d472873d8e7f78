"""What vexport reads and what it refuses is what safetensors, compressed-tensors and transformers do."""

import json
import random
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from tests.checkpoint.configs import (
    argument_disagreement,
    config_disagreement,
    random_arguments,
    random_model_config,
    random_positions,
    sound_config,
)
from tests.checkpoint.headers import disagreement, random_file
from tests.checkpoint.side_files import (
    generation_disagreement,
    index_disagreement,
    random_generation,
    random_index,
    random_template,
    random_tokenizer,
    template_disagreement,
    tokenizer_disagreement,
)
from vexport.checkpoint.header import read_header
from vexport.errors import InputError
from vexport.types import Json

RANDOM = st.randoms(use_true_random=False)
SMALL = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# A sound header, of which each case below is a spoiled one.
SOUND = '{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
SPOILED = {
    "false for 0": SOUND.replace("[0,", "[false,"),
    "true for 1": SOUND.replace("[1]", "[true]"),
    "minus zero": SOUND.replace("[0,", "[-0,"),
    "a byte order mark": "\ufeff" + SOUND,
    "UTF-16": SOUND.encode("utf-16"),
    "UTF-16 without a mark": SOUND.encode("utf-16-le"),
    "UTF-32": SOUND.encode("utf-32"),
    "NaN in a further key": SOUND.replace('"dtype"', '"x":NaN,"dtype"'),
    "1e400 in a further key": SOUND.replace('"dtype"', '"x":1e400,"dtype"'),
    "an integer of 400 digits": SOUND.replace('"dtype"', f'"x":{"9" * 400},"dtype"'),
    "a lone surrogate": SOUND.replace('"pt"', r'"\ud800"'),
    "a lone surrogate in a list": SOUND.replace('"dtype"', r'"x":["\udc00"],"dtype"'),
    "metadata twice": SOUND.replace('{"__m', '{"__metadata__":{},"__m', 1),
    "metadata of another kind, then of the right one": SOUND.replace(
        '{"__m', '{"__metadata__":{"a":1},"__m', 1
    ),
    "dtype twice": SOUND.replace('"dtype"', '"dtype":"F32","dtype"'),
    "a value that a later one hides": SOUND.replace('{"__m', '{"a":5,"__m', 1),
    "129 levels": SOUND.replace('"dtype"', f'"x":{"[" * 127}{"]" * 127},"dtype"'),
    "2**64 rows": SOUND.replace("[1]", f"[{2**64},0]").replace("4]", "0]"),
}


@pytest.mark.parametrize("text", SPOILED.values(), ids=SPOILED.keys())
def test_headers_that_safetensors_refuses_are_refused(text: str | bytes, tmp_path: Path) -> None:
    data = text.encode() if isinstance(text, str) else text
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(data)) + data + b"\0" * (0 if "[0,0]" in str(text) else 4))
    with pytest.raises(SafetensorError), safe_open(str(file), "np"):
        pass
    with pytest.raises(InputError, match="header error"):
        read_header(file)


@SMALL
@given(RANDOM)
def test_random_headers_are_read_as_by_safetensors(tmp_path: Path, rng: random.Random) -> None:
    assert disagreement(random_file(rng), tmp_path / "model.safetensors") is None


@SMALL
@given(RANDOM)
def test_random_arguments_are_read_as_by_compressed_tensors(rng: random.Random) -> None:
    assert argument_disagreement(random_arguments(rng)) is None


@SMALL
@given(RANDOM)
def test_random_configs_are_read_as_by_transformers(rng: random.Random) -> None:
    assert config_disagreement(random_model_config(rng)) is None


@SMALL
@given(RANDOM)
def test_random_positions_are_read_as_by_transformers(rng: random.Random) -> None:
    assert config_disagreement(random_positions(rng)) is None


# Of kinds of rules that random configs meet once in ten thousand.
RULES: tuple[tuple[str, dict[str, Json]], ...] = (
    ("minicpm3", {"qk_rope_head_dim": 35}),
    ("deepseek_v3", {"head_dim": 35, "qk_rope_head_dim": 64}),
    ("llama", {"head_dim": 35, "rope_parameters": None}),
    ("llama", {"head_dim": 35, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("stablelm", {"head_dim": 35, "rope_parameters": {"rope_type": "default"}}),
    ("qwen3", {"head_dim": 35, "rope_parameters": {"full_attention": {"rope_type": "default"}}}),
    ("gemma3_text", {"head_dim": 35, "partial_rotary_factor": 0.5}),
    ("lfm2_moe", {"head_dim": 35, "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}),
    ("mimo_v2_flash", {"head_dim": 35, "rope_parameters": {"rope_type": "default"}}),
    ("mimo_v2_flash", {"head_dim": 35, "partial_rotary_factor": 1.0, "rope_parameters": None}),
    ("bloom", {"head_dim": 35, "partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "default"}}),
    ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ("kimi_linear", {"mlp_layer_types": []}),
    ("exaone_moe", {"mlp_layer_types": [*["dense"] * 31, "other"]}),
    ("hy_v3", {"mlp_layer_types": []}),
    ("nemotron_h", {"layer_types": None}),
)


@pytest.mark.parametrize(("kind", "changes"), RULES)
def test_rules_of_a_config_are_those_of_transformers(kind: str, changes: dict[str, Json]) -> None:
    assert config_disagreement({**json.loads(sound_config(kind)), **changes}) is None


@SMALL
@given(RANDOM)
def test_random_tokenizers_are_read_as_by_transformers(tmp_path: Path, rng: random.Random) -> None:
    assert tokenizer_disagreement(random_tokenizer(rng), tmp_path) is None


@SMALL
@given(RANDOM)
def test_random_generation_configs_are_read_as_by_vllm(tmp_path: Path, rng: random.Random) -> None:
    assert generation_disagreement(random_generation(rng), tmp_path) is None


@SMALL
@given(RANDOM)
def test_random_indexes_are_read_as_by_vllm(tmp_path: Path, rng: random.Random) -> None:
    assert index_disagreement(random_index(rng), tmp_path) is None


@SMALL
@given(RANDOM)
def test_random_templates_render_as_in_transformers(rng: random.Random) -> None:
    assert template_disagreement(random_template(rng)) is None
