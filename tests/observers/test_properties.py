"""What holds for every shape and every value."""

from itertools import permutations
from typing import cast

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given, settings
from hypothesis import strategies as st

from vexport.observers import Observer, flatten_for_calibration
from vexport.observers.qparams import fake_quantize

INT8 = {"num_bits": 8, "type": "int"}
INT4 = {"num_bits": 4, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn",
}
WEIGHTS: tuple[dict[str, object], ...] = (
    {**FP8, "strategy": "tensor"},
    {**INT8, "strategy": "channel"},
    {**INT4, "strategy": "group", "group_size": 16},
    NVFP4,
    {**FP8, "strategy": "block", "block_structure": [4, 8]},
)
ACTIVATIONS: tuple[dict[str, object], ...] = (
    {**FP8, "strategy": "tensor"},
    {**INT8, "strategy": "token", "dynamic": True},
    {**INT8, "strategy": "group", "group_size": 16, "dynamic": True},
    {**NVFP4, "dynamic": "local"},
)
STATES: tuple[dict[str, object], ...] = ({**FP8, "strategy": "tensor"}, {**FP8, "strategy": "attn_head"})
few = settings(max_examples=30, deadline=None)
sizes = st.integers(1, 9)
seeds = st.integers(0, 2**31)


def quantization_args(given_args: dict[str, object]) -> QuantizationArgs:
    return QuantizationArgs(**given_args)


def unflatten(
    flat: torch.Tensor, args: dict[str, object], shape: torch.Size, *, state: bool = False
) -> torch.Tensor:
    """The inverse of `flatten_for_calibration`; padding is cut off."""
    if state:
        batch, heads, length, size = shape
        return flat.reshape(batch, length, heads, size).transpose(1, 2)
    if args.get("strategy") != "block":
        return flat.reshape(shape)
    _, rows, columns, _ = flat.shape
    height, width = cast(tuple[int, int], args["block_structure"])
    blocks = flat.reshape(rows, columns, height, width).transpose(1, 2)
    return blocks.reshape(rows * height, columns * width)[: shape[0], : shape[1]]


def normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@few
@given(st.sampled_from(WEIGHTS), sizes, sizes, seeds)
def test_unflattening_a_weight_is_the_inverse(
    args: dict[str, object], rows: int, groups: int, seed: int
) -> None:
    columns = groups * 16 if "group_size" in args else groups
    weight, quant = normal((rows, columns), seed), quantization_args(args)
    flat = flatten_for_calibration(weight, "weight", quant)
    assert flat.shape[0] == 1
    assert torch.equal(unflatten(flat, args, weight.shape), weight)


@few
@given(st.sampled_from(ACTIVATIONS), sizes, sizes, st.booleans(), seeds)
def test_unflattening_an_activation_is_the_inverse(
    args: dict[str, object], batch: int, length: int, flat_input: bool, seed: int
) -> None:
    shape = (batch * length, 32) if flat_input else (batch, length, 32)
    value, quant = normal(shape, seed), quantization_args(args)
    flat = flatten_for_calibration(value, "input", quant)
    assert torch.equal(unflatten(flat, args, value.shape), value)


@few
@given(st.sampled_from(STATES), sizes, sizes, sizes, seeds)
def test_unflattening_a_state_is_the_inverse(
    args: dict[str, object], batch: int, heads: int, length: int, seed: int
) -> None:
    value, quant = normal((batch, heads, length, 8), seed), quantization_args(args)
    flat = flatten_for_calibration(value, "k", quant)
    assert flat.shape[0] == batch * length
    assert torch.equal(unflatten(flat, args, value.shape, state=True), value)


