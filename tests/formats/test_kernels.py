"""The kernels that vLLM takes, by the order of each version; tests/engine/test_dry_agrees.py asks vLLM."""

import pytest

from vexport.architectures.versions import facts_of, known_versions
from vexport.formats.arguments import UNQUANTIZED_BITS
from vexport.formats.kernels import Multiplication, is_weight_only, kernel_of
from vexport.formats.schemes import all_schemes, get_scheme
from vexport.version import PINNED, Version

SM = (75, 80, 86, 89, 90, 100, 120)
SHAPE = (1024, 1024)


def kernel(
    scheme: str, sm: int, version: Version = PINNED, shape: tuple[int, int] = SHAPE, *, float16: bool = False
) -> str | None:
    known = get_scheme(scheme)
    asked = Multiplication(args=known.args, shape=shape, sm=sm, float16=float16)
    return kernel_of(known.format, asked, facts_of(version))


def test_a_kernel_for_weights_alone_is_where_inputs_stay_as_they_are() -> None:
    """Two tables that say the same: the kernels' names, and `gpu_support` of the formats."""
    for scheme in all_schemes():
        support = scheme.format.gpu_support(scheme.args)
        for sm in SM:
            found = kernel(scheme.name, sm)
            if support.package or support.refuses(sm):
                continue
            assert found is not None, (scheme.name, sm)
            assert is_weight_only(found) is (support.bits(sm) == UNQUANTIZED_BITS), (scheme.name, sm, found)


@pytest.mark.parametrize(
    ("scheme", "sm", "shape", "name"),
    [
        ("W4A16", 90, SHAPE, "MacheteLinearKernel"),
        ("W4A16", 90, (1032, 1024), "MarlinLinearKernel"),
        ("W4A16", 100, SHAPE, "MarlinLinearKernel"),
        ("NVFP4", 89, SHAPE, "MarlinNvFp4LinearKernel"),
        ("NVFP4", 120, SHAPE, "FlashInferCutlassNvFp4LinearKernel"),
        ("NVFP4A16", 100, SHAPE, "FlashInferCuteDslNvFp4W4A16LinearKernel"),
        ("NVFP4A16", 120, SHAPE, "MarlinNvFp4LinearKernel"),
        ("MXFP8", 100, (1024, 64), "MarlinMxfp8LinearKernel"),
        ("FP8", 100, SHAPE, "FlashInferFP8ScaledMMLinearKernel"),
        ("FP8_DYNAMIC", 100, SHAPE, "CutlassFP8ScaledMMLinearKernel"),
        ("W2A16", 90, SHAPE, None),
        ("W4A16", 87, SHAPE, None),
    ],
)
def test_shape_and_gpu_choose(scheme: str, sm: int, shape: tuple[int, int], name: str | None) -> None:
    assert kernel(scheme, sm, shape=shape) == name


def test_the_dtype_chooses() -> None:
    assert kernel("W4A16_G256", 80) == "TritonW4A16LinearKernel"
    assert kernel("W4A16_G256", 80, float16=True) == "ExllamaLinearKernel"


@pytest.mark.parametrize("version", known_versions())
def test_every_version_has_kernels_for_the_usual_schemes(version: Version) -> None:
    for scheme in ("FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "W8A8", "NVFP4"):
        assert all(kernel(scheme, sm, version) for sm in SM), scheme
