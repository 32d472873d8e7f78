"""List the input files and folders of an evaluation or a scenario, and find those that are missing.

This module does not import torch, so a wrong path is reported without delay.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from vexport.calibration.data import require_rows
from vexport.checkpoint.source import parse_data, require_source
from vexport.errors.extras import attempt_all
from vexport.inference.tasks import parse_task, task_files
from vexport.names import HubName, ModelRef, ResultFiles, Server
from vexport.outputs.replaceable import NamedPath
from vexport.scenario import Calibration, Evaluate, Scenario


def named_model(label: str, ref: ModelRef | None) -> Iterator[NamedPath]:
    """Yield the path of a model, which outputs must not overlap. A server has none.

    The name of a hub model becomes a path that does not exist.
    """
    if ref is not None and not isinstance(ref, Server):
        yield NamedPath(label=label, path=ref.path)


def evaluation_inputs(settings: Evaluate, label: str) -> Iterator[NamedPath]:
    """Yield the inputs of an evaluation besides the two models. `label` is the label of the tasks.

    The inputs include a task's YAML includes, documents and code.
    """
    for task in settings.tasks:
        for file in task_files(Path(task)):
            yield NamedPath(label=label, path=file)
    if settings.text:
        yield NamedPath(label="text", path=parse_data(settings.text).path)
    for folder in settings.include_path:
        yield NamedPath(label="include_path", path=folder)
    if settings.tools:
        yield NamedPath(label="tools", path=settings.tools)
    yield from named_model("tokenizer", settings.tokenizer)
    drafter = (settings.speculative or "").partition("=")[2]
    if drafter:
        yield NamedPath(label="speculative", path=Path(drafter))


def scenario_inputs(scenario: Scenario, file: Path | None) -> Iterator[NamedPath]:
    """Yield the inputs of a scenario's run. `file` is the scenario's file."""
    if file is not None:
        yield NamedPath(label="SCENARIO", path=file)
    yield from named_model("source", scenario.source)
    for path in scenario.calibration.paths if scenario.calibration else ():
        yield NamedPath(label="calibration.data", path=path)
    if scenario.evaluate:
        yield from evaluation_inputs(scenario.evaluate, "evaluate.tasks")
        yield from named_model("evaluate.baseline", scenario.evaluate.baseline)


def require_inputs(
    models: Sequence[ModelRef], settings: Evaluate | None, calibration: Calibration | None = None
) -> None:
    """Raise the errors for all missing models, tasks and texts at once.

    Texts must begin with a row that can be read. All other contents are checked later.
    """
    checks = []
    if calibration is not None:
        checks += [(data.name, partial(require_rows, data)) for data in calibration.sources()]
    if settings is not None:
        checks += [(task, partial(_require_file, task)) for task in settings.tasks]
        if text := settings.held_out():
            checks.append((text.name, partial(require_rows, text)))
        if settings.tokenizer:
            models = [*models, settings.tokenizer]
    refs = [ref for ref in dict.fromkeys(models) if not isinstance(ref, Server | ResultFiles)]
    on_hub = [ref for ref in refs if isinstance(ref, HubName)]
    checks += [(str(ref), partial(require_source, ref)) for ref in refs if ref not in on_hub]
    attempt_all(checks)
    # Models of the hub are checked last: the hub may be slow or unreachable.
    attempt_all([(str(ref), partial(require_source, ref)) for ref in on_hub])


def require_scenario_inputs(scenario: Scenario) -> None:
    """Raise the errors for all missing inputs of a scenario at once."""
    settings = scenario.evaluate
    models: list[ModelRef] = [scenario.source]
    if settings is not None and settings.baseline is not None:
        models.append(settings.baseline)
    require_inputs(models, settings, scenario.calibration)


def _require_file(task: str) -> None:
    path = Path(task)
    if path.suffix in (".yaml", ".yml") and not path.exists():
        parse_task(path, trust=True)  # it raises the error for a missing file
