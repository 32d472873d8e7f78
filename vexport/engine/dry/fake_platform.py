"""Make vLLM use a fake CUDA device with a chosen compute capability, and fake ranks.

Nothing runs on the device. The functions must be called before any other part of vLLM is imported,
because many modules of vLLM read the platform when they are imported.
"""

import sys
from collections.abc import Callable, Mapping
from enum import Enum
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import NoReturn

import torch
import torch.distributed
import transformers.models.auto.image_processing_auto  # noqa: F401
from torch._C._distributed_c10d import HashStore
from torch.overrides import TorchFunctionMode

_MEMORY_BYTES = 80 * 2**30
_MULTIPROCESSORS = 132
_SHARED_MEMORY_BYTES = 227 * 2**10
_DEVICES = 1024


def is_cuda_build() -> bool:
    """Return True if torch, and so vLLM, was built for CUDA."""
    return torch.version.cuda is not None


def fake_cuda() -> None:
    """Set vLLM's platform to a CUDA device without a driver.

    `set_capability` sets its capability.
    """
    hide_cuda()
    import vllm.platforms

    # Make compiled parts of the CUDA wheel importable.
    for name in _EXTENSIONS:
        sys.modules.setdefault(name, ModuleType(name))
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class FakeCuda(NonNvmlCudaPlatform):  # type: ignore[misc]
        """A CUDA platform with made-up properties."""

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
            """Return the device of the tensors that layers create besides their parameters."""
            return torch.device("meta")

        @classmethod
        def device_count(cls) -> int:
            return _DEVICES

    vllm.platforms._current_platform = FakeCuda()
    stub_operators()
    stub_packages()
    provide_packages()
    from vllm.model_executor.model_loader import utils
    from vllm.utils import flashinfer

    # vLLM's CUDA wheel requires FlashInfer. vLLM uses it only if the host can compile its kernels.
    # None of them runs.
    vars(flashinfer).update(
        {name: _has_toolkit for name in _FLASHINFER if hasattr(flashinfer, name)}
    )
    # vLLM asks NVIDIA's server whether kernels of TRTLLM's attention can be downloaded.
    if hasattr(flashinfer, "has_nvidia_artifactory"):
        flashinfer.has_nvidia_artifactory = _yes
    # vLLM records how to reload weights, which takes as long as building the model. A dry load does
    # not need this.
    if hasattr(utils, "record_metadata_for_reloading"):
        utils.record_metadata_for_reloading = lambda model: None


def hide_cuda() -> None:
    """Replace torch's functions about CUDA devices, so that CUDA's driver is never called.

    Packages of the CUDA wheel count devices when they are imported (FlashInfer, tvm_ffi). After
    torch has called the driver, forked processes raise "Cannot re-initialize CUDA in forked
    subprocess", even if they only read a capability. Must be called before those packages
    are imported.
    """
    vars(torch.cuda).update(
        Stream=_OnDevice,
        Event=_OnDevice,
        is_available=_no,
        device_count=_zero,
        current_device=_zero,
        get_device_capability=_capability,
        get_device_properties=_properties,
        _lazy_init=_not_initialised,
    )


