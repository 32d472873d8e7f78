"""Imported once by the fork server: vLLM, and what every session imports of it, in a worker's environment."""

import os
from contextlib import suppress

from vexport.engine.session import EAGER, worker_environment
from vexport.engine.worker import preload

os.environ.update({**worker_environment(), **EAGER})
with suppress(Exception):  # a worker will say so in its own log
    preload()
