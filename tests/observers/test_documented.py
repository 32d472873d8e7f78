"""Methods and names in llm-compressor's documents, old and new.

Each works, or its refusal names a replacement. Golden values are formulas of the documents in plain
torch, or compressed-tensors' functions.
"""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from tests.observers.named import load_observer
from tests.texts import assert_raises
from vexport.formats.arguments import QuantArgs
from vexport.observers import (
    IMatrixMSEObserver,
    MemorylessMinMaxObserver,
    MinMaxObserver,
    MovingAverageMSEObserver,
    Observer,
    fit_global_scale,
    lerp,
)

TENSOR = QuantArgs(num_bits=8, type="int", strategy="tensor")
CHANNEL = QuantArgs(num_bits=8, type="int", strategy="channel")
GROUP = QuantArgs(num_bits=4, type="int", strategy="group", group_size=16)
BLOCK = QuantArgs(num_bits=8, type="float", strategy="block", block_structure=(8, 16))
TOKEN = QuantArgs(num_bits=8, type="int", strategy="token")
HEAD = QuantArgs(num_bits=8, type="float", strategy="attn_head")
NVFP4 = QuantArgs(
    num_bits=4,
    type="float",
    strategy="tensor_group",
    group_size=16,
    scale_dtype="torch.float8_e4m3fn",
)
WEIGHT_ARGS = [TENSOR, CHANNEL, GROUP, BLOCK, NVFP4]
Pair = tuple[torch.Tensor, torch.Tensor]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def half_range(observed: torch.Tensor, reduce_dims: tuple[int, ...] | None) -> torch.Tensor:
    """Return half of the largest magnitude. Reduced dimensions have size 1."""
    if reduce_dims is None:
        return observed.abs().amax().reshape(1) / 2
    return observed.abs().amax(reduce_dims, keepdim=True) / 2


class Halved(Observer):
    """Observer in the style of older documents, which overrides one method."""

    def calculate_qparams(
        self,
        observed: torch.Tensor,
        reduce_dims: tuple[int, ...] | None = None,
        tensor_id: object = None,
        global_scale: torch.Tensor | None = None,
    ) -> Pair:
        args = self.quantization_args
        largest = {("int", 8): 127.5, ("int", 4): 7.5, ("float", 8): 448.0, ("float", 4): 6.0}
        scale = half_range(observed, reduce_dims) / largest[args.type, args.num_bits]
        scale = scale if global_scale is None else scale * global_scale
        return scale, torch.zeros_like(scale, dtype=torch.int8)


class HalvedEarlier(Observer):
    """Observer with the signature of the earliest documents."""

    def calculate_qparams(  # type: ignore[override]
        self, observed: torch.Tensor, reduce_dims: tuple[int, ...] | None = None
    ) -> Pair:
        return Halved.calculate_qparams(self, observed, reduce_dims)  # type: ignore[arg-type]


class HalvedRange(MinMaxObserver):
    """Observer that overrides the range of an older observer."""

    def calculate_updated_min_max(
        self,
        observed: torch.Tensor,
        reduce_dims: tuple[int, ...] | None = None,
        tensor_id: object = None,
        global_scale: torch.Tensor | None = None,
    ) -> Pair:
        high = half_range(observed, reduce_dims)
        return -high, high


class HalvedSearch(MovingAverageMSEObserver):
    """Observer that overrides the search of an older observer."""

    def calculate_mse_min_max(
        self,
        observed: torch.Tensor,
        reduce_dims: tuple[int, ...] | None = None,
        global_scale: torch.Tensor | None = None,
    ) -> Pair:
        high = half_range(observed, reduce_dims)
        return -high, high


class HalvedAlong(Observer):
    """Observer that overrides the range of each channel, group or token."""

    def get_qparams_along_dim(
        self,
        observed: torch.Tensor,
        dim: int | Iterable[int],
        tensor_id: object = None,
        global_scale: torch.Tensor | None = None,
    ) -> Pair:
        return super().get_qparams_along_dim(observed / 2, dim, tensor_id, global_scale)


class HalvedQParams(Observer):
    """Observer that overrides the older `get_qparams`."""

    def get_qparams(
        self,
        observed: torch.Tensor | None = None,
        g_idx: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
    ) -> Pair:
        assert observed is not None
        pair: Pair = super().get_qparams(observed / 2, g_idx, global_scale)
        return pair


