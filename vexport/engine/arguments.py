"""Check the arguments for vLLM with vLLM itself, before any long work begins."""

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast, get_args

from pydantic import JsonValue, PydanticUserError, TypeAdapter, ValidationError

from vexport.architectures.config import known_size, text_config
from vexport.architectures.layout import impossible_size
from vexport.architectures.ranks import Heads
from vexport.checkpoint.index import read_index
from vexport.engine.messages import ArgumentSet, ArgumentsRequest, InputProblem
from vexport.engine.session import Worker, log_folder, raise_found_problems, session_error
from vexport.engine.worker import CPU, input_problem, run_worker
from vexport.errors import EnvironmentFault, InputError, VexportError, nearest_hint
from vexport.errors.validation import validation_problems
from vexport.files import read_json_object
from vexport.records import silent
from vexport.rules import engine as rules
from vexport.rules import environment, model
from vexport.scenario.serve import Serve

# Arguments that every vLLM version has and `Serve` has already checked.
_ALREADY_CHECKED = {"max_model_len", "enforce_eager"}
"""The `got` of an error for an argument that this vLLM does not have."""


def require_arguments(
    serves: Sequence[Serve], vllm_python: Path | None, *, dry: bool = False
) -> None:
    """Check the engine arguments with vLLM.

    `serves` are settings that differ in their number of devices. With `dry`, no devices are needed.

    Raises InputError for all arguments that this vLLM does not accept, and EnvironmentFault if the
    machine has too few GPUs or lacks Ray. vLLM is imported in a separate process, which takes some
    seconds, and only if there are arguments to check.
    """
    largest = max(serves, key=lambda serve: serve.devices)
    (found,) = _problems_with([largest], vllm_python, dry=dry)
    raise_found_problems(found)


def find_problems(
    serves: Sequence[Serve], vllm_python: Path | None
) -> list[tuple[VexportError, ...]]:
    """Check several settings with vLLM in one process, and return the problems of each setting.

    A setting that vLLM does not accept is an InputError. Too few GPUs or a missing Ray are an
    EnvironmentFault.
    """
    return [
        tuple(session_error(problem) for problem in found)
        for found in _problems_with(serves, vllm_python)
    ]


def _problems_with(
    serves: Sequence[Serve], vllm_python: Path | None, *, dry: bool = False
) -> list[list[InputProblem]]:
    checked = [serve for serve in serves if serve.given.keys() - _ALREADY_CHECKED]
    if not checked:
        return [[] for _ in serves]
    sets = tuple(
        ArgumentSet(arguments=serve.given, devices=0 if dry else serve.devices) for serve in checked
    )
    with log_folder("vexport-arguments-") as folder:
        found = Worker(
            module="vexport.engine.arguments",
            request=ArgumentsRequest(sets=sets),
            kind=list[list[InputProblem]],
            where="vLLM's arguments",
            log=folder / "vllm.log",
            timeout=max(serve.timeout for serve in checked),
            vllm_python=vllm_python,
        ).run(silent)
    problems = iter(found)
    return [next(problems) if serve.given.keys() - _ALREADY_CHECKED else [] for serve in serves]


def require_layers(checkpoint: Path) -> None:
    """Raise InputError if config.json has more layers or experts than the stored tensors allow.

    vLLM would build them one by one and never finish. If the checkpoint cannot be read, nothing is
    raised, and vLLM reports the problem.
    """
    try:
        index = read_index(checkpoint)
    except InputError:
        return
    if (impossible := impossible_size(index.config, len(index.tensors))) is not None:
        key, reason = impossible
        where = f"{checkpoint / 'config.json'}: {key}"
        raise InputError.of(model.IMPOSSIBLE_COUNT, where, reason=reason)


