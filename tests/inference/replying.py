"""Test servers: one calls a function for each reply, one sends raw bytes on each connection."""

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

CARD = {"id": "adder", "root": "models/adder", "max_model_len": 512}


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Reply with its content, which is JSON unless it is bytes."""

    content: object
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Reply = Callable[[str, dict[str, object]], Sent]
"""A function from the path and the JSON body of a request. The body is empty for GET."""


def sound(path: str, body: dict[str, object]) -> Sent:
    """Reply as vLLM does."""
    if path == "/v1/models":
        return Sent(content={"data": [CARD]})
    if path == "/version":
        return Sent(content={"version": "0.32.0"})
    if path != "/v1/completions":
        return Sent(content={"detail": "Not Found"}, status=404)
    return Sent(content={"choices": [choice(body)], "usage": {"completion_tokens": 1}})


def choice(body: Mapping[str, object]) -> dict[str, object]:
    """Add up the token ids of a prompt. Each token of the prompt costs a hundredth of its id."""
    prompt = body["prompt"]
    assert isinstance(prompt, list)
    logprobs = None
    if body.get("echo"):
        own = [None, *(-token / 100 for token in prompt[1:]), -1.0]
        best = [None, *({f"token_id:{token}": -token / 100} for token in prompt[1:]), {}]
        logprobs = {"token_logprobs": own, "top_logprobs": best}
    return {"index": 0, "text": str(sum(prompt)), "finish_reason": "stop", "logprobs": logprobs}


def with_card(**fields: object) -> Reply:
    """Return a function that replies like a sound server, with changed fields of the model."""

    def reply(path: str, body: dict[str, object]) -> Sent:
        return (
            Sent(content={"data": [{**CARD, **fields}]})
            if path == "/v1/models"
            else sound(path, body)
        )

    return reply


@contextmanager
def replying(reply: Reply) -> Iterator[str]:
    """Run a server on this machine, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(reply(urlsplit(self.path).path, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(reply(urlsplit(self.path).path, body))

        def _send(self, sent: Sent) -> None:
            content = (
                sent.content
                if isinstance(sent.content, bytes)
                else json.dumps(sent.content).encode()
            )
            self.send_response(sent.status)
            self.send_header("Content-Length", str(len(content)))
            for name, value in sent.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()


@contextmanager
def sending_raw(parts: Callable[[], Iterator[bytes]]) -> Iterator[tuple[str, list[int]]]:
    """Send the given parts on each connection, for any request.

    Yields the address and the number of bytes sent so far.
    """
    count = [0]

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            connection: socket.socket = self.request
            connection.recv(1 << 16)
            with suppress(OSError):
                for part in parts():
                    connection.sendall(part)
                    count[0] += len(part)

    class Raw(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: object, client_address: object) -> None:
            """Print nothing. The client closes connections."""

    with Raw(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1", count
        finally:
            server.shutdown()
