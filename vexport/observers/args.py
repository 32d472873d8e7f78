"""What an observer asks of quantization arguments; `QuantArgs` and compressed-tensors' own both answer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, TypeVar, cast

from pydantic import BaseModel

from vexport.types.observer_names import OptionValue


class ObserverArgs(Protocol):
    """The part of compressed-tensors' `QuantizationArgs` that statistics and scales depend on."""

    @property
    def num_bits(self) -> int: ...
    @property
    def type(self) -> str: ...
    @property
    def symmetric(self) -> bool: ...
    @property
    def strategy(self) -> str | None: ...
    @property
    def group_size(self) -> int | None: ...
    @property
    def block_structure(self) -> "tuple[int, int] | list[int] | None": ...
    @property
    def dynamic(self) -> bool | str: ...
    @property
    def scale_dtype(self) -> object: ...
    @property
    def zp_dtype(self) -> object: ...
    @property
    def observer_kwargs(self) -> Mapping[str, OptionValue]: ...


ArgsT = TypeVar("ArgsT", bound=ObserverArgs)


def with_keywords(args: ArgsT, keywords: Mapping[str, OptionValue]) -> ArgsT:
    """The arguments with these keywords of the observer over their own; those given stay as they are."""
    if not keywords:
        return args
    own = {**(args.observer_kwargs or {}), **keywords}
    if isinstance(args, BaseModel):
        return cast(ArgsT, args.model_copy(update={"observer_kwargs": own}))
    return replace(args, observer_kwargs=own)  # type: ignore[type-var]


def plain(value: object) -> str:
    """An enum's value, a torch dtype's or any other object's text: "tensor_group", "float8_e4m3fn"."""
    return str(getattr(value, "value", value)).removeprefix("torch.")


def strategy_of(args: ObserverArgs) -> str:
    """Which elements share a scale, by compressed-tensors' name."""
    return plain(args.strategy)


def is_float(args: ObserverArgs) -> bool:
    """Whether the quantized values are floating point (e2m1 or e4m3) and not integers."""
    return plain(args.type) == "float"


def is_nvfp4(args: ObserverArgs) -> bool:
    """Whether values are e2m1 with e4m3 block scales relative to a global scale."""
    return strategy_of(args) == "tensor_group" and is_float(args) and args.num_bits == 4


def is_mx(args: ObserverArgs) -> bool:
    """Whether scales are powers of two stored as exponents (e8m0): MXFP4 and MXFP8.

    Source: should_generate_mx_scales in compressed_tensors/quantization/utils/mxfp_utils.py.
    """
    return (
        args.num_bits in (4, 8)
        and is_float(args)
        and args.group_size == 32
        and plain(args.scale_dtype) == "uint8"
    )
