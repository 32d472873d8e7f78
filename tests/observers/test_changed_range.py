"""Ranges that a subclass or a caller changes decide the scales, for every strategy.

The expected scales are those of compressed-tensors for the changed range.
"""

from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file

from tests.command import vexport
from tests.models import write_calibration
from tests.observers.named import load_observer
from tests.texts import assert_raises
from vexport.calibration.statistics import Statistics
from vexport.observers import (
    MemorylessMinMaxObserver,
    MemorylessMSEObserver,
    MinMaxObserver,
    MovingAverageMSEObserver,
    Observer,
    StaticMinMaxObserver,
    fit_global_scale,
)
from vexport.observers.flatten import Tiles, flatten_for_calibration

TENSOR = QuantizationArgs(num_bits=8, type="int", strategy="tensor")
CHANNEL = QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=False)
GROUP = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=16, symmetric=False)
BLOCK = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[8, 16])
NVFP4 = QuantizationArgs(
    num_bits=4,
    type="float",
    strategy="tensor_group",
    group_size=16,
    scale_dtype=torch.float8_e4m3fn,
)
TOKEN = QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True)
WEIGHTS = [TENSOR, CHANNEL, GROUP, BLOCK, NVFP4]
Range = tuple[torch.Tensor, torch.Tensor]
# Part of the observed range that every class below keeps.
PART = 0.75


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shrink(observer: Observer) -> None:
    observer.min_vals, observer.max_vals = PART * observer.min_vals, PART * observer.max_vals


class Updated(MemorylessMinMaxObserver):
    """Observer that replaces the range after `super()` observed it."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        super().update_statistics_from_observed(observed)
        shrink(self)


class InPlace(MemorylessMinMaxObserver):
    """Observer that changes the tensors of the range."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        super().update_statistics_from_observed(observed)
        self.min_vals.mul_(PART)
        self.max_vals.data.mul_(PART)


class Called(MemorylessMinMaxObserver):
    """Observer with the whole signature of `forward`."""

    def forward(
        self,
        observed: torch.Tensor,
        g_idx: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
        should_calculate_gparam: bool = False,
    ) -> object:
        answer = super().forward(observed, g_idx, global_scale, should_calculate_gparam)
        shrink(self)
        return answer


class CalledWithAll(MemorylessMinMaxObserver):
    """Observer that passes all arguments on."""

    def forward(self, *args: object, **kwargs: object) -> object:
        answer = super().forward(*args, **kwargs)  # type: ignore[arg-type]
        shrink(self)
        return answer


class CalledForScales(MemorylessMinMaxObserver):
    """Observer that changes the range only if it is asked for scales."""

    def forward(
        self,
        observed: torch.Tensor,
        g_idx: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
        should_calculate_gparam: bool = False,
    ) -> object:
        answer = super().forward(observed, g_idx, global_scale, should_calculate_gparam)
        if not should_calculate_gparam:
            shrink(self)
        return answer


class CalledWithoutAnswer(MemorylessMinMaxObserver):
    """Observer whose `forward` takes and returns as little as possible."""

    def forward(self, observed: torch.Tensor) -> None:  # type: ignore[override]
        super().forward(observed)
        shrink(self)


