"""Describe a loaded engine: versions, settings, and the kernel that runs each layer."""

import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

from vexport.engine.kernels import activation_bits, kernel_of
from vexport.records import EngineInfo
from vexport.scenario.serve import EngineArguments

if TYPE_CHECKING:
    from vllm import LLM

# Roundings that a scheme requires and that kernels of the CPU build leave out. Measured, or found
# in the code of vLLM's model_executor/kernels/linear.
_SKIPPED_ROUNDINGS = {
    "CPUFp8BlockScaledMMKernel": "FP8 block activations stay in the model's dtype "
    "(scaled_mm/cpu.py)",
    # From vLLM 0.33 on.
    "CPUFp8ChannelWiseScaledMMLinearKernel": "FP8 activations stay in the model's dtype "
    "(scaled_mm/cpu.py)",
    "CPUFp8PerTensorScaledMMLinearKernel": "static FP8 input scales are ignored (scaled_mm/cpu.py)",
    "EmulationMxfp8LinearKernel": "MXFP8 activations stay in the model's dtype "
    "(mxfp8/emulation.py)",
}
_UNTESTED_ON_CPU = "the rounding order and the shape limits of GPU kernels"
_CAUSAL = "attention in both directions inside a picture, which the CPU build computes as for text"
NONE = "none"
# Layer number that separates the decoder's name from the module's name within the layer.
_LAYER = re.compile(r"\.\d+\.")
_KERNEL_VARIABLES = re.compile(
    r"VLLM_(\w+_)?(AITER|ALLREDUCE|ATTENTION_BACKEND|BATCH_INVARIANT|DEEP_GEMM|EMULATION|FLASHINFER|FP4|FP8|"
    r"HUMMING|INT4|KERNELS?|MARLIN|MLA|MOE|MXFP[48]|NVFP4|PRECISION|QUANT|QUANTIZATION|REDUCE|SAMPLER|SKINNY|"
    r"TRITON)(_\w+)?"
)
# Variables that match _KERNEL_VARIABLES but do not affect responses: paths, sizes, and the variable
# that vexport always sets to the same value.
_UNRELATED = re.compile(r"_(CACHE|DIR|SIZE|THREADS)(_|$)|^VLLM_CPU_INT4_W4A8$")


class DescribeKernels:
    """Mixin for vLLM's worker (`worker_extension_cls`).

    Its methods can be called in the worker by name.
    """

    def vexport_kernels(self) -> list[list[str]]:
        """Return five texts for each linear or expert layer.

        They are the layer's name, its scheme, its kernel, the roundings that the kernel leaves out,
        and the number of bits of the kernel's inputs. The last text is empty if it is unknown.
        """
        model: torch.nn.Module = self.model_runner.get_model()  # type: ignore[attr-defined]
        return [
            [name, *_describe_layer(layer)]
            for name, layer in model.named_modules()
            if hasattr(layer, "quant_method")
            and hasattr(layer, "weight_loader")
            and "Embedding" not in type(layer.quant_method).__name__
        ]


def _describe_layer(layer: torch.nn.Module) -> tuple[str, str, str, str]:
    scheme = getattr(layer, "scheme", None) or layer.quant_method
    chosen, name = kernel_of(scheme)
    bits = activation_bits(scheme, chosen, name)
    if not name and getattr(scheme, "use_batch_invariant", False):
        # With VLLM_BATCH_INVARIANT, vLLM 0.33 dequantizes INT4 weights instead of calling a kernel.
        name = "dequantized, batch-invariant"
    kernel = name or type(layer.quant_method).__name__
    return type(scheme).__name__, kernel, _skipped_roundings(layer, scheme, kernel), str(bits or "")


def _skipped_roundings(layer: torch.nn.Module, scheme: object, kernel: str) -> str:
    if type(scheme).__module__.endswith("w8a8_int8") and getattr(
        scheme, "is_static_input_scheme", False
    ):
        return "static INT8 input scales are ignored (scaled_mm/cpu.py)"
    if getattr(layer, "use_w4a8", False):
        return "weight-only INT4 ran with INT8 activations (mixed_precision/cpu.py)"
    emulated = f"{kernel} replaces the GPU kernel" if "Emulation" in kernel else ""
    return "; ".join(filter(None, (emulated, _SKIPPED_ROUNDINGS.get(kernel))))


