"""What pydantic finds wrong with a scenario, as errors that name the key and what to write instead."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vexport.errors import InputError, InputErrors, nearest
from vexport.errors.escaping import clip
from vexport.errors.removed import instead_of
from vexport.scenario.calibration import Calibration, Sensitivity
from vexport.scenario.evaluate import Evaluate
from vexport.scenario.model import Scenario
from vexport.scenario.rules import Auto, Rule
from vexport.scenario.serve import Serve
from vexport.types import GENERATION_KEYS

# Of one file, in full, and of a value in one.
MOST_PROBLEMS, MOST_CHARACTERS = 50, 300
# What people call a setting elsewhere, in lm-eval's other front ends or in vLLM.
_OTHER_NAMES = {
    "fewshot": "evaluate.num_fewshot",
    "n_shot": "evaluate.num_fewshot",
    "shots": "evaluate.num_fewshot",
    "chat_template": "evaluate.apply_chat_template (true, false or a template's name)",
    "system_prompt": "evaluate.system_instruction",
    "generation_kwargs": "evaluate.gen_kwargs",
    "max_batch_size": "evaluate.batch_size, how many requests vLLM is given at once",
}


@contextmanager
def problems_at(where: str) -> Iterator[None]:
    """Raise what pydantic finds inside the block as InputErrors, each at its key in `where`."""
    try:
        yield
    except ValidationError as error:
        causes = _causes(error.errors())
        problems = [_problem(where, detail) for detail in causes[:MOST_PROBLEMS]]
        if len(causes) > MOST_PROBLEMS:
            got = f"{len(causes) - MOST_PROBLEMS:,} more problems"
            problems.append(InputError(where, got=got, need="a scenario", fix="correct the first ones"))
        raise InputErrors(problems) from None


def _causes(details: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """The errors without those that only follow from one further inside (an item less, say)."""
    followed = {detail["loc"][:end] for detail in details for end in range(len(detail["loc"]))}
    return [detail for detail in details if detail["loc"] not in followed]


def _problem(file: str, detail: ErrorDetails) -> InputError:
    key_path = clip(".".join(str(part) for part in detail["loc"]), MOST_CHARACTERS)
    where = f"{file}: {key_path}" if key_path else file
    if detail["type"] == "extra_forbidden":
        key, known = clip(str(detail["loc"][-1]), 100), _known_keys(detail["loc"][:-1])
        need = f"one of {', '.join(known)}"
        return InputError(where, got=f"the unknown key {key!r}", need=need, fix=_where_to(key, known))
    if detail["type"] == "missing":
        return InputError(where, got="nothing", need="a value", fix="add the key")
    message = detail["msg"].removeprefix("Value error, ")
    value = detail["input"]
    got = f"the keys {', '.join(map(str, value))}" if isinstance(value, dict) else repr(value)
    got = clip(got, MOST_CHARACTERS)
    fix = str(detail.get("ctx", {}).get("fix", "correct the value"))
    return InputError(where, got=got, need=message, fix=fix)


def _sections() -> dict[str, type[BaseModel]]:
    return {
        "rules": Rule,
        "calibration": Calibration,
        "auto": Auto,
        "sensitivity": Sensitivity,
        "serve": Serve,
        "evaluate": Evaluate,
    }


def _known_keys(location: Sequence[int | str]) -> list[str]:
    models = _sections()
    section = next((str(part) for part in location if part in models), None)
    model = models[section] if section else Scenario
    return list(model.model_fields)


def _where_to(key: str, known: Sequence[str]) -> str:
    """What to do about an unknown key: where it belongs, or what it may have been meant to be."""
    if instead := instead_of(key):
        return f"remove it: {instead}"
    if key in _OTHER_NAMES:
        return f"write {_OTHER_NAMES[key]}"
    if homes := [name for name, model in _sections().items() if key in model.model_fields]:
        return f"move it to {' or '.join(homes)}"
    if key in GENERATION_KEYS:
        return f"move it to evaluate.gen_kwargs: {{{key}: ...}}"
    return f"remove it{nearest(key, known)}"
