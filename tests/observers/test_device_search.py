"""Searches in torch choose the same as the compiled kernels, on the CPU and on another device.

`test_search_kernels` compares the kernels with a float64 search.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.forked import finish, start
from tests.observers.named import load_observer
from tests.observers.test_search_kernels import (
    IMATRIX_SHRINKS,
    INT4,
    INT4_ASYMMETRIC,
    INT8,
    SHRINKS,
    heavy_tailed,
)
from tests.quantize.second_device import NAME, register
from vexport.formats.schemes import get_scheme
from vexport.numerics.number_formats import (
    BFLOAT16,
    E2M1,
    E4M3,
    E8M0,
    FLOAT16,
)
from vexport.observers import IMatrixMSEObserver, Importance, Observer, search
from vexport.observers import device_search as by_torch
from vexport.observers.mse import fit_global_scale
from vexport.observers.search import CANDIDATE_SLACK, Search

FORMATS = {
    "int4": INT4,
    "int4-asymmetric": INT4_ASYMMETRIC,
    "int8": INT8,
    "e2m1": E2M1,
    "e4m3": E4M3,
    "mxfp4": E2M1._replace(scale_storage=E8M0),
    "int4-bf16": INT4._replace(scale_storage=BFLOAT16),
    "int4-fp16": INT4_ASYMMETRIC._replace(scale_storage=FLOAT16),
}
EXPANDED = [1 - step / 100 for step in range(56)]
# Observers by scheme for which a device searches the weights' scales.
OBSERVERS_BY_SCHEME = {
    "NVFP4": ("memoryless_minmax", "memoryless_mse", "fouroversix", "nvfp4_expanded_imatrix"),
    "W4A16": ("memoryless_minmax", "memoryless_mse", "imatrix_mse"),
    "W4A16_ASYM": ("imatrix_mse",),
    "MXFP4": ("memoryless_mse",),
    "FP8": ("memoryless_mse",),
    "FP8_BLOCK": ("memoryless_mse",),
}


def importance_of(rows: int, columns: int) -> torch.Tensor:
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(1)) ** 4


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("unit", [1.0, 2.0**-110, 1e34])
def test_grid_search(name: str, unit: float) -> None:
    form = FORMATS[name]
    narrow = form.scale_storage == FLOAT16 and unit != 1.0  # beyond the range of the scales
    groups = heavy_tailed(60, 128, torch.float32) * (1.0 if narrow else unit)
    for importance, norm in ((None, 2.4), (importance_of(3, 128), 3.0)):
        expected = search.search_grid_groups(
            groups, form, SHRINKS, norm=norm, importance=importance, expand=1.25
        )
        found = by_torch.search_grid_groups(
            groups, form, SHRINKS, norm=norm, importance=importance, expand=1.25
        )
        assert torch.equal(found.low, expected.low)
        assert torch.equal(found.high, expected.high)
        assert torch.equal(found.step, expected.step)
        assert found.improved == expected.improved


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_special_groups(value: float) -> None:
    groups = torch.full((4, 128), value)
    expected = search.search_grid_groups(groups, INT4, SHRINKS, norm=2.4)
    found = by_torch.search_grid_groups(groups, INT4, SHRINKS, norm=2.4)
    assert torch.equal(found.step, expected.step)
    assert torch.equal(found.low.isfinite(), expected.low.isfinite())


@pytest.mark.parametrize("shrinks", [SHRINKS, IMATRIX_SHRINKS, EXPANDED])
@pytest.mark.parametrize("weighs", [False, True])
def test_block_scales(shrinks: Sequence[float], weighs: bool) -> None:
    expand = 1.8 if shrinks is EXPANDED else 1.0
    groups = heavy_tailed(64, 256, torch.float32).view(64, 16, 16)
    groups[3, 5] = 0
    global_scale = torch.tensor([2688.0 / float(groups.abs().max())])
    importance = importance_of(1, 256).view(1, 1, 16, 16) if weighs else None
    candidates = Search(factors=tuple(shrinks), expand=expand, norm=2.4, patience=0)
    expected = search.block_scales(groups, global_scale, candidates, importance)
    found = by_torch.block_scales(
        groups,
        global_scale,
        largest=max(shrinks) * expand * (1 + CANDIDATE_SLACK),
        smallest=min(shrinks) * expand * (1 - CANDIDATE_SLACK),
        norm=2.4,
        importance=importance,
    )
    assert torch.equal(found, expected)


def qparams(scheme: str, name: str, device: str) -> list[torch.Tensor]:
    """Return scales, zero points and global scales of two fused weights, computed on a device."""
    args = get_scheme(scheme).args.weights
    observers: list[Observer] = []
    for seed in range(2):
        observer = load_observer(name, "weight", args)
        if isinstance(observer, IMatrixMSEObserver):
            observer.gathered = Importance(importance_of(1, 256)[0].to(device), tokens=1)
        observers.append(observer(heavy_tailed(64, 256, torch.float32, seed).to(device)))
    Observer.fuse(observers)
    fit_global_scale(observers)
    found: list[torch.Tensor] = []
    for observer in observers:
        assert all(bool(torch.isfinite(end)) for end in observer.extremes())
        values = observer.qparams()
        scales = (values["scale"], values["zero_point"], values["global_scale"])
        found += [value.to("cpu") for value in scales if value is not None]
    return found


def require_equal_searches() -> None:
    """Compare all searches on the second device with the CPU's. Kernels refuse its tensors."""
    registered = register()
    for scheme, names in OBSERVERS_BY_SCHEME.items():
        for name in names:
            expected = qparams(scheme, name, "cpu")
            found = qparams(scheme, name, NAME)
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected)), (scheme, name)
    del registered


@pytest.mark.slow
def test_searches_run_on_the_device(tmp_path: Path) -> None:
    log = tmp_path / "log"
    finish(start(log, require_equal_searches), log)