class Outside(MemorylessMinMaxObserver):
    """Observer that changes the range after the whole call."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        answer = super().__call__(*args, **kwargs)  # type: ignore[arg-type]
        shrink(self)
        return answer


class Ranged(MemorylessMinMaxObserver):
    """Observer that overrides `range`."""

    def range(self) -> Range:
        low, high = super().range()
        return PART * low, PART * high


class Found(MemorylessMinMaxObserver):
    """Observer that overrides `find_range`."""

    def find_range(self, tiles: Tiles) -> Range:
        low, high = super().find_range(tiles)
        return PART * low, PART * high


KINDS = [
    Updated,
    InPlace,
    Called,
    CalledWithAll,
    CalledForScales,
    CalledWithoutAnswer,
    Outside,
    Ranged,
    Found,
]


def expected_scale(
    value: torch.Tensor, base_name: str, args: QuantizationArgs, global_scale: torch.Tensor | None
) -> torch.Tensor:
    """Return compressed-tensors' scale for the part of a tensor's range, in float32."""
    flat = flatten_for_calibration(value, base_name, args)
    low, high = PART * flat.amin((0, -1)), PART * flat.amax((0, -1))
    scale: torch.Tensor = calculate_qparams(low, high, args, global_scale=global_scale)[0]
    return scale.float()


@pytest.mark.parametrize("args", WEIGHTS, ids=lambda args: args.strategy)
@pytest.mark.parametrize("kind", KINDS)
def test_changed_range_of_weights(kind: type[Observer], args: QuantizationArgs) -> None:
    weight = normal(16, 64) + 0.5
    observer = kind("weight", args)
    observer(normal(16, 64, seed=3) * 9)  # replaced by the second weight
    observer(weight)
    qparams = observer.qparams()
    if args is NVFP4:
        assert qparams["global_scale"] is not None
        whole = 448 * 6 / (PART * weight.abs().max())
        torch.testing.assert_close(qparams["global_scale"], whole.reshape(1))
    expected = expected_scale(weight, "weight", args, qparams["global_scale"])
    torch.testing.assert_close(qparams["scale"], expected, rtol=1e-5, atol=0)
    low, high = observer.range()
    assert low.shape == high.shape == qparams["scale"].shape
    torch.testing.assert_close(observer.extremes()[1], PART * weight.max())


@pytest.mark.parametrize("args", [TENSOR, TOKEN, NVFP4], ids=lambda args: args.strategy)
@pytest.mark.parametrize("kind", KINDS)
def test_changed_range_of_inputs(kind: type[Observer], args: QuantizationArgs) -> None:
    value = normal(2, 5, 32)
    observer = kind("input", args)
    observer(value * 3)
    observer(value)
    torch.testing.assert_close(observer.extremes()[1], PART * value.max())
    qparams = observer.qparams()
    expected = expected_scale(value, "input", args, qparams["global_scale"])
    torch.testing.assert_close(qparams["scale"], expected, rtol=1e-5, atol=0)
    assert observer.tokens == observer._num_observed_tokens == 20


@pytest.mark.parametrize("name", ["memoryless_minmax", "memoryless_mse", "mse", "static_minmax"])
@pytest.mark.parametrize("args", WEIGHTS, ids=lambda args: args.strategy)
def test_range_that_is_set_after_observing(name: str, args: QuantizationArgs) -> None:
    """The scales follow from both ends, also if only one end is set."""
    weight = normal(16, 64)
    both, one = (load_observer(name, "weight", args) for _ in range(2))
    for observer in (both, one):
        observer(weight)
    found = both.range()
    limit = torch.full_like(found[1], 0.25)
    both.min_vals, both.max_vals = -limit, limit
    one.max_vals = found[1] * 8
    for observer, ends in ((both, (-limit, limit)), (one, (found[0], found[1] * 8))):
        qparams = observer.qparams()
        expected = calculate_qparams(*ends, args, global_scale=qparams["global_scale"])[0].float()
        torch.testing.assert_close(qparams["scale"], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["memoryless_mse", "nvfp4_expanded_mse", "memoryless_minmax"])
@pytest.mark.parametrize("args", WEIGHTS, ids=lambda args: args.strategy)
def test_unchanged_range_keeps_the_search(name: str, args: QuantizationArgs) -> None:
    """A subclass that only looks at the statistics has the scales of its base class."""
    kind = type(load_observer(name, "weight", args))
    looked = list[float]()

    def update(self: Observer, observed: torch.Tensor) -> None:
        kind.update_statistics_from_observed(self, observed)
        looked.append(float(self.max_vals.amax()))

    def forward(self: Observer, *args: object, **kwargs: object) -> object:
        answer = kind.forward(self, *args, **kwargs)  # type: ignore[arg-type]
        looked.append(float(self.max_vals.amax()))
        return answer

    weight = normal(16, 64)
    plain = kind("weight", args)
    plain(weight)
    for method in ({"update_statistics_from_observed": update}, {"forward": forward}):
        own = type("Looking", (kind,), method)("weight", args)
        own(weight)
        assert looked
        for key, value in plain.qparams().items():
            found = own.qparams()[key]
            assert (value is None and found is None) or torch.equal(found, value)  # type: ignore[arg-type]


@pytest.mark.parametrize("args", [TENSOR, NVFP4], ids=lambda args: args.strategy)
@pytest.mark.parametrize("fuse_first", [True, False])
def test_fused_layers_share_a_changed_range(args: QuantizationArgs, fuse_first: bool) -> None:
    """A range that is changed at any time before the scales are read decides the shared scale."""
    observers: list[Observer] = [
        kind("weight", args) for kind in (MemorylessMSEObserver, Updated, MemorylessMSEObserver)
    ]
    if fuse_first:
        Observer.fuse(observers)
    for seed, observer in enumerate(observers):
        observer(normal(16, 64, seed=seed))
    if not fuse_first:
        Observer.fuse(observers)
    fit_global_scale(observers)
    observers[0].max_vals = observers[0].max_vals * 100
    highest = 100 * float(normal(16, 64).max())
    shared = [observer.qparams() for observer in observers]
    if args is NVFP4:
        for qparams in shared:
            assert qparams["global_scale"] is not None
            assert float(qparams["global_scale"]) == pytest.approx(448 * 6 / highest)
    else:
        assert all(torch.equal(each["scale"], shared[0]["scale"]) for each in shared)
        assert float(shared[0]["scale"]) == pytest.approx(
            float(observers[0].max_vals) / 127.5, rel=1e-5
        )


def test_own_statistics_over_samples() -> None:
    """A limit that a subclass applies to inputs holds for all later samples."""

    class Limited(StaticMinMaxObserver):
        """Observer with a limit."""

        def forward(self, observed: torch.Tensor) -> object:  # type: ignore[override]
            answer = super().forward(observed)
            self.max_vals.clamp_(max=2)
            return answer

    observer = Limited("input", TENSOR)
    for highest in (1.0, 7.0, 0.5):
        observer(torch.tensor([[-3.0, highest]]))
    assert [float(end) for end in observer.range()] == [-3.0, 2.0]


@pytest.mark.parametrize("args", [TENSOR, CHANNEL, GROUP, BLOCK], ids=lambda args: args.strategy)
def test_scales_of_super_are_of_the_last_weight(args: QuantizationArgs) -> None:
    class Halved(MemorylessMinMaxObserver):
        """Observer that unpacks the observer that `super()` returns."""

        def forward(self, observed: torch.Tensor) -> object:  # type: ignore[override]
            scale, zero_point = super().forward(observed)
            return scale / 2, zero_point

    observer, plain = Halved("weight", args), MemorylessMinMaxObserver("weight", args)
    observer(normal(16, 64, seed=1) * 3)
    for each in (observer, plain):
        each(normal(16, 64))
    expected = plain.qparams()["scale"] / 2
    torch.testing.assert_close(observer.qparams()["scale"], expected, rtol=1e-6, atol=0)


def test_weight_scales_of_a_whole_tensor() -> None:
    class Fixed(MemorylessMinMaxObserver):
        """Observer with fixed scales."""

        def weight_scales(
            self, tiles: Tiles, global_scale: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            scale = torch.full(tiles.qparam_shape, 0.5)
            return scale, torch.zeros_like(scale, dtype=torch.int32)

    for args in (TENSOR, CHANNEL, BLOCK):
        observer = Fixed("weight", args)
        observer(normal(16, 64))
        assert set(observer.qparams()["scale"].flatten().tolist()) == {0.5}


def test_shapes_of_changed_ranges() -> None:
    """A range may have another shape with as many groups, or broadcast to all groups."""
    weight = normal(16, 64)
    observer = load_observer("memoryless_minmax", "weight", CHANNEL)
    observer(weight)
    scale = observer.qparams()["scale"]
    observer.min_vals, observer.max_vals = weight.amin(1), weight.amax(1)
    assert torch.equal(observer.qparams()["scale"], scale)
    observer.min_vals, observer.max_vals = weight.amin(), weight.amax()
    assert observer.qparams()["scale"].shape == (16, 1)
    observer.max_vals = weight.amax(0)
    with assert_raises(ValueError, "MemorylessMinMaxObserver: max_vals", "(64,)", "(16, 1)"):
        observer.qparams()
    observer.max_vals = 1.0  # type: ignore[assignment]
    with assert_raises(ValueError, "max_vals: got float", "need a tensor"):
        observer.qparams()


def test_global_scale_of_inputs() -> None:
    """Calibration records the extremes that yield an overridden global scale."""

    class Fixed(StaticMinMaxObserver):
        """Observer with a fixed global scale."""

        def get_global_scale(self) -> torch.Tensor:
            return torch.tensor([64.0])

    args = NVFP4.model_copy(update={"dynamic": "local"})
    observer = Fixed("input", args)
    observer(normal(4, 32))
    recorded = Statistics(inputs={"layer": observer}, importance={}).ranges()["layer"]
    assert 448 * 6 / recorded.high == pytest.approx(64.0)


@pytest.mark.parametrize("kind", [MinMaxObserver, MovingAverageMSEObserver])
def test_names_of_llm_compressor(kind: type[MinMaxObserver | MovingAverageMSEObserver]) -> None:
    observer = kind("input", TENSOR, averaging_constant=0.5)
    assert observer.avg_constant == 0.5
    assert observer._num_observed_tokens is None
    observer.avg_constant = 1.0
    for factor in (1.0, 3.0):
        observer(torch.tensor([[-1.0, 1.0]]) * factor)
    assert float(observer.max_vals) > 2
    assert observer._num_observed_tokens == observer.tokens == 2
    observer._num_observed_tokens += 5
    assert observer.tokens == 7
    observer.reset()
    assert observer._num_observed_tokens is None


CODE = """
import torch
from vexport.observers import MemorylessMinMaxObserver, StaticMinMaxObserver


