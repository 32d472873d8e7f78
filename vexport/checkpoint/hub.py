"""Models of the Hugging Face hub: names, errors, and downloads of what is needed into the hub's
cache.
"""

import glob
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, Self

from vexport.checkpoint.index import (
    INDEX_NAME,
    SINGLE_NAME,
    index_file_names,
    require_checkpoint,
    weight_files,
)
from vexport.errors import EnvironmentFault, InputError, VexportError
from vexport.records import OnProgress

# huggingface_hub/utils/_validators.py, with a git branch, tag or commit after the @.
_NAME = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w.][\w./-]*))?")
# <cache>/models--ORG--NAME/snapshots/COMMIT, as huggingface_hub lays its cache out.
_SNAPSHOT = re.compile(r"models--(?P<id>.+)/snapshots/(?P<commit>[0-9a-f]{40})$")
RepoKind = Literal["model", "dataset"]
# Classes of huggingface_hub and datasets, by name: a wrong name or revision, or no access to it.
_INPUT = {
    "RepositoryNotFoundError",
    "RevisionNotFoundError",
    "GatedRepoError",
    "RemoteEntryNotFoundError",
}
_INPUT |= {"HFValidationError", "DatasetNotFoundError"}
# Exceptions of httpx, Python and huggingface_hub: no connection, or offline mode.
_UNREACHABLE = {
    "TransportError",
    "ConnectionError",
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
}
CONFIG = "config.json"
# Seconds before a download whose connection was reset is tried again.
_WAITS = (1.0, 4.0, 16.0)
# Config, tokenizer, chat templates, code, card and license; other formats of the weights are never
# fetched.
_SIDE_FILES = re.compile(
    r".*\.(json|txt|model|jinja|py|tiktoken|vocab|bpe)|README\.md|(LICENSE|NOTICE|USE_POLICY).*"
)
# Folders that hold the same weights in another format, and their configs.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model of the hub; `revision` is a branch, tag or commit, None for the default branch."""

    id: str
    revision: str | None = None

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Parse ORG/NAME or ORG/NAME@REVISION; None for anything else. Local folders are not
        considered.
        """
        match = _NAME.fullmatch(name)
        return cls(id=match["id"], revision=match["revision"]) if match else None

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id


def pinned_name(root: Path) -> str | None:
    """ORG/NAME@COMMIT of a folder in the hub's cache; None for any other folder."""
    match = _SNAPSHOT.search(str(root))
    return f"{match['id'].replace('--', '/', 1)}@{match['commit']}" if match else None


def explain(error: BaseException, name: HubName, kind: RepoKind = "model") -> VexportError:
    """Translate an error that a library raised while it looked for `name`.

    InputError where the name, the revision or the access to it is wrong; EnvironmentFault for all
    else.
    """
    words = " ".join(f"{type(error).__name__}: {error}".split())
    got = f"it cannot be fetched from the hub: {words}"
    if _is_any(error, _INPUT):
        fix = "check the name, and HF_TOKEN for a private one"
        return InputError(f"{kind} {name}", got=got, need="", fix=fix)
    fix = "check the network, HF_TOKEN and HF_HOME, or fetch it before with `hf download`"
    return EnvironmentFault(f"{kind} {name}", got=got, need="", fix=fix)


@contextmanager
def explained(name: HubName) -> Iterator[None]:
    """Translate the errors of huggingface_hub inside the block, see `explain`."""
    try:
        yield
    except Exception as error:
        raise explain(error, name) from error


def is_network_error(error: BaseException) -> bool:
    """Return whether a connection failed, or offline mode forbids one."""
    return _is_any(error, _UNREACHABLE)


def is_of_the_hub(error: BaseException) -> bool:
    """Return whether an error comes from the hub or the network, not from the content of a file."""
    return _is_any(error, _INPUT | _UNREACHABLE | {"HfHubHTTPError"})


def downloaded(name: HubName) -> str | None:
    """The folder of a data set in the cache that `hf download` has filled; None where there is
    none.
    """
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            name.id, repo_type="dataset", revision=name.revision, local_files_only=True
        )
    except Exception:
        return None


