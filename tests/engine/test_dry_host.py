"""Kernels that are compiled on the host of a server."""

import pytest

from vexport.engine.dry.host import compiled_kernels


@pytest.mark.parametrize(
    ("kernel", "libraries"),
    [
        ("FlashInferFp8DeepGEMMDynamicBlockScaledKernel", ["FlashInfer", "DeepGEMM"]),
        ("FLASHINFER_CUTLASS", ["FlashInfer"]),
        ("DEEP_GEMM", ["DeepGEMM"]),
        ("BatchedDeepGemmExperts", ["DeepGEMM"]),
        ("HummingNvFp4LinearKernel", ["Humming"]),
        ("TritonExperts", ["Triton"]),
        ("MarlinLinearKernel", []),
        ("", []),
    ],
)
def test_libraries(kernel: str, libraries: list[str]) -> None:
    found = list(compiled_kernels([kernel, kernel]))
    assert [each.library for each in found] == libraries
    assert all(each.kernels == (kernel,) for each in found)