class Clipped(MemorylessMinMaxObserver):
    def update_statistics_from_observed(self, observed):
        super().update_statistics_from_observed(observed)
        torch.mul(self.min_vals, 0.5, out=self.min_vals)
        self.max_vals = self.max_vals / 2


class Passing(StaticMinMaxObserver):
    def forward(self, observed, *args, **kwargs):
        answer = super().forward(observed, *args, **kwargs)
        self.min_vals = self.min_vals / 2
        self.max_vals = self.max_vals / 2
        return answer
"""


@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16_G64", "NVFP4"])
def test_changed_range_from_the_command(
    scheme: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step between neighbouring values is half as large."""
    (tmp_path / "clipping.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = write_calibration(tmp_path / "text.jsonl", rows=1)
    options = ["--scheme", scheme, "--rounding", "nearest", "--no-verify"]
    options.append("--trust-remote-code")
    if scheme in ("FP8", "NVFP4"):
        options += ["--calibration", str(text), "--samples", "1"]
    names = {"whole": "memoryless_minmax", "a": "clipping:Clipped", "b": "clipping:Passing"}
    steps = {}
    for folder, name in names.items():
        inputs = ("--input-observer", name) if scheme in ("FP8", "NVFP4") else ()
        out = tmp_path / folder
        ran = vexport("quantize", llama, out, *options, "--observer", name, *inputs)
        assert ran.code == 0, ran.stderr
        steps[folder] = steps_of(load_file(out / "model.safetensors"))
    for folder in ("a", "b"):
        for key, step in steps[folder].items():
            torch.testing.assert_close(step * 2, steps["whole"][key], rtol=0.01, atol=0)


def steps_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the scales of a layer, divided by their global scale if they have one."""
    layer = "model.layers.0.mlp.down_proj"
    scale = tensors[f"{layer}.weight_scale"].float()
    if f"{layer}.weight_global_scale" in tensors:
        scale = scale / tensors[f"{layer}.weight_global_scale"]
    found = {"weight": scale}
    for name in ("input_scale", "input_global_scale"):
        if f"{layer}.{name}" in tensors:
            value = tensors[f"{layer}.{name}"].float()
            found["input"] = value if name == "input_scale" else 1 / value
    return found
