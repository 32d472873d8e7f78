"""Quantization arguments as compressed-tensors reads them from JSON or YAML, or why it refuses them."""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache

from pydantic import TypeAdapter, ValidationError

from vexport.formats.arguments import QuantArgs
from vexport.types import Json

# Arguments that may be null; the others have a default that only leaving them out gives.
NULLABLE = frozenset(
    {"group_size", "strategy", "block_structure", "actorder", "scale_dtype", "zp_dtype", "observer"}
)
ORDERINGS = (None, "group", "weight", "dynamic", "static")
LOWERED = ("type", "strategy", "dynamic", "actorder")
# More bits than any scheme of vLLM has: what is computed from them stays small.
MOST_BITS = 16


def parse_args(raw: Json) -> QuantArgs | str:
    """Quantization arguments as compressed-tensors reads them, or the reason why it refuses them.

    Source: QuantizationArgs in compressed_tensors/quantization/quant_args.py.
    """
    if not isinstance(raw, dict):
        return "missing"
    keys = {field.name for field in fields(QuantArgs)}
    unknown = sorted(raw.keys() - keys)
    if unknown:
        return f"unknown keys {', '.join(unknown)}"
    null = sorted(key for key, value in raw.items() if value is None and key not in NULLABLE)
    if null:
        return f"{', '.join(null)} null"
    if isinstance(raw.get("group_size"), str):
        return f"group_size {raw['group_size']!r}, which is no number"
    try:
        args = _arguments().validate_python({**_inferred(raw), **_present(raw)})
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return _unknown_value(raw, args) or args


@cache
def _arguments() -> TypeAdapter[QuantArgs]:
    """What validates arguments; made once, as making it takes longer than all of a small check."""
    return TypeAdapter(QuantArgs)


def _unknown_value(raw: Mapping[str, Json], args: QuantArgs) -> str | None:
    """What pydantic converts here, or takes for any text, and compressed-tensors refuses."""
    dynamic = raw.get("dynamic")
    if isinstance(dynamic, str) and dynamic.lower() != "local":
        return f"dynamic {dynamic!r}, which is neither true, false nor local"
    if args.actorder not in ORDERINGS:
        return f"actorder {args.actorder!r}, which is none of {', '.join(filter(None, ORDERINGS))}"
    return None if 0 < args.num_bits <= MOST_BITS else f"num_bits {args.num_bits}, not from 1 to {MOST_BITS}"


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
