"""What stands in /dev/shm goes with the processes that made it."""

import os
import secrets
from _multiprocessing import SemLock  # type: ignore[import-not-found]
from pathlib import Path

from vexport.engine.shared_memory import remove_segments, segments_of


def test_a_semaphore_of_a_killed_process_is_removed() -> None:
    """One as joblib makes it: it keeps its name until its process ends by itself."""
    name = f"loky-{os.getpid()}-{secrets.token_hex(4)}"
    held = SemLock(1, 1, 1, f"/{name}", False)
    file = Path("/dev/shm") / f"sem.{name}"
    assert file.exists()
    segments = segments_of(os.getpgid(0))
    assert file.name in segments
    remove_segments({file.name})
    assert not file.exists()
    assert held.acquire()
