"""Say what kernels compile at the first start of a server, and what the host needs for this."""

from collections.abc import Iterable, Iterator

from vexport.records import CompiledKernels

# For each library of kernels: what its compilation on the host needs. Sources in the packages:
# flashinfer/jit/cpp_ext.py, deep_gemm's compiled extension, humming/jit/runtime.py and
# humming/utils/nvrtc.py, triton/runtime/build.py.
_NEEDS = {
    "FlashInfer": "nvcc, ninja and a C++ compiler (CXX or c++); MAX_JOBS limits the compilers that "
    "run at once, and so their memory",
    "DeepGEMM": "nvcc 12.9 or later, and the C++ compiler that nvcc calls",
    "Humming": "NVRTC, which is installed with vLLM",
    "Triton": "a C compiler (CC, gcc or clang)",
}


def compiled_kernels(kernels: Iterable[str]) -> Iterator[CompiledKernels]:
    """Yield each library that compiles some of the kernels, which are vLLM's names of them.

    A kernel can use two libraries: its name then contains both.
    """
    names = sorted({kernel for kernel in kernels if kernel})
    for library, needs in _NEEDS.items():
        word = library.casefold()
        if used := [name for name in names if word in name.replace("_", "").casefold()]:
            yield CompiledKernels(library=library, needs=needs, kernels=tuple(used))
