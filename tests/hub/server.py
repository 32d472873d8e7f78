"""A small hub on localhost with the Hugging Face hub's protocol, which counts requests.

It has model and dataset repositories of one commit each: repository info, file trees, `resolve`
with ETag, commit and ranges, and the hub's errors. Tests use it through HF_ENDPOINT.
"""

import hashlib
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Literal
from urllib.parse import unquote, urlsplit

TOKEN = "hf_good"
_LARGE = (".safetensors", ".parquet", ".bin")
_RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)(?:/([^/]+))?)?(?:/.*)?")


@dataclass(kw_only=True)
class Repository:
    """A repository: its folder, its access, and its branches."""

    folder: Path
    kind: Literal["models", "datasets"] = "models"
    gated: bool = False
    branches: tuple[str, ...] = ("main",)

    @property
    def commit(self) -> str:
        """Hash of the files' names and contents."""
        digest = hashlib.sha1(usedforsecurity=False)
        for path, data in self.files().items():
            digest.update(path.encode() + hashlib.sha256(data).digest())
        return digest.hexdigest()

    def files(self) -> dict[str, bytes]:
        found = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in found}


@dataclass(frozen=True, kw_only=True)
class Request:
    method: str
    path: str
    range: str | None
    sent: int


@dataclass(kw_only=True)
class Hub:
    """State of a running hub. Tests change it, and read its requests."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    ranges: bool = True
    cut: dict[str, int] = field(default_factory=dict)
    """Number of bytes by path. The connection ends once after these bytes."""

    def paths(self, method: str | None = None) -> list[str]:
        return [request.path for request in self.requests if method in (None, request.method)]

    def content(self, suffix: str) -> int:
        return sum(
            request.sent
            for request in self.requests
            if "/resolve/" in request.path and request.path.endswith(suffix)
        )


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a hub without repositories."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Hub

    def do_GET(self) -> None:
        self._handle()

    def do_HEAD(self) -> None:
        self._handle()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _handle(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := _RESOLVE.fullmatch(path):
            self._resolve("datasets" if found[1] else "models", *found.groups()[1:])
        elif found := _API.fullmatch(path):
            self._api(found[1], found[2], found[3] or "revision", found[4])
        else:
            self._fail(404, "", "Not found")

    def _repository(
        self, kind: str, name: str, revision: str | None, *, content: bool
    ) -> Repository | None:
        """Return the repository, or None after replying with an error."""
        token = self.headers.get("Authorization")
        repository = self.state.repositories.get(name)
        if token is not None and token != f"Bearer {TOKEN}":
            self._fail(401, "", "Invalid credentials in Authorization header")
        elif repository is None or repository.kind != kind:
            self._fail(404 if token else 401, "RepoNotFound", "Repository not found")
        elif content and repository.gated:
            self._fail(
                403 if token else 401, "GatedRepo", f"Access to {kind[:-1]} {name} is restricted."
            )
        elif revision not in (None, *repository.branches, repository.commit):
            self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repository
        return None

    def _resolve(self, kind: str, name: str, revision: str, path: str) -> None:
        repository = self._repository(kind, name, revision, content=True)
        if repository is None:
            return
        data = repository.files().get(path)
        if data is None:
            self._fail(
                404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": repository.commit}
            )
            return
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": repository.commit,
        }
        if path.endswith(_LARGE):
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": headers["ETag"]}
        byte_range = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if byte_range is None or not self.state.ranges:
            cut = self.state.cut.pop(path, None) if self.command == "GET" else None
            self._send(200, data, headers | {"Accept-Ranges": "bytes"}, cut=cut)
            return
        start, last = int(byte_range[1]), min(int(byte_range[2] or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {start}-{last}/{len(data)}"
        self._send(206, data[start : last + 1], headers)

    def _api(self, kind: str, name: str, what: str, revision: str | None) -> None:
        repository = self._repository(kind, name, revision, content=False)
        if repository is None:
            return
        files = repository.files()
        if what == "tree":
            below = unquote(urlsplit(self.path).path).partition(f"/tree/{revision}")[2].strip("/")
            start = f"{below}/" if below else ""
            self._json(
                [_entry(path, data) for path, data in files.items() if path.startswith(start)]
            )
        else:
            siblings = [{"rfilename": path, "size": len(data)} for path, data in files.items()]
            gated = "auto" if repository.gated else False
            self._json(
                {
                    "id": name,
                    "sha": repository.commit,
                    "siblings": siblings,
                    "gated": gated,
                    "tags": [],
                }
            )

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(
        self, status: int, code: str, message: str, headers: dict[str, str] | None = None
    ) -> None:
        extra = (
            {"X-Error-Message": message}
            | ({"X-Error-Code": code} if code else {})
            | (headers or {})
        )
        self._send(status, json.dumps({"error": message}).encode(), extra)

    def _send(
        self, status: int, data: bytes, headers: dict[str, str], *, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        sent = b"" if self.command == "HEAD" else data[:cut]
        path = unquote(urlsplit(self.path).path)
        part = self.headers.get("Range")
        self.state.requests.append(
            Request(method=self.command, path=path, range=part, sent=len(sent))
        )
        try:
            self.wfile.write(sent)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        if cut is not None:
            self.wfile.flush()
            time.sleep(0.05)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_WR)


def _entry(path: str, data: bytes) -> dict[str, object]:
    """Return a file of the tree in the hub's form."""
    oid = hashlib.sha1(data, usedforsecurity=False).hexdigest()
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(data), "oid": oid}
    if path.endswith(_LARGE):
        sha256 = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 134}
    return entry
