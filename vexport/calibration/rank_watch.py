"""Torchrun's ranks watch each other: one that fails, dies or hangs ends all of them, and it is said which.

torch's collectives wait for half an hour and name nobody. Each rank counts in a key of the store once a
second, and looks whether the others' counts change.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from threading import Event, Thread

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from vexport.errors import EnvironmentFault, ToldElsewhere, VexportError
from vexport.errors.escaping import first_line
from vexport.types.time_limit import seconds_of

# Seconds that a rank may be silent, by this variable.
TIMEOUT, DEFAULT_TIMEOUT = "VEXPORT_RANK_TIMEOUT", 60.0
# How many times as long ranks wait for each other at the beginning: hosts do not start at once.
PATIENCE = 5
BEAT_SECONDS = 1.0
# A rank whose connection is gone is given these seconds to say why.
GONE_SECONDS = 5.0
# The watch ends ranks that hang; a collective may wait for another rank's longest work.
COLLECTIVE = timedelta(days=7)
_FAILED, _NONE, _LEFT = "failed", b"-", b"left"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """What ended the ranks: the first of them that found something to tell of."""

    teller: int
    host: str
    exit_code: int
    line: str


class RankWatch:
    """One rank's watch over all; `store` is a connection that only the watch uses."""

    def __init__(self, store: Store, rank: int, size: int, *, is_host: bool, timeout: float) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._is_host, self._timeout, self._limit = is_host, timeout, timeout
        self._keys = [f"alive/{number}" for number in range(size)]
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        # When the store last answered: a stopped one leaves its clients waiting without end.
        self._answered = 0.0

    @property
    def name(self) -> str:
        return _name(self._rank, self._size)

    def meet(self) -> None:
        """Wait until all ranks are there. EnvironmentFault names those that are not."""
        self._store.compare_set(_FAILED, "", _NONE.decode())
        self._store.set(self._keys[self._rank], "0")
        try:
            self._store.wait(self._keys, timedelta(seconds=PATIENCE * self._timeout))
        except RuntimeError:
            missing = [str(rank) for rank, key in enumerate(self._keys) if not self._store.check([key])]
            raise EnvironmentFault(
                f"ranks of {os.environ['MASTER_ADDR']}",
                got=f"no rank {', '.join(missing)} of {self._size} after {PATIENCE * self._timeout:g} s",
                need="all of them",
                fix=f"start them with the same address and port, or raise {TIMEOUT} (seconds)",
            ) from None
        self._answered = time.monotonic()
        self._thread.start()
        Thread(target=self._guard, daemon=True).start()

    def leave(self) -> None:
        """This rank has come to a good end; the one that has the store waits for the others."""
        self._over.set()
        self._thread.join()
        self._store.set(self._keys[self._rank], _LEFT.decode())
        while self._is_host and set(self._store.multi_get(self._keys)) != {_LEFT}:
            self._look_for_failure()
            time.sleep(BEAT_SECONDS / 10)

    def fail(self, error: BaseException) -> None:
        """End all ranks, for what this one has raised; ToldElsewhere where another tells of it."""
        problem = error if isinstance(error, VexportError) else None
        line = f"{self.name}: {problem or first_line(error)}"
        told = self._tell(line, problem.exit_code if problem else EnvironmentFault.exit_code)
        self._over.set()
        self._linger()
        if told.teller != self._rank:
            raise ToldElsewhere(told.line, told.exit_code) from None

    def wait_for_reason(self) -> None:
        """A collective was broken off: the rank that caused it is named within GONE_SECONDS, or is slow."""
        self._limit = min(self._limit, GONE_SECONDS)
        self._thread.join(self._timeout + GONE_SECONDS)

    def _watch(self) -> None:
        beats, seen = 0, {rank: (b"", time.monotonic()) for rank in range(self._size)}
        while not self._over.wait(BEAT_SECONDS):
            try:
                beats += 1
                self._store.set(self._keys[self._rank], str(beats))
                self._look_for_failure()
                values = self._store.multi_get(self._keys)
            except RuntimeError:
                if not self._over.wait(GONE_SECONDS / 2):  # a signal may be on its way here too
                    self._store_is_gone()
                return
            self._answered = now = time.monotonic()
            for rank, value in enumerate(values):
                if value != seen[rank][0] or value == _LEFT:
                    seen[rank] = value, now
            silent = {rank: now - since for rank, (_, since) in seen.items() if rank != self._rank}
            longest = max(silent, key=lambda rank: silent[rank])
            if silent[longest] > self._limit:
                self._end(self._tell(_silence(_name(longest, self._size), silent[longest])))

    def _guard(self) -> None:
        """End this process where the store has not answered the watch for too long."""
        while not self._over.wait(BEAT_SECONDS):
            silent = time.monotonic() - self._answered
            if silent > self._timeout + 2 * BEAT_SECONDS:
                self._store_is_gone(silent)

    def _look_for_failure(self) -> None:
        found = self._store.multi_get([_FAILED])[0]
        if found != _NONE:
            self._end(RankFailure(**json.loads(found)))

    def _store_is_gone(self, silent: float = 0.0) -> None:
        """The process that has the store, the first rank or torchrun on its host, does not answer."""
        what = _name(0, self._size) if not _agent_has_store() else f"torchrun of {_name(0, self._size)}"
        if self._rank == 1 or os.environ.get("LOCAL_RANK", "0") == "0":
            os.write(2, f"error: {_silence(what, silent)}\n".encode())
        os._exit(EnvironmentFault.exit_code)

    def _tell(self, line: str, exit_code: int = EnvironmentFault.exit_code) -> RankFailure:
        """The failure that all ranks end with: this one, unless another was first."""
        own = RankFailure(teller=self._rank, host=os.uname().nodename, exit_code=exit_code, line=line)
        try:
            return RankFailure(
                **json.loads(self._store.compare_set(_FAILED, _NONE.decode(), json.dumps(asdict(own))))
            )
        except RuntimeError:
            return own

    def _end(self, failure: RankFailure) -> None:
        """End this process, wherever it is; what it had finished stays for the next call."""
        is_first_here = failure.host != os.uname().nodename and os.environ.get("LOCAL_RANK", "0") == "0"
        if failure.teller == self._rank or is_first_here:
            os.write(2, f"error: {failure.line}\n".encode())
        self._linger()
        sys.stdout.flush()
        os._exit(failure.exit_code)

    def _linger(self) -> None:
        """Keep the store until the others can have read the failure."""
        with suppress(RuntimeError):
            self._store.set(self._keys[self._rank], _LEFT.decode())
            deadline = time.monotonic() + GONE_SECONDS
            while self._is_host and time.monotonic() < deadline:
                if set(self._store.multi_get(self._keys)) == {_LEFT}:
                    break
                time.sleep(BEAT_SECONDS / 10)


