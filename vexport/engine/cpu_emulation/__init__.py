"""Lets vLLM's CPU build run the schemes that it refuses: a vLLM plugin, off unless asked for.

`register` is the entry point in the group `vllm.general_plugins`; vLLM calls it in every one of its
processes. It does nothing unless VEXPORT_CPU_EMULATION=1 and vLLM runs on its CPU platform.
"""

import os

SWITCH = "VEXPORT_CPU_EMULATION"


def register() -> None:
    """Register the emulation kernels where they were asked for; safe to call more than once."""
    if os.environ.get(SWITCH) != "1":
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vexport.engine.cpu_emulation.kernels import ready_amx, register_kernels

    ready_amx()
    register_kernels()
