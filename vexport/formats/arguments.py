"""Quantization arguments with compressed-tensors' names: parse, check, describe them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Literal, Protocol

from pydantic import TypeAdapter, ValidationError

from vexport.errors.validation import validation_problems
from vexport.numerics import E2M1_MAX, E4M3_MAX
from vexport.records import Json
from vexport.words import as_json

Strategy = Literal["tensor", "channel", "group", "tensor_group", "block", "token", "attn_head"]
GROUPED = ("group", "tensor_group")
# Strategies for tensors that are quantized at run time.
DYNAMIC = ("token", "tensor", "tensor_group", "group")
# torch's dtype names, as found by _TorchDtypeAnnotation (compressed_tensors/utils/type.py).
TORCH_DTYPE = re.compile(
    r"torch\.(u?int(8|16|32|64)|bfloat16|float(16|32|64)?|half|double|bool|float8_(e4m3fn|e5m2|e8m0fnu))$"
)
# Number of bits of unquantized inputs.
UNQUANTIZED_BITS = 16
# Arguments that may be null. All other arguments must not be null, and have a default if the config
# lacks them.
NULLABLE = frozenset(
    {"group_size", "strategy", "block_structure", "actorder", "scale_dtype", "zp_dtype", "observer"}
)
ORDERINGS = (None, "group", "weight", "dynamic", "static")
LOWERCASE_FIELDS = ("type", "strategy", "dynamic", "actorder")
# Largest accepted number of bits. No vLLM scheme has more bits. The limit prevents huge numbers in
# computations such as 2**num_bits.
MAX_BITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantArgs:
    """Quantization of a tensor, with the fields of compressed-tensors' `QuantizationArgs`.

    `dynamic` is "local" if only the global scale is static (NVFP4 inputs).
    """

    num_bits: int
    type: Literal["int", "float"]
    symmetric: bool = True
    strategy: Strategy
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    dynamic: bool | Literal["local"] = False
    actorder: str | None = None
    scale_dtype: str | None = None
    zp_dtype: str | None = None
    observer: str | None = None
    observer_kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)

    @property
    def is_float(self) -> bool:
        return self.type == "float"

    @property
    def group(self) -> int | None:
        """Number of columns that share a scale, or None if a row, block or tensor shares it."""
        return self.group_size if self.group_size and self.group_size > 0 else None

    @property
    def block(self) -> tuple[int, int] | None:
        """Size (rows, columns) of the block that shares a scale; None for other strategies."""
        return self.block_structure if self.strategy == "block" else None

    @property
    def largest_code(self) -> float | None:
        """Largest magnitude of a code; None for floats that have neither 4 nor 8 bits."""
        if not self.is_float:
            return 2.0 ** (self.num_bits - 1)
        return {8: E4M3_MAX, 4: E2M1_MAX}.get(self.num_bits)

    @property
    def shares_scale(self) -> bool:
        """True if a scale depends on the range of all layers that vLLM fuses."""
        return self.strategy in ("tensor", "tensor_group")

    @property
    def is_by_token(self) -> bool:
        """True if each token gets its scale at run time."""
        return self.strategy == "token" and bool(self.dynamic)


class Arguments(Protocol):
    """Arguments of a layer, from a scheme or from a config group of any producer's checkpoint."""

    @property
    def weights(self) -> QuantArgs: ...
    @property
    def input_activations(self) -> QuantArgs | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeArgs:
    """Quantization of a layer's weight and of its input, if the input is quantized."""

    weights: QuantArgs
    input_activations: QuantArgs | None

    @property
    def calibrated(self) -> bool:
        """True if the inputs have a static scale or global scale, which calibration computes."""
        return self.input_activations is not None and self.input_activations.dynamic is not True


def input_bits(args: Arguments) -> int:
    """Return the bits of the inputs as configured; 16 if they are not quantized."""
    return args.input_activations.num_bits if args.input_activations else UNQUANTIZED_BITS


def precision(args: Arguments) -> str:
    """Return the bits of weights and inputs, for example `W4A16`."""
    return f"W{args.weights.num_bits}A{input_bits(args)}"


def bits_of_inputs(precision: str) -> int:
    """Return the bits of the inputs in a precision: 16 for `W4A16`."""
    return int(precision.rpartition("A")[2])


def described(args: Arguments) -> str:
    """Describe the arguments in words."""
    return f"weights {_described(args.weights)}, inputs {described_inputs(args)}"


def described_inputs(args: Arguments) -> str:
    """Describe the arguments of the inputs in words."""
    return _described(args.input_activations) if args.input_activations else "none"


def _described(args: QuantArgs) -> str:
    size = f" {args.group_size}" if args.group_size else ""
    dynamic = " dynamic" if args.dynamic else ""
    symmetric = "" if args.symmetric else " asymmetric"
    return f"{args.type} {args.num_bits} bits {args.strategy}{size}{dynamic}{symmetric}"


def contradictions(args: Arguments) -> Iterator[str]:
    """Yield contradictory arguments, which compressed-tensors refuses (`validate_model_after`)."""
    for each in (args.weights, args.input_activations):
        if each is not None:
            yield from _contradictions(each)


