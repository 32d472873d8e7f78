"""Turns huggingface_hub's progress bars into ours."""

from threading import Lock

from vexport.types import OnProgress

MEGABYTE = 1_000_000
# The bar of the bytes received; the other one of bytes has those written.
_RECEIVED = "Downloading bytes"


class Downloaded:
    """Counts the bytes of a download, of all its threads, and reports megabytes."""

    def __init__(self, name: str, total: int, on_progress: OnProgress) -> None:
        self._stage, self._total, self._done = f"download {name} (MB)", max(total, 1), 0
        self._on_progress, self._lock = on_progress, Lock()
        self._report()

    def add(self, size: int) -> None:
        """Count `size` more bytes; negative where a part is fetched again."""
        with self._lock:
            self._done += size
            self._report()

    def end(self) -> None:
        """Everything is here, whatever was counted."""
        with self._lock:
            self._done = self._total
            self._report()

    def _report(self) -> None:
        self._on_progress(self._stage, *(-(-size // MEGABYTE) for size in (self._done, self._total)))


def bar_class(downloaded: Downloaded) -> type:
    """A class with tqdm's methods, as far as `snapshot_download` uses them.

    It makes three bars: bytes received (hidden by compression and caches), bytes written, and files; the
    bytes written are counted.
    """
    return type("Bar", (_Bar,), {"downloaded": downloaded})


class _Bar:
    downloaded: Downloaded

    def __init__(
        self, *, desc: str = "", unit: str = "it", total: int | None = None, initial: int = 0, **other: object
    ) -> None:
        self.n, self.total = initial, total
        self._counts = unit == "B" and not desc.startswith(_RECEIVED)

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, n: float | None = 1) -> None:
        self.n += int(n or 0)
        if self._counts:
            self.downloaded.add(int(n or 0))

    def close(self) -> None: ...

    def refresh(self) -> None: ...

    def set_description(self, text: str, refresh: bool = True) -> None: ...

    def set_description_str(self, text: str, refresh: bool = True) -> None: ...

    def set_postfix_str(self, text: str, refresh: bool = True) -> None: ...