@contextmanager
def watched_ranks() -> Iterator[None]:
    """Within the block torchrun's ranks form a process group, and watch each other.

    A rank that dies, hangs for TIMEOUT or leaves the block with an error ends all processes with one line on
    stderr, of one of them for each host: exit code 4, or that of its error. With GPUs the device "cuda" is
    each rank's own. EnvironmentFault where the ranks do not meet.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_host = rank == 0 and not _agent_has_store()
    store = _store(rank, size, is_host=is_host)
    own = PrefixStore("vexport", _store(rank, size, is_host=False))
    watch = RankWatch(own, rank, size, is_host=is_host, timeout=seconds_of(TIMEOUT, DEFAULT_TIMEOUT))
    watch.meet()
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE)
        yield
        dist.destroy_process_group()
    except Exception as error:
        if _is_of_torch(error):
            watch.wait_for_reason()
            need, fix = "a connection of all ranks", "run the same command again to resume"
            error = EnvironmentFault(watch.name, got=first_line(error), need=need, fix=fix)
        watch.fail(error)
        raise error from None
    watch.leave()


def _store(rank: int, size: int, *, is_host: bool) -> Store:
    """A connection to the store at torchrun's address, begun by `is_host`; EnvironmentFault without it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(
            address,
            port,
            is_master=is_host,
            timeout=timedelta(seconds=PATIENCE * seconds_of(TIMEOUT, DEFAULT_TIMEOUT)),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        need = "a free port" if is_host else f"an answer from the first of {size} ranks"
        raise EnvironmentFault(
            f"{address}:{port}",
            got=first_line(error)[:120],
            need=need,
            fix="check torchrun's --master-addr and --master-port",
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt-{attempt}", store)


def _agent_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_of_torch(error: Exception) -> bool:
    """Whether a collective was broken off, by gloo or nccl."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "onnection" in str(error)


def _name(rank: int, size: int) -> str:
    return f"rank {rank} of {size}"


def _silence(name: str, seconds: float) -> str:
    got = f"no sign of life for {seconds:.0f} s" if seconds else "its process has gone"
    return f"{name}: got {got}, need all ranks; see its output, then run the same command again to resume"
