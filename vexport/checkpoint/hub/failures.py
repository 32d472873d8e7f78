"""Why the hub did not give something: what was wrong, and what to do about it."""

import difflib
import errno
import os
from collections.abc import Iterator
from typing import Literal

from vexport.checkpoint.hub.names import OFFLINE, OFFLINE_DATA, HubName, offline_variable
from vexport.errors import EnvironmentFault, InputError, VexportError

Kind = Literal["model", "dataset"]
# Of httpx, requests and Python, by name: which of them huggingface_hub uses depends on its version.
_UNREACHABLE = {
    "ConnectError",
    "ConnectionError",
    "TimeoutException",
    "Timeout",
    "TransportError",
    "NetworkError",
}
_SHOWN = 200
_CANDIDATES = 200


def explain(error: BaseException, name: HubName, kind: Kind = "model") -> VexportError:
    """The error to show for one that `huggingface_hub` or `datasets` raised while it looked for `name`.

    InputError where the name, the revision or the access to it is wrong; EnvironmentFault where the network,
    the token, the disk, the hub or an offline variable is in the way.
    """
    where = f"{kind} {name}"
    causes = list(_chain(error))
    names = {cls.__name__ for cause in causes for cls in type(cause).__mro__}
    variable = offline_variable(OFFLINE_DATA if kind == "dataset" else OFFLINE)
    if variable and ("OfflineModeIsEnabled" in names or "LocalEntryNotFoundError" in names):
        return offline(name, kind, variable)
    if "GatedRepoError" in names:
        return _gated(name, kind, where)
    if "RevisionNotFoundError" in names:
        got, need = f"no revision {name.revision!r} of it on the hub", "a branch, a tag or a commit of it"
        return InputError(where, got=got, need=need, fix=f"see {_page(name, kind)}/tree/main")
    if "RepositoryNotFoundError" in names:
        return _not_found(name, kind, where)
    if "HFValidationError" in names:
        got, fix = _first_line(error), "check the id"
        return InputError(where, got=got, need="an id like ORG/NAME", fix=fix)
    for cause in causes:
        if (answer := _of_status(cause, where) or _of_disk(cause, where)) is not None:
            return answer
    return _unreachable(error, where, known=bool(names & _UNREACHABLE))


def is_network_error(error: BaseException) -> bool:
    """Whether a connection could not be made, or broke: another attempt may succeed."""
    return any(cls.__name__ in _UNREACHABLE for cause in _chain(error) for cls in type(cause).__mro__)


def diagnose(error: BaseException, name: HubName, kind: Kind) -> VexportError | None:
    """The error to show for a failed download; None where the hub would give `name`: something else is wrong.

    `datasets` drops the hub's own errors, so that the hub is asked again.
    """
    from huggingface_hub import HfApi

    if variable := offline_variable(OFFLINE_DATA):
        return offline(name, kind, variable)
    for cause in _chain(error):
        if (full := _of_disk(cause, f"{kind} {name}")) is not None:
            return full
    try:
        HfApi().repo_info(name.id, repo_type=kind, revision=name.revision)
        HfApi().auth_check(name.id, repo_type=kind)
    except Exception as hub_error:
        return explain(hub_error, name, kind)
    return None


def offline(name: HubName, kind: Kind, variable: str) -> VexportError:
    """The error where the user's environment keeps us from the hub and the cache has no copy."""
    got = f"{variable} in the environment, and no whole copy in the cache"
    fix = f"unset {variable.partition('=')[0]}, or download it before: {download_command(name, kind)}"
    return EnvironmentFault(f"{kind} {name}", got=got, need="the hub, or a copy", fix=fix)


def download_command(name: HubName, kind: Kind) -> str:
    """What brings all its files into the cache, on a machine that reaches the hub."""
    of = " --repo-type dataset" if kind == "dataset" else ""
    at = f" --revision {name.revision}" if name.revision else ""
    return f"`hf download{of} {name.id}{at}`"


