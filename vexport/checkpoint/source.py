"""Finds a checkpoint by name: a folder, or a model of the Hugging Face hub."""

from pathlib import Path

from vexport.checkpoint.hub import download
from vexport.checkpoint.hub.names import HubName
from vexport.errors import InputError
from vexport.types import OnProgress


def _quiet(stage: str, done: int, total: int) -> None: ...


def hub_name(name: str) -> HubName | None:
    """The model of the hub that `name` means; None where it is a folder, or no hub id."""
    return None if Path(name).expanduser().exists() else HubName.parse(name)


def resolve_source(name: str, on_progress: OnProgress = _quiet) -> Path:
    """The folder of a checkpoint; ORG/NAME or ORG/NAME@REVISION is downloaded into the hub's cache first.

    A folder is never looked up on the hub. Raises as `hub.download`.
    """
    model = hub_name(name)
    return Path(name).expanduser() if model is None else download.download(model, on_progress)


def require_source(name: str) -> None:
    """Raise what `resolve_source` would for a model that cannot be had; fetches its config only."""
    if (model := hub_name(name)) is not None:
        download.require_model(model)


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
