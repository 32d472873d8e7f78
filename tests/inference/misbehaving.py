"""A server of the OpenAI API that adds the token ids of a prompt, with faults on demand."""

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Fault = str | int
"""An HTTP status, `cut off` (in the middle of the body), `abort` (of the engine), `slow`, `closed`.
"""


class AddingServer(ThreadingHTTPServer):
    """Settings of the server, its answered prompts, and the next faults, one per completion."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.root, self.version, self.gives_scores = (
            "adder",
            "models/adder",
            "0.32.0",
            True,
        )
        self.finish_reason: str | None = "stop"
        self.answered: list[list[int]] = []
        self.drafts: tuple[int, int, int] | None = None
        self.others = self.running = 0
        self.faults: deque[Fault] = deque()
        self.after: int | None = None
        self.dies_after: int | None = None
        self.connections = 0
        self.headers: list[str | None] = []
        self.lock = threading.Lock()

    def process_request_thread(self, request: object, client_address: object) -> None:
        """Count the connections."""
        with self.lock:
            self.connections += 1
        super().process_request_thread(request, client_address)  # type: ignore[arg-type]

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing if a client refuses the certificate."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def metrics(self) -> str:
        """Return counters in the Prometheus format.

        All answers have the same drafts. Other clients send `others` requests for each answer.
        """
        answered = len(self.answered)
        totals = {
            "request_success_total": answered * (1 + self.others),
            "num_requests_running": self.running,
        }
        names = ("drafts", "draft_tokens", "accepted_tokens")
        for name, each in zip(names, self.drafts or (), strict=False):
            totals[f"spec_decode_num_{name}_total"] = answered * each
        label = 'model_name="adder",engine="0"'
        lines = [f"vllm:{name}{{{label}}} {float(value)}\n" for name, value in totals.items()]
        return "".join(["# HELP vllm:num_requests_running Requests.\n", *lines])

    def fault(self) -> Fault | None:
        """Return the next fault. After `after` answers, there are only errors."""
        if self.after is not None and len(self.answered) >= self.after:
            return 500
        return self.faults.popleft() if self.faults else None

    @property
    def is_dead(self) -> bool:
        """Return whether the server has answered `dies_after` completions."""
        return self.dies_after is not None and len(self.answered) >= self.dies_after


class _Handler(BaseHTTPRequestHandler):
    server: AddingServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.server.is_dead:
            self.close_connection = True
            return
        if self.path == "/version" and self.server.version:
            self._send({"version": self.server.version})
        elif self.path == "/v1/models":
            card = {"id": self.server.name, "root": self.server.root, "max_model_len": 512}
            self._send({"data": [card, {**card, "id": "other"}]})
        elif self.path == "/metrics":
            self._send_text(self.server.metrics())
        else:
            self._send({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.headers.append(self.headers["Authorization"])
            fault = "closed" if self.server.is_dead else self.server.fault()
            if fault is None:
                self.server.answered.append(body["prompt"])
        text = str(sum(body["prompt"]))
        choice: dict[str, object] = {
            "index": 0,
            "text": text,
            "finish_reason": self.server.finish_reason,
        }
        choice["logprobs"] = None
        if body.get("echo") and self.server.gives_scores:
            choice["logprobs"] = _scores(body["prompt"])
        if fault == "abort":
            choice |= {"finish_reason": "abort", "text": text[:1]}
        elif fault == "slow":
            time.sleep(2)
        elif fault == "closed":
            self.close_connection = True
            return
        elif isinstance(fault, int):
            words = f"no luck with {self.headers['Authorization']}"
            self._send({"error": {"message": words}}, fault)
            return
        self._send({"choices": [choice]}, cut=fault == "cut off")

    def _send(self, value: object, status: int = 200, *, cut: bool = False) -> None:
        self._send_text(json.dumps(value), status, cut=cut)

    def _send_text(self, text: str, status: int = 200, *, cut: bool = False) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def _scores(prompt: list[int]) -> dict[str, object]:
    """Return scores: a token costs a hundredth of its id.

    Token 7 is likelier than tokens with higher ids.
    """
    own = [None, *(-token / 100 for token in prompt[1:]), -1.0]
    best = [
        None,
        *({f"token_id:{token}": -token / 100, "token_id:7": -0.07} for token in prompt[1:]),
        {},
    ]
    return {"token_logprobs": own, "top_logprobs": best}


@contextmanager
def adding_server() -> Iterator[AddingServer]:
    with AddingServer() as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
