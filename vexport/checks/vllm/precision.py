"""Report layers that vLLM runs in another precision than stored.

The static check derives the precision from the limits of the storage format. The dry load reads it
from the kernel that vLLM selects. Both report it by this module, with the same severity and text.
"""

from collections.abc import Iterable

from vexport.checks.vllm.findings import info, warning
from vexport.formats.arguments import bits_of_inputs
from vexport.formats.gpus import GENERATIONS
from vexport.records import Finding


def layer_kinds(names: Iterable[str]) -> str:
    """Return the place of a finding on several kinds of layers: each name once, sorted."""
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

    Inputs with fewer bits than stored may cost accuracy, and an evaluation on another GPU does not
    show the loss: a warning. Inputs with more bits than stored cost speed, but no accuracy: a note.
    `capabilities` are those of the GPUs that run the layers so. `kernel` is the name of vLLM's
    kernel, if it is known.
    """
    expected = f"{stored}, as stored"
    *others, last = dict.fromkeys(GENERATIONS.get(sm, f"SM {sm}") for sm in capabilities)
    gpus = f"{', '.join(others)} and {last}" if others else last
    named = f" ({kernel})" if kernel else ""
    bits = bits_of_inputs(runs)
    if bits < bits_of_inputs(stored):
        return warning(
            check,
            where,
            expected=expected,
            got=f"{runs} on {gpus}: vLLM rounds the inputs to {bits} bits there{named}",
            fix="measure accuracy on this GPU, or serve it on another GPU",
        )
    return info(
        check,
        where,
        expected=expected,
        got=f"{runs} on {gpus}: vLLM has no {stored} kernel there, and falls back{named}",
        fix="measure speed on this GPU, or serve it on another GPU",
    )
