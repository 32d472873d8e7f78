"""Report layers that vLLM runs in another precision than stored.

The static check derives the precision from the limits of the storage format. The dry load gets it
from the kernel that vLLM selects. Both use this module, so their findings have the same severity
and text.
"""

from collections.abc import Iterable

from vexport.checks.vllm.findings import info, warning
from vexport.formats.arguments import bits_of_inputs
from vexport.formats.gpus import GENERATIONS
from vexport.records import Finding


def layer_kinds(names: Iterable[str]) -> str:
    """Return the `where` of a finding on several kinds of layers: each name once, sorted."""
    return ", ".join(sorted({*names}))


def other_precision(
    check: str,
    where: str,
    *,
    stored: str,
    runs: str,
    capabilities: Iterable[int],
    kernel: str = "",
) -> Finding:
    """Return the finding on layers stored as `stored`, such as W4A4, that run as `runs`.

    The finding is a warning if the inputs have fewer bits than stored: this may cost accuracy, and
    an evaluation on another GPU does not show the loss. It is a note if the inputs have more bits
    than stored, which costs speed but no accuracy. `capabilities` contains the SMs of the GPUs that
    run the layers as `runs`. `kernel` is the name of vLLM's kernel, or empty if it is unknown.
    """
    expected = f"{stored}, as stored"
    *others, last = dict.fromkeys(GENERATIONS.get(sm, f"SM {sm}") for sm in capabilities)
    gpus = f"{', '.join(others)} and {last}" if others else last
    these = "these GPUs" if others else "this GPU"
    named = f" ({kernel})" if kernel else ""
    bits = bits_of_inputs(runs)
    if bits < bits_of_inputs(stored):
        return warning(
            check,
            where,
            claim="precision",
            expected=expected,
            got=f"{runs} on {gpus}: vLLM rounds the inputs to {bits} bits there{named}",
            fix=f"measure accuracy on {these}, or serve it on another GPU",
        )
    return info(
        check,
        where,
        claim="precision",
        expected=expected,
        got=f"{runs} on {gpus}: vLLM has no {stored} kernel there, and falls back{named}",
        fix=f"measure speed on {these}, or serve it on another GPU",
    )
