"""The columns of a matrix of loads: what tells the loads of one checkpoint apart, in words."""

from collections.abc import Sequence

from vexport.types import DryLoadReport, LoadReport


def column_names(reports: Sequence[LoadReport | DryLoadReport]) -> list[str]:
    """For each load its vLLM, tensor parallel size and mode, as far as the loads differ in them.

    A vLLM is named by its version: that of another load by the same interpreter where one does not know it,
    else the interpreter.
    """
    known = {report.vllm_python: report.vllm for report in reports if report.vllm}
    engines = [known.get(report.vllm_python, report.vllm_python or "vLLM") for report in reports]
    several = len({report.vllm_python for report in reports}) > 1
    modes = _told([report.mode if isinstance(report, LoadReport) else "" for report in reports])
    sizes = _told([f"tp {report.tp}" if isinstance(report, LoadReport) else "" for report in reports])
    return [
        " ".join(filter(None, (engine if several else "", size, mode)))
        for engine, size, mode in zip(engines, sizes, modes, strict=True)
    ]


def _told(words: list[str]) -> list[str]:
    """The words where they differ; nothing where they are all alike."""
    return words if len(set(words)) > 1 else [""] * len(words)
