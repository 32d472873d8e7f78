"""Tell plain engine arguments from those that could make vLLM run Python code.

An argument is plain if the type of vLLM's field allows only numbers, truth values, fixed names and
containers of these, to any depth of nested config classes. Text is plain only in the fields of
`_SAFE`. All other values of a scenario need `--trust-remote-code`: vLLM has too many fields that
name a module, a file or a plugin to list them.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple

from pydantic import JsonValue

from vexport.architectures.engine_arguments import (
    ARGUMENTS,
    ArgumentTypes,
    argument_types,
    recorded_version,
)
from vexport.errors import nearest_hint
from vexport.version import Version, short_version
from vexport.words import clip


class _Safe(NamedTuple):
    """A type that replaces the type of vLLM's field, and the reason why its text is safe.

    The type is written as in scripts/engine_arguments.py. Text is plain if it matches `str` or
    `Text[PATTERN]`. `{'key': T}` is an object with these keys only.
    """

    type: str
    reason: str


_PARSER = "a name in vLLM's registry of parsers"
_LAYERS = "names or patterns of layers, which vLLM compares with the model's names"
_NUMBERS = "bool | int | float | str | list[int | float]"
_ROTARY = f"dict[str, {_NUMBERS} | dict[str, {_NUMBERS}]] | None"
_SAFE: Mapping[str, _Safe] = {
    "EngineArgs.served_model_name": _Safe("str | list[str]", "a name in responses and metrics"),
    "EngineArgs.reasoning_parser": _Safe("str", _PARSER),
    "StructuredOutputsConfig.reasoning_parser": _Safe("str", _PARSER),
    "EngineArgs.kv_cache_dtype_skip_layers": _Safe("list[str]", _LAYERS),
    "EngineArgs.offload_params": _Safe("list[str]", _LAYERS),
    "EngineArgs.cpu_offload_params": _Safe("list[str]", _LAYERS),
    "EngineArgs.ignore_patterns": _Safe("str | list[str]", "patterns of files that are not loaded"),
    "EngineArgs.compilation_config": _Safe(
        "int | CompilationConfig", "a number is the compilation mode"
    ),
    "CompilationConfig.backend": _Safe(
        "Literal['eager', 'inductor']", "vLLM's own compilers; other names are imported"
    ),
    "CompilationConfig.custom_ops": _Safe(
        "list[Text['all|none|[+-][a-z0-9_]+']]", "vLLM compares them with its operators' names"
    ),
    "CompilationConfig.splitting_ops": _Safe(
        "list[str] | None", "vLLM compares them with the names of operators in the graph"
    ),
    "CompilationConfig.compile_sizes": _Safe(
        "list[int | Literal['cudagraph_capture_sizes']] | None", "the only text that vLLM accepts"
    ),
    "EngineArgs.hf_overrides": _Safe(
        f"{{'rope_parameters': {_ROTARY}, 'rope_scaling': {_ROTARY}, 'rope_theta': int | float, "
        "'max_position_embeddings': int, 'sliding_window': int | None}",
        "sizes and numbers of rotary embeddings, which every config.json may set",
    ),
    "EngineArgs.mm_processor_kwargs": _Safe(
        "{'min_pixels': int, 'max_pixels': int, 'num_crops': int, 'fps': float} | None",
        "sizes of pictures and videos; other keys reach transformers",
    ),
    "EngineArgs.model_loader_extra_config": _Safe(
        "{'enable_multithread_load': bool, 'num_threads': int}", "how files are read"
    ),
    "KVTransferConfig.kv_connector_extra_config": _Safe(
        "{'num_cpu_blocks': int, 'cpu_bytes_to_use': float, 'block_size': int}",
        "sizes of OffloadingConnector; other keys name modules, servers and files",
    ),
    "QuantizationConfigArgs.linear": _Safe("QuantSpec | str | None", "a name in vLLM's table"),
    "QuantizationConfigArgs.moe": _Safe("QuantSpec | str | None", "a name in vLLM's table"),
    "QuantizationConfigArgs.ignore": _Safe("list[str]", _LAYERS),
    "QuantizationConfigArgs.targets": _Safe("dict[str, str] | None", "names in vLLM's table"),
    "QuantSpec.weight": _Safe("str | None", "a name in vLLM's table of number formats"),
    "QuantSpec.activation": _Safe("str | None", "a name in vLLM's table of number formats"),
    "SpeculativeConfig.model": _Safe(
        "Text['[^.]*|.*/.*'] | None",
        "a folder or a model of the hub, whose code does not run; vLLM imports dotted names only",
    ),
    "SpeculativeConfig.revision": _Safe("str | None", "a revision of a draft model on the hub"),
    "KVTransferConfig.kv_connector": _Safe(
        "str | None", "a name in vLLM's registry, unless kv_connector_module_path is set"
    ),
    "KVTransferConfig.kv_buffer_device": _Safe(
        "Literal['cpu', 'cuda', 'xpu', 'hpu', 'tpu']", "the kind of device of a buffer"
    ),
}
# Values that allow code, although the type of their field is plain.
_NEVER: Mapping[str, JsonValue] = {
    "EngineArgs.trust_remote_code": True,
    # vLLM imports the class that `model` names.
    "SpeculativeConfig.method": "custom_class",
}
_LONGEST_NEED = 200
_NO_CODE = "a setting that cannot name code or files"


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """A part of an argument that needs permission to run code, by the keys that lead to it."""

    keys: tuple[str, ...]
    value: JsonValue
    need: str

    @property
    def where(self) -> str:
        """The keys as in a scenario: `speculative_config.method`."""
        return ".".join(self.keys)


def code_problems(arguments: Mapping[str, JsonValue], version: Version) -> Iterator[CodeProblem]:
    """Yield the parts of the arguments that are not plain in a version of vLLM."""
    judge = _Judge(argument_types(version), short_version(recorded_version(version)))
    yield from judge.of_class(ARGUMENTS, dict(arguments), ())


@dataclass(frozen=True, slots=True)
class _Judge:
    """Compares values with the types of a version of vLLM."""

    types: ArgumentTypes
    version: str

    def of_class(
        self, name: str, value: dict[str, JsonValue], keys: tuple[str, ...]
    ) -> Iterator[CodeProblem]:
        """Yield the problems of an object that vLLM passes to a config class."""
        known = self.types[name]
        for key, entry in value.items():
            field, place = key.replace("-", "_"), (*keys, key)
            path = f"{name}.{field}"
            if field not in known:
                need = f"a setting of vLLM {self.version}{nearest_hint(field, [*known])}"
                yield CodeProblem(place, entry, need)
            elif entry is not None and path in _NEVER and entry == _NEVER[path]:
                yield CodeProblem(place, entry, _NO_CODE)
            elif path in _SAFE:
                yield from self._problems(_parsed(_SAFE[path].type), entry, place, is_safe=True)
            else:
                yield from self._problems(_parsed(known[field]), entry, place)

    def _problems(
        self, kind: ast.expr, value: JsonValue, keys: tuple[str, ...], *, is_safe: bool = False
    ) -> Iterator[CodeProblem]:
        """Yield the problems of a value whose field has the type `kind`.

        An object or list that is written as JSON text is judged by its content. Nothing and empty
        values are plain in every field.
        """
        members = [*_members(kind)]
        value = _content(value)
        if value in (None, "", [], {}):
            return
        found = [[*self._of_member(member, value, keys, is_safe)] for member in members]
        if all(found):
            yield from max(found, key=_precision)

    def _of_member(
        self, kind: ast.expr, value: JsonValue, keys: tuple[str, ...], is_safe: bool
    ) -> Iterator[CodeProblem]:
        match kind, value:
            case ast.Name(id=name), dict() if name in self.types:
                yield from self.of_class(name, value, keys)
            case ast.Subscript(value=ast.Name(id="list"), slice=item), list():
                for number, entry in enumerate(value):
                    place = (*keys, str(number))
                    yield from self._problems(item, entry, place, is_safe=is_safe)
            case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, item])), dict():
                for key, entry in value.items():
                    yield from self._problems(item, entry, (*keys, key), is_safe=is_safe)
            case ast.Dict(), dict():
                known = {ast.literal_eval(key): each for key, each in _entries(kind)}
                for key, entry in value.items():
                    if key not in known:
                        yield CodeProblem((*keys, key), entry, _NO_CODE)
                    else:
                        yield from self._problems(known[key], entry, (*keys, key), is_safe=is_safe)
            case _ if not _is_plain(kind, value, is_safe):
                yield CodeProblem(keys, value, _needed(kind))


def _is_plain(kind: ast.expr, value: JsonValue, is_safe: bool) -> bool:
    """Return True if a value without parts has the type `kind`, and this type is plain."""
    match kind:
        case ast.Name(id="bool"):
            return isinstance(value, bool)
        case ast.Name(id="int"):
            return isinstance(value, int)
        case ast.Name(id="float"):
            return isinstance(value, int | float)
        case ast.Name(id="str"):
            return is_safe and isinstance(value, str)
        case ast.Subscript(value=ast.Name(id="Text"), slice=ast.Constant(value=str(pattern))):
            return isinstance(value, str) and re.fullmatch(pattern, value) is not None
        case ast.Subscript(value=ast.Name(id="Literal" | "Enum" as name)):
            found = value.upper() if name == "Enum" and isinstance(value, str) else value
            return isinstance(found, str | int | float) and found in _names(kind)
    return False


def _needed(kind: ast.expr) -> str:
    match kind:
        case ast.Name(id="bool"):
            return "true or false"
        case ast.Name(id="int" | "float"):
            return "a number"
        case ast.Subscript(value=ast.Name(id="Literal" | "Enum")):
            return f"one of {clip(', '.join(str(name) for name in _names(kind)), _LONGEST_NEED)}"
    return _NO_CODE


def _precision(problems: list[CodeProblem]) -> tuple[int, bool]:
    """Return how exactly the problems of a union's member describe what is wrong."""
    return max((len(each.keys), each.need != _NO_CODE) for each in problems)


def _content(value: JsonValue) -> JsonValue:
    """Return the object or list that a text contains as JSON, and any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            parsed: JsonValue = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return parsed
    return value


@cache
def _parsed(kind: str) -> ast.expr:
    return ast.parse(kind, mode="eval").body


def _members(kind: ast.expr) -> Iterator[ast.expr]:
    if isinstance(kind, ast.BinOp):
        yield from chain(_members(kind.left), _members(kind.right))
    else:
        yield kind


def _entries(kind: ast.Dict) -> Iterator[tuple[ast.expr, ast.expr]]:
    for key, value in zip(kind.keys, kind.values, strict=True):
        assert key is not None
        yield key, value


def _names(kind: ast.expr) -> tuple[JsonValue, ...]:
    assert isinstance(kind, ast.Subscript)
    values = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
    return tuple(ast.literal_eval(value) for value in values)
