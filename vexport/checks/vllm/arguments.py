"""Config groups as compressed-tensors reads them, or why it refuses them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache

from pydantic import TypeAdapter, ValidationError

from vexport.formats import nearest_format, vllm_format
from vexport.formats.arguments import QuantArgs
from vexport.formats.base import Format, Parameter
from vexport.types import Json, TensorInfo

# Arguments that may be null; the others have a default that only leaving them out gives.
NULLABLE = frozenset(
    {"group_size", "strategy", "block_structure", "actorder", "scale_dtype", "zp_dtype", "observer"}
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

    @property
    def storage(self) -> Format:
        """How its layers are stored; where vLLM refuses the group, the format that comes closest."""
        return nearest_format(self, self.format)

    @property
    def refusal(self) -> str | None:
        """Why vLLM refuses the group, or None."""
        found = vllm_format(self, self.format)
        return found if isinstance(found, str) else None

    def parameters(self, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        """The tensors of a layer (out_features, in_features) by their names within it."""
        return self.storage.parameters(self, shape)

    def shape(self, tensors: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
        """(out_features, in_features) of a layer by its stored tensors; None where that cannot be told."""
        return self.storage.shape(self, tensors)

    def expected(self, tensors: Mapping[str, TensorInfo]) -> Mapping[str, Parameter] | None:
        """The parameters of a layer with these tensors; None where its shape cannot be told."""
        shape = self.shape(tensors)
        return None if shape is None else self.parameters(shape)


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
