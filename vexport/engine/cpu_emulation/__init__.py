"""Add kernels to vLLM's CPU build, for schemes that it would refuse.

This is a vLLM plugin that is off by default.

`register` is the entry point in the group `vllm.general_plugins`. vLLM calls it in each of its
processes. It does nothing unless VEXPORT_CPU_EMULATION=1 and vLLM runs on its CPU platform.
"""

import os

SWITCH = "VEXPORT_CPU_EMULATION"


def register() -> None:
    """Register the emulation kernels if they are enabled. It may be called more than once."""
    if os.environ.get(SWITCH) != "1":
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vexport.engine.cpu_emulation.kernels import enable_amx, register_kernels

    enable_amx()
    register_kernels()
