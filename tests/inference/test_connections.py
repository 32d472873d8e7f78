"""Connections to a server: reused, through a proxy of the environment, and encrypted."""

import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.inference.misbehaving import AddingServer, adding_server
from tests.inference.replying import replying, sending_raw, sound
from tests.texts import breaks
from vexport.inference.endpoint.server import Server
from vexport.records import Endpoint, Json
from vexport.rules import server as rules

PARAMETERS: dict[str, Json] = {"max_tokens": 4, "temperature": 0}
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def connect(url: str, *, timeout: float = 20) -> Server:
    return Server(Endpoint(url=url, model="adder", request_timeout=timeout, retry_seconds=0))


def test_connection_is_reused() -> None:
    with adding_server() as server:
        asking = connect(server.url)
        answers = [asking.generate([3, number], PARAMETERS).text for number in range(5)]
        assert answers == ["3", "4", "5", "6", "7"]
        assert server.connections == 1


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_proxy_of_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with replying(sound) as proxy:
        monkeypatch.setenv(name, proxy.removesuffix("/v1"))
        server = connect("http://only-the-proxy-knows.invalid/v1")
        assert server.generate([3, 4], PARAMETERS).text == "7"


def test_no_proxy_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with replying(sound) as url:
        with breaks(rules.NO_RESPONSE, "ConnectionRefusedError"):
            connect(url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert connect(url).generate([3, 4], PARAMETERS).text == "7"


def test_unusable_proxy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "socks5://127.0.0.1:9")
    with breaks(rules.PROXY, "HTTP_PROXY"):
        connect("http://127.0.0.1:9/v1")


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1, and return its file and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    file, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    return file, key


@contextmanager
def encrypted_server(file: Path, key: Path) -> Iterator[AddingServer]:
    with adding_server() as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file, key)
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        yield server


def test_ssl_cert_file_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    file, key = make_certificate(tmp_path)
    with encrypted_server(file, key) as server:
        url = server.url.replace("http:", "https:")
        with breaks(rules.CERTIFICATE):
            connect(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        assert connect(url).generate([3, 4], PARAMETERS).text == "7"


def test_silent_handshake_ends_in_time() -> None:
    def silence() -> Iterator[bytes]:
        time.sleep(30)
        yield b""

    with sending_raw(silence) as (url, _):
        began = time.monotonic()
        with breaks(rules.NO_RESPONSE):
            connect(url.replace("http:", "https:"), timeout=0.5)
        assert time.monotonic() - began < 8
