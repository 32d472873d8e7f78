"""Parameters that several formats have, as vLLM's `create_weights` makes them."""

from vexport.formats.arguments import QuantArgs
from vexport.formats.base import FLOAT_SCALES, Parameter
from vexport.numerics.constants import INT32_BITS


def exact(dtype: str, shape: tuple[int, ...], *also: str, along: tuple[int, ...] = ()) -> Parameter:
    """A parameter that is stored in one dtype; vLLM copies others in `also` without a change of value."""
    return Parameter(dtypes=frozenset({dtype, *also}), shape=shape, dtype=dtype, along=along)


def single(dtypes: frozenset[str] = FLOAT_SCALES) -> Parameter:
    """A number, float32, for all of a layer."""
    return Parameter(dtypes=dtypes, shape=(1,))


def scale_shape(args: QuantArgs, shape: tuple[int, int]) -> tuple[int, ...]:
    """(1,) per tensor, (out, 1) per channel, (out, in/group) or (ceil(out/rows), ceil(in/columns))."""
    rows, columns = shape
    if args.strategy == "tensor":
        return (1,)
    if args.block:
        block_rows, block_columns = args.block
        return (-(-rows // block_rows), -(-columns // block_columns))
    if args.strategy == "channel" or args.group is None:
        return (rows, 1)
    return (rows, columns // args.group)


def scale(args: QuantArgs, shape: tuple[int, int], *, in_model_dtype: bool = False) -> Parameter:
    """Scales of the weight: floats, float32 but where they have the model's dtype."""
    size = scale_shape(args, shape)
    if args.strategy == "tensor":
        return single()
    by_row = not args.block and size[1:] == (1,) and (args.strategy == "channel" or args.group is None)
    dtype = "BF16" if in_model_dtype else "F32"
    return Parameter(
        dtypes=FLOAT_SCALES,
        shape=size,
        dtype=dtype,
        along=(0,) if by_row else (0, 1),
        in_model_dtype=in_model_dtype,
    )


def coded_scale(dtype: str, args: QuantArgs, shape: tuple[int, int]) -> Parameter:
    """Scales of groups that are codes of their own in `dtype`; plain ones where arguments name no groups."""
    if args.strategy in ("tensor", "channel") or args.block or args.group is None:
        return scale(args, shape)
    return exact(dtype, scale_shape(args, shape), along=(0, 1))


def zero_point(args: QuantArgs, shape: tuple[int, int]) -> dict[str, Parameter]:
    """Zero points of asymmetric weights: (ceil(out*bits/32), groups), packed along out_features."""
    if args.symmetric:
        return {}
    size = (words(shape[0], args.num_bits), scale_shape(args, shape)[-1])
    return {"weight_zero_point": exact("I32", size, along=(0, 1))}


def words(count: int, bits: int) -> int:
    """int32 words that `count` values of `bits` bits take."""
    return -(-count * bits // INT32_BITS)
