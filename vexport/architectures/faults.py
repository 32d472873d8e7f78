"""Known faults of vLLM: their kernels and layers, and a test of vLLM's source for each.

`FAULTS` is the table. Each entry has a predicate that reads the Python files of a vLLM version. It
returns True if the fault is in them, False if it is repaired, and None if it finds neither. So an
entry expires by itself when a version repairs it. The results for each version of vLLM with tables
are in `generated/versions/` (scripts/generate_versions.py). A dry load runs the predicates on the
vLLM that it uses.
"""

import __future__

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

# Returns the text of a file of vLLM (`vllm/_custom_ops.py`), or "" if there is no such file.
Source = Callable[[str], str]
Predicate = Callable[[Source], bool | None]
LayerGroup = Literal["linear", "experts", "head"]
Effect = Literal["crash", "wrong-numbers", "slow"]
_LAYERS = "vllm/model_executor/layers"
_CT = f"{_LAYERS}/quantization/compressed_tensors"
_CUTLASS = "vllm/model_executor/kernels/linear/scaled_mm/cutlass.py"
_MXFP4_MOE = f"{_CT}/compressed_tensors_moe/compressed_tensors_moe_w4a4_mxfp4.py"
# CutlassFP8ScaledMMLinearKernel pads the sides of weights to multiples of this.
_CUTLASS_ALIGNMENT = 16
_THREADS = "https://github.com/vllm-project/vllm/issues/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLayer:
    """A layer and its kernel, as far as they are known.

    `stored` and `runs` are precisions such as W4A16, and `sides` the sizes of the weight on a rank.
    Unknown values are empty.
    """

    name: str
    group: LayerGroup
    kernel: str
    stored: str = ""
    runs: str = ""
    sides: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A known fault of vLLM.

    `kernels` matches the names of vLLM's kernels with the fault. `sms` are the compute capabilities
    with the fault; if it is empty, the kernel alone decides. `concerns` returns True for layers
    with the fault. `repaired` is the first version without the fault, empty if there is none.
    `remedy` says how to avoid it.
    """

    name: str
    effect: Effect
    what: str
    remedy: str
    repaired: str
    thread: str
    groups: tuple[LayerGroup, ...]
    kernels: re.Pattern[str]
    predicate: Predicate
    sms: tuple[int, ...] = ()
    concerns: Callable[[RunningLayer], bool] = lambda layer: True

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

    `values` are the results of the predicates (`VersionFacts.faults`, or `found_in`). An entry
    without a result is unknown.
    """
    for layer in layers:
        for fault in FAULTS.values():
            value = values.get(fault.name)
            if value is not False and fault.is_on(sm, layer):
                yield FaultyLayer(
                    fault=fault.name, layer=layer.name, kernel=layer.kernel, is_known=value is True
                )


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


def _call(function: ast.FunctionDef, argument: object, **names: object) -> object:
    """Run a function of vLLM alone, with stand-ins for the names that it uses."""
    function.decorator_list = []
    module = ast.Module(body=[function], type_ignores=[])
    annotations = __future__.annotations.compiler_flag
    space: dict[str, object] = dict(names)
    exec(compile(module, "vllm", "exec", flags=annotations, dont_inherit=True), space)
    run = space[function.name]
    assert callable(run)
    return run(argument)


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


def _deep_gemm_on_121(source: Source) -> bool | None:
    """CudaPlatform.support_deep_gemm is True on SM 121, for which DeepGEMM has no kernels."""
    function = _function(source, "vllm/platforms/cuda.py", "support_deep_gemm")
    if function is None:
        return None
    platform = SimpleNamespace(
        is_device_capability=lambda sm: sm == 121,
        is_device_capability_family=lambda sm: sm // 10 == 12,
        has_device_capability=lambda sm: sm <= 121,
    )
    return bool(_call(function, platform))


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


_ENTRIES = (
    Fault(
        name="humming-head",
        effect="crash",
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
        name="mxfp4-weight-only-inputs",
        effect="wrong-numbers",
        what="it rounds the inputs of weights in MXFP4 to 4 or 8 bits, although the checkpoint "
        "leaves them in 16 bits",
        remedy="measure accuracy on this GPU, or use NVFP4A16 or W4A16",
        repaired="",
        thread=f"{_THREADS}56770",
        groups=("linear",),
        kernels=re.compile(r"(?i)mxfp4(?!.*(marlin|emulation))(?<!marlin)"),
        predicate=_weights_alone_get_inputs,
        concerns=lambda layer: layer.stored == "W4A16" and layer.runs in ("W4A4", "W4A8"),
    ),
    Fault(
        name="deep-gemm-sm121",
        effect="crash",
        what="DeepGEMM has no kernels for this GPU, and fails when it runs",
        remedy="serve it with VLLM_USE_DEEP_GEMM=0",
        repaired="",
        thread=f"{_THREADS}54125",
        groups=("linear", "head"),
        kernels=re.compile(r"(?i)deep_?gemm"),
        predicate=_deep_gemm_on_121,
        sms=(121,),
    ),
    Fault(
        name="fp8-experts-sm12x",
        effect="slow",
        what="vLLM does not use its CUTLASS kernels for experts in FP8 on this GPU",
        remedy="measure speed on this GPU, or store the experts in NVFP4",
        repaired="",
        thread=f"{_THREADS}43507",
        groups=("experts",),
        kernels=re.compile(r"(?i)^triton(experts)?$"),
        predicate=_no_grouped_gemm_on_120,
        sms=(120, 121),
        concerns=lambda layer: layer.stored in ("", "W8A8"),
    ),
    Fault(
        name="mxfp4-experts-sm103",
        effect="crash",
        what="vLLM always takes CUTLASS for experts in MXFP4, ignores --moe-backend, and CUTLASS "
        "fails on this GPU",
        remedy="store the experts in NVFP4, or serve it on another GPU",
        repaired="",
        thread=f"{_THREADS}55232",
        groups=("experts",),
        kernels=re.compile(r"^CutlassExpertsMxfp4$"),
        predicate=_experts_ignore_backend,
        sms=(103,),
    ),
)
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _ENTRIES}
