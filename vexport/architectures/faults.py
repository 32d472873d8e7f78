"""Known faults of vLLM: their kernels and layers, and a test of vLLM's source for each.

`FAULTS` is the table. Each entry has a predicate that reads files of a vLLM version. It returns
True if the fault is in them, False if it is repaired, and None if it finds neither. So an entry
expires by itself when a version repairs it. scripts/generate_faults.py runs the predicates on
vLLM's wheels and writes the results to `generated/faults.json`. A dry load runs them on the vLLM
that it uses.
"""

import __future__

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

from vexport.architectures.tables import FOLDER
from vexport.version import Version

# Returns the text of a file of vLLM (`vllm/_custom_ops.py`), or "" if there is no such file.
Source = Callable[[str], str]
Predicate = Callable[[Source], bool | None]
LayerGroup = Literal["linear", "experts", "head"]
# "fewer-bits": the kernel rounds inputs to fewer bits than the checkpoint has.
Effect = Literal["crash", "wrong-numbers", "fewer-bits", "slow"]
_LAYERS = "vllm/model_executor/layers"
_CT = f"{_LAYERS}/quantization/compressed_tensors"
_KERNELS = "vllm/model_executor/kernels/linear"
_CUTLASS = f"{_KERNELS}/scaled_mm/cutlass.py"
_TRTLLM_MOE = f"{_LAYERS}/fused_moe/experts/trtllm_nvfp4_moe.py"
# DeepGEMM compiles its kernels from these files.
_DEEP_GEMM = "vllm/third_party/deep_gemm/include/deep_gemm/impls"
_MXFP4_MOE = f"{_CT}/compressed_tensors_moe/compressed_tensors_moe_w4a4_mxfp4.py"
# CutlassFP8ScaledMMLinearKernel pads the sides of weights to multiples of this. INT8 layers with
# other sides run in Triton instead of CUTLASS (`cutlass_scaled_mm` in vllm/_custom_ops.py).
_CUTLASS_ALIGNMENT = 16
# FlashInfer's mm_mxfp8 refuses weights with smaller sides.
_LEAST_MXFP8_SIDE = 128
# Rows of a block of FP8 weights.
_BLOCK_ROWS = 128
# GPUs without FP8 in hardware.
_BEFORE_ADA = (75, 80, 86, 87, 88)
_BLACKWELL = (100, 101, 103, 107, 110, 120, 121)
_THREADS = "https://github.com/vllm-project/vllm/issues/"
_PULLS = "https://github.com/vllm-project/vllm/pull/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLayer:
    """A layer and its kernel, as far as they are known.

    `stored` and `runs` are precisions such as W4A16. `sides` are the rows (out_features) and
    columns of the weight on a rank. Unknown values are empty. `gated` is False for experts whose
    activation has no gate. `blocks` is True if each block of the weight has a scale.
    """

    name: str
    group: LayerGroup
    kernel: str
    stored: str = ""
    runs: str = ""
    sides: tuple[int, ...] = ()
    gated: bool = True
    blocks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A known fault of vLLM.

    `kernels` matches the names of vLLM's kernels with the fault. `sms` are the compute capabilities
    with the fault; if it is empty, the kernel alone decides. `concerns` returns True for layers
    with the fault. `layers` and `library` say in a few words which layers these are, and whose
    kernels. `repaired` is the first version without the fault, empty if there is none. `remedy`
    says how to avoid it. If vLLM itself raises an error at the first batch, `message` is its text
    for a compute capability, and the fault counts as a refusal.
    """

    name: str
    effect: Effect
    layers: str
    library: str
    what: str
    remedy: str
    repaired: str
    thread: str
    groups: tuple[LayerGroup, ...]
    kernels: re.Pattern[str]
    predicate: Predicate
    sms: tuple[int, ...] = ()
    concerns: Callable[[RunningLayer], bool] = lambda layer: True
    message: str = ""

    @property
    def breaks(self) -> bool:
        """Return True if a server with the fault crashes, or gives wrong answers."""
        return self.effect in ("crash", "wrong-numbers")

    def is_on(self, sm: int, layer: RunningLayer) -> bool:
        """Return True if a version with the fault has it in this layer on this GPU."""
        return (
            layer.group in self.groups
            and (not self.sms or sm in self.sms)
            and self.kernels.search(layer.kernel) is not None
            and self.concerns(layer)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyLayer:
    """A layer with a known fault. `is_known` is False if the source of vLLM did not show it."""

    fault: str
    layer: str
    kernel: str
    is_known: bool


def faults_of(
    values: Mapping[str, bool | None], sm: int, layers: Iterable[RunningLayer]
) -> Iterator[FaultyLayer]:
    """Yield the known faults of these layers on a GPU.

    `values` are the results of the predicates: those of a recorded version (`recorded_faults`), or
    of the vLLM at hand (`found_in`). An entry without a result is unknown. A layer needs at least
    its name, its group and its kernel. Entries that concern only some sizes or precisions are
    skipped if these are unknown.
    """
    for layer in layers:
        for fault in FAULTS.values():
            value = values.get(fault.name)
            if value is not False and fault.is_on(sm, layer):
                yield FaultyLayer(
                    fault=fault.name, layer=layer.name, kernel=layer.kernel, is_known=value is True
                )


def recorded_faults(version: Version) -> tuple[Version, Mapping[str, bool | None]]:
    """Return the recorded results of the predicates for a version of vLLM.

    If the version is not recorded, they are those of the nearest recorded version before it, or
    else of the oldest. This version is returned as well.
    """
    table = _recorded()
    nearest = max((each for each in table if each <= version), default=min(table))
    return nearest, table[nearest]


@cache
def _recorded() -> dict[Version, dict[str, bool | None]]:
    table = json.loads(FOLDER.joinpath("faults.json").read_text(encoding="utf-8"))
    parts = {name: name.split(".") for name in table}
    return {(int(major), int(minor)): table[name] for name, (major, minor) in parts.items()}


def found_in(source: Source) -> dict[str, bool | None]:
    """Return the result of each predicate for a version of vLLM. An exception is None."""
    found: dict[str, bool | None] = {}
    for fault in FAULTS.values():
        found[fault.name] = None
        with suppress(Exception):  # source text of another version may raise anything
            found[fault.name] = fault.predicate(source)
    return found


def installed_source(packages: Path) -> Source:
    """Return a function that reads the files of the vLLM in a folder of packages."""

    def text(name: str) -> str:
        file = packages / name
        return file.read_text(encoding="utf-8") if file.is_file() else ""

    return text


def _function(source: Source, file: str, name: str, of_class: str = "") -> ast.FunctionDef | None:
    nodes: list[ast.AST] = [*ast.walk(ast.parse(source(file)))]
    if of_class:
        nodes = [
            line
            for node in nodes
            if isinstance(node, ast.ClassDef) and node.name == of_class
            for line in node.body
        ]
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef))
    return next((node for node in functions if node.name == name), None)


def _text(node: ast.AST | None) -> str:
    return "" if node is None else ast.unparse(node)


def _call(function: ast.FunctionDef, *arguments: object, **names: object) -> object:
    """Run a function of vLLM alone, with stand-ins for the names that it uses."""
    function.decorator_list = []
    module = ast.Module(body=[function], type_ignores=[])
    annotations = __future__.annotations.compiler_flag
    space: dict[str, object] = dict(names)
    exec(compile(module, "vllm", "exec", flags=annotations, dont_inherit=True), space)
    run = space[function.name]
    assert callable(run)
    return run(*arguments)


def _head_lacks_attributes(source: Source) -> bool | None:
    """Humming's kernels read attributes of linear layers that an output head must set."""
    head = source(f"{_LAYERS}/vocab_parallel_embedding.py")
    attributes = ("output_partition_sizes", "has_bias", "params_dtype")
    return any(f"self.{attribute} = " not in head for attribute in attributes) if head else None


