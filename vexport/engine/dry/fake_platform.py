"""Makes vLLM believe in a CUDA device of a chosen compute capability, and in ranks. Nothing is run on it.

Called before any other part of vLLM is imported, because much of vLLM asks for the platform when imported.
"""

import torch
import torch.distributed
from torch._C._distributed_c10d import HashStore

from vexport.engine.dry.stubs import (
    stub_device,
    stub_flashinfer,
    stub_operators,
    stub_packages,
    stub_reloading,
    supports_block_fp8,
)

_MEMORY_BYTES = 80 * 2**30
_MULTIPROCESSORS = 132
_DEVICES = 1024


def fake_cuda() -> None:
    """Set vLLM's platform to a CUDA device without a driver; `set_capability` chooses which."""
    import vllm.platforms

    stub_device()
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class FakeCuda(NonNvmlCudaPlatform):  # type: ignore[misc]
        """A CUDA platform whose facts are made up."""

        capability = DeviceCapability(9, 0)

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return cls.capability

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return f"fake SM {cls.capability.to_int()}"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return _MEMORY_BYTES

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return _MULTIPROCESSORS

        @classmethod
        def current_device(cls) -> torch.device:
            """Where layers put the tensors that they make besides their parameters."""
            return torch.device("meta")

        @classmethod
        def device_count(cls) -> int:
            return _DEVICES

    vllm.platforms._current_platform = FakeCuda()
    stub_operators()
    stub_packages()
    stub_flashinfer()
    stub_reloading()


def set_capability(sm: int) -> None:
    """Choose the compute capability, 90 for SM 9.0; before the first configuration of the process."""
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    type(current_platform).capability = DeviceCapability(sm // 10, sm % 10)
    # The one place where vLLM keeps an answer from the time of its import.
    if hasattr(cutlass, "CUTLASS_BLOCK_FP8_SUPPORTED"):
        cutlass.CUTLASS_BLOCK_FP8_SUPPORTED = supports_block_fp8(sm)


def join_group(tp: int, rank: int) -> None:
    """Set up vLLM's groups for one process, then let the tensor parallel one claim to be `rank` of `tp`.

    Nothing may communicate: the other ranks do not exist.
    """
    from vllm.distributed import parallel_state

    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
    parallel_state.initialize_model_parallel(1)
    group = parallel_state.get_tp_group()
    group.world_size, group.rank_in_group = tp, rank
