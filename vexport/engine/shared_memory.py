"""What vLLM's processes leave in /dev/shm: the CPU build shared memory at every end, others when killed."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path("/dev/shm")
# Python's multiprocessing, and vLLM's CPU kernels: shm_broadcast.py and cpu_communicator.py in
# vllm/distributed/device_communicators; semaphores of joblib, which lm-eval's metrics import.
_NAME = re.compile(r"psm_|vllm_dist_|sem\.")
# The inode of what is mapped: a semaphore gets its name only after its file was opened under another.
_MAPPED = re.compile(rf"^\S+ \S+ \S+ \S+ (\d+) +{_FOLDER}/", re.MULTILINE)


def segments_of(group: int) -> set[str]:
    """The names of what processes of a group have mapped now."""
    mapped = {inode for process in _members(group) for inode in _inodes(process)}
    return {
        entry.name
        for entry in os.scandir(_FOLDER)
        if _NAME.match(entry.name) and str(entry.inode()) in mapped
    }


def remove_segments(names: set[str]) -> None:
    """Remove what is left of them; call it when no process of the group is."""
    for name in names:
        (_FOLDER / name).unlink(missing_ok=True)


def _members(group: int) -> Iterator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) == group:
                yield process
        except OSError:
            continue


def _inodes(process: Path) -> list[str]:
    try:
        return _MAPPED.findall((process / "maps").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return []