def set_capability(sm: int) -> None:
    """Set the compute capability (90 for SM 9.0), before the first configuration of the process."""
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    type(current_platform).capability = DeviceCapability(sm // 10, sm % 10)
    # The only place where vLLM caches a capability at import.
    if hasattr(cutlass, "CUTLASS_BLOCK_FP8_SUPPORTED"):
        cutlass.CUTLASS_BLOCK_FP8_SUPPORTED = _from_hopper(sm)


def set_toolkit(present: bool) -> None:
    """Set whether the host has a CUDA toolkit (nvcc), before the first configuration."""
    _host.toolkit, _host.asked = present, False


def asked_for_toolkit() -> bool:
    """Return True if vLLM has asked whether the host has a CUDA toolkit since `set_toolkit`."""
    return bool(_host.asked)


def join_group(tp: int, rank: int) -> None:
    """Set up vLLM's process groups with this process as rank `rank` of `tp` tensor parallel ranks.

    The other ranks do not exist, so nothing may communicate.
    """
    from vllm.distributed import parallel_state

    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
    parallel_state.initialize_model_parallel(1)
    group = parallel_state.get_tp_group()
    group.world_size, group.rank_in_group = tp, rank


# Compiled parts of the CUDA wheel that modules look for when they are imported.
_EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm._qutlass_C",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
# Packages that vLLM's CUDA wheel requires or contains, and that its model classes import:
# FlashInfer, CUTLASS's Python DSL (nvidia-cutlass-dsl, with the bindings of CUDA), Humming,
# TileLang, Quack, triton_kernels. Multimodal classes import the remaining packages for images and
# sound, which a dry load does not need.
_OPTIONAL_PACKAGES = (
    "torchvision",
    "torchaudio",
    "timm",
    "flashinfer",
    "humming",
    "cutlass",
    "cuda",
    "tilelang",
    "quack",
    "triton_kernels",
)
# Modules that only vLLM's CUDA wheel has. It contains triton_kernels, and imports it under the name
# of the package.
_TRITON_KERNELS = "vllm.third_party.triton_kernels"
_WHEEL_MODULES = ("vllm.third_party.deep_gemm", "vllm._deepselect_C", _TRITON_KERNELS)
# vLLM's functions that check whether Humming, DeepGEMM or a part of DeepGEMM can be imported.
_IMPORTABLE = ("has_humming", "has_deep_gemm", "has_deep_gemm_sparse_mqa")
# Functions of vllm/utils/flashinfer.py that decide which kernel vLLM chooses for layers or experts.
_FLASHINFER = (
    "has_flashinfer",
    "has_flashinfer_moe",
    "has_flashinfer_cutedsl",
    "has_flashinfer_bf16_fp4",
    "has_flashinfer_trtllm_fused_moe",
    "has_flashinfer_cutlass_fused_moe",
    "has_flashinfer_cutedsl_grouped_gemm_nt_masked",
    "has_flashinfer_cutedsl_moe_nvfp4",
)


class NeedsDevice(RuntimeError):
    """vLLM needs something that only a real device has."""


# Other modules of vLLM import `has_flashinfer` by value, so the answer is stored here.
_host = SimpleNamespace(toolkit=True, asked=False)


def _has_toolkit() -> bool:
    _host.asked = True
    return bool(_host.toolkit)


def _yes() -> bool:
    return True


def _no() -> bool:
    return False


def _zero() -> int:
    return 0


def _capability(device: object = None) -> tuple[int, int]:
    from vllm.platforms import current_platform

    return tuple(current_platform.get_device_capability())


def _properties(device: object = None) -> SimpleNamespace:
    major, minor = _capability()
    return SimpleNamespace(
        major=major,
        minor=minor,
        name=f"fake SM {10 * major + minor}",
        total_memory=_MEMORY_BYTES,
        multi_processor_count=_MULTIPROCESSORS,
        shared_memory_per_block_optin=_SHARED_MEMORY_BYTES,
    )


def _not_initialised() -> NoReturn:
    raise NeedsDevice("CUDA is initialised only on a device")


class PlaceholderValues(TorchFunctionMode):
    """Values for tensors without data while a model is built.

    Numbers that vLLM computes and reads back (for example slopes of ALiBi) are all 1. Tensors that
    it allocates on the GPU are on the meta device.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        read = func in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu)
        if read and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            values = torch.ones(args[0].shape, dtype=args[0].dtype, device="cpu")
            return values if func is torch.Tensor.cpu else func(values)
        given = dict(kwargs or {})
        if str(given.get("device")).startswith("cuda"):
            given["device"] = "meta"
        return func(*args, **given)


def provide_packages() -> None:
    """Make Humming, DeepGEMM and triton_kernels appear to exist.

    vLLM then chooses kernels and builds classes that need them.

    vLLM's CUDA wheel requires the package humming-kernels and contains DeepGEMM and triton_kernels
    (vllm/third_party). triton_kernels runs experts in MXFP4 on SM 90. The sparse attention indexer
    of GLM-5 and DeepSeek V3.2 raises without DeepGEMM. vLLM itself decides whether DeepGEMM
    supports a capability. The DeepGEMM library, which computes sizes and packs scales, is never
    called, because no kernel runs. Must be called before other modules of vLLM import
    `has_humming` and the other replaced functions.
    """
    from vllm.utils import deep_gemm, import_utils

    for module in (import_utils, deep_gemm):
        vars(module).update({name: _yes for name in _IMPORTABLE if hasattr(module, name)})
    if hasattr(deep_gemm, "is_deep_gemm_e8m0_used"):
        deep_gemm.is_deep_gemm_e8m0_used = _no
    if hasattr(import_utils, "import_triton_kernels"):
        import_utils.import_triton_kernels = _import_triton_kernels


def _import_triton_kernels() -> None:
    """Import the wheel's triton_kernels, or its stand-in, under the name of the package.

    vLLM's function with this name also logs the file of the package. A stand-in has no file.
    """
    sys.modules.setdefault("triton_kernels", import_module(_TRITON_KERNELS))


def stub_packages() -> None:
    """Let classes be imported without Triton and without the packages of the CUDA wheel.

    The packages for images and sound are not needed either. transformers prepares images
    differently if these packages exist. So this module imports
    transformers before the packages seem to exist.
    """
    sys.meta_path.append(_AbsentPackages())
    from vllm.triton_utils import HAS_TRITON, triton

    if not HAS_TRITON:
        triton.Config = _TritonConfig


def stub_operators() -> None:
    """Make the operators of a wheel for CUDA 12.9 or later report their support by capability.

    Sources in csrc/libtorch_stable/quantization of vLLM: w8a8/cutlass/scaled_mm_entry.cu (FP8,
    blocks, groups), fp4/nvfp4_scaled_mm_entry.cu, fp4/mxfp4_experts_quant.cu. vLLM's wrappers are
    imported first, because at import they only register operators that torch really has. After
    this function, every operator seems to exist.
    """
    import vllm._custom_ops  # noqa: F401

    answers = {
        "cutlass_scaled_mm_supports_fp8": lambda sm: sm >= 89,
        "cutlass_scaled_mm_supports_block_fp8": _from_hopper,
        "cutlass_group_gemm_supported": _from_hopper,
        "cutlass_scaled_mm_supports_fp4": lambda sm: 100 <= sm < 130,
        "mxfp4_experts_quant_supported": lambda sm: 100 <= sm < 120,
        "moe_permute_unpermute_supported": _yes,
    }
    for namespace in (torch.ops._C, torch.ops._moe_C):
        vars(namespace).update(answers)
        namespace.__class__ = type("AnyName", (_AnyOperator, type(namespace)), {})


def _from_hopper(sm: int) -> bool:
    return sm >= 90


class _AnyOperator(ModuleType):
    """A namespace of operators in which every name exists and raises when called."""

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return _Uncallable(name)


class _OnDevice:
    """Stand-in for a stream or an event.

    Layers create these when they are built, and use them only when they run.
    """


class _TritonConfig:
    """Stand-in for a choice of tile sizes.

    Modules filter these when they are imported on a CUDA platform.
    """

    num_stages = 1

    def __init__(self, *_: object, **__: object) -> None:
        """Ignore all arguments."""


class _AnyAttribute(type):
    """Metaclass: its classes can be called and subscripted, and each attribute is such a class."""

    def __getattr__(cls, name: str) -> "_AnyAttribute":
        if name.startswith("__"):
            raise AttributeError(name)
        return _any_class(name)

    def __getitem__(cls, item: object) -> "_AnyAttribute":
        """Return the class itself: `cutlass.Constexpr[int]` in an annotation."""
        return cls


class _AnyInstance:
    """Base of the stand-in classes that `_any_class` makes.

    An instance can be called, because `@cute.jit` and `@tilelang.jit(...)` are decorators.
    """

    def __init__(self, *_: object, **__: object) -> None:
        """Ignore all arguments."""

    def __call__(self, *_: object, **__: object) -> "_AnyInstance":
        return self


def _any_class(name: str) -> _AnyAttribute:
    return _AnyAttribute(name, (_AnyInstance,), {})


class _GemmType(Enum):
    """Stand-in for humming.config.GemmType. vLLM compares its values when it chooses experts."""

    DENSE = "dense"
    INDEXED = "indexed"
    GROUPED_CONTIGUOUS = "grouped_contiguous"
    GROUPED_MASKED = "grouped_masked"


class _Absent(ModuleType):
    """Stand-in for an optional package that is not installed.

    Each name in it is an empty class, with two exceptions. FlashInfer's functions return 1, because
    vLLM 0.33 calls them for sizes when it builds an attention layer. humming.config.GemmType is
    an enum.
    """

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if (self.__name__, name) == ("humming.config", _GemmType.__name__.removeprefix("_")):
            return _GemmType
        if self.__name__.startswith("flashinfer") and name.islower():
            return lambda *_, **__: 1
        return _any_class(name)


class _AbsentPackages(MetaPathFinder, Loader):
    """Import hook that returns stand-ins for optional packages that are not installed.

    It comes last in `sys.meta_path`, after the finders of installed packages.
    """

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        of_wheel = any(f"{fullname}.".startswith(f"{module}.") for module in _WHEEL_MODULES)
        wanted = of_wheel or fullname.partition(".")[0] in _OPTIONAL_PACKAGES
        return ModuleSpec(fullname, self, is_package=True) if wanted else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: there is no code to run."""


class _Uncallable:
    """Stand-in for an operator of the CUDA wheel, and for each of its overloads."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, overload: str) -> "_Uncallable":
        if overload.startswith("__"):
            raise AttributeError(overload)
        return self

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise NeedsDevice(f"the operator {self._name} only runs on a GPU")
