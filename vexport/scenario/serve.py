"""Settings of vLLM's engine: arguments that users may set, and arguments that vexport sets."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Le
from pydantic import (
    AliasChoices,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from vexport.errors import InputError, InputErrors
from vexport.errors.validation import ValidationProblem, validation_problems
from vexport.formats.gpus import GENERATIONS, parse_capability
from vexport.records.values import Positive
from vexport.scenario.declaring import Key, Option, options_of
from vexport.scenario.section import KeyProblem, ScenarioSection, located_error, located_errors

EngineArguments = Mapping[str, JsonValue]
"""Arguments of `vllm.EngineArgs` by name."""

# Arguments that quantize the served model. The baseline runs without them.
CANDIDATE_ONLY = (
    *("kv_cache_dtype", "kv_cache_dtype_skip_layers", "calculate_kv_scales"),
    *("quantization", "quantization_config", "allow_deprecated_quantization"),
)
_CHECKPOINT = "no value here: the checkpoint's own files are judged"
_SAMPLING = "auto: each task of lm-eval defines its sampling"
# Arguments that vexport sets: the values that change nothing and are allowed, and the text of the
# error's `need` for all other values.
_RESERVED: Mapping[str, tuple[Sequence[JsonValue], str]] = {
    **dict.fromkeys(("model_weights", "hf_config_path", "tokenizer_revision"), ((), _CHECKPOINT)),
    **dict.fromkeys(("tokenizer", "revision", "code_revision"), ((), _CHECKPOINT)),
    "model": ((), "no value here: vexport serves the checkpoint and its baseline"),
    "skip_tokenizer_init": ((False,), "false: prompts are text"),
    "runner": (("auto", "generate"), "generate: the model must generate text"),
    "convert": (("auto", "none"), "none: the model must generate text"),
    "trust_remote_code": ((False,), "the option --trust-remote-code instead"),
    "hf_token": ((), "the environment variable HF_TOKEN instead: reports list all arguments"),
    "seed": ((), "evaluate.seed instead, which sets the seed of vLLM and of lm-eval"),
    "max_logprobs": ((-1,), "-1: vexport compares log-probabilities of the whole vocabulary"),
    "logprobs_mode": (("raw_logprobs",), "raw_logprobs: lm-eval scores raw log-probabilities"),
    "generation_config": (("auto", "vllm"), _SAMPLING),
    "override_generation_config": (({},), _SAMPLING),
    "data_parallel_size": (
        (1,),
        "1: for data parallelism, start a server and evaluate it by its address",
    ),
    "worker_extension_cls": ((), "no value here: vexport sets its own class to report kernels"),
    "nnodes": ((1,), "1: for several hosts, use Ray and distributed_executor_backend ray"),
}


class EngineSettings(ScenarioSection):
    """Arguments of vLLM, which shape the responses. None means vLLM's default.

    `engine_args` contains the arguments without a key of their own. If an argument changes, the
    models run again.
    """

    tensor_parallel_size: Annotated[
        Positive | None,
        Option(
            "Tensor parallel size: serve the model on N devices.",
            "vLLM",
            names="--tp --tensor-parallel-size tp",
            metavar="N",
            unset="vLLM's default",
        ),
    ] = None
    pipeline_parallel_size: Annotated[
        Positive | None, Key("Pipeline parallel size.", unset="vLLM's default")
    ] = None
    distributed_executor_backend: Annotated[
        Literal["mp", "ray", "uni"] | None,
        Key("How vLLM starts its workers.", unset="vLLM's default"),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Gt(0),
        Le(1),
        Option(
            "Share of the GPU's memory that vLLM uses.",
            "vLLM",
            metavar="S",
            unset="vLLM's default",
        ),
    ] = None
    max_num_seqs: Annotated[
        Positive | None,
        Option(
            "Maximum number of sequences at once.",
            "vLLM",
            unset="64 on a CPU, else vLLM's default",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        Field(min_length=1),
        Key(
            "Data type of the checkpoint's KV cache. The baseline is served without it.",
            unset="vLLM's default",
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Ge(1),
        Option(
            "Maximum length of a sequence in tokens.",
            "vLLM",
            unset="as needed",
            more="Tasks of lm-eval get 4,096 tokens, or the model's maximum if it is smaller; a "
            "longer prompt is an error. A dry load uses the model's maximum.",
        ),
    ] = None
    enforce_eager: Annotated[
        bool | None,
        Key(
            "Run the model operator by operator, or compile it.",
            unset="compile on a GPU, operator by operator on a CPU",
        ),
    ] = None
    engine_args: Annotated[
        dict[str, JsonValue],
        Key(
            "Other arguments of vLLM's engine, by name. Arguments that are not plain need "
            "`--trust-remote-code`."
        ),
    ] = {}

    @model_validator(mode="before")
    @classmethod
    def _move_typed_arguments(cls, values: object) -> object:
        """Move arguments in `engine_args` to their keys in `serve`.

        An argument stays in `engine_args` if its key has another value.
        """
        if not isinstance(values, dict) or not isinstance(values.get("engine_args"), dict):
            return values
        keys = {**values}
        others: dict[str, JsonValue] = {}
        for name, value in values["engine_args"].items():
            key = name.replace("-", "_") if isinstance(name, str) else name
            if key in SERVE_KEYS and keys.get(key) is None:
                keys[key] = value
            elif key not in SERVE_KEYS or keys[key] != value:
                others[key] = value
        return {**keys, "engine_args": others}

    @field_validator("engine_args")
    @classmethod
    def _check_engine_args(
        cls, values: dict[str, JsonValue], info: ValidationInfo
    ) -> dict[str, JsonValue]:
        problems: list[KeyProblem] = []
        for name, value in values.items():
            typed = info.data.get(name)
            allowed, need = _RESERVED.get(name, ((value,), ""))
            if typed is not None:
                need = f"{typed!r}, the value of the setting {name}"
                problems.append(((name,), value, need, f"set {name} only once"))
            elif value not in allowed:
                problems.append(((name,), value, need, "remove it"))
            elif (name, value) == ("load_format", "dummy"):
                need = "a format that loads the checkpoint's weights, not random weights"
                problems.append(((name,), value, need, "remove it"))
        if problems:
            raise located_errors(problems)
        return values

    @model_validator(mode="after")
    def _check_uni_has_one_device(self) -> Self:
        if self.distributed_executor_backend == "uni" and self.devices > 1:
            need = f"mp or ray: uni runs one device, and {self.devices} are set"
            raise located_error("distributed_executor_backend", "uni", need, "use mp")
        return self

    @property
    def ranks(self) -> int:
        """The tensor parallel size of the engine that runs."""
        return self.tensor_parallel_size or 1

    @property
    def devices(self) -> int:
        """The number of devices that an engine needs."""
        return self.ranks * (self.pipeline_parallel_size or 1)

    @property
    def given(self) -> EngineArguments:
        """The arguments that are set: `SERVE_KEYS` in their order, then `engine_args`."""
        typed = {name: value for name in SERVE_KEYS if (value := getattr(self, name)) is not None}
        return {**typed, **self.engine_args}

    def arguments(self, *, is_baseline: bool) -> EngineArguments:
        """Return the arguments for the baseline or for the candidate; see `CANDIDATE_ONLY`."""
        return {
            name: value
            for name, value in self.given.items()
            if not (is_baseline and name in CANDIDATE_ONLY)
        }


# Arguments of vLLM that have a key in `serve`.
SERVE_KEYS = tuple(key for key in EngineSettings.model_fields if key != "engine_args")


class LoadSettings(ScenarioSection):
    """Devices of the dry load, and prompts of the load check."""

    dry_tensor_parallel: Annotated[
        tuple[Positive, ...] | None,
        Field(
            validation_alias=AliasChoices("dry_tensor_parallel", "tensor_parallel"), min_length=1
        ),
        Key("Tensor parallel sizes of the dry load.", unset="`tensor_parallel_size`"),
    ] = None
    compute: Annotated[
        tuple[str, ...],
        Field(min_length=1),
        Key(
            "GPUs of the dry load: compute capabilities such as `sm90`, or names. With `cpu` "
            "alone, there is no dry load."
        ),
    ] = ("cpu",)
    canaries: Annotated[
        bool,
        Option(
            "Continue fixed prompts by 200 tokens in each engine, to find degenerate output.",
            "vLLM",
            more="See [canary](real-load.md#canary).",
        ),
    ] = True

    @field_validator("compute")
    @classmethod
    def _check_compute(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        known = {value: value if value == "cpu" else parse_capability(value) for value in values}
        if None in known.values():
            capabilities = ", ".join(f"sm{sm}" for sm in GENERATIONS)
            raise ValueError(f"cpu, a GPU such as H100, or a compute capability ({capabilities})")
        return tuple(value if value == "cpu" else f"sm{known[value]}" for value in values)

    @property
    def capabilities(self) -> tuple[int, ...]:
        """The compute capabilities in `compute` as numbers: 90 for sm90."""
        return tuple(int(name.removeprefix("sm")) for name in self.compute if name != "cpu")


class LimitSettings(ScenarioSection):
    """Limits of a call. If they change, no model runs again."""

    timeout: Annotated[Positive, Option("Maximum number of seconds per engine.", "vLLM")] = 3600


# Each setting is in the base class for what it shapes. Pydantic lists the fields of the last base
# class first.
class Serve(LimitSettings, LoadSettings, EngineSettings):
    """Target GPUs of the checkpoint, and settings for starting vLLM on this machine.

    The checkpoint is loaded dry for each capability in `compute` and each size in
    `dry_tensor_parallel`. Engines run on the devices of this machine. All other keys except
    `timeout` are arguments of vLLM, and None means vLLM's default. `engine_args` contains the
    arguments without a key in this section.
    """

    @property
    def dry_ranks(self) -> tuple[int, ...]:
        """The tensor parallel sizes of the dry load."""
        return self.dry_tensor_parallel or (self.ranks,)

    @property
    def planned_ranks(self) -> tuple[int, ...]:
        """Every tensor parallel size that the checkpoint must fit."""
        return tuple(dict.fromkeys((*self.dry_ranks, self.ranks)))


def with_options(
    serve: Serve, options: Mapping[str, JsonValue], engine_args: EngineArguments
) -> Serve:
    """Return the settings of a scenario, overridden by settings from the command line.

    `options` maps keys of `Serve` to values. An option that is not given has the value None.
    `engine_args` are the arguments of --engine-arg. Raises InputErrors for values that are not
    allowed, and if `options` and `engine_args` contradict each other.
    """
    options = {name: value for name, value in options.items() if value is not None}
    typed = {name: value for name, value in engine_args.items() if name in SERVE_KEYS} | options
    others = {
        name: value
        for name, value in engine_args.items()
        if name not in SERVE_KEYS or name in options
    }
    keys = {
        **serve.model_dump(mode="json"),
        **typed,
        "engine_args": {**serve.engine_args, **others},
    }
    try:
        return Serve.model_validate(keys)
    except ValidationError as error:
        problems = [_option_error(problem, options) for problem in validation_problems(error)]
    raise InputErrors(problems)


def _option_error(problem: ValidationProblem, options: EngineArguments) -> InputError:
    """Return the error of a validation problem. Its place is the option that sets the value."""
    section, *rest = problem.keys or ("",)
    name = rest[0] if rest else section
    if section in options:
        names = {option.key: option.names[0] for option in options_of(Serve)}
        return problem.at(names[name])
    return problem.at(f"--engine-arg {name}".strip())
