"""A local S3 (moto's server) with faults: answers can be refused, cut short, held back or changed."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import s3fs
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

BUCKET = "models"
# What becomes of an answer: its bytes, given the path and the range that was asked for.
Fault = Callable[[str, str, bytes], bytes]


def faithful(path: str, asked: str, body: bytes) -> bytes:
    """No fault."""
    return body


class Refused(Exception):
    """Raised by a fault: the answer is a 403."""


@dataclass(slots=True)
class Server:
    """An S3 at `url`; `sent` counts the bytes of each object's answers."""

    url: str = ""
    fault: Fault = faithful
    sent: dict[str, int] = field(default_factory=dict)

    def put(self, folder: Path, name: str) -> str:
        """Upload a folder; the URL of it."""
        fs = s3fs.S3FileSystem(endpoint_url=self.url, skip_instance_cache=True)
        if not fs.exists(BUCKET):
            fs.mkdir(BUCKET)
        for file in folder.iterdir():
            fs.pipe(f"{BUCKET}/{name}/{file.name}", file.read_bytes())
        return f"s3://{BUCKET}/{name}"

    def application(self, app: "WSGIApplication") -> "WSGIApplication":
        """The same with the faults: an answer that a fault cuts promises the length that it had."""

        def answer(environ: "WSGIEnvironment", start: "StartResponse") -> Iterable[bytes]:
            if environ["REQUEST_METHOD"] != "GET":
                return app(environ, start)
            path, body = str(environ["PATH_INFO"]), b""
            began: list[tuple[str, list[tuple[str, str]]]] = []

            def note(status: str, headers: list[tuple[str, str]], *rest: object) -> Callable[[bytes], object]:
                began.append((status, headers))
                return lambda data: None

            body = b"".join(app(environ, note))
            try:
                body = self.fault(path, str(environ.get("HTTP_RANGE", "")), body)
            except Refused:
                start("403 Forbidden", [("Content-Type", "application/xml")])
                return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]
            self.sent[path] = self.sent.get(path, 0) + len(body)
            start(*began[-1])
            return [body]

        return answer


@contextmanager
def s3_server() -> Iterator[Server]:
    """A server of an empty S3."""
    server = Server()
    app = server.application(DomainDispatcherApplication(create_backend_app))
    http = make_server("127.0.0.1", 0, app, threaded=True)
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
