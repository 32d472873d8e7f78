"""What is compiled on the host of a server."""

from vexport.engine.dry.host import compiled_kernels


def test_libraries_of_all_cells_are_joined() -> None:
    cells = (
        {"FlashInferBackend": ("FlashInfer",), "DeepGemmExperts": ("DeepGEMM", "Triton")},
        {"attention FLASHINFER": ("FlashInfer",)},
    )
    found = {each.library: each.kernels for each in compiled_kernels(cells)}
    assert found == {
        "FlashInfer": ("FlashInferBackend", "attention FLASHINFER"),
        "DeepGEMM": ("DeepGemmExperts",),
        "Triton": ("DeepGemmExperts",),
    }
    assert [*compiled_kernels([])] == []
