"""Observers apart from formulas: names, keywords, tokens, importance, activation ordering."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams

from tests.observers.named import load_observer
from tests.texts import assert_raises
from vexport.formats.arguments import QuantArgs
from vexport.observers import (
    OBSERVERS,
    IMatrixMSEObserver,
    Importance,
    MemorylessMinMaxObserver,
    Observer,
    flatten_for_calibration,
    get_observer_token_count,
)
from vexport.observers.search import Search, block_scales

CHANNEL = QuantArgs(num_bits=8, type="int", strategy="channel")
GROUP = QuantArgs(num_bits=4, type="int", strategy="group", group_size=4)
BLOCK = QuantArgs(num_bits=8, type="float", strategy="block", block_structure=(2, 8))
TENSOR = QuantArgs(num_bits=8, type="float", strategy="tensor")
NVFP4 = QuantArgs(
    num_bits=4,
    type="float",
    strategy="tensor_group",
    group_size=16,
    scale_dtype="torch.float8_e4m3fn",
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_unknown_names_list_known_names() -> None:
    with assert_raises(ValueError, "'minmaxx'", "imatrix_mse", "static_minmax"):
        load_observer("minmaxx", "weight", CHANNEL)
    with assert_raises(ValueError, "patients: got 3", "one of maxshrink, patience"):
        Observer.load_from_registry("memoryless_mse", base_name="weight", args=CHANNEL, patients=3)
    with assert_raises(ValueError, "norm: got 2.0", "one of averaging_constant"):
        load_observer("minmax", "weight", replace(CHANNEL, observer_kwargs={"norm": 2.0}))
    with assert_raises(ValueError, "norm: got 2.0", "need no keywords"):
        Observer.load_from_registry("static_minmax", base_name="input", args=TENSOR, norm=2.0)
    with assert_raises(ValueError, "grid: got 0", "positive number", "norm: got -1"):
        Observer.load_from_registry("mse", base_name="weight", args=CHANNEL, grid=0, norm=-1)
    with assert_raises(ValueError, "grid: got 'many'", "need a number"):
        Observer.load_from_registry("mse", base_name="weight", args=CHANNEL, grid="many")


@pytest.mark.parametrize(
    ("base_name", "args"),
    [("weight", replace(TENSOR, strategy="token")), ("input", CHANNEL), ("bias", TENSOR)],
)
def test_unsupported_strategies_are_refused(base_name: str, args: QuantArgs) -> None:
    with assert_raises(ValueError, "one of weight/tensor, weight/channel"):
        load_observer("minmax", base_name, args)
    with pytest.raises(ValueError, match="need one of"):
        flatten_for_calibration(torch.zeros(4, 4), base_name, args)


def test_keywords_override_arguments() -> None:
    args = QuantizationArgs(
        num_bits=8, type="float", strategy="tensor", observer_kwargs={"averaging_constant": 0.5}
    )
    for keywords, high in (({}, 1.5), ({"averaging_constant": 1.0}, 2.0)):
        observer = load_observer("minmax", "input", args, keywords)
        observer(torch.tensor([[1.0]]))(torch.tensor([[2.0]]))
        assert observer.range()[1].item() == high
    assert args.observer_kwargs == {"averaging_constant": 0.5}


@pytest.mark.parametrize("name", OBSERVERS)
def test_last_seen_weight_counts(name: str) -> None:
    args = replace(GROUP, group_size=8)
    once, twice = (with_importance(name, args) for _ in range(2))
    twice(normal(4, 16, seed=1) * 100)
    for observer in (once, twice):
        observer(normal(4, 16))
    assert torch.equal(once.get_qparams()["scale"], twice.get_qparams()["scale"])


def with_importance(name: str, args: QuantArgs) -> Observer:
    observer = load_observer(name, "weight", args)
    if isinstance(observer, IMatrixMSEObserver):
        observer.gathered = Importance(normal(16, seed=2).double().square() + 0.1, 1)
    return observer


def test_reset_forgets_counted_tokens() -> None:
    state = load_observer("static_minmax", "k", TENSOR)
    state(torch.zeros(2, 3, 5, 4))
    assert state.tokens == 10
    weight = load_observer("static_minmax", "weight", TENSOR)(torch.ones(3, 4))
    assert weight.tokens == 0
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for layer, tokens in zip(model, (6, 0), strict=True):
        layer.register_module("input_observer", load_observer("static_minmax", "input", TENSOR))
        layer.get_submodule("input_observer")(torch.zeros(2, tokens // 2, 4))
    assert get_observer_token_count(model) == {"0": 6, "1": 0}
    state.reset()
    assert state.tokens == 0
    assert not state.has_statistics
    observer = load_observer("minmax", "input", TENSOR)
    assert observer(torch.zeros(0, 8)) is observer
    assert not observer.has_statistics
    assert observer.tokens == 0
    with pytest.raises(ValueError, match="got no observation"):
        observer.get_qparams()


def test_fusing_needs_observations_and_no_weight_copies() -> None:
    observers = [load_observer("memoryless_minmax", "weight", NVFP4) for _ in range(2)]
    Observer.fuse(observers)
    observers[0](normal(2, 32))
    with pytest.raises(ValueError, match="got observations of 1 of 2"):
        observers[0].get_qparams()
    observers[1].reset()
    assert observers[0].get_qparams()["global_scale"] is not None
    weight = normal(64, 128)
    observer = load_observer("memoryless_mse", "weight", NVFP4)
    observer(weight)
    weight.zero_()
    assert torch.equal(observer.get_qparams()["scale"], torch.full((64, 8), 0.125))


def test_search_uses_global_scale_of_fused_layers() -> None:
    small, large = normal(64, 256), normal(64, 256, seed=1) * 37
    observers = [load_observer("memoryless_mse", "weight", NVFP4) for _ in range(2)]
    Observer.fuse(observers)
    for observer, weight in zip(observers, (small, large), strict=True):
        observer(weight)
    qparams, global_scale = observers[0].get_qparams(), 448 * 6 / large.abs().max().item()
    assert qparams["global_scale"] is not None
    assert qparams["global_scale"].item() == pytest.approx(global_scale, rel=1e-6)
    search = Search(factors=(1.0, 0.81), expand=1.0, norm=2.4, patience=0)
    scales = block_scales(small.view(64, 16, 16), qparams["global_scale"], search)
    assert torch.equal(qparams["scale"], scales)


@pytest.mark.parametrize("keywords", [{"maxshrink": 0.0}, {"maxshrink": 0.04, "grid": 20.0}])
@pytest.mark.parametrize("args", [CHANNEL, GROUP, BLOCK, TENSOR])
def test_search_without_steps_keeps_range(args: QuantArgs, keywords: dict[str, float]) -> None:
    weight = normal(64, 64)
    searching = load_observer("memoryless_mse", "weight", args, keywords)
    found = searching(weight).get_qparams()
    expected = load_observer("memoryless_minmax", "weight", args)(weight).get_qparams()
    assert torch.equal(found["scale"], expected["scale"])


def test_groups_of_zeros_have_least_scale() -> None:
    weight = torch.zeros(2, 64)
    for first, global_scale, scale in ((0.0, 1.0, 0.125), (3.0, 448 * 6 / 3, 448.0)):
        weight[0, 0] = first
        qparams = load_observer("memoryless_mse", "weight", NVFP4)(weight).get_qparams()
        assert qparams["global_scale"] is not None
        assert qparams["global_scale"].item() == global_scale
        assert qparams["scale"].tolist() == [[scale, *[0.125] * 3], [0.125] * 4]


def test_importance_is_gathered_in_separate_pass() -> None:
    layer = torch.nn.Linear(16, 4)
    inputs = normal(3, 5, 16)
    gathering = IMatrixMSEObserver("weight", CHANNEL)
    gathering.attach(layer)
    for row in inputs:
        layer(row)
    gathering.detach(layer)
    layer(inputs * 100)
    assert gathering.gathered is not None
    assert gathering.gathered.tokens == 15
    torch.testing.assert_close(gathering.gathered.mean(), inputs.square().mean((0, 1)))
    other = IMatrixMSEObserver("weight", CHANNEL, strict=True)
    other.gathered = gathering.gathered
    scales = [observer(layer.weight).get_qparams()["scale"] for observer in (gathering, other)]
    assert torch.equal(*scales)


def test_importance_decides_clipping() -> None:
    """An outlier is clipped if its input is about zero, and kept if its input is large."""
    weight = normal(1, 16) * 0.1
    weight[0, 0] = 1.0
    highs = []
    for outlier in (1e-6, 1e6):
        observer = IMatrixMSEObserver("weight", replace(CHANNEL, num_bits=4), patience=0)
        importance = torch.ones(16, dtype=torch.float64)
        importance[0] = outlier
        observer.gathered = Importance(importance, 1)
        highs.append(observer(weight).range()[1].item())
    assert highs[0] < 0.4
    assert highs[1] > 0.8


@pytest.mark.parametrize("args", [CHANNEL, TENSOR])
def test_missing_importance_warns_once(args: QuantArgs) -> None:
    weight = normal(4, 16)
    with pytest.warns(UserWarning, match="imatrix_mse: .*the same weight") as seen:
        scale = IMatrixMSEObserver("weight", args)(weight).get_qparams()["scale"]
    assert len(seen) == 1
    plain = Observer.load_from_registry(
        "memoryless_mse", base_name="weight", args=args, maxshrink=1.0, grid=20, norm=3.0
    )
    assert torch.equal(scale, plain(weight).get_qparams()["scale"])
    with pytest.raises(ValueError, match="imatrix_mse: "):
        IMatrixMSEObserver("weight", args, strict=True)(weight)


@pytest.mark.parametrize("name", ["memoryless_minmax", "memoryless_mse", "nvfp4_expanded_mse"])
@pytest.mark.parametrize("args", [NVFP4, GROUP, CHANNEL, TENSOR])
def test_tiles_do_not_change_the_result(
    name: str, args: QuantArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = normal(33, 64)
    whole = load_observer(name, "weight", args)(weight).get_qparams()["scale"]
    monkeypatch.setattr("vexport.observers.flatten.TILE_ELEMENTS", 256)
    tiled = load_observer(name, "weight", args)(weight).get_qparams()["scale"]
    torch.testing.assert_close(tiled, whole, rtol=1e-6, atol=0)


def test_patience_counts_over_all_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all tiles pause, a later improvement in one tile is ignored, as without tiles."""
    weight = normal(16, 64).sign() * torch.tensor([1.0, 0.02]).repeat(32)
    results = []
    for elements in (1 << 20, 64):
        monkeypatch.setattr("vexport.observers.flatten.TILE_ELEMENTS", elements)
        observer = Observer.load_from_registry(
            "memoryless_mse",
            base_name="weight",
            args=replace(CHANNEL, num_bits=4),
            maxshrink=0.9,
            patience=2,
        )
        results.append(observer(weight).range()[1])
    assert torch.equal(*results)