@few
@given(st.sampled_from(("memoryless_minmax", "memoryless_mse")), sizes, sizes, seeds)
def test_padding_never_changes_a_scale(name: str, rows: int, columns: int, seed: int) -> None:
    """Zeros that fill up blocks give the scales of the same weight with those zeros written out."""
    args = quantization_args(WEIGHTS[-1])
    weight = normal((rows, columns), seed)
    padded = torch.nn.functional.pad(weight, (0, -columns % 8, 0, -rows % 4))
    scales = [
        Observer.load_from_registry(name, base_name="weight", args=args)(value).get_qparams()["scale"]
        for value in (weight, padded)
    ]
    assert torch.equal(*scales)
    if name == "memoryless_minmax":
        assert scales[0][-1, -1].item() == pytest.approx(
            weight[(rows - 1) // 4 * 4 :, (columns - 1) // 8 * 8 :].abs().max().item() / 448, rel=1e-6
        )


@few
@given(
    st.sampled_from((WEIGHTS[0], NVFP4)),
    st.sampled_from(("memoryless_minmax", "memoryless_mse")),
    st.booleans(),
    seeds,
)
def test_fusing_is_order_independent(args: dict[str, object], name: str, before: bool, seed: int) -> None:
    weights = [normal((4, 32), seed + number) * (number + 1) for number in range(3)]
    results = []
    for order in permutations(range(3)):
        observers = {
            number: Observer.load_from_registry(name, base_name="weight", args=quantization_args(args))
            for number in order
        }
        if before:
            Observer.fuse(observers.values())
        for number, observer in observers.items():
            observer(weights[number])
        if not before:
            Observer.fuse(observers.values())
        results.append([observers[number].get_qparams() for number in range(3)])
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            assert torch.equal(one["scale"], other["scale"])
            assert str(one["global_scale"]) == str(other["global_scale"])
    first, second, third = results[0]
    if args is NVFP4:
        assert str(first["global_scale"]) == str(third["global_scale"])
    else:
        assert torch.equal(first["scale"], second["scale"])


@few
@given(
    st.sampled_from(
        (WEIGHTS[1], WEIGHTS[2], {**INT4, "strategy": "group", "group_size": 16, "symmetric": False})
    ),
    seeds,
    st.floats(1e-3, 1e3),
)
def test_quantizing_changes_a_value_in_range_by_half_a_step_at_most(
    args: dict[str, object], seed: int, size: float
) -> None:
    """A symmetric range has one integer less above zero, so its largest value may be out of range."""
    quant = quantization_args(args)
    weight = normal((4, 32), seed) * size
    observer = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=quant)
    qparams = observer(weight).get_qparams()
    scale, zero_point = qparams["scale"].unsqueeze(-1), qparams["zero_point"].float().unsqueeze(-1)
    values = flatten_for_calibration(weight, "weight", quant)[0]
    back = fake_quantize(values, scale, zero_point, quant)
    highest = (2 ** (quant.num_bits - 1) - 1 - zero_point) * scale
    lowest = (-(2 ** (quant.num_bits - 1)) - zero_point) * scale
    inside = (values <= highest) & (values >= lowest)
    error = (back - values).abs()
    assert bool((error <= scale * 0.5 * (1 + 1e-5)).expand_as(inside)[inside].all())
    assert bool((error <= scale * (1 + 1e-5)).all())


@few
@given(sizes, sizes, st.sampled_from((ACTIVATIONS[0], *ACTIVATIONS[2:])), seeds)
@pytest.mark.parametrize("name", ["memoryless_minmax", "static_minmax", "minmax", "memoryless_mse", "mse"])
def test_inputs_of_experts_give_the_same_statistics(
    name: str, batch: int, length: int, args: dict[str, object], seed: int
) -> None:
    value, quant = normal((batch, length, 32), seed), quantization_args(args)
    observers = [Observer.load_from_registry(name, base_name="input", args=quant) for _ in range(2)]
    for scale in (1.0, 2.0, 0.5):
        observers[0](value * scale)
        observers[1]((value * scale).reshape(-1, 32))
    first, second = observers
    assert first.tokens == second.tokens == 3 * batch * length
    assert torch.equal(first.range()[0], second.range()[0])
    assert torch.equal(first.range()[1], second.range()[1])
