"""Find the result files of lm-eval, which may be given in place of a model."""

import re
from pathlib import Path

from vexport.files import user_path

STAMP = re.compile(r"(\d{4}-\d{2}-\d{2}T[\d.-]+)\.json$")
"""The end of a result file's name: lm-eval's date."""


def is_results(name: str) -> bool:
    """Return whether the name of a model is a result file of lm-eval, or a folder with one."""
    path = user_path(name)
    return not (path / "config.json").exists() and bool(result_files(path))


def result_files(path: Path) -> list[Path]:
    """Return lm-eval's results below a folder, or the results of a run with
    `--output_path NAME.json`.

    lm-eval writes `results_DATE.json` into a folder for each model, and `NAME_DATE.json` next to
    NAME.json.
    """
    if path.is_dir():
        return [file for file in path.rglob("*.json") if _is_result(file)]
    if path.suffix == ".json" and not path.exists():
        dated = [file for file in path.parent.glob("*.json") if _is_result(file)]
        return [file for file in dated if run_name(file) == path.stem]
    return [path] if _is_result(path) else []


def _is_result(file: Path) -> bool:
    return STAMP.search(file.name) is not None and file.is_file()


def run_name(file: Path) -> str:
    """Return the part of a result file's name before the date: `results`, or the run's name."""
    return STAMP.sub("", file.name).removesuffix("_")
