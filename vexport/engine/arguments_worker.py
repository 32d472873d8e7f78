"""`python -m vexport.engine.arguments_worker REQUEST.json RESULT.json`: asks vLLM about its arguments.

Imports vLLM and starts no engine: some seconds, before a model is downloaded or quantized.
"""

import dataclasses
import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from typing import Annotated, Literal, Union, cast, get_args, get_origin

from pydantic import JsonValue, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from vexport.engine.messages import ArgumentsRequest, FoundProblems, InputProblem
from vexport.engine.worker import CPU, answer_request
from vexport.errors import EnvironmentFault, InputError, nearest


def main(arguments: list[str]) -> int:
    """Read the request, ask vLLM, write the answer."""
    return answer_request(
        arguments, ArgumentsRequest, lambda request: FoundProblems(problems=tuple(problems_of(request)))
    )


def problems_of(request: ArgumentsRequest) -> Iterator[InputProblem]:
    """Problems of the arguments: unknown to vLLM, unfit, or more than this machine has."""
    from vllm import __version__ as version
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name: field.type for field in dataclasses.fields(EngineArgs) if field.name[0] != "_"}
    for name, value in request.arguments.items():
        if name not in known:
            fix = f"remove it{nearest(name, list(known))}"
            need = f"an argument of the engine of vLLM {version}"
            yield _problem(InputError.exit_code, name, "an unknown argument", need, fix)
        elif value is not None and (need := unfit(known[name], value)):
            yield _problem(InputError.exit_code, name, json.dumps(value), need, "correct the value")
    yield from _devices(request)


def _devices(request: ArgumentsRequest) -> Iterator[InputProblem]:
    from vllm.platforms import current_platform

    if request.arguments.get("distributed_executor_backend") == "ray":
        if importlib.util.find_spec("ray") is None:
            name, need = "distributed_executor_backend", "Ray's package"
            fix = "install ray next to vLLM, or use mp"
            yield _problem(EnvironmentFault.exit_code, name, "no module ray", need, fix)
        return
    if current_platform.device_type == CPU:
        return
    devices = int(current_platform.device_count())
    if devices < request.devices:
        sizes = ("tensor_parallel_size", "pipeline_parallel_size")
        named = [f"{name} {request.arguments[name]}" for name in sizes if name in request.arguments]
        yield _problem(
            EnvironmentFault.exit_code,
            " and ".join(named) or "the engine",
            _gpus(devices),
            _gpus(request.devices),
            "use a machine with more GPUs, a smaller --tp, or Ray over several hosts",
        )


def _gpus(number: int) -> str:
    return f"{number} GPU" + ("" if number == 1 else "s")


def _problem(exit_code: int, where: str, got: str, need: str, fix: str) -> InputProblem:
    return InputProblem(exit_code=exit_code, where=f"vLLM's argument {where}", got=got, need=need, fix=fix)


def unfit(kind: object, value: JsonValue) -> str:
    """The type that an argument's value must have; empty where it has it, or only vLLM can tell.

    Of a section (`compilation_config`) its keys are looked at; its values are vLLM's to judge.
    """
    sections = [part for part in _parts(kind) if dataclasses.is_dataclass(part) and isinstance(part, type)]
    if sections and isinstance(value, dict):
        known = [field.name for field in dataclasses.fields(sections[0])]
        unknown = [key for key in value if key not in known]
        name = sections[0].__name__
        return f"a key of {name} instead of {unknown[0]!r}{nearest(unknown[0], known)}" if unknown else ""
    try:
        TypeAdapter(cast(type[object], kind)).validate_json(json.dumps(value), strict=True)
    except PydanticSchemaGenerationError:  # a type that JSON alone does not tell
        return ""
    except ValidationError as error:
        # One line for each member of a union: the first says most.
        return str(error.errors()[0]["msg"]).removeprefix("Input should be ") + _choice(kind, value)
    return ""


def _choice(kind: object, value: JsonValue) -> str:
    """` (did you mean X?)` for a word that is nearly one of a type's."""
    words = [word for part in _parts(kind) if get_origin(part) is Literal for word in get_args(part)]
    return nearest(value, [word for word in words if isinstance(word, str)]) if isinstance(value, str) else ""


def _parts(kind: object) -> Iterator[object]:
    """The members of a union, else the type itself."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _parts(get_args(kind)[0])
    elif origin in (Union, types.UnionType):
        for part in get_args(kind):
            yield from _parts(part)
    else:
        yield kind


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
