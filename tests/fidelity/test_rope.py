"""Rotary embeddings and sliding windows of config.json, compared with the source's."""

import json
from pathlib import Path
from shutil import copytree

import pytest

from tests.models import save_llama
from vexport.checkpoint.index import read_index
from vexport.fidelity.kept import SPELLINGS, file_findings
from vexport.records import Json

YARN: dict[str, Json] = {"rope_type": "yarn", "factor": 4.0}
Config = dict[str, Json]
EQUAL: list[tuple[Config, Config]] = [
    ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}}),
    (
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": {**YARN, "rope_theta": 5e5}},
    ),
    ({"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    (
        {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {
            "model_type": "qwen2_vl",
            "text_config": {
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}
            },
        },
    ),
    # Without `use_sliding_window`, Qwen2 has no window.
    ({"model_type": "qwen2", "sliding_window": 4096}, {"model_type": "qwen2"}),
    ({"rope_theta": 1e4}, {}),
    (
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "qwen2", "sliding_window": None},
    ),
]
DIFFERENT: list[tuple[Config, Config, str]] = [
    ({"rope_scaling": YARN}, {}, "rope_scaling.rope_type"),
    ({"rope_parameters": {**YARN, "rope_theta": 5e5}}, {"rope_theta": 5e5}, "rope_type"),
    ({}, {"rope_scaling": YARN}, "rope_scaling.rope_type"),
    (
        {"rope_theta": 5e5, "rope_scaling": YARN},
        {"rope_parameters": {**YARN, "factor": 8.0, "rope_theta": 5e5}},
        "rope_parameters.factor",
    ),
    (
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "rope_parameters.rope_theta",
    ),
    ({"rope_theta": 5e5}, {"rope_theta": 1e4}, "rope_theta"),
    ({"rope_theta": 5e5}, {}, "rope_theta"),
    (
        {"model_type": "mistral3", "text_config": {"model_type": "mistral", "rope_theta": 5e5}},
        {"model_type": "mistral3", "text_config": {"model_type": "mistral"}},
        "text_config.rope_theta",
    ),
    (
        {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 5e4},
        "rope_parameters.sliding_attention.rope_theta",
    ),
    (
        {"model_type": "stablelm"},
        {"model_type": "stablelm", "partial_rotary_factor": 0.5},
        "factor",
    ),
    ({"model_type": "mistral", "sliding_window": 64}, {"model_type": "mistral"}, "sliding_window"),
    # A class that transformers does not have.
    ({"model_type": "other"}, {"model_type": "other", "rope_scaling": YARN}, "rope_scaling"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("rope") / "model")


def places(model: Path, folder: Path, old: Config, new: Config) -> list[str]:
    """Return the keys of config.json with a finding, for a checkpoint `new` of the source `old`."""
    whole = json.loads((model / "config.json").read_text())
    base = {key: value for key, value in whole.items() if key not in SPELLINGS}
    for name, config in (("old", old), ("new", new)):
        copytree(model, folder / name)
        (folder / name / "config.json").write_text(json.dumps({**base, **config}))
    found = file_findings(read_index(folder / "new"), read_index(folder / "old"))
    return [each.where.rpartition("config.json: ")[2] for each in found]


@pytest.mark.parametrize(("old", "new"), EQUAL)
def test_other_spelling_of_rope_is_equal(
    model: Path, old: Config, new: Config, tmp_path: Path
) -> None:
    assert places(model, tmp_path, old, new) == []


@pytest.mark.parametrize(("old", "new", "place"), DIFFERENT)
def test_changed_and_lost_rope(
    model: Path, old: Config, new: Config, place: str, tmp_path: Path
) -> None:
    (found,) = places(model, tmp_path, old, new)
    assert found.endswith(place)
