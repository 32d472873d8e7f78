"""Models of the Hugging Face hub: names, errors, and downloads to the hub's cache."""

import glob
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from vexport.checkpoint.index import (
    INDEX_NAME,
    SINGLE_NAME,
    index_file_names,
    require_checkpoint,
    weight_files,
)
from vexport.errors import EnvironmentFault, InputError, VexportError
from vexport.names import HubName
from vexport.records import OnProgress
from vexport.rules import checkpoint as rules

# <cache>/models--ORG--NAME/snapshots/COMMIT, the layout of huggingface_hub's cache.
_SNAPSHOT = re.compile(r"models--(?P<id>.+)/snapshots/(?P<commit>[0-9a-f]{40})$")
RepoKind = Literal["model", "dataset"]
# Classes of huggingface_hub and datasets: the name or revision is wrong, or access is denied.
_INPUT_ERRORS = {
    "RepositoryNotFoundError",
    "RevisionNotFoundError",
    "GatedRepoError",
    "RemoteEntryNotFoundError",
}
_INPUT_ERRORS |= {"HFValidationError", "DatasetNotFoundError"}
# Exceptions of httpx, Python and huggingface_hub: no connection, or offline mode.
_UNREACHABLE = {
    "TransportError",
    "ConnectionError",
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
}
CONFIG = "config.json"
# Seconds to wait before retrying a download after a connection reset.
_WAITS = (1.0, 4.0, 16.0)
# Config, tokenizer, chat templates, code, card and license. Other weight formats are not fetched.
_SIDE_FILES = re.compile(
    r".*\.(json|txt|model|jinja|py|tiktoken|vocab|bpe)|README\.md|(LICENSE|NOTICE|USE_POLICY).*"
)
# Folders that contain the same weights in another format, and their configs.
_OTHER_FORMATS = {
    "original",
    "onnx",
    "openvino",
    "gguf",
    "coreml",
    "metal",
    "mlx",
    "tflite",
    "flax",
}
_OTHER_INDEX = re.compile(r".*\.(safetensors|bin|msgpack|h5)\.index\.json")


def pinned_name(root: Path) -> str | None:
    """Return ORG/NAME@COMMIT for a folder in the hub's cache, or None for any other folder."""
    match = _SNAPSHOT.search(str(root))
    return f"{match['id'].replace('--', '/', 1)}@{match['commit']}" if match else None


def translate_error(error: BaseException, name: HubName, kind: RepoKind = "model") -> VexportError:
    """Translate an error that a library raised when it looked up `name`.

    Returns InputError if the name or revision is wrong or access is denied, else EnvironmentFault.
    """
    words = " ".join(f"{type(error).__name__}: {error}".split())
    where = f"{kind} {name}"
    if _is_any(error, _INPUT_ERRORS):
        return InputError.of(rules.NOT_ON_HUB, where, reason=words)
    return EnvironmentFault.of(rules.HUB_UNREACHABLE, where, reason=words)


@contextmanager
def translated_errors(name: HubName) -> Iterator[None]:
    """Translate the errors of huggingface_hub inside the block, as `translate_error` does."""
    try:
        yield
    except Exception as error:
        raise translate_error(error, name) from error


def is_network_error(error: BaseException) -> bool:
    """Return True if a connection failed, or if offline mode forbids connections."""
    return _is_any(error, _UNREACHABLE)


def is_hub_error(error: BaseException) -> bool:
    """Return True if an error comes from the hub or the network, and not from a file's content."""
    return _is_any(error, _INPUT_ERRORS | _UNREACHABLE | {"HfHubHTTPError"})


