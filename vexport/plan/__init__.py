"""From headers, rules and vLLM's architectures to a plan: what is quantized how, what vLLM would refuse."""

from vexport.plan.blocks import blocks, group_layout, output_blocks, output_bytes
from vexport.plan.build import Settings, build_plan, require_accepted
from vexport.plan.linears import find_linears
from vexport.plan.rules import matches

__all__ = [
    "Settings",
    "blocks",
    "build_plan",
    "find_linears",
    "group_layout",
    "matches",
    "output_blocks",
    "output_bytes",
    "require_accepted",
]