def describe(llm: "LLM", given: EngineArguments, *, start_seconds: float) -> EngineInfo:
    """Return the EngineInfo of a loaded engine that was started with the arguments `given`.

    The kernels are read in the engine's worker processes, which may run on other hosts.
    """
    from vllm import __version__ as vllm_version
    from vllm.platforms import current_platform

    # All tensor parallel ranks have the same layers. Each stage of a pipeline has different layers.
    rows = [row for rank in llm.collective_rpc("vexport_kernels") for row in rank]
    on_cpu = current_platform.is_cpu()
    spots = dict.fromkeys(row[3] for row in rows if row[3])
    if on_cpu and _is_causal_in_pictures(llm):
        spots[_CAUSAL] = None
    # `mlp.down_proj: Kernel (Scheme)`, once for each kind of layer and kernel, in the model's
    # order.
    kernels = dict.fromkeys(
        f"{_LAYER.split(name)[-1]}: {kernel}" + (f" ({scheme})" if scheme != kernel else "")
        for name, scheme, kernel, *_ in rows
    )
    config = llm.llm_engine.vllm_config
    untested_ranks = (
        ", and collectives" if config.parallel_config.world_size > 1 else ", and tensor parallelism"
    )
    mode = config.compilation_config.mode
    return EngineInfo(
        vllm=vllm_version,
        torch=torch.__version__,
        transformers=transformers.__version__,
        platform=str(current_platform.device_type),
        processor=_processor() if on_cpu else str(current_platform.get_device_name()),
        dtype=str(llm.llm_engine.model_config.dtype).removeprefix("torch."),
        compilation=str(getattr(mode, "name", mode)),  # a number or an enum, by the version
        settings=_settings(llm, given),
        multiprocess=os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "1",
        emulated=any("Emulation" in row[2] for row in rows),
        kernels=tuple(kernels),
        input_bits=min((int(row[4]) for row in rows if row[4]), default=None),
        blind_spots=(_UNTESTED_ON_CPU + untested_ranks, *spots) if on_cpu else (),
        start_seconds=start_seconds,
    )


def _is_causal_in_pictures(llm: "LLM") -> bool:
    """Return True for a model such as Gemma 3 if the CPU's attention is causal inside pictures.

    On other platforms, vLLM refuses such an attention. On a CPU there is no choice of attentions.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    needs_both = getattr(llm.llm_engine.model_config, "is_mm_prefix_lm", False)
    return bool(needs_both) and not CPUAttentionBackend.supports_mm_prefix()


def _settings(llm: "LLM", given: EngineArguments) -> dict[str, str]:
    """Return the engine's settings as text, including vLLM's defaults.

    The keys are names in EngineArgs, except `engine_args`, which has all other given arguments as
    JSON, and `environment`. `kv_cache_dtype` is the given value, because vLLM's resolved value
    depends on the checkpoint.
    """
    config = llm.llm_engine.vllm_config
    recorded = {
        "tensor_parallel_size": str(config.parallel_config.tensor_parallel_size),
        "pipeline_parallel_size": str(config.parallel_config.pipeline_parallel_size),
        "distributed_executor_backend": str(config.parallel_config.distributed_executor_backend),
        "gpu_memory_utilization": str(config.cache_config.gpu_memory_utilization),
        "max_num_seqs": str(config.scheduler_config.max_num_seqs),
        "kv_cache_dtype": str(given.get("kv_cache_dtype", "auto")),
        "max_model_len": str(config.model_config.max_model_len),
    }
    # EngineInfo.compilation has the effect of enforce_eager.
    known = (*recorded, "enforce_eager")
    others = {name: value for name, value in given.items() if name not in known}
    return {
        **recorded,
        "engine_args": json.dumps(others, sort_keys=True) if others else "none",
        "environment": kernel_environment(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = set(re.findall(r"\b(amx_tile|avx512_bf16|avx512f|avx2)\b", text))
    found = [flag for flag in ("amx_tile", "avx512_bf16", "avx512f", "avx2") if flag in flags]
    return (
        f"{name.group(1) if name else platform.machine()} "
        f"({', '.join(found) or platform.machine()})"
    )


def kernel_environment(environment: Mapping[str, str] = os.environ) -> str:
    """Return the variables in the environment that affect responses: `VLLM_BATCH_INVARIANT=1`.

    Return "none" if no such variable is set.
    """
    names = (
        name
        for name in sorted(environment)
        if _KERNEL_VARIABLES.fullmatch(name) and not _UNRELATED.search(name)
    )
    return " ".join(f"{name}={environment[name]}" for name in names) or NONE
