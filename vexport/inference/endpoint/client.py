"""HTTP requests to a server that is not trusted.

The time limit covers the whole request (name lookup, connection, TLS, headers and body). The size
limit covers the response. Redirects are not followed, because the API key would go to another host.
"""

import asyncio
import ssl
import threading
import urllib.request
import weakref
import zlib
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from vexport.errors import EnvironmentFault
from vexport.rules import server as rules

MEBIBYTE = 1 << 20
# Limits in bytes and seconds for the body of an error. Messages show only its beginning.
_ERROR_BYTES = 64 << 10
_ERROR_SECONDS = 10.0
# Number of seconds after which the client no longer uses an idle connection. It must be less than
# the time after which servers close idle connections (uvicorn: 5 seconds).
_IDLE_SECONDS = 2.0
# Maximum share of the time limit for connecting. A TLS handshake may take the same share again. The
# share is below 1, because httpcore leaves a connection open if the time limit itself cancels a
# handshake (_backends/anyio.py).
_CONNECTING = 0.9
# Value of zlib's `wbits` that detects both the header of gzip and the header of zlib.
_GZIP_OR_ZLIB = 47


class NoReplyError(Exception):
    """A request without a complete reply. `is_connection` is True if connecting failed."""

    is_connection = False


class CertificateError(Exception):
    """The server's certificate cannot be verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A server's reply. The content of an error (`status` 300 and above) may be cut off.

    `retry_after` and `location` are headers. They are empty if the server does not send them.
    """

    status: int
    content: bytes
    retry_after: str = ""
    location: str = ""


class Client:
    """Connections to one server. Several threads may send requests at the same time.

    The connections are kept for later requests and closed with the object.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        proxy = _proxy(url)
        is_encrypted = url.startswith("https:") or (
            proxy is not None and proxy.url.scheme == "https"
        )
        self._http = httpx.AsyncClient(
            headers=dict(headers),
            timeout=None,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_SECONDS),
            # The certificates of the system and of SSL_CERT_FILE take time to load.
            verify=ssl.create_default_context() if is_encrypted else False,
            proxy=proxy,
            trust_env=False,
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run, args=(self._loop,), name="vexport-http", daemon=True).start()
        weakref.finalize(self, _close, self._loop, self._http)

    def send(self, url: str, body: bytes | None, *, seconds: float, most_bytes: int) -> Reply:
        """Send a request (POST if there is a body, otherwise GET) and return the reply.

        Raises:
            NoReplyError: no whole reply within `seconds` and `most_bytes`. The same request may
                succeed later.
            CertificateError: the certificate of the server is not trusted.
        """
        exchange = _exchange(self._http, url, body, seconds, most_bytes)
        future = asyncio.run_coroutine_threadsafe(exchange, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _exchange(
    http: httpx.AsyncClient, url: str, body: bytes | None, seconds: float, most_bytes: int
) -> Reply:
    try:
        async with asyncio.timeout(seconds):
            request = http.build_request(
                "POST" if body is not None else "GET",
                url,
                content=body,
                timeout=httpx.Timeout(None, connect=_CONNECTING * seconds),
            )
            response = await http.send(request, stream=True)
            http.cookies.clear()
            try:
                return await _read(response, most_bytes)
            finally:
                await response.aclose()
    except (TimeoutError, httpx.TimeoutException):
        raise NoReplyError(f"no complete response within {seconds:g} s") from None
    except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError, ValueError) as error:
        cause = _cause(error)
        words = f"{type(cause).__name__}: {cause}"
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise CertificateError(words) from None
        problem = NoReplyError(words)
        is_refused = isinstance(error, httpx.ConnectError)
        problem.is_connection = is_refused and not isinstance(cause, ssl.SSLError)
        raise problem from None


async def _read(response: httpx.Response, most_bytes: int) -> Reply:
    status = response.status_code
    headers = response.headers
    content = bytearray()
    if status >= 300:
        with suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(_ERROR_SECONDS):
                async for part in response.aiter_raw():
                    content += part
                    if len(content) > _ERROR_BYTES:
                        break
    else:
        length = headers.get("content-length", "")
        _require_size(int(length) if length.isdecimal() else 0, most_bytes)
        async for part in response.aiter_raw():
            content += part
            _require_size(len(content), most_bytes)
    return Reply(
        status=status,
        content=_decoded(bytes(content), headers.get("content-encoding", ""), most_bytes),
        retry_after=headers.get("retry-after", ""),
        location=headers.get("location", ""),
    )


def _require_size(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise NoReplyError(f"a response of more than {most_bytes // MEBIBYTE} MiB")


def _decoded(content: bytes, encoding: str, most_bytes: int) -> bytes:
    """Decompress content up to the size limit. A server may send compressed content unasked."""
    if encoding.strip().lower() in ("", "identity"):
        return content
    if encoding.strip().lower() not in ("gzip", "x-gzip", "deflate"):
        raise NoReplyError(
            f"a response with the content-encoding {encoding}, which was not requested"
        )
    try:
        expanded = zlib.decompressobj(_GZIP_OR_ZLIB).decompress(content, most_bytes + 1)
    except zlib.error as error:
        raise NoReplyError(f"a response that is not {encoding}: {error}") from None
    _require_size(len(expanded), most_bytes)
    return expanded


def _cause(error: BaseException) -> BaseException:
    """Return the innermost cause of an error.

    If there were several attempts to connect, use the error of the first attempt.
    """
    inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
    inner = inner or error.__cause__ or error.__context__
    return error if inner is None else _cause(inner)


def _proxy(url: str) -> httpx.Proxy | None:
    """Return the proxy for an address from the environment (HTTP_PROXY, NO_PROXY and so on)."""
    parts = urlsplit(url)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all", "")
    if not proxy or urllib.request.proxy_bypass(parts.netloc):
        return None
    is_http = "://" not in proxy or proxy.startswith(("http://", "https://"))
    if not is_http and parts.scheme not in proxies:
        return None
    try:
        if not is_http:
            raise ValueError(proxy)
        return httpx.Proxy(proxy if "://" in proxy else f"http://{proxy}")
    except (ValueError, httpx.InvalidURL):
        raise EnvironmentFault.of(rules.PROXY, f"{parts.scheme.upper()}_PROXY") from None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _close(loop: asyncio.AbstractEventLoop, http: httpx.AsyncClient) -> None:
    """Close the connections and stop the loop's thread, without waiting until this is done."""

    async def end() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        with suppress(Exception):
            await http.aclose()
        loop.stop()

    ending: Coroutine[None, None, None] = end()
    asyncio.run_coroutine_threadsafe(ending, loop)