def test_example_of_llm_compressors_guide() -> None:
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=128)
    x = normal(64, 512)
    groups = x.reshape(64, 4, 128)
    expected, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    for observer in (
        Observer.load_from_registry("minmax", base_name="weight", quantization_args=args),
        Observer.load_from_registry("minmax", args=args),
    ):
        scale, zero_point = observer(x)
        torch.testing.assert_close(scale, expected)
        assert zero_point.shape == (64, 4)


def test_names_are_looked_up_like_llm_compressors() -> None:
    for name in ("memoryless-minmax", "Memoryless MinMax", "MEMORYLESS_MINMAX"):
        assert type(load_observer(name, "weight", CHANNEL)) is OBSERVERS["memoryless_minmax"]
    assert type(load_observer("fouroversix", "weight", NVFP4)) is OBSERVERS["nvfp4_expanded_mse"]

    @Observer.register("test-wide", alias=["test_wider"])
    class Wide(MemorylessMinMaxObserver):
        """Observer with an alias."""

    @Observer.register()
    class TestNamedByItself(MemorylessMinMaxObserver):
        """Observer that is registered by the name of its class."""

    for name, kind in (
        ("test_wide", Wide),
        ("Test-Wider", Wide),
        ("testnamedbyitself", TestNamedByItself),
    ):
        assert type(load_observer(name, "weight", CHANNEL)) is kind
    with pytest.raises(ValueError, match="a second class of that name"):
        Observer.register("minmax")(Wide)


