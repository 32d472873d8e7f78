"""Config groups as compressed-tensors reads them, or why it refuses them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from pydantic import TypeAdapter, ValidationError

from vexport.schemes.base import QuantArgs
from vexport.types import Json

# Arguments that may be null; the others have a default that only leaving them out gives.
NULLABLE = frozenset(
    {"group_size", "strategy", "block_structure", "actorder", "scale_dtype", "zp_dtype", "observer"}
)
GROUPED = ("group", "tensor_group")
# Strategies of what is quantized when the model runs.
DYNAMIC = ("token", "tensor", "tensor_group", "group")
# torch's names of dtypes, as _TorchDtypeAnnotation finds them (compressed_tensors/utils/type.py).
TORCH_DTYPE = re.compile(
    r"torch\.(u?int(8|16|32|64)|bfloat16|float(16|32|64)?|half|double|bool|float8_(e4m3fn|e5m2|e8m0fnu))$"
)
ORDERINGS = (None, "group", "weight", "dynamic", "static")
LOWERED = ("type", "strategy", "dynamic", "actorder")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigGroup:
    """One entry of config_groups: which layers, and how their weights and inputs are quantized."""

    name: str
    targets: tuple[str, ...]
    weights: QuantArgs
    input_activations: QuantArgs | None
    format: str


def parse_group(name: str, raw: Json, default_format: str) -> ConfigGroup | str:
    """A config group, or the reason why it cannot be read."""
    if not isinstance(raw, dict):
        return "no JSON object"
    targets = raw.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        return "no list of targets"
    weights = parse_args(raw.get("weights"))
    inputs = parse_args(raw.get("input_activations")) if raw.get("input_activations") else None
    if isinstance(weights, str):
        return f"weights: {weights}"
    if isinstance(inputs, str):
        return f"input_activations: {inputs}"
    return ConfigGroup(
        name=name,
        targets=tuple(str(target) for target in targets),
        weights=weights,
        input_activations=inputs,
        format=str(raw.get("format") or default_format),
    )


def of_attention(raw: Json) -> bool:
    """Whether vLLM passes over a group: it quantizes attention by the KV cache's scheme (`from_config`)."""
    targets = raw.get("targets") if isinstance(raw, dict) else None
    return isinstance(targets, list) and len(targets) == 1 and str(targets[0]).endswith("Attention")


def parse_args(raw: Json) -> QuantArgs | str:
    """Quantization arguments as compressed-tensors reads them, or the reason why it refuses them.

    Source: QuantizationArgs in compressed_tensors/quantization/quant_args.py.
    """
    if not isinstance(raw, dict):
        return "missing"
    known = {field.name for field in fields(QuantArgs)}
    unknown = sorted(raw.keys() - known)
    if unknown:
        return f"unknown keys {', '.join(unknown)}"
    null = sorted(key for key, value in raw.items() if value is None and key not in NULLABLE)
    if null:
        return f"{', '.join(null)} null"
    if isinstance(raw.get("group_size"), str):
        return f"group_size {raw['group_size']!r}, which is no number"
    try:
        args = TypeAdapter(QuantArgs).validate_python({**_inferred(raw), **_present(raw)})
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return _unknown_value(raw, args) or args


def _unknown_value(raw: Mapping[str, Json], args: QuantArgs) -> str | None:
    """What pydantic converts here, or takes for any text, and compressed-tensors refuses."""
    dynamic = raw.get("dynamic")
    if isinstance(dynamic, str) and dynamic.lower() != "local":
        return f"dynamic {dynamic!r}, which is neither true, false nor local"
    if args.actorder not in ORDERINGS:
        return f"actorder {args.actorder!r}, which is none of {', '.join(filter(None, ORDERINGS))}"
    return None if args.num_bits > 0 else f"num_bits {args.num_bits}"


def _inferred(raw: Mapping[str, Json]) -> dict[str, Json]:
    """compressed-tensors' defaults: INT8, and a strategy that follows from the group size."""
    size = raw.get("group_size")
    strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    return {"num_bits": 8, "type": "int", "strategy": strategy}


def _present(raw: Mapping[str, Json]) -> dict[str, Json]:
    present: dict[str, Json] = {key: value for key, value in raw.items() if value is not None}
    for key in LOWERED:
        value = present.get(key)
        if isinstance(value, str):
            present[key] = value.lower()
    if isinstance(present.get("actorder"), bool):
        present["actorder"] = "group" if present["actorder"] else None
    for key in ("scale_dtype", "zp_dtype"):
        value = present.get(key)
        if isinstance(value, str):
            present[key] = f"torch.{value.removeprefix('torch.')}"
    blocks = present.get("block_structure")
    if isinstance(blocks, str):
        present["block_structure"] = list(blocks.split("x"))
    return present


def contradictions(args: QuantArgs) -> Iterator[str]:
    """What compressed-tensors refuses of arguments that it can read (`validate_model_after`)."""
    size, strategy = args.group_size, args.strategy
    if strategy in GROUPED and (size is None or size <= 0):
        yield f"strategy {strategy} with group_size {size}"
    if size is not None and (size < -1 or size > 0 and strategy not in GROUPED):
        yield f"group_size {size} with strategy {strategy}"
    if (strategy == "block") != (args.block_structure is not None):
        yield f"strategy {strategy} with block_structure {args.block_structure}"
    if args.actorder == "group" and strategy not in GROUPED:
        yield f"actorder group with strategy {strategy}"
    yield from _contradictions_of_time(args)
    yield from _unknown_dtypes(args)


def _contradictions_of_time(args: QuantArgs) -> Iterator[str]:
    """Strategies that are dynamic only, or never."""
    if args.strategy == "token" and not args.dynamic:
        yield "strategy token that is not dynamic"
    if args.dynamic and args.strategy not in DYNAMIC:
        yield f"strategy {args.strategy} that is dynamic"
    if args.dynamic == "local" and args.strategy != "tensor_group":
        yield f"dynamic local with strategy {args.strategy}"


def _unknown_dtypes(args: QuantArgs) -> Iterator[str]:
    if args.type == "float" and args.num_bits not in (4, 8) and args.zp_dtype is None:
        yield f"floats of {args.num_bits} bits"
    for dtype in (args.scale_dtype, args.zp_dtype):
        if dtype is not None and not TORCH_DTYPE.match(dtype):
            yield f"{dtype}, which is no dtype of torch"
