"""Rows of equal length that run together, as on a GPU. Here they do so on a CPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.calibration.models import configs, expert_configs, plan_for, samples, save
from tests.mutations.edits import all_of, put, spoiled
from tests.texts import assert_raises
from vexport.calibration import Samples, calibrate
from vexport.calibration.walk import LayerWalk, batches_of
from vexport.errors import CheckpointFailed
from vexport.quantize.rounding_walk import round_weights
from vexport.quantize.scale_search import decode_importance

TEXT = samples((12, 20, 12, 7, 20, 12))
MOST = 40


def test_batches_have_rows_of_equal_length() -> None:
    assert batches_of(TEXT, MOST) == [[0, 2, 5], [1, 4], [3]]
    assert batches_of(TEXT, 24) == [[0, 2], [1], [3], [4], [5]]
    assert batches_of(TEXT, 0) == [[row] for row in range(6)]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_statistics_equal_those_of_single_rows(family: str, tmp_path: Path) -> None:
    config = {**configs(), **expert_configs()}[family]
    folder = save(config, tmp_path / "model")
    index, plan = plan_for(folder, scheme="FP8", observer="imatrix_mse", kv_cache="fp8")
    single = calibrate(LayerWalk(index), plan, TEXT)
    together = calibrate(LayerWalk(index, batch_tokens=MOST), plan, TEXT)
    assert single.ranges.keys() == together.ranges.keys()
    for name, expected in single.ranges.items():
        found = together.ranges[name]
        assert found.tokens == expected.tokens
        assert found.low == pytest.approx(expected.low, rel=0.05)
        assert found.high == pytest.approx(expected.high, rel=0.05)
    for name, text in single.importance.items():
        torch.testing.assert_close(
            decode_importance(together.importance[name]),
            decode_importance(text),
            rtol=0.05,
            atol=1e-4,
        )
    for name, cached in single.kv_ranges.items():
        assert together.kv_ranges[name].tokens == cached.tokens
        assert together.kv_ranges[name].key.high == pytest.approx(cached.key.high, rel=0.05)


def masked(chosen: Samples) -> Samples:
    """Return samples in which two of three tokens count."""
    counted = (tuple(place % 3 != 0 for place in range(len(ids))) for ids in chosen.token_ids)
    return replace(chosen, counted=tuple(counted))


@pytest.mark.parametrize("text", [TEXT, masked(TEXT)], ids=["all tokens", "answers"])
def test_rounding_equals_that_of_single_rows(text: Samples, tmp_path: Path) -> None:
    """The token weights of a batch begin again at each row.

    In float32, a batched product rounds nearly like the products of single rows.
    """
    folder = save(configs()["llama"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    index, plan = plan_for(folder, scheme="W4A16_G32")
    groups = tuple(replace(group, rounding="refit") for group in plan.groups)
    plan = replace(plan, groups=groups)
    record = calibrate(LayerWalk(index), plan, text)
    names = [member.name for group in plan.groups for member in group.members]
    record = replace(record, token_weights=dict.fromkeys(names, (64.0, 1.0, 1.0, 0.25, 0.25)))
    reports = []
    for number, most in enumerate((0, MOST)):
        out = tmp_path / f"rounded-{number}"
        out.mkdir()
        _, report = round_weights(LayerWalk(index, batch_tokens=most), plan, record, text, out)
        reports.append(report)
    for single, together in zip(reports[0].layers, reports[1].layers, strict=True):
        assert together.state_error == pytest.approx(single.state_error, rel=1e-3)
        for expected, found in zip(single.groups, together.groups, strict=True):
            assert found.tokens == expected.tokens
            assert found.error == pytest.approx(expected.error, rel=1e-3)


def test_averages_are_of_single_rows(tmp_path: Path) -> None:
    folder = save(configs()["llama"], tmp_path / "model")
    index, plan = plan_for(folder)
    groups = tuple(replace(group, input_observer="minmax") for group in plan.groups)
    plan = replace(plan, groups=groups)
    single = calibrate(LayerWalk(index), plan, TEXT)
    together = calibrate(LayerWalk(index, batch_tokens=MOST), plan, TEXT)
    assert single == together


def test_row_of_batch_is_named(tmp_path: Path) -> None:
    """Only a token of the last row, the third of its batch, makes an infinite value."""
    others = {token for row in TEXT.token_ids[:5] for token in row}
    token = next(token for token in TEXT.token_ids[5] if token not in others)

    def only_token_has_channel(embeddings: torch.Tensor) -> torch.Tensor:
        embeddings[:, 0] = 0
        embeddings[token] = 0
        embeddings[token, 0] = 1
        return embeddings

    def overflow_in_channel(weight: torch.Tensor) -> torch.Tensor:
        weight[:, 0] = 2e38
        return weight

    layer = "model.layers.0.self_attn.v_proj"
    folder = spoiled(
        save(configs()["llama"], tmp_path / "model"),
        tmp_path / "spoiled",
        all_of(
            put("model.embed_tokens.weight", only_token_has_channel),
            put(f"{layer}.weight", overflow_in_channel),
        ),
    )
    index, plan = plan_for(folder)
    for most in (0, MOST):
        with assert_raises(CheckpointFailed, f"{layer}:", "row 11", "output", "not finite"):
            calibrate(LayerWalk(index, batch_tokens=most), plan, TEXT)
