"""Schemes of a user's own: arguments as compressed-tensors writes them, and the names that spell them.

`INT4_GROUP64_ASYM.A16` are weights of 4 bits in groups of 64 with zero points, inputs as they are;
`FP8_CHANNEL.FP8_TENSOR` has one calibrated scale for the inputs. A name says all that is stored, so that
plans, recipes and reports need no more than the name.
"""

import re
from dataclasses import replace
from typing import Literal, get_args

from vexport.formats import WRITTEN, vllm_format, written_format
from vexport.formats.arguments import GROUPED, QuantArgs, SchemeArgs, Strategy, contradictions, parse_args
from vexport.formats.base import Format
from vexport.numerics import MX_GROUP
from vexport.records import Json

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


def spelled(args: SchemeArgs) -> str:
    """The name that spells arguments; equal where the same is stored."""
    inputs = args.input_activations
    return f"{_spelled(args.weights)}.{_spelled(inputs) if inputs else UNQUANTIZED}"


def spelled_args(name: str) -> SchemeArgs | None:
    """The arguments that a name spells; None where it is no such name."""
    if not _NAME.fullmatch(name):
        return None
    weights, _, inputs = name.upper().partition(".")
    return _completed(_args(weights), None if inputs == UNQUANTIZED else _args(inputs))


def own_args(weights: Json, inputs: Json) -> SchemeArgs:
    """Arguments as compressed-tensors writes them, checked; ValueError says what vexport cannot write.

    Observers are no part of them (see `Rule`).
    """
    parsed = _parsed("weights", weights)
    parsed_inputs = None if inputs is None else _parsed("input_activations", inputs)
    completed = _completed(parsed, parsed_inputs)
    _require_dtypes("weights", parsed, completed.weights)
    if parsed_inputs is not None and completed.input_activations is not None:
        _require_dtypes("input_activations", parsed_inputs, completed.input_activations)
    return completed


def format_of(args: SchemeArgs) -> Format | str:
    """The format that stores the weights, or why vLLM does not run them or vexport does not write them."""
    storage = written_format(args)
    if storage is None:
        reason = next(contradictions(args), None)
        answers = [vllm_format(args, each.name) for each in reversed(WRITTEN)]
        return reason or next(answer for answer in answers if isinstance(answer, str))
    if not storage.gpu_support(args).input_bits and storage.cpu(args) != "native":
        sizes = [str(size) for size in storage.group_sizes(args) if size]
        return f"groups of {args.weights.group}, for which vLLM has no kernel: {' or '.join(sizes)} it runs"
    return storage.unwritten(args) or storage


def _parsed(where: str, raw: Json) -> QuantArgs:
    args = parse_args(raw)
    if isinstance(args, str):
        raise ValueError(f"{where} as compressed-tensors takes them: {args}")
    if args.actorder in ("group", "dynamic"):
        raise ValueError(f"{where}: actorder static (vLLM refuses {args.actorder})")
    return args


def _completed(weights: QuantArgs, inputs: QuantArgs | None) -> SchemeArgs:
    """Add the dtypes and observers of presets; a scale per row has no group size."""
    exponents = weights.is_float and weights.strategy == "group" and weights.group_size == MX_GROUP
    if inputs is not None:
        observer = None if inputs.dynamic is True else STATIC_OBSERVER
        inputs = replace(_with_dtypes(inputs, exponents=exponents), observer=observer)
    weights = replace(_with_dtypes(weights, exponents=exponents), observer=WEIGHT_OBSERVER)
    return SchemeArgs(weights=weights, input_activations=inputs)


def _with_dtypes(args: QuantArgs, *, exponents: bool) -> QuantArgs:
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
        raise ValueError(f"{where}: scale_dtype {complete.scale_dtype}, as the format stores it")
    if not args.symmetric and args.zp_dtype not in (None, complete.zp_dtype):
        raise ValueError(f"{where}: zp_dtype {complete.zp_dtype}, as the format stores it")


def _spelled(args: QuantArgs) -> str:
    size = str(args.group_size) if args.strategy in GROUPED else ""
    if args.block:
        size = "{}X{}".format(*args.block)
    zero = "" if args.symmetric else "_ASYM"
    dynamic = {True: "_DYNAMIC", "local": "_LOCAL"}.get(args.dynamic, "")
    kind = "FP" if args.is_float else "INT"
    return f"{kind}{args.num_bits}_{args.strategy.upper()}{size}{zero}{dynamic}"


def _args(text: str) -> QuantArgs:
    """The arguments that one part of a name spells."""
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
