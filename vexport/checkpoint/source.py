"""Finds a checkpoint by name: a folder, or a model of the Hugging Face hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vexport.checkpoint.hub import download, headers
from vexport.checkpoint.hub.names import HubName, pinned_name
from vexport.errors import EnvironmentFault, InputError
from vexport.types import OnProgress


def _quiet(stage: str, done: int, total: int) -> None: ...


def hub_name(name: str) -> HubName | None:
    """The model of the hub that `name` means; None of a folder, and of no hub id. InputError for a URL."""
    if Path(name).expanduser().exists():
        return None
    if "://" in name:
        need, fix = "a folder or a model of the hub (ORG/NAME)", "copy or mount it to a folder first"
        raise InputError(name, got="a URL", need=need, fix=fix)
    return HubName.parse(name)


def resolve_source(name: str, on_progress: OnProgress = _quiet) -> Path:
    """The folder of a checkpoint; ORG/NAME or ORG/NAME@REVISION is downloaded into the hub's cache first.

    A folder is never looked up on the hub. Raises as `hub.download`; InputError for a URL.
    """
    model = hub_name(name)
    if model is None:
        return Path(name).expanduser()
    with _or_no_such_folder(name):
        return download.download(model, on_progress)


@contextmanager
def source_headers(name: str, on_progress: OnProgress = _quiet) -> Iterator[Path]:
    """Yield a folder to read headers from; of a model of the hub only they are fetched."""
    if (model := hub_name(name)) is None:
        yield Path(name).expanduser()
    else:
        with _or_no_such_folder(name), headers.header_files(model, on_progress) as root:
            yield root


def pinned_source(name: str, root: Path) -> str:
    """ORG/NAME@COMMIT where `root`, a folder to read `name` from, is of the hub; else `name`."""
    config = root / "config.json"
    folders = (root, config.readlink().parent if config.is_symlink() else root)
    return next((pinned for folder in folders if (pinned := pinned_name(folder))), name)


def require_source(name: str) -> None:
    """Raise what `resolve_source` would for a model that cannot be had; fetches its config only."""
    if (model := hub_name(name)) is not None:
        with _or_no_such_folder(name):
            download.require_model(model)


@contextmanager
def _or_no_such_folder(name: str) -> Iterator[None]:
    """A name below a folder that exists is a path with a mistake where the hub cannot be asked."""
    try:
        yield
    except EnvironmentFault as fault:
        if not Path(name).parent.is_dir():
            raise
        got = f"no such folder, and the hub cannot be asked ({fault.got})"
        raise InputError(name, got=got, need="a checkpoint folder", fix="check the path") from fault


def with_revision(name: str, revision: str | None) -> str:
    """`name` with a revision that was given next to it. InputError where it has none, or has another."""
    if revision is None:
        return name
    model = hub_name(name)
    if model is None:
        got, need = f"the revision {revision!r} of a folder", "a model of the hub (ORG/NAME)"
        raise InputError(name, got=got, need=need, fix="leave the revision out")
    if model.revision not in (None, revision):
        got = f"two revisions, {model.revision!r} and {revision!r}"
        raise InputError(name, got=got, need="one", fix="leave one out")
    return str(HubName(id=model.id, revision=revision))