def downloaded(name: HubName, kind: Kind) -> str | None:
    """The folder of the cache that such a download has filled; None where there is none."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name.id, repo_type=kind, revision=name.revision, local_files_only=True)
    except Exception:
        return None


def _gated(name: HubName, kind: Kind, where: str) -> VexportError:
    page = _page(name, kind)
    account = "the account of your token" if _has_token() else "your account, and set HF_TOKEN to its token"
    got = f"a gated {kind}, and no access to it"
    return InputError(where, got=got, need="its terms accepted", fix=f"accept them at {page} with {account}")


def _not_found(name: HubName, kind: Kind, where: str) -> VexportError:
    close = _close_ids(name, kind)
    hint = f"did you mean {' or '.join(close)}?" if close else "check the id"
    private = "" if _has_token() else "; a private one needs HF_TOKEN"
    missing = "" if kind == "dataset" else "no such folder, and "
    got = f"{missing}no {kind} of that name on the hub"
    need = f"the id of a {kind} on the hub" + ("" if kind == "dataset" else ", or a folder")
    return InputError(where, got=got, need=need, fix=hint + private)


def _of_status(error: BaseException, where: str) -> VexportError | None:
    """What the hub's answer says, from its HTTP status."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if not isinstance(status, int) or response is None:
        return None
    if status == 404:
        missing = str(response.url).partition("/resolve/")[2].partition("/")[2] or str(response.url)
        need = "a Hugging Face checkpoint (config.json and safetensors)"
        return InputError(where, got=f"no {missing} in it", need=need, fix="check the id")
    if status == 429:
        wait = response.headers.get("Retry-After")
        later = f"try again in {wait} s" if wait else "try again later"
        token = "" if _has_token() else ", or set HF_TOKEN, which allows more requests"
        return EnvironmentFault(where, got="a rate limit (429)", need="fewer requests", fix=later + token)
    if status == 401:
        fix = "set HF_TOKEN to a valid token, or unset it for what is public"
        return EnvironmentFault(where, got="a token that the hub refuses (401)", need="a valid one", fix=fix)
    if status == 403:
        fix = "give the token of HF_TOKEN the right to read it"
        return EnvironmentFault(where, got="no permission (403)", need="a token that may read it", fix=fix)
    fix = "try again later, or name a local folder"
    return EnvironmentFault(where, got=f"the answer {status} of the hub", need="its files", fix=fix)


def _of_disk(error: BaseException, where: str) -> VexportError | None:
    if not isinstance(error, OSError) or error.errno is None:
        return None
    cache = os.environ.get("HF_HOME") or "the hub's cache (~/.cache/huggingface)"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        fix = f"free space in {cache}, or set HF_HOME to a larger disk"
        return EnvironmentFault(where, got="a full disk", need="room for its files", fix=fix)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        fix = "set HF_HOME to a folder that you may write to"
        got = f"{error.strerror}: {error.filename or cache}"
        return EnvironmentFault(where, got=got, need="a cache that can be written", fix=fix)
    return None


def _unreachable(error: BaseException, where: str, *, known: bool) -> VexportError:
    endpoint = _endpoint()
    got = f"no connection to {endpoint}" if known else "no answer that can be used from the hub"
    fix = "check the network, the proxy and HF_ENDPOINT, or name a local folder"
    if where.startswith("dataset "):
        command = download_command(
            HubName.parse(where.removeprefix("dataset ")) or HubName(id=where), "dataset"
        )
        fix = f"check the network, the proxy and HF_ENDPOINT, or download it before: {command}"
    return EnvironmentFault(where, got=f"{got} ({_first_line(error)})", need="the hub", fix=fix)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what it came from."""
    seen: set[int] = set()
    pending: BaseException | None = error
    while pending is not None and id(pending) not in seen:
        seen.add(id(pending))
        yield pending
        pending = pending.__cause__ or pending.__context__


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text[:_SHOWN]


def _close_ids(name: HubName, kind: Kind) -> list[str]:
    """Names of the same organization that are written alike; none where it cannot be asked."""
    from huggingface_hub import HfApi

    owner = name.id.partition("/")[0]
    try:
        api = HfApi()
        listed = (api.list_models if kind == "model" else api.list_datasets)(author=owner, limit=_CANDIDATES)
        ids = {found.id.lower(): found.id for found in listed}
    except Exception:
        return []
    return [ids[close] for close in difflib.get_close_matches(name.id.lower(), ids, n=2, cutoff=0.8)]


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _page(name: HubName, kind: Kind) -> str:
    return f"{_endpoint()}/{'datasets/' if kind == 'dataset' else ''}{name.id}"
