"""Observers, compared with golden values of llm-compressor within its rounding."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import BaseModel
from safetensors.torch import load_file

from vexport.observers import IMatrixMSEObserver, Observer
from vexport.observers.flatten import tiles_of
from vexport.observers.search import range_of

FOLDER = Path(__file__).parent / "golden"
VALUES = load_file(FOLDER / "values.safetensors")
pytestmark = pytest.mark.filterwarnings("ignore:imatrix_mse:UserWarning")


class Case(BaseModel):
    """Recorded run of llm-compressor: its arguments, and the names of the observed tensors."""

    dtype: str
    observer: str
    base_name: str
    args: dict[str, bool | int | str | list[int]]
    observed: list[str]
    fused_with_factor: int | None = None


def observe(case: Case) -> Observer:
    """Run vexport's observer on the tensors that llm-compressor's observer saw."""
    observer = new_observer(case)
    for name in case.observed:
        observer(VALUES[name])
    if case.fused_with_factor:
        other = new_observer(case)
        Observer.fuse([observer, other])
        other(VALUES[case.observed[0]] * case.fused_with_factor)
    return observer


def new_observer(case: Case) -> Observer:
    """Return vexport's observer, with importance if llm-compressor gathers it."""
    args = QuantizationArgs(**case.args)
    observer = Observer.load_from_registry(case.observer, base_name=case.base_name, args=args)
    if isinstance(observer, IMatrixMSEObserver) and case.base_name == "weight":
        activations = VALUES["activations"]
        layer = torch.nn.Linear(activations.shape[-1], 1)
        observer.attach(layer)
        layer(activations)
        observer.detach(layer)
    return observer


# The results of case n are named `n.low`, `n.scale`, ...
CASES = [
    (number, Case.model_validate(case))
    for number, case in enumerate(json.loads((FOLDER / "cases.json").read_text()))
]
# llm-compressor computes in this dtype. A rounding is 2**-(mantissa bits + 1). Scales need four.
TOLERANCES = {"float32": 2e-6, "float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-8}


@pytest.mark.parametrize("name", ["memoryless_minmax", "static_minmax", "minmax"])
def test_min_max_equals_llm_compressors(name: str) -> None:
    for number, case in CASES:
        if case.observer != name:
            continue
        observer = observe(case)
        # Stored scales have three bits of mantissa, or are powers of two. A different rounding
        # changes them by a whole step.
        stored = {"torch.float8_e4m3fn": 0.13, "torch.uint8": 1.0}.get(
            str(case.args.get("scale_dtype")), 0.0
        )
        low, high = observer.range()
        for key, value in {"low": low, "high": high, **observer.get_qparams()}.items():
            expected = VALUES.get(f"{number}.{key}")
            assert (value is None) == (expected is None), case
            if expected is not None and key != "zero_point":
                loose = stored if key == "scale" and case.dtype != "float32" else 0.0
                require_close(case, value, expected.float(), TOLERANCES[case.dtype] + loose)


def require_close(case: Case, value: object, expected: object, tolerance: float) -> None:
    torch.testing.assert_close(
        value,
        expected,
        rtol=tolerance,
        atol=0.0,
        check_dtype=False,
        msg=lambda text: f"{case}: {text}",
    )


@pytest.mark.parametrize("name", ["memoryless_mse", "mse", "imatrix_mse"])
def test_float32_searches_equal_llm_compressors(name: str) -> None:
    for number, case in CASES:
        is_nvfp4_weight = case.base_name == "weight" and case.args["strategy"] == "tensor_group"
        if case.observer == name and case.dtype == "float32" and not is_nvfp4_weight:
            for key, value in zip(("low", "high"), observe(case).range(), strict=True):
                require_close(case, value, VALUES.get(f"{number}.{key}"), 2e-6)


def test_nvfp4_range_is_not_shrunk_before_search() -> None:
    case = next(
        case
        for _, case in CASES
        if (case.observer, case.args["strategy"], case.base_name)
        == ("memoryless_mse", "tensor_group", "weight")
    )
    weight = VALUES[case.observed[0]]
    expected = range_of(tiles_of(weight, "weight", QuantizationArgs(**case.args)))
    assert all(map(torch.equal, observe(case).range(), expected))
