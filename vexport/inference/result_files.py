"""Find result files of lm-eval. The user may give them instead of a model."""

import re
from pathlib import Path

from vexport.files import user_path

TIMESTAMP = re.compile(r"(\d{4}-\d{2}-\d{2}T[\d.-]+)\.json$")
"""End of a result file's name, with the date from lm-eval."""


def is_results(name: str) -> bool:
    """Return True if the name of a model is a result file of lm-eval, or a folder with results."""
    path = user_path(name)
    return not (path / "config.json").exists() and bool(result_files(path))


def result_files(path: Path) -> list[Path]:
    """Return lm-eval's result files at a path.

    For a folder, return all result files at any depth, such as `results_DATE.json`. For a result
    file, return the file itself. The path may also be NAME.json, an argument of lm-eval's
    `--output_path` that does not exist as a file. Then return the files `NAME_DATE.json` next to
    it.
    """
    if path.is_dir():
        return [file for file in path.rglob("*.json") if _is_result(file)]
    if path.suffix == ".json" and not path.exists():
        dated = [file for file in path.parent.glob("*.json") if _is_result(file)]
        return [file for file in dated if run_name(file) == path.stem]
    return [path] if _is_result(path) else []


def _is_result(file: Path) -> bool:
    return TIMESTAMP.search(file.name) is not None and file.is_file()


def run_name(file: Path) -> str:
    """Return the part of a result file's name before the date: `results`, or the run's name."""
    return TIMESTAMP.sub("", file.name).removesuffix("_")
