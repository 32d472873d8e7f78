"""Find checkpoints and calibration data by name: a folder or file, or a repository on the hub.

For a model on the hub, a plan needs only the headers of its weights. HTTP range requests fetch them
in seconds.
"""

import re
import struct
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from vexport.checkpoint.hub import (
    RepoListing,
    download,
    fetch,
    list_files,
    needed_weights,
    pinned_name,
    require_model,
    side_files,
    translated_errors,
)
from vexport.checkpoint.index import (
    MAX_HEADER_BYTES,
    require_checkpoint,
    require_config,
    require_weights_found,
)
from vexport.errors import EnvironmentFault, InputError, InputErrors
from vexport.names import (
    Folder,
    HubName,
    ModelRef,
    Server,
    SourceRef,
    parse_source,
    user_path,
)
from vexport.records import OnProgress, silent
from vexport.rules import checkpoint as rules
from vexport.version import __version__

DEFAULT = "default"
# Text that is part of vexport.
DEFAULT_FILE = Path(__file__).resolve().parent.parent / "calibration" / "default.jsonl"
COMPRESSED = (".gz", ".zst")
SUFFIXES = (
    *(".jsonl", ".json", ".txt", ".md", ".parquet", ".csv", ".tsv", ".arrow"),
    *COMPRESSED,
)
_HUB = re.compile(r"(?P<id>[^:]+)(?::(?P<split>[^:]*))?(?::(?P<column>[^:]+))?")
# As in huggingface_hub's header reader: most headers are shorter, so a single request is enough.
_FIRST_BYTES = 100_000
_WORKERS = 8
_PARTIAL_CONTENT = 206


@dataclass(frozen=True, slots=True, kw_only=True)
class DataName:
    """A parsed name of calibration data: a local path, a dataset on the hub, or `default`.

    `name` is the whole name. `path` is the local file or folder of the data, and only meaningful if
    `kind` is "path". `hub` and `split` are for a dataset on the hub. `column` is for a path
    or a dataset.
    """

    kind: Literal["path", "hub", "default"]
    name: str
    path: Path
    hub: HubName | None = None
    split: str | None = None
    column: str | None = None


def parse_data(name: str) -> DataName:
    """Parse the name of calibration data.

    It is a path if the file exists, or if the name cannot be anything else. PATH:COLUMN is a path,
    too.
    """
    whole = user_path(name)
    if name == DEFAULT:
        return DataName(kind="default", name=name, path=whole)
    if whole.exists():
        return DataName(kind="path", name=name, path=whole)
    text, _, column = name.rpartition(":")
    path = user_path(text)
    if column and text and (text.endswith(SUFFIXES) or path.is_file()):
        return DataName(kind="path", name=name, path=path, column=column)
    match = _HUB.fullmatch(name)
    hub = HubName.parse(match["id"]) if match else None
    if match and hub and not name.startswith((".", "~", "/")) and not name.endswith(SUFFIXES):
        return DataName(
            kind="hub",
            name=name,
            path=whole,
            hub=hub,
            split=match["split"] or None,
            column=match["column"],
        )
    return DataName(kind="path", name=name, path=whole)


def not_served_here(server: Server) -> InputError:
    """Return the error for an address in the place of a checkpoint."""
    return InputError.of(rules.SERVER, str(server))


def resolve_source(ref: ModelRef, on_progress: OnProgress = silent) -> Path:
    """Return the folder of a checkpoint. A model of the hub is downloaded first.

    Raises the errors of `download`, and InputError for a server.
    """
    match ref:
        case HubName():
            with _or_missing_folder(ref):
                return download(ref, on_progress)
        case Server():
            raise not_served_here(ref)
        case _:
            return ref.path


@contextmanager
def source_headers(ref: SourceRef, on_progress: OnProgress = silent) -> Iterator[Path]:
    """Yield a folder to read headers from. For a model of the hub, only headers are fetched."""
    if isinstance(ref, HubName):
        with _or_missing_folder(ref), header_files(ref, on_progress) as root:
            yield root
    else:
        yield resolve_source(ref)


def pinned_source(ref: SourceRef, root: Path) -> str:
    """Return ORG/NAME@COMMIT if `root`, the folder for `ref`, comes from the hub, else its name."""
    config = root / "config.json"
    folders = (root, config.readlink().parent if config.is_symlink() else root)
    return next((pinned for folder in folders if (pinned := pinned_name(folder))), str(ref))


def require_source(ref: ModelRef) -> None:
    """Raise InputError for a missing folder, and the errors of `download` for an unavailable model.

    Only the config of a model is fetched.
    """
    if isinstance(ref, HubName):
        with _or_missing_folder(ref):
            require_model(ref)
    elif not (path := resolve_source(ref)).exists():
        require_config(path)  # it raises the error for a missing folder


@contextmanager
def _or_missing_folder(ref: HubName) -> Iterator[None]:
    """Raise InputError for a wrong path if the hub cannot be reached.

    If the parent folder of the name exists, the name is assumed to be a wrong path.
    """
    try:
        yield
    except EnvironmentFault as fault:
        if not Path(str(ref)).parent.is_dir():
            raise
        raise InputError.of(rules.NO_FOLDER_OR_MODEL, str(ref), reason=fault.got) from fault


