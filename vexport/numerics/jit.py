"""Compiles kernels by numba at their first call and keeps them in `cache_folder`, without torch.

The folder is named by a digest of all kernels' sources. Numba looks at the file of a function
alone: code that calls a function of another file would stay as it is when that file changes. And it
looks at the file's place and time: what was compiled in a checkout would be compiled again in an
installed package.
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
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator
from numba.core.typing import Context, Signature
from numba.extending import intrinsic

from vexport.records import OnProgress

Function = TypeVar("Function", bound=Callable[..., object])

# Allowed float optimizations: fused multiply-add; sums kept in vector lanes.
MULTIPLY_ADD = frozenset({"contract"})
LANES = frozenset({"contract", "reassoc"})
STAGE = "compile kernels, once"


def compiled(
    *, parallel: bool = False, inline: bool = False, fastmath: frozenset[str] = frozenset()
) -> Callable[[Function], Function]:
    """Compile at the first call; the code is kept next to the package or in the user's cache
    folder.

    `inline` makes it part of its callers, so that their loops are turned into vector code. A
    division by zero gives infinity or NaN: a check would keep loops scalar.
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
    """The function that calls this may use 512-bit vectors, which LLVM avoids by itself on many
    machines.

    Where there are none it has no effect. Every function that has a loop needs it, inlined or not.
    """
    return types.none(), _generate_wide_vectors


wide_vectors = cast(Callable[[], None], intrinsic(_wide_vectors))


PACKAGE = Path(__file__).resolve().parent.parent
KERNELS = (
    "numerics/__init__.py",
    "numerics/arithmetic.py",
    "numerics/jit.py",
    "numerics/number_formats.py",
    "formats/packing/*.py",
    "observers/kernels/*.py",
    "quantize/gptq.py",
)


def kernel_files() -> list[Path]:
    """The modules with kernels, and those whose constants they are compiled with."""
    return sorted(file for pattern in KERNELS for file in PACKAGE.glob(pattern))


def sources_digest() -> str:
    """SHA-256, shortened to 16 digits, of the sources of all kernels."""
    whole = hashlib.sha256()
    for file in kernel_files():
        whole.update(f"{file.relative_to(PACKAGE)}\0".encode() + file.read_bytes())
    return whole.hexdigest()[:16]


def _user_caches() -> list[Path]:
    """Return the folder for caches of vexport's user; nothing if the user has no home folder."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return [Path(named) / "vexport"]
    try:
        return [Path.home() / ".cache" / "vexport"]
    except RuntimeError:
        return []


def cache_folder() -> Path | None:
    """Below NUMBA_CACHE_DIR, the package, or the user's cache, whichever is writable; None where
    none is.
    """
    named = os.environ.get("NUMBA_CACHE_DIR")
    package = PACKAGE / "numerics" / "__pycache__"
    for folder in [Path(named)] if named else [package, *_user_caches()]:
        kernels = folder / f"kernels-{sources_digest()}"
        try:
            kernels.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(kernels, os.W_OK):
            return kernels
    return None


class KernelLocator(UserProvidedCacheLocator):  # type: ignore[misc]
    """The place of a kernel of this package in `cache_folder`, and the digest of all of them as its
    state.
    """

    def __init__(self, function: object, file: str) -> None:
        super().__init__(function, file)
        room = Path(file).resolve().parent.relative_to(PACKAGE)
        self._cache_path = str(Path(numba.config.CACHE_DIR) / "-".join(room.parts))

    def get_source_stamp(self) -> str:
        return Path(self._cache_path).parent.name

    @classmethod
    def from_function(cls, function: object, file: str) -> "KernelLocator | None":
        """Return None for functions of other packages."""
        if not Path(file).resolve().is_relative_to(PACKAGE):
            return None
        locator: KernelLocator | None = super().from_function(function, file)
        return locator


class KernelCacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    """Looks for the place of a kernel of ours first."""

    _locator_classes = (KernelLocator, *CompileResultCacheImpl._locator_classes)


class KernelCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of one kernel; damaged files are replaced, a full disk is passed over."""

    _impl_class = KernelCacheImpl

    def _load_overload(self, signature: object, context: object) -> object:
        try:
            return super()._load_overload(signature, context)
        except Exception:  # pickle raises anything on damaged bytes
            with suppress(OSError):
                self.flush()
            return None

    def _save_overload(self, signature: object, data: object) -> None:
        with suppress(OSError):  # the kernel runs all the same
            super()._save_overload(signature, data)


if folder := cache_folder():  # else numba chooses
    numba.config.CACHE_DIR = str(folder)


class Compilation(event.Listener):  # type: ignore[misc]
    """A stage that begins when a first kernel is to be compiled; one whose code was kept does not
    count.
    """

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._begun = self._ended = False

    def on_start(self, event: event.Event) -> None:
        """Called by numba, in the thread that compiles."""
        if not self._begun:
            self._begun = True
            self._on_progress(STAGE, 0, 1)

    def on_end(self, event: event.Event) -> None:
        """Others may follow."""

    def on_progress(self, stage: str, done: int, total: int) -> None:
        """Pass on the progress of another stage, which ends the compilation."""
        if self._begun and not self._ended:
            self._ended = True
            self._on_progress(STAGE, 1, 1)
        self._on_progress(stage, done, total)


@contextmanager
def telling_compilation(on_progress: OnProgress) -> Iterator[OnProgress]:
    """Report compilation of kernels as progress inside the block; other progress goes to what is
    yielded.
    """
    with event.install_listener("numba:compile", Compilation(on_progress)) as compilation:
        yield compilation.on_progress
