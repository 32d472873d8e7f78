"""Reads from any storage that fsspec knows: whole ranges, again after a cut, in time, of one version."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass
from tarfile import TarError
from typing import Protocol, TypeVar
from zipfile import BadZipFile

from vexport.errors import EnvironmentFault, InputError, VexportError
from vexport.errors.escaping import first_line
from vexport.errors.extras import MissingPackage

T = TypeVar("T")
# Seconds for one request, and before it is made again.
REQUEST_SECONDS = 120.0
WAITS = (0.5, 2.0, 8.0)
# What tells one version of an object from another, by the name that a file system gives it; the first counts.
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "generation", "mtime", "LastModified", "created")
# What the next try would raise again.
_WRONG = (IsADirectoryError, NotADirectoryError, NotImplementedError, BadZipFile, TarError)
# Errors of credentials, by the class names of the libraries that fsspec uses.
_DENIED = ("NoCredentialsError", "PartialCredentialsError", "ClientAuthenticationError", "RefreshError")


class FileSystem(Protocol):
    """What is used of fsspec's AbstractFileSystem."""

    def ls(self, path: str, *, detail: bool) -> Sequence[Mapping[str, object]]: ...
    def info(self, path: str) -> Mapping[str, object]: ...
    def cat_file(self, path: str, *, start: int | None, end: int | None) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """An object as it was when it was first seen."""

    size: int
    tag: str


class Storage:
    """A folder of a file system; threads may share it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._path = _file_system(self.url)

    def versions(self) -> dict[str, Version]:
        """The objects of the folder and of those in it by their relative names; InputError without any."""
        start, versions, folders = f"{self._path.rstrip('/')}/", dict[str, Version](), [self._path]
        for folder in folders:
            for info in self._listed(folder):
                name = str(info["name"])
                if info.get("type") == "file" and name.startswith(start):
                    versions[name.removeprefix(start)] = _version(info)
                elif info.get("type") == "directory" and folder == self._path:
                    folders.append(name)
        if not versions:
            raise _absent(self.url)
        return versions

    def _listed(self, folder: str) -> Sequence[Mapping[str, object]]:
        return self._asked(self.url, lambda: self._fs.ls(folder, detail=True))

    def read(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """A range of an object, whole. InputError where the object has changed since `version`."""
        url = f"{self.url}/{name}"
        data = self._asked(url, lambda: self._whole(name, start, stop, version))
        self.require_unchanged(name, version)
        return data

    def require_unchanged(self, name: str, version: Version) -> None:
        """InputError where an object is no longer as it was."""
        url = f"{self.url}/{name}"
        found = _version(self._asked(url, lambda: self._fs.info(f"{self._path}/{name}")))
        if found != version:
            raise InputError(
                url,
                got=f"another object than when its header was read ({found.size:,} bytes, {found.tag})",
                need="one that stays the same while it is read",
                fix="run again when nothing else writes to it; nothing was published",
            )

    def _whole(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Go on where an answer is shorter than what was asked for."""
        data = b""
        while start + len(data) < stop:
            more = self._fs.cat_file(f"{self._path}/{name}", start=start + len(data), end=stop)
            if not more or len(data) + len(more) > stop - start:
                self.require_unchanged(name, version)
                raise ConnectionError(
                    f"{len(data) + len(more):,} bytes where {stop - start:,} were asked for"
                )
            data += more
        return data

    def _asked(self, url: str, ask: Callable[[], T]) -> T:
        for wait in (*WAITS, None):
            try:
                return _within(REQUEST_SECONDS, ask)
            except Exception as error:
                problem = _problem(url, error)
                if wait is None or not isinstance(problem, EnvironmentFault):
                    raise problem from error
                time.sleep(wait)
        raise AssertionError("the last try returns or raises")


def _file_system(url: str) -> tuple[FileSystem, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingPackage("fsspec", f"reading {url}") from None
    try:
        fs, path = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        need, fix = "the package that reads it", "pip install 'vexport[storage]', or that package"
        raise EnvironmentFault(url, got=first_line(error), need=need, fix=fix) from None
    except (ValueError, TypeError, AttributeError) as error:  # of a URL that lacks what the protocol needs
        fix = "use a URL that fsspec knows, e.g. s3://BUCKET/MODEL"
        raise InputError(
            url, got=first_line(error), need="a known protocol and what it asks for", fix=fix
        ) from None
    except Exception as error:
        raise _problem(url, error) from error
    return fs, path


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """What `ask` gives; TimeoutError where it takes longer: its thread is left to itself."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(ask).result(seconds)
    except TooLate:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    finally:
        pool.shutdown(wait=False)


def _version(info: Mapping[str, object]) -> Version:
    size = info.get("size")
    tag = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return Version(size=size if isinstance(size, int) else 0, tag=tag)


def _absent(url: str) -> InputError:
    return InputError(url, got="no such object", need="a checkpoint's folder", fix="check the URL")


def _problem(url: str, error: Exception) -> VexportError:
    """What a file system raised as one of our errors: a fault of the environment may pass."""
    if isinstance(error, VexportError):
        return error
    if isinstance(error, FileNotFoundError) or _status(error) == 404:
        return _absent(url)
    if isinstance(error, _WRONG):
        need, fix = "a folder, or an archive with one", "check the URL"
        return InputError(url, got=first_line(error), need=need, fix=fix)
    if isinstance(error, PermissionError) or type(error).__name__ in _DENIED or _status(error) in (401, 403):
        got = f"no access ({first_line(error)})"
        return InputError(url, got=got, need="the right to read it", fix="check the credentials")
    fix = "run the same command again to resume"
    return EnvironmentFault(url, got=first_line(error), need="an answer of the storage", fix=fix)


def _status(error: Exception) -> object:
    """The HTTP status that an exception of aiohttp carries."""
    return getattr(error, "status", None)
