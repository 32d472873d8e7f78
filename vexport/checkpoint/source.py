"""Finds a checkpoint by name: a folder, or a model of the Hugging Face hub."""

import os
import re
from pathlib import Path

from vexport.errors import InputError

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
# Weights as safetensors and the files beside them; pickled weights are never fetched.
HUB_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "LICENSE*", "*.tiktoken"]
HUB_TIMEOUT_SECONDS = 10.0


def resolve_source(name: str) -> Path:
    """The folder of a checkpoint; a hub id is downloaded into the hub's cache first.

    Raises InputError where `name` is neither a folder nor a model that the hub (or its cache) has.
    """
    path = Path(name).expanduser()
    return path if path.exists() or not HUB_ID.match(name) else download(name)


def download(name: str) -> Path:
    """The folder in the hub's cache of a model, fetched if need be; InputError where the hub has none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    try:
        folder = snapshot_download(
            name, allow_patterns=HUB_PATTERNS, etag_timeout=HUB_TIMEOUT_SECONDS, local_files_only=offline
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            name,
            got=f"no such folder, and the hub did not give the model ({reason[:120]})",
            need="a folder or the id of a model on the hub",
            fix="check the name and the network, or download the model and name its folder",
        ) from None
    return Path(folder)