def _is_any(error: BaseException | None, names: set[str]) -> bool:
    """Return whether an error, or one of its causes, is of a class with one of these names."""
    if error is None:
        return False
    is_one = any(cls.__name__ in names for cls in type(error).__mro__)
    return is_one or _is_any(error.__cause__ or error.__context__, names)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepoListing:
    """The files of a model at one commit, with their sizes in bytes."""

    name: HubName
    commit: str
    sizes: Mapping[str, int]

    @property
    def pinned(self) -> str:
        """ORG/NAME@COMMIT."""
        return f"{self.name.id}@{self.commit}"


def download(name: HubName, on_progress: OnProgress) -> Path:
    """The folder in the hub's cache with the model's config, tokenizer and safetensors.

    Raises InputError where the hub has no such model or gives no access to it, EnvironmentFault
    where the hub cannot be reached and the cache has no whole copy.
    """
    try:
        listing = list_files(name)
    except EnvironmentFault as fault:
        folder = _cached(name, fault)
        on_progress(f"{fault.where}: {fault.got}; using the copy in the cache", 1, 1)
        return folder
    folder = fetch(listing, side_files(listing.sizes))
    return fetch(listing, needed_weights(listing, folder))


def require_model(name: HubName) -> None:
    """Raise what `download` would for a model that is not available; fetches its config only."""
    try:
        _fetch_config(name)
    except EnvironmentFault as fault:
        _cached(name, fault)


def list_files(name: HubName) -> RepoListing:
    """Resolve the revision to a commit and list its files; fetches the config. Raises as
    `explain`.
    """
    from huggingface_hub import HfApi

    with explained(name):
        info = HfApi().model_info(name.id, revision=name.revision, files_metadata=True)
    commit = _fetch_config(name).parent.name
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return RepoListing(name=name, commit=info.sha or commit, sizes=sizes)


def _fetch_config(name: HubName) -> Path:
    """The config in the cache, in the folder of its commit; notes which commit a branch or tag
    is.
    """
    from huggingface_hub import hf_hub_download

    with explained(name):
        return Path(hf_hub_download(name.id, CONFIG, revision=name.revision))


def needed_weights(listing: RepoListing, folder: Path) -> list[str]:
    """The weight files that are read: those of the index in `folder`, the single one, or all at the
    top.

    A file that the index names and the repository lacks is among them. InputError where there is
    none.
    """
    paths = listing.sizes
    if INDEX_NAME in paths:
        names = index_file_names(folder)
    elif SINGLE_NAME in paths:
        names = [SINGLE_NAME]
    else:
        names = sorted(path for path in paths if path.endswith(".safetensors") and "/" not in path)
    if not names:
        fix = "choose a repository with safetensors (pickled weights are never loaded)"
        raise InputError(
            f"model {listing.name}", got="no safetensors file", need="weights", fix=fix
        )
    return names


def side_files(paths: Iterable[str]) -> list[str]:
    """The files that are not weights, the index of the weights included."""
    return sorted(filter(_is_side_file, paths))


def _is_side_file(path: str) -> bool:
    relative = PurePosixPath(path)
    if _OTHER_FORMATS.intersection(relative.parts[:-1]) or relative.is_absolute():
        return False
    if any(part.startswith(".") for part in relative.parts):  # hidden, or out of the folder
        return False
    if _OTHER_INDEX.fullmatch(relative.name):
        return path == INDEX_NAME
    return _SIDE_FILES.fullmatch(relative.name) is not None


def fetch(listing: RepoListing, files: list[str]) -> Path:
    """Download files of a listing and return the snapshot's folder. Raises as `explain`.

    huggingface_hub goes on in the middle of a file where a connection ends; where it is reset, the
    files that are not complete are begun again here.
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
                raise explain(error, listing.name) from error
            time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def _cached(name: HubName, fault: BaseException) -> Path:
    """The whole copy in the cache; `fault` is raised where there is none."""
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