class HalvedForward(Observer):
    """Observer that overrides the call, with the older signature."""

    def forward(
        self,
        observed: torch.Tensor,
        g_idx: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
        should_calculate_gparam: bool = False,
    ) -> Pair | torch.Tensor:
        if should_calculate_gparam:
            return self.get_gparam(observed / 2)
        pair: Pair = self.get_qparams(observed / 2, g_idx, global_scale)
        return pair


class HalvedStatistics(Observer):
    """Observer in the style of newer documents."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.min_vals, self.max_vals = observed.amin((0, -1)) / 2, observed.amax((0, -1)) / 2


class HalvedInput(MemorylessMinMaxObserver):
    """Observer whose newer `forward` changes its input."""

    def forward(self, observed: torch.Tensor) -> object:  # type: ignore[override]
        return super().forward(observed / 2)


HALVING = [
    Halved,
    HalvedEarlier,
    HalvedRange,
    HalvedSearch,
    HalvedQParams,
    HalvedForward,
    HalvedStatistics,
    HalvedInput,
]
# These observers halve the scale, but not the global scale.
WHOLE_GLOBAL_SCALE = (Halved, HalvedEarlier, HalvedQParams)


@pytest.mark.parametrize("args", WEIGHT_ARGS, ids=lambda args: args.strategy)
@pytest.mark.parametrize("kind", HALVING)
def test_overridden_methods_decide_weights(kind: type[Observer], args: QuantArgs) -> None:
    weight = normal(16, 64)
    observer = kind("weight", args)
    observer(weight)
    qparams = observer.qparams()
    plain = load_observer("memoryless_minmax", "weight", args)
    if args.strategy == "tensor_group" and kind in WHOLE_GLOBAL_SCALE:
        plain(weight)
        torch.testing.assert_close(
            qparams["global_scale"], plain.qparams()["global_scale"], rtol=0, atol=0
        )
        expected = (plain.qparams()["scale"] / 2).to(torch.float8_e4m3fn).float()
        torch.testing.assert_close(qparams["scale"], expected, rtol=0.07, atol=0)
        return
    plain(weight / 2)
    for name, expected_value in plain.qparams().items():
        found = {**qparams}[name]
        assert (found is None) == (expected_value is None)
        if expected_value is not None:
            torch.testing.assert_close(found, expected_value, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        observer.max_vals.abs().amax(), (weight / 2).abs().amax(), rtol=0.07, atol=0
    )


@pytest.mark.parametrize("kind", [*HALVING, HalvedAlong])
def test_overridden_methods_decide_inputs(kind: type[Observer]) -> None:
    """Inputs are static with one scale, with a scale for each position, or with a global scale."""
    value = normal(2, 5, 32)
    for args in (TOKEN,) if kind is HalvedAlong else (TENSOR, replace(NVFP4, dynamic="local")):
        observer, plain = kind("input", args), load_observer("memoryless_minmax", "input", args)
        observer(value)
        halves_global = args.strategy == "tensor_group" and kind in WHOLE_GLOBAL_SCALE
        plain(value if halves_global else value / 2)
        assert observer.tokens == 10
        assert observer.has_statistics
        for name in ("global_scale",) if args.strategy == "tensor_group" else ("scale",):
            found, expected = ({**each.qparams()}[name] for each in (observer, plain))
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        largest = (torch.stack(each.extremes()).abs().max() for each in (observer, plain))
        torch.testing.assert_close(*largest, rtol=1e-6, atol=0)


def test_overridden_scale_per_head() -> None:
    states = normal(2, 4, 7, 16)
    observer = Halved("k", HEAD)
    observer(states)
    expected = states.abs().amax((0, 2, 3)) / 2 / 448
    assert torch.equal(observer.qparams()["scale"].flatten(), expected)
    assert observer.qparams()["scale"].shape == (4, 1, 1)


class Shifted(Observer):
    """Observer with an asymmetric scale and a zero point."""

    def calculate_qparams(
        self,
        observed: torch.Tensor,
        reduce_dims: tuple[int, ...] | None = None,
        tensor_id: object = None,
        global_scale: torch.Tensor | None = None,
    ) -> Pair:
        low, high = observed.amin(reduce_dims or (), True), observed.amax(reduce_dims or (), True)
        scale = (high - low) / 15
        return scale, (-8 - low / scale).round().clamp(-8, 7).to(torch.int8)


def test_zero_points_of_an_override() -> None:
    weight = normal(8, 32) + 3
    args = replace(GROUP, symmetric=False)
    observer = Shifted("weight", args)
    observer(weight)
    groups = weight.reshape(8, 2, 16)
    scale = (groups.amax(-1) - groups.amin(-1)) / 15
    assert torch.equal(observer.qparams()["scale"], scale)
    zeros = (-8 - groups.amin(-1) / scale).round().clamp(-8, 7)
    assert torch.equal(observer.qparams()["zero_point"], zeros.to(torch.int32))


class Numbered(Observer):
    """Observer that records its arguments."""

    def calculate_qparams(
        self,
        observed: torch.Tensor,
        reduce_dims: tuple[int, ...] | None = None,
        tensor_id: object = None,
        global_scale: torch.Tensor | None = None,
    ) -> Pair:
        calls = vars(self).setdefault("calls", [])
        calls.append((tuple(observed.shape), reduce_dims, tensor_id))
        return super().calculate_qparams(observed, reduce_dims, tensor_id, global_scale)

    def post_calculate_qparams(self) -> None:
        vars(self).setdefault("calls", []).append("post")


@pytest.mark.parametrize(
    ("args", "calls"),
    [
        (TENSOR, [((16, 32), None, None)]),
        (CHANNEL, [((16, 32), (1,), None)]),
        (GROUP, [((16, 16), (1,), 0), ((16, 16), (1,), 1)]),
        (
            replace(BLOCK, block_structure=(8, 32)),
            [((8, 32), (0, 1), (0, 0)), ((8, 32), (0, 1), (1, 0))],
        ),
    ],
    ids=lambda each: getattr(each, "strategy", ""),
)
def test_documented_arguments(args: QuantArgs, calls: list[object]) -> None:
    observer = Numbered("weight", args)
    observer(normal(16, 32))
    assert vars(observer)["calls"] == [*calls, "post"]


def test_hook_after_scales() -> None:
    class Posted(MemorylessMinMaxObserver):
        """Observer that overrides only the hook."""

        done = 0

        def post_calculate_qparams(self) -> None:
            self.done += 1

    observer = Posted("weight", CHANNEL)
    observer(normal(4, 8))
    observer.qparams()
    assert observer.done == 1


class QuarteredGlobalScale(Observer):
    """Observer with a quarter of the usual global scale. Scales relative to it are as usual."""

    def calculate_gparam(self, observed: torch.Tensor) -> torch.Tensor:
        return 448 * 6 / (4 * observed.abs().max())


@pytest.mark.parametrize("base_name", ["weight", "input"])
def test_overridden_global_scale(base_name: str) -> None:
    value = normal(16, 32)
    args = NVFP4 if base_name == "weight" else replace(NVFP4, dynamic="local")
    observer = QuarteredGlobalScale(base_name, args)
    observer(value)
    global_scale = observer.qparams()["global_scale"]
    assert global_scale is not None
    torch.testing.assert_close(global_scale, (448 * 6 / (4 * value.abs().max())).reshape(1))
    torch.testing.assert_close(observer.extremes()[1], 4 * value.abs().max())
    if base_name == "weight":
        steps = value.reshape(16, 2, 16).abs().amax(-1) / 6 * global_scale
        assert torch.equal(observer.qparams()["scale"], steps.to(torch.float8_e4m3fn).float())


def test_fused_layers_share_overridden_scales() -> None:
    weights = normal(8, 32), normal(8, 32, seed=1) * 5
    for args in (NVFP4, replace(TENSOR, type="float")):
        own, plain = (
            [kind("weight", args) for _ in weights] for kind in (Halved, MemorylessMinMaxObserver)
        )
        for observers in (own, plain):
            Observer.fuse(observers)
            for observer, weight in zip(observers, weights, strict=True):
                observer(weight)
        name = "global_scale" if args is NVFP4 else "scale"
        first, second = ({**observer.qparams()}[name] for observer in own)
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        expected = {**plain[0].qparams()}[name]
        assert isinstance(expected, torch.Tensor)
        torch.testing.assert_close(first, expected if args is NVFP4 else expected / 2)


def test_unused_overrides_are_refused() -> None:
    """The error names the replacement. A helper that the class calls is accepted."""

    class Earlier(Observer):
        """Observer of a generation between old and new."""

        def get_min_max(self, observed: torch.Tensor) -> Pair:
            return observed.amin((0, -1)), observed.amax((0, -1))

    class Both(HalvedStatistics):
        """Observer with two methods that both set the range."""

        def calculate_qparams(self, observed: torch.Tensor) -> Pair:  # type: ignore[override]
            return observed, observed

    class Helped(Observer):
        """Observer that calls its helper."""

        def get_min_max(self, observed: torch.Tensor) -> Pair:
            return observed.amin((0, -1)), observed.amax((0, -1))

        def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
            self.min_vals, self.max_vals = self.get_min_max(observed)

    for kind, overridden in ((Earlier, "get_min_max"), (Both, "calculate_qparams")):
        parts = (overridden, "update_statistics_from_observed")
        with assert_raises(ValueError, *parts):
            Observer.register("test_refused")(kind)
        with assert_raises(ValueError, *parts):
            kind("weight", CHANNEL)
    Helped("weight", CHANNEL)(normal(4, 8))


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("get_min_max", "update_statistics_from_observed"),
        ("get_current_min_max", "update_statistics_from_observed"),
        ("get_global_min_max", "get_global_scale"),
        ("get_current_global_min_max", "get_global_scale"),
    ],
)
def test_replaced_methods_name_replacement(name: str, replacement: str) -> None:
    kind = type("Earlier", (Observer,), {name: lambda self, observed: (observed, observed)})
    with pytest.raises(ValueError, match=f"{name}: .*; override {replacement} instead"):
        kind("weight", NVFP4)


def test_overridden_get_global_scale() -> None:
    class Fixed(MemorylessMinMaxObserver):
        """Observer whose global scale does not follow the values."""

        def get_global_scale(self) -> torch.Tensor:
            return torch.tensor([100.0])

    weight = normal(16, 32)
    observer = Fixed("weight", NVFP4)
    observer(weight)
    found = observer.qparams()
    assert torch.equal(observer.get_global_scale(), torch.tensor([100.0]))
    assert found["global_scale"] is not None
    assert torch.equal(found["global_scale"], torch.tensor([100.0]))
    steps = weight.reshape(16, 2, 16).abs().amax(-1) / 6 * 100
    assert torch.equal(found["scale"], steps.to(torch.float8_e4m3fn).float())


def test_overridden_token_count() -> None:
    class Rows(MemorylessMinMaxObserver):
        """Observer that counts rows instead of tokens."""

        def record_observed_tokens(self, observed: torch.Tensor) -> None:
            self.tokens += observed.shape[0]

    usual = load_observer("static_minmax", "input", TENSOR)
    usual.record_observed_tokens(torch.zeros(2, 3, 8))
    assert usual.tokens == 6
    own = Rows("input", TENSOR)
    own(torch.zeros(2, 3, 8))
    assert own.tokens == 2


def test_class_in_file_is_refused() -> None:
    with assert_raises(ValueError, "observers.py:Halved", "imported"):
        Observer.load_from_registry("observers.py:Halved", base_name="weight", args=CHANNEL)


def test_wrong_scales_of_an_override_are_refused() -> None:
    class Wrong(Observer):
        """Observer that returns one scale for all channels."""

        def calculate_qparams(self, observed: torch.Tensor, reduce_dims: object = None) -> Pair:  # type: ignore[override]
            return torch.ones(1), torch.zeros(1)

    class Nothing(Observer):
        """Observer that returns no zero point."""

        def calculate_qparams(self, observed: torch.Tensor, reduce_dims: object = None) -> Pair:  # type: ignore[override]
            return torch.ones(1)  # type: ignore[return-value]

    with pytest.raises(ValueError, match=r"Wrong: weight: got .*\(1,\).* need .*\(4, 1\)"):
        Wrong("weight", CHANNEL)(normal(4, 8))
    with assert_raises(ValueError, "got Tensor", "a scale and a zero point"):
        Nothing("weight", TENSOR)(normal(4, 8))


def test_wrong_ranges_of_an_override_are_refused() -> None:
    class OneEnd(Observer):
        """Observer that returns only one end of a range."""

        def calculate_updated_min_max(self, observed: torch.Tensor) -> Pair:  # type: ignore[override]
            return torch.ones(1)  # type: ignore[return-value]

    with assert_raises(ValueError, "calculate_updated_min_max: got Tensor", "ends of a range"):
        OneEnd("weight", TENSOR)(normal(4, 8))


def test_older_constructors() -> None:
    weight = normal(4, 32)
    for observer in (
        MemorylessMinMaxObserver(quantization_args=CHANNEL),
        MemorylessMinMaxObserver(CHANNEL),
        Observer.load_from_registry("memoryless_minmax", quantization_args=CHANNEL),
    ):
        scale, zero_point = observer(weight)
        torch.testing.assert_close(scale, weight.abs().amax(1, keepdim=True) / 127.5)
        assert observer.base_name == "weight"
        latest = observer.get_qparams()
        assert isinstance(latest, tuple)
        assert torch.equal(latest[0], scale)
        assert torch.equal(latest[1], zero_point)
    searching = MovingAverageMSEObserver(
        TENSOR, maxshrink=0.5, patience=7, averaging_constant=0.1, grid=50.0
    )
    same = load_observer("mse", "weight", TENSOR, {"maxshrink": 0.5, "patience": 7, "grid": 50.0})
    assert searching.averaging_constant == 0.1
    assert torch.equal(searching(weight)[0], same(weight)[0])
    with assert_raises(ValueError, "quantization arguments"):
        MinMaxObserver(CHANNEL, CHANNEL)


def test_older_observers_average_over_calls() -> None:
    """The attributes from the documents have a history for each tensor id."""
    observer = MinMaxObserver(quantization_args=TENSOR, averaging_constant=0.5)
    for factor in (1.0, 2.0):
        observer(torch.tensor([[-1.0, 1.0]]) * factor)
    torch.testing.assert_close(observer.max_vals, torch.tensor([1.5]))
    for factor in (1.0, 2.0):
        low, high = observer.calculate_updated_min_max(torch.tensor([[-1.0, 1.0]]) * factor)
    assert (low.item(), high.item()) == (-1.5, 1.5)
    assert observer.max_val["default"].item() == 1.5
    observer.calculate_updated_min_max(torch.ones(2, 2), tensor_id="other")
    assert observer.max_val["other"].item() == 1.0
    observer.reset()
    assert observer.max_val == {}


class Mine(Observer):
    """Observer in the style of older documents, with its constructor and keywords."""

    def __init__(self, quantization_args: QuantArgs, part: float = 1.0, **kwargs: object) -> None:
        super().__init__(quantization_args=quantization_args)
        self.part = part

    def calculate_qparams(
        self,
        observed: torch.Tensor,
        reduce_dims: tuple[int, ...] | None = None,
        tensor_id: object = None,
        global_scale: torch.Tensor | None = None,
    ) -> Pair:
        scale, zero_point = super().calculate_qparams(
            observed, reduce_dims, tensor_id, global_scale
        )
        return scale * self.part, zero_point


@pytest.mark.parametrize("base_name", ["weight", "input"])
def test_older_constructor(base_name: str) -> None:
    args = replace(TENSOR, observer_kwargs={"part": 0.25})
    observer = load_observer_of(Mine, base_name, args)
    observer(normal(3, 16))
    assert observer.base_name == base_name
    expected = normal(3, 16).abs().max().reshape(1) / 127.5 / 4
    torch.testing.assert_close(observer.get_qparams()["scale"], expected)


def load_observer_of(kind: type[Observer], base_name: str, args: QuantArgs) -> Observer:
    return kind.create(base_name, args, {})


def test_older_calls() -> None:
    weight = normal(8, 32)
    observer = load_observer("memoryless_minmax", "weight", NVFP4)
    global_scale = observer(weight, should_calculate_gparam=True)
    assert isinstance(global_scale, torch.Tensor)
    torch.testing.assert_close(global_scale, (448 * 6 / weight.abs().max()).reshape(1))
    assert torch.equal(global_scale, observer.get_gparam(weight))
    assert torch.equal(global_scale, observer.calculate_gparam(weight))
    scale, zero_point = observer(weight, global_scale=global_scale)
    assert torch.equal(scale, observer.get_qparams()["scale"])
    scale_of_half, _ = observer.get_qparams(weight, global_scale=global_scale * 0.5)
    steps = weight.reshape(8, 2, 16).abs().amax(-1) / 6 * global_scale * 0.5
    assert torch.equal(scale_of_half, steps.to(torch.float8_e4m3fn).float())
    with assert_raises(ValueError, "got strategy channel", "need tensor_group"):
        load_observer("minmax", "weight", CHANNEL).get_gparam(weight)
    for name in ("memoryless_minmax", "minmax"):
        along, zeros = load_observer(name, "weight", CHANNEL).get_qparams_along_dim(weight, 0)
        torch.testing.assert_close(along, weight.abs().amax(1, keepdim=True) / 127.5)
        assert zeros.shape == (8, 1)
    both, _ = load_observer("minmax", "weight", CHANNEL).get_qparams_along_dim(
        normal(2, 3, 4), {0, 1}
    )
    assert both.shape == (2, 3, 1)
    answer = load_observer("minmax", "weight", CHANNEL)(weight)
    assert torch.equal(answer[0], answer.get_qparams()["scale"])


def test_search_by_older_name() -> None:
    weight = normal(6, 64)
    observer = load_observer("memoryless_mse", "weight", CHANNEL)
    observer(weight)
    low, high = observer.calculate_mse_min_max(weight, (1,))  # type: ignore[operator]
    assert torch.equal(low, observer.min_vals)
    assert torch.equal(high, observer.max_vals)
    assert low.shape == (6, 1)


@pytest.mark.parametrize("name", ["memoryless_minmax", "memoryless_mse"])
@pytest.mark.parametrize("args", [GROUP, NVFP4], ids=lambda args: args.strategy)
def test_g_idx_maps_columns_to_groups(name: str, args: QuantArgs) -> None:
    weight, order = normal(8, 64), torch.randperm(64, generator=torch.Generator().manual_seed(3))
    g_idx = torch.empty(64, dtype=torch.int32)
    g_idx[order] = torch.arange(64, dtype=torch.int32) // 16
    mapped, ordered, unmapped = (load_observer(name, "weight", args) for _ in range(3))
    mapped(weight, g_idx=g_idx)
    ordered(weight[:, torch.argsort(g_idx, stable=True)])
    unmapped(weight, g_idx=torch.full((64,), -1))
    assert torch.equal(mapped.qparams()["scale"], ordered.qparams()["scale"])
    plain = load_observer(name, "weight", args)(weight)
    assert torch.equal(unmapped.qparams()["scale"], plain.get_qparams()["scale"])
    with pytest.raises(ValueError, match="g_idx: got 8 columns, need 64"):
        mapped(weight, g_idx=g_idx[:8])


def test_groups_of_different_sizes() -> None:
    weight, g_idx = normal(4, 32), torch.tensor([1] * 5 + [0] * 20 + [2] * 7)
    observer = load_observer("memoryless_minmax", "weight", GROUP)
    observer(weight, g_idx=g_idx)
    expected = torch.stack([weight[:, g_idx == group].abs().amax(1) for group in range(3)], 1) / 7.5
    torch.testing.assert_close(observer.qparams()["scale"], expected)


def test_importance_follows_g_idx() -> None:
    weight, g_idx = normal(4, 32), torch.arange(32) % 2
    inputs = normal(64, 32, seed=1) * torch.linspace(0.1, 3, 32)
    scales = []
    for columns, each in ((torch.arange(32), g_idx), (torch.argsort(g_idx, stable=True), None)):
        layer = torch.nn.Linear(32, 4)
        observer = IMatrixMSEObserver("weight", GROUP, strict=True)
        observer.attach(layer)
        layer(inputs[:, columns])
        observer(weight[:, columns], g_idx=each)
        scales.append(observer.qparams()["scale"])
    assert torch.equal(*scales)


def test_importance_of_earlier_pass_is_kept() -> None:
    layer, inputs = torch.nn.Linear(16, 4), normal(3, 5, 16)
    first = IMatrixMSEObserver("weight", CHANNEL, strict=True)
    first.attach(layer)
    layer(inputs)
    first.detach(layer)
    torch.testing.assert_close(vars(layer)["_imatrix_sum"].float(), inputs.square().sum((0, 1)))
    assert int(vars(layer)["_imatrix_count"]) == 15
    second = IMatrixMSEObserver("weight", CHANNEL, strict=True)
    second.attach(layer)
    layer(inputs * 100)
    second.detach(layer)
    assert int(vars(layer)["_imatrix_count"]) == 15
    first(layer.weight)
    second(layer.weight)
    assert torch.equal(first.qparams()["scale"], second.qparams()["scale"])


@pytest.mark.parametrize("name", ["memoryless_minmax", "memoryless_mse"])
@pytest.mark.parametrize("args", WEIGHT_ARGS, ids=lambda args: args.strategy)
def test_ranges_of_weights_are_attributes(name: str, args: QuantArgs) -> None:
    weight = normal(16, 64)
    observer = load_observer(name, "weight", args)
    assert not hasattr(observer, "min_vals")
    observer(weight)
    shape = {"tensor": (1,), "channel": (16, 1), "block": (2, 4)}.get(args.strategy, (16, 4))
    assert observer.min_vals.shape == observer.max_vals.shape == shape
    if name == "memoryless_minmax" and args.strategy == "channel":
        assert torch.equal(observer.max_vals, weight.amax(1, keepdim=True))
    observer(weight * 2)
    assert observer.max_vals.amax() == pytest.approx(2 * float(weight.amax()), rel=0.2)


def test_registered_names() -> None:
    names = Observer.registered_names()
    assert {"memoryless_minmax", "static_minmax", "minmax", "mse", "imatrix_mse"} <= {*names}
    assert "fouroversix" in Observer.registered_aliases()
    assert "fouroversix" not in names
    assert Observer.get_value_from_registry("Memoryless-MinMax") is MemorylessMinMaxObserver

    class Valued(MemorylessMinMaxObserver):
        """Observer that is registered by a call."""

    Observer.register_value(Valued, name="test_valued", alias="test_value")
    assert "test_valued" in Observer.registered_names()
    assert type(load_observer("test-value", "weight", CHANNEL)) is Valued


def test_observers_are_internal_modules() -> None:
    from compressed_tensors.registry import RegistryMixin
    from compressed_tensors.utils import InternalModule, match_named_modules

    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model[0].register_module("weight_observer", load_observer("minmax", "weight", CHANNEL))
    found = [name for name, _ in match_named_modules(model, ["re:.*"])]
    assert "0" in found
    assert not [name for name in found if "observer" in name]
    assert issubclass(Observer, InternalModule)
    assert issubclass(Observer, RegistryMixin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_lerp(dtype: torch.dtype) -> None:
    start, end = torch.tensor([0.0, 4.0], dtype=dtype), torch.tensor([8.0, 0.0], dtype=dtype)
    assert torch.equal(lerp(start, end, 0.25), torch.tensor([2.0, 3.0], dtype=dtype))


def test_fitted_global_scale_of_uniform_weights() -> None:
    """If all fused weights have about the same magnitude, a smaller global scale loses less."""
    weights = [normal(64, 256).sign() * (1 + 0.01 * normal(64, 256, seed=seed)) for seed in (1, 2)]
    observers = [load_observer("nvfp4_expanded_mse", "weight", NVFP4) for _ in weights]
    Observer.fuse(observers)
    losses = []
    for fitted in (False, True):
        for observer, weight in zip(observers, weights, strict=True):
            observer(weight)
        if fitted:
            fit_global_scale(observers)
        assert torch.equal(*(observer.qparams()["global_scale"] for observer in observers))  # type: ignore[arg-type]
        losses.append(
            sum(loss(each, weight) for each, weight in zip(observers, weights, strict=True))
        )
    assert losses[1] < losses[0]


def loss(observer: Observer, weight: torch.Tensor) -> float:
    """Return the sum of squared errors of a weight in NVFP4."""
    qparams = observer.qparams()
    assert qparams["global_scale"] is not None
    steps = (qparams["scale"] / qparams["global_scale"]).unsqueeze(-1)
    groups = weight.reshape(*steps.shape[:2], 16)
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((-values, values))
    nearest = values[((groups / steps).unsqueeze(-1) - values).abs().argmin(-1)]
    return float((nearest * steps - groups).square().sum())
