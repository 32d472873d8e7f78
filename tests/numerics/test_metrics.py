"""Distances between tensors and between distributions, compared with scipy."""

import math
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import numpy as np
import pytest
import torch
from compressed_tensors.quantization.utils import generate_gparam
from scipy.stats import entropy

import vexport
from tests.models import save_llama
from vexport.numerics.arithmetic import global_scale_of
from vexport.numerics.jit import PACKAGE, kernel_files
from vexport.numerics.metrics import (
    EXACT_DB,
    KL_ROWS,
    divergence_of_logits,
    kl_divergence,
    quantization_error,
    sqnr_db,
)


@pytest.mark.parametrize("lost", [math.inf, -math.inf, math.nan])
def test_nan_weight_has_no_signal(lost: float) -> None:
    exact, other = torch.tensor([3.0, 4.0]), torch.tensor([3.0, lost])
    assert quantization_error(exact, other).sqnr_db == -EXACT_DB


def test_errors_of_parts_add_up() -> None:
    exact = torch.randn(64, generator=torch.Generator().manual_seed(0))
    other = exact.round(decimals=1)
    parts = quantization_error(exact[:20], other[:20]) + quantization_error(exact[20:], other[20:])
    whole = quantization_error(exact, other)
    assert (
        parts.sqnr_db
        == whole.sqnr_db
        == pytest.approx(20 * math.log10(1 / whole.relative), abs=1e-3)
    )
    assert sqnr_db(100.0, 1.0) == 20
    assert sqnr_db(1.0, 0.0) == EXACT_DB
    assert sqnr_db(0.0, 1.0) == -EXACT_DB


def test_divergence_equals_scipys() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = [torch.randn(2 * KL_ROWS + 3, 50, generator=generator) for _ in range(2)]
    reference, measured = (torch.log_softmax(each, dim=-1) for each in logits)
    expected = entropy(reference.double().exp().numpy(), measured.double().exp().numpy(), axis=-1)
    np.testing.assert_allclose(kl_divergence(reference, measured).numpy(), expected, rtol=1e-5)
    measured[5, 0], measured[6, 1] = math.nan, -math.inf
    reference[6, 2], measured[6, 2] = -math.inf, -math.inf
    assert torch.isinf(kl_divergence(reference, measured)).nonzero().flatten().tolist() == [5, 6]
    assert kl_divergence(reference[:0], measured[:0]).shape == (0,)
    with pytest.raises(ValueError, match="log-probabilities"):
        kl_divergence(reference, measured[:, 1:])


def test_divergence_of_logits_is_sum() -> None:
    """There are more positions than are computed at a time, in a model's dtype."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(1, 150, 40, generator=generator).bfloat16() for _ in range(2)]
    expected = kl_divergence(*(values[0].float().log_softmax(-1) for values in logits)).sum()
    assert divergence_of_logits(*logits) == pytest.approx(float(expected), rel=1e-9)
    assert divergence_of_logits(logits[0], logits[0]) == 0


@pytest.mark.parametrize("largest", [1e-30, 0.03, 1.0, 448.0, 6e4])
def test_global_scale_equals_compressed_tensors(largest: float) -> None:
    peer = generate_gparam(torch.tensor([-largest]), torch.tensor([largest / 2]))
    assert global_scale_of(np.float32(largest)).tolist() == peer.tolist()


def test_global_scale_of_zeros_is_one() -> None:
    assert global_scale_of(np.float32(0.0)).tolist() == [1.0]


COMPILING = "compile kernels (only once)"


def copy_package(folder: Path) -> Path:
    """Copy the package to a folder, without compiled files."""
    package = Path(vexport.__file__).parent
    return copytree(package, folder / "vexport", ignore=ignore_patterns("__pycache__"))


def python(package: Path, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run an interpreter with a copy of the package. `folder` has the cache of compiled kernels."""
    changes = {"PYTHONPATH": str(package.parent), "NUMBA_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, **changes}
    return subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=folder, env=environment
    )


@pytest.mark.slow
def test_compiling_is_announced_once(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "model")
    package = Path(vexport.__file__).parent
    command = ("-m", "vexport", "quantize", source, "--scheme", "FP8_DYNAMIC")
    first = python(package, tmp_path, *command, tmp_path / "first").stderr
    assert first.splitlines().count(COMPILING) == 1
    assert COMPILING not in python(package, tmp_path, *command, tmp_path / "second").stderr


@pytest.mark.slow
def test_changed_constant_recompiles_kernels(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    code = (
        "import numpy as np; from vexport.numerics.arithmetic import e4m3_codes; "
        "codes = np.zeros(1, np.uint8); "
        "e4m3_codes(np.float32([1e6]), np.float32([1]), codes); print(codes[0])"
    )
    assert int(python(package, tmp_path, "-c", code).stdout) == 0x7E
    constants = package / "numerics" / "__init__.py"
    constants.write_text(constants.read_text().replace("E4M3_MAX = 448.0", "E4M3_MAX = 240.0"))
    assert int(python(package, tmp_path, "-c", code).stdout) == 0x77


def test_digest_covers_compiling_modules() -> None:
    compiling = [path for path in PACKAGE.rglob("*.py") if "@compiled(" in path.read_text()]
    assert len(compiling) > 5
    assert set(compiling) <= set(kernel_files())
