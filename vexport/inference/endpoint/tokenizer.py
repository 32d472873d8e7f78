"""Choose the tokenizer that makes the prompts for a server's model."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from vexport.checkpoint.hub import fetch, list_files, side_files
from vexport.errors import InputError, visible
from vexport.inference.endpoint.server import ServedModel, Server
from vexport.inference.options import BASELINE, EngineOptions
from vexport.names import Folder, HubName, SourceRef
from vexport.records import PROGRESS_DETAIL
from vexport.rules import server as rules
from vexport.scenario import Evaluate
from vexport.words import clip

# Names of files from which transformers loads a tokenizer: vocabularies of all kinds, settings.
_TOKENIZER_FILE = re.compile(
    r"tokenizer.*\.(json|model)|vocab.*\.(json|txt)|tekken\.json|spiece\.model|sentencepiece.*\.model|.*\.tiktoken"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTokenizer:
    """Folder of the tokenizer for a server's prompts. If `is_trusted`, its code may run."""

    folder: Path
    is_trusted: bool
    model: ServedModel | None = None


def tokenizer_of(
    role: str, url: str, settings: Evaluate, options: EngineOptions, checkpoint: Path | None = None
) -> ServedTokenizer:
    """Return the tokenizer for a server's prompts.

    The setting `tokenizer` has priority, then `checkpoint`, the model's folder on this machine.
    Otherwise the server's tokenizer is used: the folder or hub model with which the server was
    started. Code of this tokenizer never runs. Two rules keep a server on another machine from
    choosing local files or downloads:

    - A folder is used only if the server runs on this machine.
    - A hub model is downloaded only if the server runs on this machine, or if `--model` has the
      same name.

    Raises InputError if there is no tokenizer, and the errors of `Server` if the server does not
    respond.
    """
    if settings.tokenizer is None and checkpoint is not None:
        return ServedTokenizer(folder=checkpoint, is_trusted=options.trust_remote_code)
    where = f"{role} {url}: tokenizer"
    endpoint = settings.endpoint_at(url, is_baseline=role == BASELINE)
    server = Server(endpoint, show_retries(role, options))
    if settings.tokenizer is not None:
        folder = _chosen_tokenizer(where, settings.tokenizer)
        return ServedTokenizer(
            folder=folder, is_trusted=options.trust_remote_code, model=server.model
        )
    folder = _servers_tokenizer(where, server)
    return ServedTokenizer(folder=folder, is_trusted=False, model=server.model)


def show_retries(role: str, options: EngineOptions) -> Callable[[str], None]:
    """Return a function that reports the retry of a request as progress."""
    return lambda line: options.on_progress(f"{role}: server{PROGRESS_DETAIL}{line}", 0, 1)


def _servers_tokenizer(where: str, server: Server) -> Path:
    url = server.endpoint.url
    name = server.model.root or server.model.name
    shown = visible(clip(server.mask_key(name), 200))
    folder = Path(name)
    if folder.is_dir() and _is_local(url):
        if _has_tokenizer(folder):
            return folder
        raise InputError.of(rules.NO_TOKENIZER, where, name=shown)
    model = None if folder.is_absolute() else HubName.parse(name)
    if model is None:
        raise InputError.of(rules.NO_TOKENIZER, where, name=shown)
    if not _is_local(url) and name != server.endpoint.model:
        raise InputError.of(rules.UNCONFIRMED_TOKENIZER, where, name=shown)
    listing = list_files(model)
    return fetch(listing, side_files(listing.sizes))


def _chosen_tokenizer(where: str, ref: SourceRef) -> Path:
    match ref:
        case HubName():
            listing = list_files(ref)
            return fetch(listing, side_files(listing.sizes))
        case Folder() if _has_tokenizer(ref.path):
            return ref.path
    raise InputError.of(rules.NO_TOKENIZER, where, name=str(ref))


def _has_tokenizer(folder: Path) -> bool:
    try:
        return any(_TOKENIZER_FILE.fullmatch(entry.name) for entry in folder.iterdir())
    except OSError:
        return False


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
