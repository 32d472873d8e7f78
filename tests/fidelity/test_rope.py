"""Rotary embeddings and sliding windows of config.json, compared with the source's."""

import json
from pathlib import Path
from shutil import copytree

import pytest

from tests.models import save_llama
from vexport.checkpoint.index import read_index
from vexport.fidelity.kept import ROPE_KEYS, file_findings
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
    ({"rope_scaling": {"type": "mrope"}}, {"rope_parameters": {"rope_type": "default"}}),
    ({"rope_theta": 1e4}, {}),
    ({"sliding_window": 4096, "use_sliding_window": False}, {"sliding_window": None}),
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
    ({"text_config": {"rope_theta": 5e5}}, {"text_config": {}}, "text_config.rope_theta"),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "other": {}}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "other": {}}},
        "rope_parameters.full_attention.rope_theta",
    ),
    ({}, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"sliding_window": 4096}, {}, "sliding_window"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("rope") / "model")


def places(model: Path, folder: Path, old: Config, new: Config) -> list[str]:
    """Return the keys of config.json with a finding, for a checkpoint `new` of the source `old`."""
    whole = json.loads((model / "config.json").read_text())
    base = {key: value for key, value in whole.items() if key not in ROPE_KEYS}
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