def _padding_sets_loader_twice(source: Source) -> bool | None:
    """`set_weight_attrs` refuses to replace the attribute weight_loader of a parameter."""
    name = "process_weights_after_loading"
    text = _text(_function(source, _CUTLASS, name, "CutlassFP8ScaledMMLinearKernel"))
    return "set_weight_attrs(" in text and "padded_weight_loader" in text if text else None


def _weights_alone_get_inputs(source: Source) -> bool | None:
    """The class of MXFP4 weights does not receive the inputs of the config group."""
    choose = f"{_CT}/compressed_tensors.py"
    for node in ast.walk(ast.parse(source(choose))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "self._is_mxfp4(weight_quant)":
            return "CompressedTensorsW4A4Mxfp4()" in ast.unparse(node.body[0])
    return None


def _is_supported(source: Source, kernel: str, sm: int) -> bool | None:
    """A kernel of CUTLASS accepts a GPU for which its library has no code."""
    function = _function(source, _CUTLASS, "is_supported", kernel)
    if function is None:
        return None
    cuda = SimpleNamespace(is_cuda=lambda: True)
    answer = _call(function, None, sm, current_platform=cuda, cutlass_fp8_supported=lambda: False)
    return isinstance(answer, tuple) and bool(answer[0])


def _deep_gemm_without_kernels(source: Source, sm: int, kernels: str) -> bool | None:
    """CudaPlatform.support_deep_gemm is True on a GPU for which DeepGEMM has no kernels.

    vLLM's CPU build has no files of DeepGEMM: the result is then None.
    """
    function = _function(source, "vllm/platforms/cuda.py", "support_deep_gemm")
    if function is None:
        return None
    platform = SimpleNamespace(
        is_device_capability=lambda each: each == sm,
        is_device_capability_family=lambda each: each // 10 == sm // 10,
        has_device_capability=lambda each: sm >= each,
    )
    if not _call(function, platform):
        return False
    has_files = bool(source(f"{_DEEP_GEMM}/smxx_layout.cuh"))
    return not source(f"{_DEEP_GEMM}/{kernels}") if has_files else None


def _no_grouped_gemm_on_120(source: Source) -> bool | None:
    """cutlass_group_gemm_supported refuses SM 120 before it asks the compiled kernels."""
    function = _function(source, "vllm/_custom_ops.py", "cutlass_group_gemm_supported")
    if function is None:
        return None
    kernels = SimpleNamespace(cutlass_group_gemm_supported=lambda sm: True)
    torch = SimpleNamespace(ops=SimpleNamespace(_C=kernels))
    return not _call(function, 120, torch=torch)


def _experts_ignore_backend(source: Source) -> bool | None:
    """The method of MXFP4 experts takes CUTLASS on each GPU that has it."""
    text = _text(_function(source, _MXFP4_MOE, "__init__"))
    return "CutlassExpertsMxfp4._supports_current_device()" in text if text else None


def _mxfp8_ignores_sizes(source: Source) -> bool | None:
    """FlashInfer's kernels for MXFP8 accept weights of every size."""
    file = f"{_KERNELS}/mxfp8/flashinfer.py"
    text = _text(_function(source, file, "can_implement", "FlashInferCutlassMxfp8LinearKernel"))
    return "weight_shape" not in text if text else None


def _blocks_ignore_rows(source: Source) -> bool | None:
    """CUTLASS's kernel for blocks of FP8 neither refuses nor pads rows that fill no block."""
    kernel = "CutlassFp8BlockScaledMMKernel"
    text = _text(_function(source, _CUTLASS, "can_implement", kernel))
    pads = _function(source, _CUTLASS, "process_weights_after_loading", kernel)
    return "weight_shape" not in text and pads is None if text else None


def _trtllm_accepts_ungated(source: Source) -> bool | None:
    """TRTLLM's experts in NVFP4 accept activations without a gate."""
    name, kernel = "_supports_no_act_and_mul", "TrtLlmNvFp4Experts"
    function = _function(source, _TRTLLM_MOE, name, f"{kernel}Monolithic")
    function = function or _function(source, _TRTLLM_MOE, name, f"{kernel}Base")
    return None if function is None else bool(_call(function))


_ENTRIES = (
    Fault(
        name="humming-head",
        effect="crash",
        layers="quantized output head",
        library="Humming",
        what="it reads output_partition_sizes and has_bias, which vLLM does not set for an output "
        "head, and fails after the weights are loaded",
        remedy="quantize again with the head in ignore",
        repaired="0.31",
        thread=f"{_THREADS}48856",
        groups=("head",),
        kernels=re.compile(r"^Humming"),
        predicate=_head_lacks_attributes,
    ),
    Fault(
        name="cutlass-fp8-padding",
        effect="crash",
        layers="FP8, a side on a rank not a multiple of 16",
        library="CUTLASS",
        what="it pads a weight with a side that is not a multiple of 16, and sets weight_loader a "
        "second time, which raises an AssertionError after the weights are loaded",
        remedy="serve it on another number of GPUs, or keep these layers unquantized",
        repaired="0.33",
        thread=f"{_THREADS}47005",
        groups=("linear", "head"),
        kernels=re.compile(r"^CutlassFP8ScaledMMLinearKernel$"),
        predicate=_padding_sets_loader_twice,
        concerns=lambda layer: any(side % _CUTLASS_ALIGNMENT for side in layer.sides),
    ),
    Fault(
        name="cutlass-fp8-before-ada",
        effect="crash",
        layers="FP8 of other methods than compressed-tensors",
        library="CUTLASS",
        what="it accepts this GPU, for which CUTLASS has no FP8 kernel, and fails when it runs",
        remedy="set VLLM_DISABLED_KERNELS=CutlassFP8ScaledMMLinearKernel",
        repaired="0.31",
        thread=f"{_THREADS}55008",
        groups=("linear", "head"),
        kernels=re.compile(r"^CutlassFP8ScaledMMLinearKernel$"),
        predicate=partial(_is_supported, kernel="CutlassFP8ScaledMMLinearKernel", sm=80),
        sms=_BEFORE_ADA,
    ),
    Fault(
        name="cutlass-int8-blackwell",
        effect="crash",
        layers="W8A8 with INT8",
        library="CUTLASS",
        what="it accepts this GPU, for which CUTLASS has no INT8 kernel, and fails when it runs",
        remedy="serve it with --linear-backend triton, or use FP8",
        repaired="",
        thread=f"{_THREADS}54311",
        groups=("linear", "head"),
        kernels=re.compile(r"^CutlassInt8ScaledMMLinearKernel$"),
        predicate=partial(_is_supported, kernel="CutlassInt8ScaledMMLinearKernel", sm=120),
        sms=_BLACKWELL,
        concerns=lambda layer: not any(side % _CUTLASS_ALIGNMENT for side in layer.sides),
        # csrc/libtorch_stable/quantization/w8a8/cutlass/c3x/scaled_mm_helper.hpp.
        message="Int8 not supported on SM{}",
    ),
    Fault(
        name="cutlass-fp8-block-rows",
        effect="crash",
        layers="FP8 in blocks, rows on a rank not a multiple of 128",
        library="CUTLASS",
        what="it has no code for rows (out_features on a rank) that are not a multiple of 128, and "
        "fails when it runs",
        remedy="set VLLM_DISABLED_KERNELS=CutlassFp8BlockScaledMMKernel, so that vLLM takes "
        "another kernel",
        repaired="",
        thread=f"{_THREADS}47990",
        groups=("linear", "head"),
        kernels=re.compile(r"^CutlassFp8BlockScaledMMKernel$"),
        predicate=_blocks_ignore_rows,
        sms=(120, 121),
        concerns=lambda layer: bool(layer.sides) and layer.sides[0] % _BLOCK_ROWS != 0,
    ),
    Fault(
        name="deep-gemm-sm12x",
        effect="crash",
        layers="FP8 in blocks",
        library="DeepGEMM",
        what="DeepGEMM in this version has no kernels for this GPU, and fails when it loads or "
        "first runs",
        remedy="set VLLM_USE_DEEP_GEMM=0",
        repaired="0.28",
        thread=f"{_THREADS}47436",
        groups=("linear", "head", "experts"),
        kernels=re.compile(r"(?i)^deep_?gemm|ordeepgemm"),
        predicate=partial(
            _deep_gemm_without_kernels, sm=120, kernels="sm120_fp8_fp4_gemm_1d1d.cuh"
        ),
        sms=(120, 121),
    ),
    Fault(
        name="deep-gemm-sm107",
        effect="crash",
        layers="FP8 in blocks",
        library="DeepGEMM",
        what="DeepGEMM has no kernels for this GPU, and fails when it loads them",
        remedy="set VLLM_USE_DEEP_GEMM=0",
        repaired="",
        thread=f"{_PULLS}58022",
        groups=("linear", "head", "experts"),
        kernels=re.compile(r"(?i)^deep_?gemm|ordeepgemm"),
        predicate=partial(
            _deep_gemm_without_kernels, sm=107, kernels="sm107_fp8_fp4_gemm_1d1d.cuh"
        ),
        sms=(107,),
    ),
    Fault(
        name="mxfp4-weight-only-inputs",
        effect="fewer-bits",
        layers="MXFP4A16",
        library="FlashInfer, Humming",
        what="it rounds the inputs of weights in MXFP4 to 4 or 8 bits, although the checkpoint "
        "leaves them in 16 bits",
        remedy="serve it with --linear-backend marlin, which leaves the inputs in 16 bits, or "
        "measure accuracy on this GPU",
        repaired="",
        thread=f"{_THREADS}56770",
        groups=("linear",),
        kernels=re.compile(r"(?i)mxfp4(?!.*(marlin|emulation))(?<!marlin)"),
        predicate=_weights_alone_get_inputs,
        concerns=lambda layer: layer.stored == "W4A16" and layer.runs in ("W4A4", "W4A8"),
    ),
    Fault(
        name="mxfp8-small-sides",
        effect="crash",
        layers="MXFP8, a side on a rank below 128",
        library="FlashInfer",
        what="it accepts a weight with a side below 128, and raises an AssertionError when it runs",
        remedy="keep these layers unquantized",
        repaired="0.31",
        thread=f"{_PULLS}54223",
        groups=("linear", "head"),
        kernels=re.compile(r"^FlashInfer(Cutlass|Cutedsl)Mxfp8LinearKernel$"),
        predicate=_mxfp8_ignores_sizes,
        concerns=lambda layer: any(side < _LEAST_MXFP8_SIDE for side in layer.sides),
    ),
    Fault(
        name="fp8-experts-sm12x",
        effect="slow",
        layers="experts in FP8, not in blocks",
        library="Triton",
        what="vLLM does not use CUTLASS's kernels for experts in FP8 on this GPU",
        remedy="measure speed on this GPU, or store the experts in NVFP4",
        repaired="",
        thread=f"{_THREADS}43507",
        groups=("experts",),
        kernels=re.compile(r"(?i)^triton(experts)?$"),
        predicate=_no_grouped_gemm_on_120,
        sms=(120, 121),
        # CUTLASS has no kernels for experts in blocks on any GPU (CutlassExpertsFp8Base).
        concerns=lambda layer: layer.stored in ("", "W8A8") and not layer.blocks,
    ),
    Fault(
        name="mxfp4-experts-sm103",
        effect="crash",
        layers="experts in MXFP4",
        library="CUTLASS",
        what="vLLM always takes CUTLASS for experts in MXFP4, ignores --moe-backend, and CUTLASS "
        "fails on this GPU",
        remedy="serve it on a GPU where vLLM takes another kernel (SM 80 to 90, 120, 121), or "
        "store the experts in another scheme",
        repaired="",
        thread=f"{_PULLS}55232",
        groups=("experts",),
        kernels=re.compile(r"^CutlassExpertsMxfp4$"),
        predicate=_experts_ignore_backend,
        sms=(103,),
    ),
    Fault(
        name="trtllm-ungated-experts",
        effect="wrong-numbers",
        layers="experts in NVFP4 without a gate (such as Nemotron-H)",
        library="FlashInfer's TRTLLM",
        what="its kernel for experts without a gate computes wrong values: the text is fluent, but "
        "wrong",
        remedy="serve it with --moe-backend flashinfer_cutlass",
        repaired="",
        thread=f"{_THREADS}52308",
        groups=("experts",),
        kernels=re.compile(r"(?i)^(TrtLlmNvFp4ExpertsMonolithic|flashinfer_trtllm)$"),
        predicate=_trtllm_accepts_ungated,
        sms=(100, 101, 103),
        concerns=lambda layer: not layer.gated and layer.stored in ("", "W4A4"),
    ),
)
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _ENTRIES}
