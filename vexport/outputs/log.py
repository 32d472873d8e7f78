"""The log of a folder of results: a line for each thing that was done, over all calls."""

import logging
import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vexport.version import __version__

LOG_FILE = "vexport.log"
FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


@contextmanager
def logged_to(folder: Path) -> Iterator[None]:
    """Within the block all that vexport logs goes to FOLDER/vexport.log, too; and what ends it."""
    logger, handler = logging.getLogger("vexport"), logging.FileHandler(folder / LOG_FILE, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    logger.addHandler(handler)
    try:
        logger.debug(
            "vexport %s, Python %s: %s", __version__, platform.python_version(), shlex.join(sys.argv)
        )
        yield
    except BaseException as error:
        handler.handle(
            logging.makeLogRecord({"levelname": "ERROR", "msg": f"{type(error).__name__}: {error}"})
        )
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()
