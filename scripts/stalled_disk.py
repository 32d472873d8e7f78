"""What vexport does when a disk or server stops answering: shown on a file system that does, through FUSE.

    PYTHONPATH=. .venv/bin/python scripts/stalled_disk.py SOURCE [--after BYTES] [--timeout SECONDS]

Mounts SOURCE, a folder of files, read-only; answers reads until BYTES of weights have been read, then none.
It runs `quantize` and `check` on the mount and prints how each ended, and after how long. Needs root, Linux
and /dev/fuse; no library of FUSE. The protocol is that of include/uapi/linux/fuse.h, version 7.31.
"""

import argparse
import ctypes
import os
import stat
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread

LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH = 1, 2, 3, 14, 15, 18, 25
INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, BATCH_FORGET = 26, 27, 28, 29, 36, 42
NO_REPLY = (FORGET, INTERRUPT, BATCH_FORGET)
ENOENT, ENOSYS = 2, 38
ROOT, FORCE, DETACH = 1, 1, 2
# Who reads waits for the page, as with NFS, and can be killed: whoever waits for FUSE's own answer cannot.
ASYNC_READ, WAITING = 1, 64
MOST_REQUEST = 1 << 21
LIBC = ctypes.CDLL(None, use_errno=True)


class StallingMount:
    """A read-only mount of a folder's files that stops answering reads after so many bytes of weights."""

    def __init__(self, source: Path, mount: Path, after: int) -> None:
        self._files = [source, *sorted(path for path in source.iterdir() if path.is_file())]
        self._mount, self._left = mount, after
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        if LIBC.mount(b"stalling", os.fsencode(mount), b"fuse", 1, options):
            raise OSError(ctypes.get_errno(), "mount")
        Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Unmount, which fails what still waits."""
        LIBC.umount2(os.fsencode(self._mount), FORCE | DETACH)
        os.close(self._device)

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, MOST_REQUEST)
            except OSError:  # unmounted
                return
            _, opcode, unique, node = struct.unpack_from("<IIQQ", request)
            if opcode in NO_REPLY:
                continue
            answer = self._answer(opcode, node, request[40:])
            if answer is None:
                continue
            error, data = (-answer, b"") if isinstance(answer, int) else (0, answer)
            os.write(self._device, struct.pack("<IiQ", 16 + len(data), error, unique) + data)

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes | int | None:
        """The data of an answer, a number of an error, or None for no answer at all."""
        if opcode == INIT:
            sizes = (1 << 17, ASYNC_READ, WAITING, WAITING, 1 << 17, 1)
            return struct.pack("<IIIIHHII36x", 7, 31, *sizes)
        if opcode == LOOKUP:
            name = os.fsdecode(body.rstrip(b"\0"))
            found = [number for number, file in enumerate(self._files) if number and file.name == name]
            head = struct.pack("<QQQQII", found[0] + ROOT, 0, 60, 60, 0, 0) if found else b""
            return head + self._attributes(found[0] + ROOT) if found else ENOENT
        if opcode == GETATTR:
            return struct.pack("<QII", 60, 0, 0) + self._attributes(node)
        if opcode in (OPEN, OPENDIR):
            return struct.pack("<QII", 0, 0, 0)
        if opcode == READDIR:
            return b"".join(self._entries(struct.unpack_from("<QQ", body)[1]))
        if opcode == READ:
            return self._read(self._files[node - ROOT], *struct.unpack_from("<QQI", body)[1:])
        return b"" if opcode in (RELEASE, RELEASEDIR, FLUSH) else ENOSYS

    def _read(self, file: Path, start: int, size: int) -> bytes | None:
        if file.suffix == ".safetensors":
            self._left -= size
            if self._left < 0:
                return None
        with file.open("rb") as stream:
            stream.seek(start)
            return stream.read(size)

    def _attributes(self, node: int) -> bytes:
        found = self._files[node - ROOT].stat()
        mode = stat.S_IFDIR | 0o755 if node == ROOT else stat.S_IFREG | 0o644
        times = (int(found.st_mtime),) * 3
        head = (node, found.st_size, -(-found.st_size // 512), *times, 0, 0, 0)
        return struct.pack("<6Q3I7I", *head, mode, 1, 0, 0, 0, 4096, 0)

    def _entries(self, offset: int) -> list[bytes]:
        entries = []
        for number, file in enumerate(self._files[1:], start=1):
            name = os.fsencode(file.name)
            entry = struct.pack("<QQII", number + ROOT, number, len(name), 8) + name
            entries.append(entry + b"\0" * (-len(entry) % 8))
        return entries[offset : offset + 16]


def run(arguments: list[str], source: Path, after: int, timeout: float) -> str:
    """How a command on a stalling mount ended."""
    with tempfile.TemporaryDirectory() as folder:
        mount = Path(folder, "mount")
        mount.mkdir()
        stalling = StallingMount(source, mount, after)
        call = [part.format(source=mount, out=f"{folder}/out") for part in arguments]
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "vexport", *call, "--quiet"],
            env={**os.environ, "VEXPORT_READ_TIMEOUT": f"{timeout:g}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            errors = process.communicate(timeout=20 * timeout)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            errors = "no end: killed"
        seconds = time.monotonic() - start
        stalling.close()
        return f"exit code {process.wait()} after {seconds:.0f} s: {errors.strip()}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--after", type=int, default=50_000_000)
    parser.add_argument("--timeout", type=float, default=5.0)
    given = parser.parse_args()
    for command in (["quantize", "{source}", "{out}", "--scheme", "W4A16_G64"], ["check", "{source}"]):
        print(f"{command[0]}: {run(command, given.source, given.after, given.timeout)}", flush=True)
