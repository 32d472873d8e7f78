"""How kernels are compiled: by numba at their first call, then kept in `cache_folder`, without torch."""

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from llvmlite import ir
from numba import njit, types
from numba.core.base import BaseContext
from numba.core.typing import Context, Signature
from numba.extending import intrinsic

from vexport.numerics.cache import KernelCache, use_cache

Function = TypeVar("Function", bound=Callable[..., object])

# What a compiler may do to sums and products: a multiply-add as one instruction; a sum kept in lanes.
MULTIPLY_ADD = frozenset({"contract"})
LANES = frozenset({"contract", "reassoc"})

use_cache()


def compiled(
    *, parallel: bool = False, inline: bool = False, fastmath: frozenset[str] = frozenset()
) -> Callable[[Function], Function]:
    """Compile at the first call; the code is kept next to the package or in the user's cache folder.

    `inline` makes it part of its callers, so that their loops are turned into vector code. A division by
    zero gives infinity or NaN: a check would keep loops scalar.
    """

    def decorate(function: Function) -> Function:
        kernel = njit(
            nogil=True,
            error_model="numpy",
            parallel=parallel,
            forceinline=inline,
            fastmath=set(fastmath),
        )(function)
        kernel._cache = KernelCache(function)
        return cast(Function, kernel)

    return decorate


def _generate_wide_vectors(
    target: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Sequence[ir.Value]
) -> ir.Value:
    # llvmlite's own `add` refuses attributes that have a value.
    set.add(builder.function.attributes, '"prefer-vector-width"="512"')
    return target.get_dummy_value()


def _wide_vectors(context: Context) -> tuple[Signature, object]:
    """The function that calls this may use 512-bit vectors, which LLVM avoids by itself on many machines.

    Where there are none it has no effect. Every function that has a loop needs it, inlined or not.
    """
    return types.none(), _generate_wide_vectors


wide_vectors = cast(Callable[[], None], intrinsic(_wide_vectors))
