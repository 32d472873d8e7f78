"""Read a scenario from YAML, make its paths absolute, and report problems with their remedies."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ValidationError

from vexport.checkpoint.source import DEFAULT, parse_data, with_revision
from vexport.config_files import load_yaml
from vexport.errors import InputError, InputErrors, nearest_hint
from vexport.errors.validation import UNKNOWN_KEY, ValidationProblem, validation_problems
from vexport.files import read_json_object
from vexport.names import SourceRef, parse_model, parse_source
from vexport.outputs import RECIPE
from vexport.records import GENERATION_KEYS
from vexport.rules import scenario as rules
from vexport.scenario.calibration import Calibration, DataSource, Sensitivity
from vexport.scenario.evaluate import Evaluate
from vexport.scenario.rules import Auto, Rule
from vexport.scenario.scenario import Scenario
from vexport.scenario.serve import Serve
from vexport.scenario.variants import Variants
from vexport.words import clip

# Maximum number of problems shown for a file.
MOST_PROBLEMS = 50
# Maps names of settings in vLLM or in other tools that use lm-eval to keys of a scenario.
_OTHER_NAMES = {
    "fewshot": "evaluate.num_fewshot",
    "n_shot": "evaluate.num_fewshot",
    "shots": "evaluate.num_fewshot",
    "chat_template": "evaluate.apply_chat_template (true, false or a template's name)",
    "system_prompt": "evaluate.system_instruction",
    "generation_kwargs": "evaluate.gen_kwargs",
    "max_batch_size": "evaluate.batch_size (the number of requests that vLLM gets at once)",
}
_SECTIONS: Mapping[str, type[BaseModel]] = {
    "rules": Rule,
    "calibration": Calibration,
    "data": DataSource,
    "auto": Auto,
    "sensitivity": Sensitivity,
    "serve": Serve,
    "evaluate": Evaluate,
    "variants": Variants,
}


# A file without the ending of YAML counts as a scenario if it has one of these keys.
_REQUIRED = ("source", "rules")
# Scenarios are shorter. A file of another kind may be large.
_MOST_CHARACTERS = 100_000


@contextmanager
def problems_at(where: str) -> Iterator[None]:
    """Convert a ValidationError of pydantic inside the block to an InputError for each key."""
    try:
        yield
    except ValidationError as error:
        causes = validation_problems(error)
        problems = [_with_place(where, problem) for problem in causes[:MOST_PROBLEMS]]
        more = len(causes) - MOST_PROBLEMS
        if more > 0:
            problems.append(InputError.of(rules.MORE_PROBLEMS, where, count=more))
        raise InputErrors(problems) from None


def _with_place(file: str, problem: ValidationProblem) -> InputError:
    where = f"{file}: {problem.place}" if problem.place else file
    if problem.kind != UNKNOWN_KEY:
        return problem.at(where)
    *sections, name = problem.keys
    inner = reversed(sections)
    section = next((_SECTIONS[part] for part in inner if part in _SECTIONS), Scenario)
    key, known = clip(name, 100), list(section.model_fields)
    return InputError.of(
        rules.UNKNOWN_KEY, where, key=key, known=", ".join(known), remedy=_advice(key, known)
    )


def _advice(key: str, known: Sequence[str]) -> str:
    """Return the section to which an unknown key belongs, or the known key with the most similar
    name.
    """
    if key in _OTHER_NAMES:
        return f"write {_OTHER_NAMES[key]}"
    sections = [
        name
        for name, model in _SECTIONS.items()
        if key in model.model_fields and model is not DataSource
    ]
    if sections:
        return f"move it to {' or '.join(sections)}"
    if key in GENERATION_KEYS:
        return f"move it to evaluate.gen_kwargs: {{{key}: ...}}"
    return f"remove it{nearest_hint(key, known)}"


def is_scenario(source: str) -> bool:
    """Return True if the argument names a scenario's file or the recipe in a checkpoint."""
    return source.endswith((".yaml", ".yml", f"/{RECIPE}")) or source == RECIPE


