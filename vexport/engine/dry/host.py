"""Say what is compiled at the first start of a server, and what the host needs for this."""

from collections.abc import Iterable, Iterator, Mapping

from vexport.records import CompiledKernels

# For each library of kernels: what its compilation on the host needs. Sources in the packages:
# flashinfer/jit/cpp_ext.py (run_ninja, _get_num_workers) and JitSpec in jit/core.py, deep_gemm's
# compiled extension, humming/jit/runtime.py, triton/runtime/build.py. The memory of a compiler is
# FlashInfer's own estimate (MEM_PER_JOB in scripts/jit_cache_build_common.sh;
# github.com/flashinfer-ai/flashinfer/issues/3634 measured 3 to 8 GB).
_NEEDS = {
    "FlashInfer": "nvcc, ninja, a C++ compiler (CXX or c++), and up to 8 GB of memory for each "
    "compiler, of which ninja runs more than one per core unless MAX_JOBS limits them; or the "
    "package flashinfer-jit-cache of the same version, which has most kernels compiled",
    "DeepGEMM": "nvcc 12.9 or later, and the C++ compiler that nvcc calls",
    "Humming": "NVRTC, which is installed with vLLM",
    "Triton": "a C compiler (CC, gcc or clang)",
}


def compiled_kernels(parts: Iterable[Mapping[str, tuple[str, ...]]]) -> Iterator[CompiledKernels]:
    """Yield each library that compiles some of the parts of a server.

    `parts` are mappings from the name of a kernel, an attention backend or the sampler to its
    libraries.
    """
    names: dict[str, set[str]] = {}
    for name, libraries in (item for each in parts for item in each.items()):
        for library in libraries:
            names.setdefault(library, set()).add(name)
    for library, needs in _NEEDS.items():
        if library in names:
            yield CompiledKernels(
                library=library, needs=needs, kernels=tuple(sorted(names[library]))
            )
