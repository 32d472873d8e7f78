"""A worker that dies like vLLM may: `python -m tests.engine.dying REQUEST RESULT`.

The request contains the kind of death.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main(how: str) -> None:
    print(f"about to die: {how}", flush=True)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "memory":
        raise MemoryError("can't allocate memory: you tried to allocate 1 byte")
    if how == "sleep":
        time.sleep(60)
    sys.exit(3)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text())["how"])
