"""Read a scenario from YAML, with its paths made absolute."""

import os
import re
from collections.abc import Hashable
from pathlib import Path

import yaml

from vexport.checkpoint.data_name import DEFAULT, parse_data
from vexport.checkpoint.source import with_revision
from vexport.errors import InputError, require_working_disk
from vexport.errors.escaping import clip
from vexport.files import require_no_device
from vexport.outputs.replaceable import RECIPE
from vexport.scenario.evaluate import Evaluate
from vexport.scenario.model import Scenario
from vexport.scenario.problems import problems_at
from vexport.scenario.rules import Rule


def read_scenario(path: Path) -> Scenario:
    """Read a scenario; every problem in it is reported at once, with the path of its key.

    Paths inside are made absolute, relative to the scenario's folder. Raises InputError.
    """
    content = load_yaml(path)
    if path.name == RECIPE and isinstance(content, dict):
        content = content.get("scenario")
    with problems_at(str(path)):
        scenario = Scenario.model_validate(content)
    return _absolute(scenario, path.parent)


# Values of a scenario, each alias counted as what it stands for; a long one has hundreds.
MOST_VALUES = 100_000
MOST_DIGITS = 1000


class _Loader(yaml.SafeLoader):
    """YAML without repeated keys, of which PyYAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """The mapping of a node; MarkedYAMLError where a key stands in it twice."""
        seen = set[str]()
        for key, _ in node.value:
            name = repr(self.construct_object(key, deep=True))
            if name in seen:
                problem = f"the key {clip(name, 100)} a second time"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path, need: str = "a scenario") -> object:
    """What a YAML file says, within bounds; InputError where it cannot be read."""
    try:
        require_no_device(path)
        loader = _Loader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is not None:
            require_bounded(node)
        content: object = None if node is None else loader.construct_document(node)
    except FileNotFoundError:
        raise InputError(str(path), got="no such file", need=need, fix="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        require_working_disk(error, path)
        raise InputError(
            str(path), got=str(error), need="a readable YAML file", fix="check the file"
        ) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = error.problem or "a syntax error"
        raise InputError(f"{path}:{line}", got=problem, need="valid YAML", fix="correct that line") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        got = "values too deep in each other" if isinstance(error, RecursionError) else str(error)
        raise InputError(
            str(path), got=clip(" ".join(got.split()), 200), need="valid YAML", fix="correct the file"
        ) from None
    return content


def require_bounded(root: yaml.Node) -> None:
    """MarkedYAMLError where aliases make more values of a text than MOST_VALUES, or hold themselves.

    Integers are bounded too: of more than 4,300 digits Python makes no text, hexadecimal ones included.
    """
    sizes: dict[int, int] = {}
    waiting = [root]
    while waiting:
        node = waiting[-1]
        inner = [part for each in node.value for part in (each if isinstance(each, tuple) else (each,))]
        children = inner if isinstance(node, yaml.CollectionNode) else []
        unknown = [child for child in children if id(child) not in sizes]
        if unknown and sizes.get(id(node)) != -1:
            sizes[id(node)] = -1  # begun
            waiting += unknown
            continue
        waiting.pop()
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > MOST_DIGITS:
            raise _marked(f"an integer of {len(node.value):,} digits", node)
        if any(sizes.get(id(child), -1) < 0 for child in children):
            raise _marked("an alias inside what it stands for", node)
        sizes[id(node)] = 1 + sum(sizes[id(child)] for child in children)
        if sizes[id(node)] > MOST_VALUES:
            raise _marked(f"aliases that stand for more than {MOST_VALUES:,} values", node)


def _marked(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _absolute(scenario: Scenario, folder: Path) -> Scenario:
    """Resolve what names a file; a source, baseline or task that is no file stays a hub id or task name."""
    folder = folder.resolve()

    def absolute(name: str | Path) -> str:
        return os.path.normpath(folder / name)  # without `..`; links stay what they are

    def local(name: str) -> str:
        return absolute(name) if (folder / name).exists() else name

    source = with_revision(local(scenario.source), scenario.revision)
    changes: dict[str, object] = {"source": source, "revision": None}
    if scenario.calibration:
        data = scenario.calibration.data
        if (folder / data).exists() or parse_data(data).kind == "path":
            data = absolute(data)
        changes["calibration"] = scenario.calibration.model_copy(update={"data": data})
    if scenario.evaluate:
        baseline = local(scenario.evaluate.baseline) if scenario.evaluate.baseline else None
        tasks = tuple(
            absolute(task) if task.endswith((".yaml", ".yml")) else task for task in scenario.evaluate.tasks
        )
        folders = tuple(Path(absolute(path)) for path in scenario.evaluate.include_path)
        text = scenario.evaluate.text
        if text is not None and ((folder / text).exists() or parse_data(text).kind == "path"):
            text = absolute(text)
        update = {"tasks": tasks, "text": text, "baseline": baseline, "include_path": folders}
        changes["evaluate"] = scenario.evaluate.model_copy(update=update)
    return scenario.model_copy(update=changes)


def base_scenario(source: str, scheme: str, file: Path | None) -> Scenario:
    """What all schemes have in common: the scenario of a file, or text with all defaults."""
    if file is not None:
        return read_scenario(file).model_copy(update={"source": source})
    path = Path(source).expanduser()
    name = re.sub(r"[^A-Za-z0-9._-]", "-", path.resolve().name if path.is_dir() else path.name)
    return Scenario(
        name=name.lstrip("._-") or "model",
        source=source,
        rules=(Rule(match="Linear", scheme=scheme),),
        evaluate=Evaluate(text=DEFAULT),
    )
