"""List the input files and folders of an evaluation or a scenario, which no output may replace."""

from collections.abc import Iterator
from pathlib import Path

from vexport.checkpoint.source import parse_data
from vexport.files import user_path
from vexport.inference.tasks import task_files
from vexport.outputs.replaceable import NamedPath
from vexport.scenario import Evaluate, Scenario


def evaluation_inputs(settings: Evaluate, label: str) -> Iterator[NamedPath]:
    """Yield the inputs of an evaluation besides the two models. `label` is the label of the tasks.

    The includes, documents and code of a task are among the paths. Names that are not paths are
    ignored later.
    """
    for task in settings.tasks:
        for file in task_files(user_path(task)):
            yield NamedPath(label=label, path=file)
    if settings.text:
        yield NamedPath(label="text", path=parse_data(settings.text).path)
    for folder in settings.include_path:
        yield NamedPath(label="include_path", path=folder)
    if settings.tokenizer:
        yield NamedPath(label="tokenizer", path=user_path(settings.tokenizer))
    drafter = (settings.speculative or "").partition("=")[2]
    if drafter:
        yield NamedPath(label="speculative", path=user_path(drafter))


def scenario_inputs(scenario: Scenario, file: Path | None) -> Iterator[NamedPath]:
    """Yield the inputs of a scenario's run. `file` is the scenario's file."""
    if file is not None:
        yield NamedPath(label="SCENARIO", path=file)
    yield NamedPath(label="source", path=user_path(scenario.source))
    if scenario.calibration and scenario.calibration.path:
        yield NamedPath(label="calibration.data", path=scenario.calibration.path)
    if scenario.evaluate:
        yield from evaluation_inputs(scenario.evaluate, "evaluate.tasks")
        if scenario.evaluate.baseline:
            yield NamedPath(label="evaluate.baseline", path=user_path(scenario.evaluate.baseline))
