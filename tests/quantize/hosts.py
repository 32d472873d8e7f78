"""Ranks as torchrun starts them, each a process, on hosts of their own where that is asked for.

A host is a network namespace with one interface on a common bridge.
"""

import ctypes
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.command import vexport

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
INTERFACE = "host0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The names of namespaces, in the order of the ranks."""

    names: tuple[str, ...]

    def address(self, rank: int) -> str:
        return f"10.213.7.{rank + 1}"


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Hosts that reach each other; OSError or CalledProcessError where namespaces cannot be made."""
    found = Hosts(names=tuple(f"vx{os.getpid()}-{rank}" for rank in range(count)))
    bridge = f"vx{os.getpid()}"
    try:
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge0", "up")
        for rank, name in enumerate(found.names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", f"v{rank}", "netns", bridge)
            _ip("-n", bridge, "link", "set", f"v{rank}", "master", "bridge0", "up")
            _ip("-n", name, "address", "add", f"{found.address(rank)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield found
    finally:
        for name in (*found.names, bridge):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def run_rank(rank: int, folder: Path, shared: dict[str, str], call: Sequence[str], host: str | None) -> None:
    """What torchrun starts. Files are written with a mode that tells of the rank."""
    if host is not None:
        with Path("/var/run/netns", host).open() as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), _NEW_NETWORK) == 0
    errors = (folder / f"{rank}.err").open("w")
    os.dup2(errors.fileno(), 2)
    os.umask(0o007 if rank % 2 else 0o077)
    os.environ.update(shared, RANK=str(rank))
    ran = vexport(*call)
    (folder / f"{rank}.out").write_text(ran.stdout)
    print(ran.stderr, end="", file=errors, flush=True)
    sys.exit(ran.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Running ranks, and the folder of what they say."""

    processes: tuple[BaseProcess, ...]
    folder: Path

    def codes(self, seconds: float) -> list[int | None]:
        """The exit codes of those that have ended within so many seconds; the others are killed."""
        for process in self.processes:
            process.join(seconds)
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return codes

    def stdout(self, rank: int) -> str:
        return (self.folder / f"{rank}.out").read_text()

    def errors(self) -> list[str]:
        """The lines of error of all ranks."""
        texts = [file.read_text() for file in sorted(self.folder.glob("*.err"))]
        return [line for text in texts for line in text.splitlines() if line.startswith("error: ")]


def start(
    count: int, folder: Path, calls: Sequence[Sequence[object]], on: Hosts | None = None, timeout: float = 60
) -> Ranks:
    """As many ranks with these calls, one for all or one for each, which leave in `folder` what they say."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": on.address(0) if on else "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(count), "VEXPORT_RANK_TIMEOUT": str(timeout)}
    shared |= {"GLOO_SOCKET_IFNAME": INTERFACE} if on else {}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.calibration.models", "vexport.quantize.rounding"])
    folder.mkdir()
    processes = []
    for rank in range(count):
        call = [str(part) for part in calls[rank % len(calls)]]
        host = on.names[rank] if on else None
        processes.append(context.Process(target=run_rank, args=(rank, folder, shared, call, host)))
    for process in processes:
        process.start()
    return Ranks(processes=tuple(processes), folder=folder)
