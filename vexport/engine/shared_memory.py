"""Shared memory that vLLM's processes leave in /dev/shm: the CPU build at every end, others when killed."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path("/dev/shm")
# Python's multiprocessing, and vLLM's CPU kernels: shm_broadcast.py and cpu_communicator.py in
# vllm/distributed/device_communicators.
_SEGMENT = re.compile(rf"{_FOLDER}/((?:psm_|vllm_dist_)\S+)$", re.MULTILINE)


def segments_of(group: int) -> set[str]:
    """The names of the segments that processes of a group have mapped now."""
    return {name for process in _members(group) for name in _mapped(process)}


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


def _mapped(process: Path) -> list[str]:
    try:
        return _SEGMENT.findall((process / "maps").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return []
