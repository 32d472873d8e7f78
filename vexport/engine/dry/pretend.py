"""Makes vLLM believe in a CUDA device of a chosen compute capability. Nothing is ever run on it.

Called before any other part of vLLM is imported, because much of vLLM asks for the platform when imported.
Where the installed vLLM is a CPU build, its missing CUDA extensions are answered for: present, but an
operator that is called raises `NotFollowed`.
"""

import sys
from types import ModuleType
from typing import NoReturn

import torch

# Compiled parts of the CUDA wheel that modules look for when they are imported.
_EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm._qutlass_C",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
_MEMORY_BYTES = 80 * 2**30
_MULTIPROCESSORS = 132
_DEVICES = 1024


class NotFollowed(RuntimeError):
    """vLLM wants something that only a real device has."""


def pretend_cuda() -> None:
    """Set vLLM's platform to a CUDA device without a driver; `set_capability` chooses which."""
    import vllm.platforms

    for name in _EXTENSIONS:
        sys.modules.setdefault(name, ModuleType(name))
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class PretendedCuda(NonNvmlCudaPlatform):  # type: ignore[misc]
        """A CUDA platform whose facts are made up."""

        capability = DeviceCapability(9, 0)

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return cls.capability

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return f"pretended SM {cls.capability.to_int()}"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return _MEMORY_BYTES

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return _MULTIPROCESSORS

        @classmethod
        def device_count(cls) -> int:
            return _DEVICES

    vllm.platforms._current_platform = PretendedCuda()
    _answer_for_operators()


def set_capability(sm: int) -> None:
    """Choose the compute capability, 90 for SM 9.0; before the first configuration of the process."""
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    type(current_platform).capability = DeviceCapability(sm // 10, sm % 10)
    # The one place where vLLM keeps an answer from the time of its import.
    if hasattr(cutlass, "CUTLASS_BLOCK_FP8_SUPPORTED"):
        cutlass.CUTLASS_BLOCK_FP8_SUPPORTED = _block_fp8(sm)


def _answer_for_operators() -> None:
    """What the CUDA wheel's own functions say of a capability: csrc/quantization/w8a8/cutlass, fp4."""
    from vllm import _custom_ops

    _custom_ops.cutlass_scaled_mm_supports_fp8 = lambda sm: sm >= 89
    _custom_ops.cutlass_scaled_mm_supports_block_fp8 = _block_fp8
    _custom_ops.cutlass_group_gemm_supported = lambda sm: 90 <= sm < 110
    _custom_ops.cutlass_scaled_mm_supports_fp4 = lambda sm: sm >= 100
    for namespace in (torch.ops._C, torch.ops._moe_C):
        namespace.__class__ = _operators_of_any_name(type(namespace))


def _block_fp8(sm: int) -> bool:
    return sm >= 90


def _operators_of_any_name(kind: type) -> type:
    """A namespace of operators in which every name exists and raises when called."""

    class AnyName(kind):  # type: ignore[misc]
        def __getattr__(self, name: str) -> object:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return _Uncallable(name)

    return AnyName


class _Uncallable:
    """Stands for an operator of the CUDA wheel."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise NotFollowed(f"the operator {self._name} runs only on a device")
