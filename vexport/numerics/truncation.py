"""Tells of a mapped file that became shorter while it was read, which the system answers with SIGBUS.

Python cannot handle that signal: its handlers run after the instruction that failed, which fails again. The
handler here is compiled. It calls only functions that are safe in a signal handler, and ends the process.
"""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numba import types
from numba.core.ccallback import CFunc

from vexport.numerics.jit import KernelCache

# The variable of the environment that holds the message: the handler can read it without Python.
_VARIABLE = "VEXPORT_SIGBUS_MESSAGE"
_NAME = np.frombuffer(_VARIABLE.encode() + b"\0", np.uint8)
_STDERR = 2
_EXIT_CODE = 2
# Functions of the C library; addresses are passed as integers.
_getenv = types.ExternalFunction("getenv", types.uintp(types.uintp))
_strlen = types.ExternalFunction("strlen", types.uintp(types.uintp))
_write = types.ExternalFunction("write", types.intp(types.int32, types.uintp, types.uintp))
_exit = types.ExternalFunction("_exit", types.void(types.int32))


def _end(number: int) -> None:
    """Write the message to stderr and end the process."""
    message = _getenv(_NAME.ctypes.data)
    if message != 0:
        _write(_STDERR, message, _strlen(message))
    _exit(_EXIT_CODE)


@contextmanager
def truncation_told(where: str) -> Iterator[None]:
    """End the process with one line and exit code 2 if a file below `where` becomes shorter inside the block.

    A line is all that can be done: the values that the process was reading are gone.
    """
    got = "a file became shorter while it was read, or its disk failed"
    fix = "run again when nothing else writes to it; nothing was published"
    earlier = os.environ.get(_VARIABLE)  # a caller in this process may read another source
    os.environ[_VARIABLE] = f"error: {where}: {got}; {fix}\n"
    handler = CFunc(_end, (((types.int32,), types.void)), {}, {})
    handler._cache = KernelCache(_end)
    handler.compile()
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before = set_handler(signal.SIGBUS, handler.address)
    try:
        yield
    finally:
        set_handler(signal.SIGBUS, before)
        os.environ.pop(_VARIABLE, None)
        if earlier is not None:
            os.environ[_VARIABLE] = earlier
