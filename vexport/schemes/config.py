"""The `quantization_config` of config.json, in the terms of compressed-tensors that vLLM reads."""

from collections.abc import Sequence
from dataclasses import replace

from pydantic import TypeAdapter

from vexport.schemes import get_scheme
from vexport.schemes.base import QuantArgs
from vexport.types import FusionGroup, Json, Plan

MIXED_FORMAT = "mixed-precision"


def quantization_config(plan: Plan) -> dict[str, Json]:
    """The configuration of a plan's output: a config group per scheme and observer, and what is left alone.

    One scheme targets the class Linear; several target their layers by name. vLLM's class of an output
    head is not Linear, so a quantized one is always named (vllm-project/vllm, ParallelLMHead).
    """
    treatments = list(dict.fromkeys((group.scheme, group.observer) for group in plan.groups))
    formats = {get_scheme(scheme).family.format for scheme, _ in treatments}
    groups: dict[str, Json] = {}
    for number, (scheme, observer) in enumerate(treatments):
        members = [group for group in plan.groups if (group.scheme, group.observer) == (scheme, observer)]
        targets = _targets(members, alone=len(treatments) == 1)
        groups[f"group_{number}"] = _config_group(scheme, observer, targets)
    return {
        "config_groups": groups,
        "format": formats.pop() if len(formats) == 1 else MIXED_FORMAT,
        "global_compression_ratio": None,
        "ignore": list(plan.kept_linears),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _targets(groups: Sequence[FusionGroup], *, alone: bool) -> list[Json]:
    names: list[Json] = [member.name for group in groups for member in group.members]
    if not alone:
        return names
    return ["Linear", *(name for name in names if str(name).endswith("lm_head"))]


def _config_group(name: str, observer: str, targets: list[Json]) -> dict[str, Json]:
    scheme = get_scheme(name)
    return {
        "targets": targets,
        "weights": _args(replace(scheme.args.weights, observer=observer)),
        "input_activations": _args(scheme.args.input_activations),
        "output_activations": None,
        "format": scheme.family.format,
    }


def _args(args: QuantArgs | None) -> Json:
    dumped: Json = TypeAdapter(QuantArgs | None).dump_python(args, mode="json")
    return dumped