def require_heads(checkpoint: Path, ranks: int) -> None:
    """Raise InputError if vLLM cannot split the attention heads among `ranks` ranks."""
    text = text_config(read_json_object(checkpoint / "config.json"))
    # Latent attention (MLA) has no KV heads to split.
    keys = 0 if text.get("kv_lora_rank") else known_size("num_key_value_heads", text)
    heads = Heads(queries=known_size("num_attention_heads", text), keys=keys)
    if (got := heads.uneven(ranks)) is not None:
        where = f"{checkpoint} (tensor_parallel_size {ranks})"
        possible = heads.possible_ranks
        raise InputError.of(rules.HEADS, where, heads=got, ranks=ranks, possible=possible)


def main(arguments: list[str]) -> int:
    """Read the request, check the arguments with vLLM, and write the result."""
    return run_worker(
        arguments,
        ArgumentsRequest,
        lambda request: [[*map(input_problem, problems_of(each))] for each in request.sets],
    )


def problems_of(request: ArgumentSet) -> Iterator[VexportError]:
    """Yield problems of the arguments.

    An argument may be unknown to vLLM, have a wrong value, or need more devices than there are.
    """
    from vllm import __version__ as version
    from vllm.engine.arg_utils import EngineArgs

    known = {
        field.name: field.type for field in dataclasses.fields(EngineArgs) if field.name[0] != "_"
    }
    yield from _prefix_caching(request, version)
    for name, value in request.arguments.items():
        where = f"vLLM's argument {name}"
        if name not in known:
            hint = nearest_hint(name, [*known])
            yield InputError.of(rules.UNKNOWN_ARGUMENT, where, version=version, hint=hint)
        elif value is not None and (need := type_problem(known[name], value)):
            yield InputError.of(rules.ARGUMENT, where, value=json.dumps(value), need=need)
    yield from _devices(request)


def _prefix_caching(request: ArgumentSet, version: str) -> Iterator[InputError]:
    from vllm import SamplingParams

    if not request.arguments.get("enable_prefix_caching"):
        return
    if not getattr(SamplingParams(prompt_logprobs=1), "skip_reading_prefix_cache", False):
        where = "vLLM's argument enable_prefix_caching"
        need = f"false: vLLM {version} returns no log-probabilities of cached prompts"
        yield InputError.of(rules.ARGUMENT, where, value="true", need=need)


def _devices(request: ArgumentSet) -> Iterator[VexportError]:
    from vllm.platforms import current_platform

    if request.arguments.get("distributed_executor_backend") == "ray":
        if importlib.util.find_spec("ray") is None:
            yield EnvironmentFault.of(
                environment.MODULE,
                "vLLM's argument distributed_executor_backend",
                module="ray",
                requirement="ray",
                interpreter=sys.executable,
            )
    elif (
        request.devices
        and current_platform.device_type != CPU
        and (devices := int(current_platform.device_count())) < request.devices
    ):
        sizes = ("tensor_parallel_size", "pipeline_parallel_size")
        named = [f"{name} {request.arguments[name]}" for name in sizes if name in request.arguments]
        where = f"vLLM's argument {' and '.join(named)}" if named else "vLLM's engine"
        yield EnvironmentFault.of(rules.DEVICES, where, count=devices, least=request.devices)


def type_problem(kind: object, value: JsonValue) -> str:
    """Return the type that an argument's value must have, or "" if the value has this type.

    Also return "" if only vLLM can check the value. If the argument is an object, such as
    `compilation_config`, only the names of its keys are checked. vLLM checks the keys' values.
    """
    parts = (kind, *get_args(kind))
    sections = [part for part in parts if dataclasses.is_dataclass(part) and isinstance(part, type)]
    if sections and isinstance(value, dict):
        known = [field.name for field in dataclasses.fields(sections[0])]
        unknown = [key for key in value if key not in known]
        name = sections[0].__name__
        return (
            f"a key of {name} instead of {unknown[0]!r}{nearest_hint(unknown[0], known)}"
            if unknown
            else ""
        )
    try:
        TypeAdapter(cast(type[object], kind)).validate_json(json.dumps(value), strict=True)
    except PydanticUserError:  # a type that pydantic cannot check against JSON
        return ""
    except ValidationError as error:
        return validation_problems(error)[0].need
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
