"""The worker of an evaluation, with a child that leaves its group and listens to nothing."""

import subprocess
import sys

from vexport.evaluation.worker import main as work
from vexport.evaluation.worker import preload

__all__ = ["main", "preload"]
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def main(arguments: list[str]) -> int:
    """As the worker's."""
    subprocess.Popen([sys.executable, "-c", DEAF], start_new_session=True)
    return work(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