def downloaded(name: HubName) -> str | None:
    """Return the cache folder of a data set that `hf download` has fetched, or None."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            name.id, repo_type="dataset", revision=name.revision, local_files_only=True
        )
    except Exception:
        return None


def _is_any(error: BaseException | None, names: set[str]) -> bool:
    if error is None:
        return False
    is_one = any(cls.__name__ in names for cls in type(error).__mro__)
    return is_one or _is_any(error.__cause__ or error.__context__, names)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepoListing:
    """Files of a model at one commit, with their sizes in bytes."""

    name: HubName
    commit: str
    sizes: Mapping[str, int]

    @property
    def pinned(self) -> str:
        """ORG/NAME@COMMIT."""
        return f"{self.name.id}@{self.commit}"


def download(name: HubName, on_progress: OnProgress) -> Path:
    """Download a model's config, tokenizer and safetensors, and return the cached folder.

    Raises InputError if the hub has no such model or denies access. Raises EnvironmentFault if the
    hub cannot be reached and the cache has no complete copy.
    """
    try:
        listing = list_files(name)
    except EnvironmentFault as fault:
        folder = _cached_copy(name, fault)
        on_progress(f"{fault.where}: {fault.got}; using the copy in the cache", 1, 1)
        return folder
    folder = fetch(listing, side_files(listing.sizes))
    return fetch(listing, needed_weights(listing, folder))


def require_model(name: HubName) -> None:
    """Raise the errors of `download` for an unavailable model. Fetch only its config."""
    try:
        _fetch_config(name)
    except EnvironmentFault as fault:
        _cached_copy(name, fault)


def list_files(name: HubName) -> RepoListing:
    """Resolve the revision to a commit, list its files and fetch the config.

    Raises the errors of `translate_error`.
    """
    from huggingface_hub import HfApi

    with translated_errors(name):
        info = HfApi().model_info(name.id, revision=name.revision, files_metadata=True)
    commit = _fetch_config(name).parent.name
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return RepoListing(name=name, commit=info.sha or commit, sizes=sizes)


def _fetch_config(name: HubName) -> Path:
    """Download the config to the cache if necessary, and return its path below the commit's folder.

    huggingface_hub also stores the commit of a branch or tag, so that `_cached_copy` can find it
    without the network.
    """
    from huggingface_hub import hf_hub_download

    with translated_errors(name):
        return Path(hf_hub_download(name.id, CONFIG, revision=name.revision))


def needed_weights(listing: RepoListing, folder: Path) -> list[str]:
    """Return the names of the weight files to download.

    They are the files of the index in `folder`, or the single file, or all safetensors files at the
    top level. The result includes files that the index names and the repository lacks. Raises
    InputError if there are no weight files.
    """
    paths = listing.sizes
    if INDEX_NAME in paths:
        names = index_file_names(folder)
    elif SINGLE_NAME in paths:
        names = [SINGLE_NAME]
    else:
        names = sorted(path for path in paths if path.endswith(".safetensors") and "/" not in path)
    if not names:
        raise InputError.of(rules.NO_WEIGHTS_ON_HUB, f"model {listing.name}")
    return names


def side_files(paths: Iterable[str]) -> list[str]:
    """Return the files that are not weights, including the index of the weights."""
    return sorted(filter(_is_side_file, paths))


def _is_side_file(path: str) -> bool:
    relative = PurePosixPath(path)
    if _OTHER_FORMATS.intersection(relative.parts[:-1]) or relative.is_absolute():
        return False
    if any(part.startswith(".") for part in relative.parts):  # hidden, or outside of the folder
        return False
    if _OTHER_INDEX.fullmatch(relative.name):
        return path == INDEX_NAME
    return _SIDE_FILES.fullmatch(relative.name) is not None


def fetch(listing: RepoListing, files: list[str]) -> Path:
    """Download files of a listing and return the snapshot's folder.

    Raises the errors of `translate_error`.
    If a connection ends, huggingface_hub continues in the middle of the file. If a connection is
    reset, this function downloads the incomplete files again.
    """
    from huggingface_hub import snapshot_download

    patterns = [glob.escape(file) for file in files]
    for wait in (*_WAITS, None):
        try:
            return Path(
                snapshot_download(listing.name.id, revision=listing.commit, allow_patterns=patterns)
            )
        except Exception as error:
            if wait is None or not is_network_error(error):
                raise translate_error(error, listing.name) from error
            time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def _cached_copy(name: HubName, fault: BaseException) -> Path:
    """Return the complete copy in the cache. Raise `fault` if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                name.id, revision=name.revision, local_files_only=True, allow_patterns=[CONFIG]
            )
        )
        require_checkpoint(folder)
        weight_files(folder)
    except (LocalEntryNotFoundError, InputError):
        raise fault from None
    return folder
