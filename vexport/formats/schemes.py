"""Quantization schemes: presets of compressed-tensors, other group sizes, custom schemes.

The custom scheme `INT4_GROUP64_ASYM.A16` has weights of 4 bits in groups of 64 with zero points,
and unquantized inputs. `FP8_CHANNEL.FP8_TENSOR` has a single static scale for the inputs. A name
determines the dtypes and shapes of all stored tensors, so plans, recipes and reports contain only
the name.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Literal, get_args

from pydantic import TypeAdapter

from vexport.architectures.ranks import Split, uneven
from vexport.errors import InputError, nearest_hint
from vexport.formats import WRITTEN_FORMATS, vllm_format, written_format
from vexport.formats.arguments import (
    GROUPED,
    QuantArgs,
    SchemeArgs,
    Strategy,
    contradictions,
    parse_args,
)
from vexport.formats.base import Format, partition_of
from vexport.numerics import MX_GROUP
from vexport.records import Json, LinearPlan, TensorSpec
from vexport.rules import scheme as rules

KEEP = "keep"
# `W4A16_G64` is W4A16 with groups of 64 columns, and `W4A16_CHANNEL` is W4A16 with a scale per row.
OTHER_GROUPS = re.compile(
    r"(?P<preset>.+?)[-_ ]?(?:G(?P<size>[1-9]\d{0,5})|CHANNEL)", re.IGNORECASE
)
UNQUANTIZED = "A16"
STATIC_OBSERVER = "static_minmax"
WEIGHT_OBSERVER = "memoryless_minmax"
_TENSOR = (
    r"(INT|FP)(\d{1,2})_(TENSOR_GROUP|TENSOR|CHANNEL|GROUP|BLOCK|TOKEN)(?:(\d{1,6})(?:X(\d{1,6}))?)?"
    r"(_ASYM)?(_DYNAMIC|_LOCAL)?"
)
_NAME = re.compile(rf"{_TENSOR}\.(?:{UNQUANTIZED}|{_TENSOR})", re.IGNORECASE)
_TENSOR_NAME = re.compile(_TENSOR, re.IGNORECASE)
_STRATEGIES: dict[str, Strategy] = {strategy.upper(): strategy for strategy in get_args(Strategy)}
_DYNAMIC: dict[str, bool | Literal["local"]] = {"": False, "_DYNAMIC": True, "_LOCAL": "local"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetFile:
    """Generated presets, and the version of compressed-tensors that they come from."""

    compressed_tensors: str
    presets: Mapping[str, SchemeArgs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Named scheme: its arguments, and the format in which its weights are stored.

    The name determines the rest, so schemes are compared only by name.
    """

    name: str
    args: SchemeArgs = field(compare=False, repr=False)
    format: Format = field(compare=False, repr=False)

    def layout(self, linear: LinearPlan, source_dtype: str) -> tuple[TensorSpec, ...]:
        """Return the tensors that replace a layer's weight, in the order of the output."""
        stored = self.stored_parameters((linear.out_features, linear.in_features), source_dtype)
        return tuple(
            TensorSpec(name=f"{linear.name}.{name}", dtype=dtype, shape=parameter_shape)
            for name, (dtype, parameter_shape) in stored.items()
        )

    def stored_parameters(
        self, shape: tuple[int, int], source_dtype: str
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of the tensors that store a weight (out_features, in_features)."""
        return {
            name: (source_dtype if parameter.in_model_dtype else parameter.dtype, parameter.shape)
            for name, parameter in self.format.parameters(self.args, shape).items()
        }

    def unsupported_shape(
        self, members: Sequence[LinearPlan], *, ranks: int = 1, split: Split = "none"
    ) -> str | None:
        """Return why vLLM could not run these layers as one on this number of ranks, or None.

        `split` is the dimension that tensor parallelism splits. If a model has fewer key and value
        heads than ranks, vLLM repeats the layers of keys and values. Pass these layers with the
        total out_features of all ranks.
        """
        on_one_rank = self.format.unsupported_shape(self.args, partition_of(members, 1, "none"))
        if ranks == 1 or split == "none":
            return on_one_rank
        refused = uneven(members, ranks, split)
        if refused:
            return refused
        reason = self.format.unsupported_shape(self.args, partition_of(members, ranks, split))
        if reason is None or reason == on_one_rank:
            return reason
        return f"{reason} on each of {ranks} ranks"


# Maps other tools' names of schemes, without case and separators, to vexport's names.
NAMES_IN_OTHER_TOOLS: Mapping[str, str] = {
    **dict.fromkeys(("int4", "w4", "q4", "nf4", "4bit"), "W4A16"),
    **dict.fromkeys(("fp4", "w4a4", "nvfp4a4", "nvfp4w4a4"), "NVFP4"),
    **dict.fromkeys(("w4afp16", "nvfp4w4a16"), "NVFP4A16"),
    **dict.fromkeys(("fp8static", "fp8tensor", "fp8pertensor", "w8a8fp8static"), "FP8"),
    **dict.fromkeys(
        ("fp8w8a8", "w8a8fp8", "ptpc", "fp8ptpc", "fp8channel", "fp8perchannel"), "FP8_DYNAMIC"
    ),
    **dict.fromkeys(("blockfp8", "fp8blockwise", "fp8deepseek"), "FP8_BLOCK"),
    **dict.fromkeys(("w8", "int8a16", "8bit"), "W8A16"),
    **dict.fromkeys(("w8a8int8", "int8w8a8"), "W8A8"),
}
# Names of methods that users mistake for schemes, each with the remedy.
METHODS: Mapping[str, str] = {
    **dict.fromkeys(
        ("gptq", "w4a16gptq"), "GPTQ is a rounding: use --scheme W4A16 --rounding gptq"
    ),
    **dict.fromkeys(
        ("smoothquant", "w8a8smoothquant"),
        "SmoothQuant is a smoothing: use --scheme W8A8 --calibration DATA --smoothing 0.5",
    ),
    **dict.fromkeys(
        ("autoround", "w4a16autoround"),
        "vexport has no AutoRound: use --scheme W4A16 --rounding refit instead, or quantize with "
        "AutoRound and check its checkpoint with `vexport check`",
    ),
    **dict.fromkeys(
        ("awq", "w4a16awq"),
        "vexport has no AWQ: use --scheme W4A16_ASYM --rounding refit instead, or run AWQ in "
        "another tool and check its checkpoint with `vexport check`",
    ),
}


@cache
def presets() -> PresetFile:
    """Return the generated presets, in the order in which lists and tables show them."""
    text = (
        files("vexport.formats").joinpath("generated", "presets.json").read_text(encoding="utf-8")
    )
    return TypeAdapter(PresetFile).validate_json(text)


def scheme_names() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(presets().presets)


def fold_name(name: str) -> str:
    """Remove case and separators from a name: `fp8-dynamic` and `FP8_DYNAMIC` become equal."""
    return re.sub(r"[-_ ]", "", name).casefold()


def scheme_name(text: str) -> str:
    """Return the scheme's name for a text in any case and with any separators.

    Returns `text` itself if there is no such scheme.
    """
    names = {fold_name(name): name for name in scheme_names()}
    if fold_name(text) in names:
        return names[fold_name(text)]
    other = OTHER_GROUPS.fullmatch(text)
    with suppress(InputError):
        if other is not None and (preset := names.get(fold_name(other["preset"]))):
            return regrouped(get_scheme(preset), _size(other)).name
        if (args := parse_canonical_name(text)) is not None:
            return named_scheme(args).name
    return text


def scheme_hint(name: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown scheme, such as ` (did you mean W4A16?)`, or "".

    If the name is a scheme of another tool, the hint is vexport's name. If it is a method such as
    AWQ, the hint is a remedy. Otherwise the hint is the nearest known name.
    """
    folded = fold_name(name)
    if folded in METHODS:
        return f" ({METHODS[folded]})"
    elsewhere = NAMES_IN_OTHER_TOOLS.get(folded)
    return f" (did you mean {elsewhere}?)" if elsewhere else nearest_hint(name, known)


def is_scheme(name: str) -> bool:
    """Return True if there is a scheme with exactly this name."""
    with suppress(InputError):
        return get_scheme(name).name == name
    return False


@cache
def get_scheme(name: str) -> Scheme:
    """Return the scheme with a name.

    The name is a preset, a preset with another group size, or spells out the arguments.

    Raises InputError if the name is unknown (with the nearest preset) or if its arguments are
    invalid.
    """
    known = presets().presets
    if name in known:
        return _scheme(name, known[name])
    other = OTHER_GROUPS.fullmatch(name)
    if other is not None and other["preset"] in known:
        return regrouped(get_scheme(other["preset"]), _size(other))
    args = parse_canonical_name(name)
    if args is not None:
        return named_scheme(args)
    raise InputError.of(rules.UNKNOWN, f"scheme {name!r}", hint=scheme_hint(name, list(known)))


def named_scheme(args: SchemeArgs) -> Scheme:
    """Return the scheme with these arguments, with a preset's name if the stored tensors are equal.

    If only the group size differs from a preset, the name is the preset's name with the group size,
    such as `W4A16_G64`. Raises InputError if vLLM would not run the scheme, or if vexport does not
    write it.
    """
    text = canonical_name(args)
    for name, preset in presets().presets.items():
        if canonical_name(preset) == text:
            return _scheme(name, preset)
    weights = args.weights
    for name, preset in presets().presets.items():
        if not weights.is_float and canonical_name(_with_groups(preset, weights.group)) == text:
            return _scheme(f"{name}_{f'G{weights.group}' if weights.group else 'CHANNEL'}", args)
    return _scheme(text, args)


def with_group_size(name: str, group_size: int | None) -> str:
    """Return the name of a scheme with this group size; None stands for a scale per row.

    Raises InputError if the name or format of the scheme requires another size.
    """
    scheme = get_scheme(scheme_name(name))
    weights = scheme.args.weights
    if weights.group == group_size and (group_size or weights.strategy == "channel"):
        return scheme.name
    if scheme.name not in scheme_names():
        raise InputError.of(
            rules.GROUP_SIZE_TWICE,
            f"scheme {name!r}",
            size=_describe_group_size(group_size),
            named=_describe_group_size(weights.group),
        )
    return regrouped(scheme, group_size).name


def regrouped(scheme: Scheme, group_size: int | None) -> Scheme:
    """Return a scheme of integers with this group size; None stands for a scale per row.

    Raises InputError for floats, which support only one size, and if vLLM has no scheme for the
    size.
    """
    weights = scheme.args.weights
    if weights.is_float or group_size == 0:
        size = _describe_group_size(weights.group, weights.strategy)
        only = f"{size}, the only size of this format"
        raise InputError.of(
            rules.GROUP_SIZE,
            f"scheme {scheme.name!r}",
            size=_describe_group_size(group_size),
            only=only if weights.is_float else "a size of at least 1",
        )
    return named_scheme(_with_groups(scheme.args, group_size))


def grouped_schemes(group_size: int | None) -> tuple[str, ...]:
    """Return the presets that have or support this group size, named with the size."""
    names: dict[str, None] = {}
    for name in scheme_names():
        with suppress(InputError):
            names[with_group_size(name, group_size)] = None
    return tuple(names)


def group_sizes(scheme: Scheme) -> tuple[int, ...]:
    """Return the group sizes that vLLM's kernels run for a scheme, largest first.

    The result is empty for schemes with a fixed group size, and for schemes without groups.
    """
    if scheme.args.weights.is_float or scheme.args.weights.group is None:
        return ()
    sizes = scheme.format.group_sizes(scheme.args)
    return tuple(sorted((size for size in sizes if size), reverse=True))


def all_schemes() -> tuple[Scheme, ...]:
    """Return all presets."""
    return tuple(get_scheme(name) for name in scheme_names())


def _with_groups(args: SchemeArgs, group_size: int | None) -> SchemeArgs:
    strategy: Strategy = "channel" if group_size is None else "group"
    return replace(args, weights=replace(args.weights, group_size=group_size, strategy=strategy))


def _scheme(name: str, args: SchemeArgs) -> Scheme:
    storage = format_of(args)
    if isinstance(storage, str):
        raise InputError.of(rules.ARGUMENTS, f"scheme {name!r}", reason=storage)
    return Scheme(name=name, args=args, format=storage)


def _size(name: re.Match[str]) -> int | None:
    """Return the group size in a match of `OTHER_GROUPS`; None stands for a scale per row."""
    return int(name["size"]) if name["size"] else None


def _describe_group_size(group_size: int | None, strategy: Strategy = "channel") -> str:
    if group_size is not None:
        return f"groups of {group_size}"
    return {"block": "a scale per block", "tensor": "a scale per tensor"}.get(
        strategy, "a scale per row"
    )


def canonical_name(args: SchemeArgs) -> str:
    """Return the name that spells out the arguments.

    Schemes with equal storage have the same name.
    """
    inputs = args.input_activations
    return f"{_spelled(args.weights)}.{_spelled(inputs) if inputs else UNQUANTIZED}"


def parse_canonical_name(name: str) -> SchemeArgs | None:
    """Return the arguments that a name spells out, or None if it is not such a name."""
    if not _NAME.fullmatch(name):
        return None
    weights, _, inputs = name.upper().partition(".")
    return _complete_args(_args(weights), None if inputs == UNQUANTIZED else _args(inputs))


def custom_args(weights: Json, inputs: Json) -> SchemeArgs:
    """Check arguments in compressed-tensors' format, and complete them.

    Raises ValueError if compressed-tensors or vLLM refuses them, or if they have other dtypes than
    the format. Observers are not part of them (see `Rule`).
    """
    parsed = _parsed("weights", weights)
    parsed_inputs = None if inputs is None else _parsed("input_activations", inputs)
    completed = _complete_args(parsed, parsed_inputs)
    _require_dtypes("weights", parsed, completed.weights)
    if parsed_inputs is not None and completed.input_activations is not None:
        _require_dtypes("input_activations", parsed_inputs, completed.input_activations)
    return completed


def format_of(args: SchemeArgs) -> Format | str:
    """Return the format of the weights, or why vLLM cannot run or vexport cannot write them."""
    storage = written_format(args)
    if storage is None:
        reason = next(contradictions(args), None)
        formats = [vllm_format(args, each.name) for each in reversed(WRITTEN_FORMATS)]
        return reason or next(refusal for refusal in formats if isinstance(refusal, str))
    if not storage.gpu_support(args).input_bits and storage.cpu(args) != "native":
        sizes = [str(size) for size in storage.group_sizes(args) if size]
        return (
            f"groups of {args.weights.group}, for which vLLM has no kernel (it runs groups of "
            f"{' or '.join(sizes)})"
        )
    return storage.unwritable_arguments(args) or storage


def _parsed(where: str, raw: Json) -> QuantArgs:
    args = parse_args(raw)
    if isinstance(args, str):
        raise ValueError(f"{where} that compressed-tensors accepts: {args}")
    if args.actorder in ("group", "dynamic"):
        raise ValueError(f"{where}: actorder static, because vLLM refuses {args.actorder}")
    return args


def _complete_args(weights: QuantArgs, inputs: QuantArgs | None) -> SchemeArgs:
    """Add the presets' dtypes and observers, and remove the group size if scales are per row."""
    exponents = weights.is_float and weights.strategy == "group" and weights.group_size == MX_GROUP
    if inputs is not None:
        observer = None if inputs.dynamic is True else STATIC_OBSERVER
        inputs = replace(_with_dtypes(inputs, exponents=exponents), observer=observer)
    weights = replace(_with_dtypes(weights, exponents=exponents), observer=WEIGHT_OBSERVER)
    return SchemeArgs(weights=weights, input_activations=inputs)


def _with_dtypes(args: QuantArgs, *, exponents: bool) -> QuantArgs:
    """Set the dtypes of scales and zero points, and remove options of the observer.

    `exponents` is True if the scales of groups are stored as exponents (MXFP4 and MXFP8).
    """
    scale = "torch.float8_e4m3fn" if args.strategy == "tensor_group" else None
    if exponents and args.strategy == "group" and args.group_size == MX_GROUP:
        scale = "torch.uint8"
    return replace(
        args,
        group_size=args.group,
        actorder=None,
        scale_dtype=scale,
        zp_dtype=None if args.symmetric else "torch.int8",
        observer_kwargs={},
    )


def _require_dtypes(where: str, args: QuantArgs, complete: QuantArgs) -> None:
    if args.scale_dtype not in (None, complete.scale_dtype):
        raise ValueError(f"{where}: scale_dtype {complete.scale_dtype}, which the format requires")
    if not args.symmetric and args.zp_dtype not in (None, complete.zp_dtype):
        raise ValueError(f"{where}: zp_dtype {complete.zp_dtype}, which the format requires")


def _spelled(args: QuantArgs) -> str:
    size = str(args.group_size) if args.strategy in GROUPED else ""
    if args.block:
        size = "{}X{}".format(*args.block)
    zero = "" if args.symmetric else "_ASYM"
    dynamic = {True: "_DYNAMIC", "local": "_LOCAL"}.get(args.dynamic, "")
    kind = "FP" if args.is_float else "INT"
    return f"{kind}{args.num_bits}_{args.strategy.upper()}{size}{zero}{dynamic}"


def _args(text: str) -> QuantArgs:
    match = _TENSOR_NAME.fullmatch(text)
    assert match is not None
    kind, bits, strategy, size, columns, asymmetric, dynamic = match.groups(default="")
    return QuantArgs(
        num_bits=int(bits),
        type="float" if kind == "FP" else "int",
        symmetric=not asymmetric,
        strategy=_STRATEGIES[strategy],
        group_size=int(size) if size and not columns else None,
        block_structure=(int(size), int(columns)) if columns else None,
        dynamic=_DYNAMIC[dynamic],
    )
