"""Shipped tasks: tasks whose documents vexport makes itself.

lm-eval's tasks are texts with a right answer. A shipped task asks in other forms, with tools to
call, for example. Everything else is shared with lm-eval's tasks:

- A shipped task (`ShippedTask` in `base.py`) has one or more parts. Each part is a task of its own
  in results, verdicts, margins and accepted baselines: `tool-calls-40` is a part of `tool-calls`.
  `--task` accepts the name of the task, for all parts, or the name of a part.
- A part makes its documents from a seed, so that both models and later calls get the same
  questions. `lm_eval_task.py` hands them to lm-eval as a task. Limits, seeds, repeated documents,
  sample files and hashes are therefore lm-eval's.
- A document has conversations, which a model gets as `Question.conversation`. An engine renders
  them with the model's chat template. A server gets them at `/chat/completions`. Responses are
  stored, so that a killed call resumes.
- `score` turns the responses to a document into metrics. They become a row of the table of scores,
  as for any other task.
- A verdict counts how the candidate's responses became wrong (`fault`), and its reason ends with
  the clause of `explain_loss`.

To add a task, write a subclass of `ShippedTask` and add it to `_TASKS`.
"""

from collections.abc import Sequence
from pathlib import Path

from vexport.files import from_json
from vexport.inference.shipped.base import SUFFIX, ShippedPart, ShippedTask
from vexport.inference.shipped.sight import Sight
from vexport.inference.shipped.tool_calls import ToolCalls
from vexport.scenario import Evaluate

_TASKS: tuple[ShippedTask, ...] = (Sight(), ToolCalls())
SHIPPED = {task.name: task for task in _TASKS}
"""All shipped tasks by name."""
_OF_PART = {part: task for task in _TASKS for part in task.parts}
_ORDER = {part: number for number, part in enumerate(_OF_PART)}
NAMES = frozenset((*SHIPPED, *_OF_PART))
"""Names that only shipped tasks may have."""


def shipped_task(name: str) -> ShippedTask | None:
    """Return the shipped task with this name or with a part of this name, or None."""
    return SHIPPED.get(name) or _OF_PART.get(name)


def in_order_of_parts(names: Sequence[str]) -> list[str]:
    """Return the names with the parts of each shipped task in their order. Other names stay."""
    places = [number for number, name in enumerate(names) if name in _ORDER]
    parts = sorted((names[place] for place in places), key=_ORDER.__getitem__)
    ordered = [*names]
    for place, part in zip(places, parts, strict=True):
        ordered[place] = part
    return ordered


def shipped_parts(name: str, settings: Evaluate) -> tuple[ShippedPart, ...]:
    """Return the parts that a name in `--task` stands for. Empty if no shipped task has the name.

    Raises InputError if the settings do not fit the task.
    """
    task = shipped_task(name)
    if task is None:
        return ()
    options = task.options(settings)
    names = task.parts if name == task.name else (name,)
    return tuple(
        ShippedPart(task=task.name, name=part, seed=settings.seed, options=options)
        for part in names
    )


def read_part(file: str) -> ShippedPart | None:
    """Read the part that `ShippedPart.write` wrote. Return None for another kind of task."""
    return from_json(ShippedPart, Path(file)) if file.endswith(SUFFIX) else None


def longest_sequences(settings: Evaluate) -> Sequence[int]:
    """Return the number of tokens that each part of the settings' shipped tasks needs."""
    parts = [part for name in settings.tasks for part in shipped_parts(name, settings)]
    return [SHIPPED[part.task].longest_sequence(part) for part in parts]


def takes_tools(settings: Evaluate) -> bool:
    """Return True if a task of these settings asks for calls of tools."""
    found = map(shipped_task, settings.tasks)
    return any(task is not None and task.takes_tools for task in found)


def takes_pictures(specs: Sequence[str]) -> str:
    """Return the name of the first task with pictures among tasks that were written, or ""."""
    parts = (part for spec in specs if (part := read_part(spec)) is not None)
    return next((part.name for part in parts if SHIPPED[part.task].takes_pictures), "")