def read_scenario(path: Path) -> Scenario:
    """Read a scenario from YAML, or from the recipe in a checkpoint, and make its paths absolute.

    Paths in the file are relative to the file's folder. Raises InputErrors with all problems, each
    with the path of its key.
    """
    is_recipe = path.name == RECIPE
    content = read_json_object(path).get("scenario") if is_recipe else _yaml_of_scenario(path)
    with problems_at(str(path)):
        scenario = Scenario.model_validate(content)
    return _absolute(scenario, path.parent)


def _yaml_of_scenario(path: Path) -> object:
    """Return the content of a scenario's YAML file.

    Raises InputError if the file cannot be read. If the path is a folder, or a file such as
    README.md or config.json, the error says that it is no scenario.
    """
    is_named_yaml = path.suffix.lower() in (".yaml", ".yml")
    try:
        content = load_yaml(path, "a scenario")
    except InputError:
        if is_named_yaml or not path.exists() or _looks_like_scenario(path):
            raise
        content = None
    is_scenario_like = isinstance(content, dict) and not content.keys().isdisjoint(_REQUIRED)
    if not is_named_yaml and not is_scenario_like:
        raise InputError.of(rules.NO_SCENARIO, str(path)) from None
    return content


def _looks_like_scenario(path: Path) -> bool:
    """Return True if the first line of a file is a YAML key, or if the file cannot be opened.

    `_yaml_of_scenario` then reports the invalid YAML or the unreadable file. Otherwise, it reports
    that the file is not a scenario.
    """
    if not path.is_file():
        return False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_MOST_CHARACTERS)
    except OSError:
        return True
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return bool(lines) and re.match(r"\w+\s*:", lines[0]) is not None


def _absolute(scenario: Scenario, folder: Path) -> Scenario:
    """Make paths in a scenario absolute. Hub ids and names of tasks stay unchanged."""
    folder = folder.resolve()

    def absolute(name: str | Path) -> str:
        return os.path.normpath(folder / name)  # remove `..` but do not resolve links

    def local(name: str) -> str:
        return absolute(name) if (folder / name).exists() else name

    def data(name: str) -> str:
        return absolute(name) if parse_data(name).kind == "path" else local(name)

    def drafter(speculative: str) -> str:
        method, _, model = speculative.partition("=")
        return f"{method}={local(model)}" if model else method

    source = with_revision(parse_source(local(str(scenario.source))), scenario.revision)
    changes: dict[str, object] = {"source": source, "revision": None}
    if text := scenario.calibration:
        changes["calibration"] = text.with_paths(data)
    if evaluate := scenario.evaluate:
        update = {
            "tasks": tuple(
                absolute(name) if name.endswith((".yaml", ".yml")) else name
                for name in evaluate.tasks
            ),
            "text": data(evaluate.text) if evaluate.text else None,
            "baseline": parse_model(local(str(evaluate.baseline))) if evaluate.baseline else None,
            "tokenizer": parse_source(local(str(evaluate.tokenizer)))
            if evaluate.tokenizer
            else None,
            "speculative": drafter(evaluate.speculative) if evaluate.speculative else None,
            "include_path": tuple(Path(absolute(path)) for path in evaluate.include_path),
            "tools": Path(absolute(evaluate.tools)) if evaluate.tools else None,
        }
        changes["evaluate"] = evaluate.model_copy(update=update)
    if variants := scenario.variants:
        pythons = tuple(Path(absolute(path)) for path in variants.vllm_python)
        changes["variants"] = variants.model_copy(update={"vllm_python": pythons})
    return scenario.model_copy(update=changes)


def base_scenario(source: SourceRef, scheme: str, file: Path | None) -> Scenario:
    """Return the scenario of a comparison of schemes, before each run sets its scheme.

    It is the scenario in `file` with the given source. Without a file, the scenario quantizes all
    linear layers in `scheme`, and evaluates on the text that ships with vexport.
    """
    if file is not None:
        return read_scenario(file).model_copy(update={"source": source})
    name = re.sub(r"[^A-Za-z0-9._-]", "-", source.file_name)
    return Scenario(
        name=name.lstrip("._-") or "model",
        source=source,
        rules=(Rule(match="Linear", scheme=scheme),),
        evaluate=Evaluate(text=DEFAULT),
    )