def _contradictions(args: QuantArgs) -> Iterator[str]:
    size, strategy = args.group_size, args.strategy
    if strategy in GROUPED and (size is None or size <= 0):
        yield f"strategy {strategy} {_with_value('group_size', size)}"
    if size is not None and (size < -1 or size > 0 and strategy not in GROUPED):
        yield f"group_size {size} with strategy {strategy}"
    if (strategy == "block") != (args.block_structure is not None):
        yield f"strategy {strategy} {_with_value('block_structure', args.block_structure)}"
    if args.actorder in ("group", "dynamic") and strategy not in GROUPED:
        yield f"actorder {args.actorder} with strategy {strategy}"
    yield from _contradictory_dynamic(args)
    yield from _unknown_dtypes(args)


def _with_value(key: str, value: object) -> str:
    return f"without {key}" if value is None else f"with {key} {value}"


def _contradictory_dynamic(args: QuantArgs) -> Iterator[str]:
    if args.strategy == "token" and not args.dynamic:
        yield "a strategy token that is not dynamic"
    if args.dynamic and args.strategy not in DYNAMIC:
        yield f"a strategy {args.strategy} that is dynamic"
    if args.dynamic == "local" and args.strategy != "tensor_group":
        yield f"dynamic local with strategy {args.strategy}"


def _unknown_dtypes(args: QuantArgs) -> Iterator[str]:
    if args.largest_code is None and args.zp_dtype is None:
        yield f"floats of {args.num_bits} bits"
    for dtype in (args.scale_dtype, args.zp_dtype):
        if dtype is not None and not TORCH_DTYPE.match(dtype):
            yield f"{dtype}, which is not a dtype of torch"


def parse_args(raw: Json) -> QuantArgs | str:
    """Parse quantization arguments as compressed-tensors does, or return why it refuses them.

    Source: QuantizationArgs in compressed_tensors/quantization/quant_args.py.
    """
    if not isinstance(raw, dict):
        return "no arguments" if raw is None else f"{as_json(raw)}, which is not an object"
    keys = {field.name for field in fields(QuantArgs)}
    unknown = sorted(raw.keys() - keys)
    if unknown:
        nouns = "unknown key" if len(unknown) == 1 else "unknown keys"
        return f"{nouns} {', '.join(unknown)}"
    null = sorted(key for key, value in raw.items() if value is None and key not in NULLABLE)
    if null:
        return f"null for {', '.join(null)}"
    if isinstance(raw.get("group_size"), str):
        return f"group_size {as_json(raw['group_size'])}, which is not a number"
    try:
        args = arguments_adapter().validate_python({**_inferred(raw), **_normalized(raw)})
    except ValidationError as error:
        first = validation_problems(error)[0]
        return f"{first.place} {as_json(first.value)}, which is not {first.need}"
    return _unknown_value(raw, args) or args


@cache
def arguments_adapter() -> TypeAdapter[QuantArgs]:
    """Return pydantic's adapter for QuantArgs.

    It is cached, because creating it takes longer than a small check.
    """
    return TypeAdapter(QuantArgs)


def _unknown_value(raw: Mapping[str, Json], args: QuantArgs) -> str | None:
    """Describe a value that compressed-tensors refuses but pydantic accepts here, or None."""
    dynamic = raw.get("dynamic")
    if isinstance(dynamic, str) and dynamic.lower() != "local":
        return f"dynamic {as_json(dynamic)}, which is neither true, false nor local"
    if args.actorder not in ORDERINGS:
        known = ", ".join(filter(None, ORDERINGS))
        return f"actorder {as_json(args.actorder)}, which is none of {known}"
    return (
        None
        if 0 < args.num_bits <= MAX_BITS
        else f"num_bits {args.num_bits}, which is not from 1 to {MAX_BITS}"
    )


def _inferred(raw: Mapping[str, Json]) -> dict[str, Json]:
    """Return compressed-tensors' defaults: INT8, and a strategy derived from the group size."""
    size = raw.get("group_size")
    strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    return {"num_bits": 8, "type": "int", "strategy": strategy}


def _normalized(raw: Mapping[str, Json]) -> dict[str, Json]:
    """Return the values that are not null, converted as compressed-tensors converts them."""
    present: dict[str, Json] = {key: value for key, value in raw.items() if value is not None}
    for key in LOWERCASE_FIELDS:
        value = present.get(key)
        if isinstance(value, str):
            present[key] = value.lower()
    if isinstance(present.get("actorder"), (bool, int, float)) and present["actorder"] in (0, 1):
        present["actorder"] = "group" if present["actorder"] is True else None
    for key in ("scale_dtype", "zp_dtype"):
        value = present.get(key)
        if isinstance(value, str):
            present[key] = f"torch.{value.removeprefix('torch.')}"
    blocks = present.get("block_structure")
    if isinstance(blocks, str):
        present["block_structure"] = list(blocks.split("x"))
    return present
