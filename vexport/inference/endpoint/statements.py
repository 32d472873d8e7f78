"""Read what a running server states about itself: its model, its version and its KV cache."""

import re
from collections.abc import Mapping
from contextlib import suppress

from vexport.errors import InputError
from vexport.inference.endpoint.replies import base_name
from vexport.inference.endpoint.server import Server, UnreachableError
from vexport.records import Endpoint
from vexport.records.serving import StartupLog, Stated
from vexport.rules import server as server_rules
from vexport.rules import serving as rules

_CACHE = "vllm:cache_config_info"
_RETRY_SECONDS = 5.0


def server_statements(url: str) -> StartupLog:
    """Return the statements of a server. A value that it does not state is None.

    Of several models, the base model is used. Raises InputError and EnvironmentFault as `Server`
    does, but a server without metrics is no error.
    """
    labels: Mapping[str, str] = {}
    try:
        server = Server(Endpoint(url=url, retry_seconds=_RETRY_SECONDS), choose=base_name)
        with suppress(InputError):  # the server has no metrics, or hides them
            labels = server.labels(_CACHE)
    except InputError as error:
        if error.rule in (server_rules.MODEL.id, server_rules.NO_LIST.id):
            raise InputError.of(rules.NO_MODEL, url, found=error.got) from None
        raise
    except UnreachableError as error:
        if error.rule == server_rules.NO_RESPONSE.id:
            raise UnreachableError.of(rules.NO_RESPONSE, url, found=error.got) from None
        raise
    model, length = server.model, server.model.max_model_len
    return StartupLog(
        log=url,
        lines=0,
        version=_stated(model.version),
        model=_stated(model.root),
        max_model_len=_stated(str(length or "")),
        kv_cache_dtype=_stated(labels.get("cache_dtype", "")),
        cache_gib=_stated(_gib(labels.get("kv_cache_memory_bytes", ""))),
        cache_tokens=_number(labels, "kv_cache_size_tokens"),
        max_concurrency=_number(labels, "kv_cache_max_concurrency"),
    )


def _stated(value: str) -> Stated | None:
    return Stated(value=value) if value else None


def _number(labels: Mapping[str, str], name: str) -> Stated | None:
    """Return a number in the labels. Labels without a value are `None`."""
    value = labels.get(name, "")
    return Stated(value=value) if re.fullmatch(r"\d+(\.\d+)?", value) else None


def _gib(size: str) -> str:
    return f"{int(size) / 2**30:.2f}" if size.isdecimal() else ""
