"""What huggingface_hub or datasets raised, as an error of ours: their words in one line, our exit code."""

import itertools
from collections.abc import Iterator
from typing import Literal

from vexport.checkpoint.hub.names import HubName
from vexport.errors import EnvironmentFault, InputError, VexportError

Kind = Literal["model", "dataset"]
# Classes of huggingface_hub and datasets, by name: a wrong name or revision, or no access to it.
_INPUT = {"RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError", "RemoteEntryNotFoundError"}
_INPUT |= {"HFValidationError", "DatasetNotFoundError"}
# Of httpx, Python and huggingface_hub: no connection, or a wish to have none.
_UNREACHABLE = {"TransportError", "ConnectionError", "OfflineModeIsEnabled", "LocalEntryNotFoundError"}


def explain(error: BaseException, name: HubName, kind: Kind = "model") -> VexportError:
    """The error to show for one that was raised while a library looked for `name`.

    InputError where the name, the revision or the access to it is wrong; EnvironmentFault for all else.
    """
    words = " ".join(f"{type(error).__name__}: {error}".split())
    if _is_any(error, _INPUT):
        need, fix = f"a {kind} of the hub that may be read", "check the name, and HF_TOKEN for a private one"
        return InputError(f"{kind} {name}", got=words, need=need, fix=fix)
    fix = "check the network, HF_TOKEN and HF_HOME, or fetch it before with `hf download`"
    return EnvironmentFault(f"{kind} {name}", got=words, need="its files from the hub", fix=fix)


def is_network_error(error: BaseException) -> bool:
    """Whether a connection could not be made, or broke, or is not wanted."""
    return _is_any(error, _UNREACHABLE)


def is_of_the_hub(error: BaseException) -> bool:
    """Whether the hub or the way to it raised an error, not what was read from there."""
    return _is_any(error, _INPUT | _UNREACHABLE | {"HfHubHTTPError"})


def downloaded(name: HubName, kind: Kind) -> str | None:
    """The folder of the cache that `hf download` has filled; None where there is none."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name.id, repo_type=kind, revision=name.revision, local_files_only=True)
    except Exception:
        return None


def _is_any(error: BaseException, names: set[str]) -> bool:
    """Whether an error, or what it came from, is of a class with one of these names."""
    classes = (type(cause).__mro__ for cause in _chain(error))
    return any(cls.__name__ in names for cls in itertools.chain.from_iterable(classes))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
