"""Compile kernels with numba at their first call, and cache them in `cache_folder`.

A digest of all kernels' sources is part of the folder's name, because numba checks only the file of
a kernel. If the kernel calls a function in another file, numba would keep outdated code when that
other file changes. This module does not import torch.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar, cast

import numba
from llvmlite import ir
from numba import njit, types
from numba.core import event
from numba.core.base import BaseContext
from numba.core.caching import FunctionCache
from numba.core.typing import Context, Signature
from numba.extending import intrinsic

from vexport.caches import user_caches
from vexport.records import OnProgress

Function = TypeVar("Function", bound=Callable[..., object])

# Float optimizations that a kernel may allow: fused multiply-add, and sums that are split into the
# lanes of a vector.
MULTIPLY_ADD = frozenset({"contract"})
LANES = frozenset({"contract", "reassoc"})


def compiled(
    *, parallel: bool = False, inline: bool = False, fastmath: frozenset[str] = frozenset()
) -> Callable[[Function], Function]:
    """Compile a function at its first call, and cache the code (see `cache_folder`).

    `inline` compiles the function into its callers, so that their loops are vectorized. Division by
    zero returns infinity or NaN, because a check would keep loops scalar.
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
    # llvmlite's `add` refuses attributes that have a value.
    set.add(builder.function.attributes, '"prefer-vector-width"="512"')
    return target.get_dummy_value()


def _wide_vectors(context: Context) -> tuple[Signature, object]:
    """Allow 512-bit vectors in the calling function, because LLVM avoids them on many machines.

    The call has no effect if the CPU has no 512-bit vectors. Every function with a loop needs this
    call, even if the function is inlined.
    """
    return types.none(), _generate_wide_vectors


wide_vectors = cast(Callable[[], None], intrinsic(_wide_vectors))


PACKAGE = Path(__file__).resolve().parent.parent
KERNELS = (
    "numerics/__init__.py",
    "numerics/arithmetic.py",
    "numerics/bf16_products.py",
    "numerics/jit.py",
    "numerics/number_formats.py",
    "formats/packing/*.py",
    "observers/kernels/*.py",
    "quantize/gptq.py",
)


def kernel_files() -> list[Path]:
    """Return the modules with kernels and with constants that are compiled into kernels."""
    return sorted(file for pattern in KERNELS for file in PACKAGE.glob(pattern))


def sources_digest() -> str:
    """Return the SHA-256 of the sources of all kernels, shortened to 16 digits."""
    whole = hashlib.sha256()
    for file in kernel_files():
        whole.update(f"{file.relative_to(PACKAGE)}\0".encode() + file.read_bytes())
    return whole.hexdigest()[:16]


def cache_folder() -> Path | None:
    """Return the first writable folder for kernels, or None.

    It is below NUMBA_CACHE_DIR if this variable is set. Otherwise it is below the package or the
    user's cache folder.
    """
    named = os.environ.get("NUMBA_CACHE_DIR")
    package = PACKAGE / "numerics" / "__pycache__"
    for folder in [Path(named)] if named else [package, *user_caches()]:
        kernels = folder / f"kernels-{sources_digest()}"
        try:
            kernels.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(kernels, os.W_OK):
            return kernels
    return None


class KernelCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of a kernel. Damaged files are replaced, and a full disk is ignored."""

    def _load_overload(self, signature: object, context: object) -> object:
        try:
            return super()._load_overload(signature, context)
        except Exception:  # pickle can raise anything on damaged bytes
            with suppress(OSError):
                self.flush()
            return None

    def _save_overload(self, signature: object, data: object) -> None:
        with suppress(OSError):  # the kernel works without a cache
            super()._save_overload(signature, data)


if folder := cache_folder():  # otherwise numba chooses
    numba.config.CACHE_DIR = str(folder)


class _Announcement(event.Listener):  # type: ignore[misc]
    """Reports once that kernels are compiled, if the cache does not have them."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress: OnProgress | None = on_progress

    def on_start(self, event: event.Event) -> None:
        """Numba calls this in the thread that compiles."""
        if self._on_progress is not None:
            self._on_progress("compile kernels (only once)", 1, 1)
            self._on_progress = None

    def on_end(self, event: event.Event) -> None:
        """Do nothing."""


@contextmanager
def announce_compilation(on_progress: OnProgress) -> Iterator[None]:
    """Report the first compilation of a kernel inside the block as progress."""
    with event.install_listener("numba:compile", _Announcement(on_progress)):
        yield