class Quantile(Observer):
    """Observer like in llm-compressor's tutorial, with statistics, keywords and history."""

    _act_sync_dict: ClassVar[dict[str, object]] = {}

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        keep = float((self.args.observer_kwargs or {}).get("keep", 1.0))
        low, high = (
            torch.amin(observed, dim=(0, -1)) * keep,
            torch.amax(observed, dim=(0, -1)) * keep,
        )
        if self.has_statistics:
            low, high = torch.minimum(low, self.min_vals), torch.maximum(high, self.max_vals)
        self.min_vals, self.max_vals = low, high


@pytest.mark.parametrize("args", [TENSOR, CHANNEL, replace(GROUP, group_size=16), BLOCK, NVFP4])
def test_subclass_with_own_statistics(args: QuantArgs) -> None:
    weight = normal(16, 64)
    own = Quantile("weight", args, keep=0.5)(weight).get_qparams()
    plain = load_observer("memoryless_minmax", "weight", args)(weight * 0.5).get_qparams()
    assert torch.equal(own["scale"], plain["scale"])
    assert (own["global_scale"] is None) == (plain["global_scale"] is None)
    inputs = Quantile("input", TENSOR)
    assert not hasattr(inputs, "min_vals")
    inputs(normal(3, 8) * 5)(normal(3, 8, seed=1))
    assert torch.equal(inputs.range()[1], (normal(3, 8) * 5).max().reshape(1))
    assert inputs.tokens == 6
