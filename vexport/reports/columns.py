"""The columns of a matrix of loads: what tells the loads of one checkpoint apart, in words."""

from collections.abc import Sequence

from vexport.types import DryLoadReport, LoadReport


def column_names(reports: Sequence[LoadReport | DryLoadReport]) -> list[str]:
    """For each load its vLLM and mode, as far as the loads differ in them; nothing where they do not.

    A vLLM is named by its version: that of another load by the same interpreter where one does not know it,
    else the interpreter.
    """
    known = {report.vllm_python: report.vllm for report in reports if report.vllm}
    engines = [known.get(report.vllm_python, report.vllm_python or "vLLM") for report in reports]
    several = len({report.vllm_python for report in reports}) > 1
    modes = [report.mode if isinstance(report, LoadReport) else "" for report in reports]
    return [
        " ".join(filter(None, (engine if several else "", mode if len(set(modes)) > 1 else "")))
        for engine, mode in zip(engines, modes, strict=True)
    ]
