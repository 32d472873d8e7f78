"""Makes vLLM believe in a CUDA device of a chosen compute capability. Nothing is ever run on it.

Called before any other part of vLLM is imported, because much of vLLM asks for the platform when imported.
"""

import torch

from vexport.engine.dry.stand_ins import (
    stand_in_for_device,
    stand_in_for_flashinfer,
    stand_in_for_operators,
    stand_in_for_packages,
    stand_in_for_reloading,
    supports_block_fp8,
)

_MEMORY_BYTES = 80 * 2**30
_MULTIPROCESSORS = 132
_DEVICES = 1024


def pretend_cuda() -> None:
    """Set vLLM's platform to a CUDA device without a driver; `set_capability` chooses which."""
    import vllm.platforms

    stand_in_for_device()
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
        def current_device(cls) -> torch.device:
            """Where layers put the tensors that they make beside their parameters."""
            return torch.device("meta")

        @classmethod
        def device_count(cls) -> int:
            return _DEVICES

    vllm.platforms._current_platform = PretendedCuda()
    stand_in_for_operators()
    stand_in_for_packages()
    stand_in_for_flashinfer()
    stand_in_for_reloading()


def set_capability(sm: int) -> None:
    """Choose the compute capability, 90 for SM 9.0; before the first configuration of the process."""
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    type(current_platform).capability = DeviceCapability(sm // 10, sm % 10)
    # The one place where vLLM keeps an answer from the time of its import.
    if hasattr(cutlass, "CUTLASS_BLOCK_FP8_SUPPORTED"):
        cutlass.CUTLASS_BLOCK_FP8_SUPPORTED = supports_block_fp8(sm)
