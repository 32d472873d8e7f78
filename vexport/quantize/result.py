"""Build the result of `quantize`: how much was quantized, warnings, and the next commands."""

import re
import shlex
from collections.abc import Set
from pathlib import Path

from vexport.architectures.fusion import moe_layer
from vexport.formats.plan import FusionGroup, Plan
from vexport.quantize.warnings import (
    fallback_warnings,
    little_quantized_warnings,
    little_text_warnings,
    unknown_expert_warnings,
    unsupported_warnings,
)
from vexport.records import CalibrationRecord, Quantized
from vexport.records.calibration import RoundingReport, expert_coverage

# NVIDIA's driver makes this device. Checking it is faster than importing torch, which takes
# seconds.
NVIDIA_DEVICE = Path("/dev/nvidiactl")
CPU_INFO = Path("/proc/cpuinfo")


def quantized_result(
    checkpoint: str,
    plan: Plan,
    calibration: CalibrationRecord | None,
    rounding: RoundingReport | None,
) -> Quantized:
    """Return the result of `quantize` for a checkpoint with this plan."""
    members = [member for group in plan.groups for member in group.members]
    quantized = sum(member.out_features * member.in_features for member in members)
    return Quantized(
        checkpoint=checkpoint,
        source=plan.source,
        schemes=plan.schemes,
        layers=len(members),
        of_layers=len(members) + len(plan.kept_linears),
        quantized_parameters=quantized,
        parameters=plan.parameters,
        source_bytes=plan.source_bytes,
        output_bytes=plan.output_bytes,
        bits=8 * plan.output_bytes / plan.parameters if plan.parameters else 0.0,
        calibration_rows=len(calibration.rows) if calibration else 0,
        calibration_data=calibration.data if calibration else "",
        calibration_digest=calibration.digest if calibration else None,
        smoothing=plan.smoothing,
        smoothed_tensors=len(calibration.smoothing) if calibration else 0,
        experts=expert_coverage(calibration) if calibration else (),
        rounding=rounding,
        warnings=(
            *unsupported_warnings(plan),
            *unknown_expert_warnings(plan),
            *little_quantized_warnings(plan, len(members), quantized),
            *fallback_warnings(rounding),
            *little_text_warnings(calibration, rounding),
        ),
        next_commands=(
            f"vexport check {shlex.quote(checkpoint)}",
            _serve_command(checkpoint, plan),
        ),
    )


def _serve_command(checkpoint: str, plan: Plan) -> str:
    """Return the command that serves a checkpoint.

    vLLM's CPU build cannot run some schemes, or needs instructions that this CPU may lack. vexport
    emulates them inside its commands only. If such a checkpoint is made on a machine without a GPU,
    a comment after the command states that serving needs a GPU.
    """
    command = f"vllm serve {shlex.quote(checkpoint)}"
    if NVIDIA_DEVICE.exists():
        return command
    flags = _cpu_flags()
    if any(is_emulated(group, flags) for group in plan.groups):
        return f"{command}  # on a machine with a GPU"
    return command


def is_emulated(group: FusionGroup, cpu_flags: Set[str]) -> bool:
    """Return True if vLLM has no kernel for a group on a CPU with these flags."""
    storage, args = group.scheme.format, group.scheme.args
    if storage.cpu(args) == "emulated":
        return True
    experts = moe_layer(group.members[0].name) is not None
    needed = storage.cpu_instructions(args, experts=experts)
    return bool(needed) and needed not in cpu_flags


def _cpu_flags() -> Set[str]:
    """Return the flags in /proc/cpuinfo, such as `avx512f`. Processors without flags have none."""
    text = CPU_INFO.read_text(encoding="utf-8") if CPU_INFO.is_file() else ""
    flags = re.search(r"^flags\s*: (.*)$", text, re.MULTILINE)
    return set(flags[1].split()) if flags else set()