def with_revision(ref: SourceRef, revision: str | None) -> SourceRef:
    """Return the source with a revision that was given separately.

    Raises InputError if the source is not on the hub or already has another revision.
    """
    if revision is None:
        return ref
    if isinstance(ref, Server):
        raise not_served_here(ref)
    if isinstance(ref, Folder):
        raise InputError.of(rules.REVISION_OF_FOLDER, str(ref), revision=revision)
    if ref.revision not in (None, revision):
        raise InputError.of(rules.TWO_REVISIONS, str(ref), first=ref.revision, second=revision)
    return HubName(id=ref.id, revision=revision)


class _NoRangesError(Exception):
    """Raised if the server returns whole files instead of the requested range."""


@contextmanager
def header_files(name: HubName, on_progress: OnProgress) -> Iterator[Path]:
    """Yield a copy of the model's folder in which the data of the weights are holes.

    Weight files have the right headers and sizes. The folder is deleted after the block. The folder
    in the cache is yielded instead if it has the weights, if the hub does not support range
    requests, or if the hub cannot be reached. Raises the errors of `download`.
    """
    try:
        listing = list_files(name)
    except EnvironmentFault:
        yield download(name, on_progress)  # the copy in the cache, if there is one
        return
    folder = fetch(listing, side_files(listing.sizes))
    weights = needed_weights(listing, folder)
    if all((folder / file).is_file() for file in weights):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="vexport-headers-") as temporary:
        root = Path(temporary)
        try:
            _write_headers(listing, weights, root, on_progress)
        except _NoRangesError:
            yield fetch(listing, weights)
            return
        for file in side_files(listing.sizes):
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).symlink_to(folder / file)
        try:
            yield root
        except InputErrors as errors:
            raise InputErrors(
                [_with_model_name(error, root, listing.pinned) for error in errors.problems]
            ) from None
        except InputError as error:
            raise _with_model_name(error, root, listing.pinned) from None


def _with_model_name(error: InputError, root: Path, name: str) -> InputError:
    where, got, need, fix = (
        text.replace(str(root), name) for text in (error.where, error.got, error.need, error.fix)
    )
    return InputError(where, got=got, need=need, fix=fix, rule=error.rule, facts=error.facts)


def _write_headers(
    listing: RepoListing, weights: list[str], root: Path, on_progress: OnProgress
) -> None:
    stage = f"headers of {listing.name.id}"
    on_progress(stage, 0, len(weights))
    with ThreadPoolExecutor(_WORKERS) as pool:
        headers = pool.map(partial(read_remote_header, listing), weights)
        for done, (file, header) in enumerate(zip(weights, headers, strict=True), start=1):
            with (root / file).open("wb") as stream:
                stream.write(header)
                stream.truncate(max(listing.sizes.get(file, 0), len(header)))
            on_progress(stage, done, len(weights))


def read_remote_header(listing: RepoListing, file: str) -> bytes:
    """Return the first bytes of a safetensors file: the length of its header, and the header.

    If the length is too large, only the bytes of the first request are returned. The reader of the
    file then raises the error.
    """
    first = _range(listing, file, 0, _FIRST_BYTES)
    length = struct.unpack("<Q", first[:8])[0] if len(first) >= 8 else 0
    end = 8 + length
    if end <= len(first) or length > MAX_HEADER_BYTES:
        return first[:end]
    return first + _range(listing, file, len(first), end)


def _range(listing: RepoListing, file: str, start: int, stop: int) -> bytes:
    """Return the bytes from `start` to `stop` of a file, or fewer if the file ends before."""
    from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status

    url = hf_hub_url(listing.name.id, file, revision=listing.commit)
    headers = {
        **_identification(),
        "Range": f"bytes={start}-{stop - 1}",
        "Accept-Encoding": "identity",
    }
    with (
        translated_errors(listing.name),
        get_session().stream("GET", url, headers=headers, follow_redirects=True) as got,
    ):
        hf_raise_for_status(got)
        data = bytes(got.read()) if got.status_code == _PARTIAL_CONTENT else None
    if data is None:
        raise _NoRangesError
    return data


def _identification() -> dict[str, str]:
    """Return headers with this program's name and the token, as huggingface_hub sends them."""
    from huggingface_hub import constants, get_token

    headers = {"User-Agent": f"vexport/{__version__}"}
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return headers


def resolve_drafter(speculative: str, on_progress: OnProgress) -> str:
    """Return `METHOD`, or `METHOD=FOLDER` with the absolute path of a draft model's folder.

    `speculative` is METHOD or METHOD=MODEL. MODEL is a folder or a model on the hub.
    """
    method, _, name = speculative.partition("=")
    if not name:
        return method
    root = resolve_source(parse_source(name), on_progress)
    require_checkpoint(root)
    require_weights_found(root)
    return f"{method}={root.absolute()}"
