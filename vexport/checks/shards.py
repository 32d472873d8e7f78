"""Check that the files that vLLM loads are consistent and have the bytes that were written."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock

from vexport.checkpoint.index import (
    INDEX_NAME,
    read_header,
    vllm_finds_weights,
)
from vexport.checkpoint.reader import same_bytes
from vexport.checks.vllm.view import CheckpointView
from vexport.errors import InputError
from vexport.files import read_json_object
from vexport.outputs import RECIPE
from vexport.outputs.digests import DIGESTS, digest_of, recorded_digests
from vexport.records import Finding, NotJudged, OnProgress, TensorInfo, silent
from vexport.rules import digests as digest_rules
from vexport.rules import shards as rules
from vexport.words import first_and_more

SHARD = re.compile(r"(?P<start>.*)-\d+(?P<of>-of-(?P<count>\d{1,9})\.safetensors)")
DESCRIPTION = "vLLM loads the same files that the index lists, and each tensor is in only one file"
DIGESTS_DESCRIPTION = (
    "the files match all digests that are recorded for them (vexport.json, --digests, "
    "--hub-digests)"
)
# Part of a checkpoint that only digests or a comparison with the source can judge.
VALUES = "values of weights and scales"
# Digests of more bytes than this are only computed with --digests, because reading all weights
# takes long. All other checks take a second or two.
MAX_BYTES = 8_000_000_000
_MEGABYTE = 1_000_000


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on safetensors files and the index.

    With an index, vLLM loads the files that the index lists, and without an index all files in the
    folder (filter_duplicate_safetensors_files in model_loader/weight_utils.py). If two files
    contain a tensor of the same name, vLLM keeps the tensor that it reads last. If the folder has
    files in Mistral's format, vLLM loads only these (_prepare_weights in default_loader.py).
    """
    root = view.index.root
    if replacing := _files_of_mistral(view):
        rule = rules.OTHER_FILES
        has_config = (root / "params.json").is_file()
        is_loadable = has_config and any("/" not in name for name in replacing)
        yield Finding.at(rule.as_warning if is_loadable else rule, str(root), names=replacing)
    if not vllm_finds_weights(root):
        yield Finding.at(rules.PATTERN_IN_PATH, str(root))
    if (root / INDEX_NAME).is_file():
        for tensor in view.index.repeated:
            yield _duplicate_finding(view, tensor, view.index.tensors[tensor.name])
        first = {tensor.name: tensor for tensor in reversed(view.index.repeated)}
        yield from _index(view, {**view.index.tensors, **first})
        return
    places: dict[str, TensorInfo] = {}
    files = {file: read_header(file) for file in sorted(root.glob("*.safetensors"))}
    for header in files.values():
        for name, tensor in header.items():
            other = places.setdefault(name, tensor)
            if other is not tensor:
                unread = (
                    _is_remnant(other.file.name, files)
                    and files[other.file].keys() <= header.keys()
                )
                yield _duplicate_finding(view, other, tensor, unread=unread)
    yield from _unlisted_files(view, places)


def _files_of_mistral(view: CheckpointView) -> list[str]:
    """Return the files in Mistral's format that vLLM loads in place of those that were judged.

    vLLM also finds them in subfolders, but then loads none.
    """
    root = view.index.root
    found = root.rglob("consolidated*.safetensors")
    files = sorted(file.relative_to(root).as_posix() for file in found if file.is_file())
    judged = {tensor.file.name for tensor in view.index.tensors.values()}
    return [] if judged <= set(files) else files


def _is_remnant(name: str, files: Mapping[Path, Mapping[str, TensorInfo]]) -> bool:
    """Return True if a file is a shard and other shards of its set are missing.

    Older exports leave such files behind.
    """
    shard = SHARD.fullmatch(name)
    if shard is None:
        return False
    several = sum(
        file.name.startswith(shard["start"]) and file.name.endswith(shard["of"]) for file in files
    )
    return several < int(shard["count"])


def _unlisted_files(view: CheckpointView, places: Mapping[str, TensorInfo]) -> Iterator[Finding]:
    """Report tensors in files next to model.safetensors, if there is no index.

    vLLM loads these files, too, and refuses tensor names that its class does not have.
    """
    layout = view.model.layout
    modules = () if layout is None or layout.unknown else layout.modules
    for name in sorted(places.keys() - view.index.tensors.keys()):
        module, _, parameter = name.rpartition(".")
        packed = parameter == "weight" and f"{module}.weight_packed" in view.index.tensors
        refused = packed or (bool(modules) and module not in modules)
        rule = rules.UNKNOWN_TENSOR_IN_UNLISTED_FILE if refused else rules.UNLISTED_FILE
        yield Finding.at(rule, name, file=places[name].file.name)


def _duplicate_finding(
    view: CheckpointView, first: TensorInfo, second: TensorInfo, *, unread: bool = False
) -> Finding:
    """Return the finding on a tensor that is stored in two files.

    `unread` is True if the first file is a remnant and the second file contains all its tensors.
    """
    if same_bytes(view.reader, first, view.reader, second):
        rule = rules.EQUAL_COPIES
    else:
        rule = rules.UNREAD_COPY if unread else rules.DIFFERENT_COPIES
    return Finding.at(rule, first.name, first=first.file.name, second=second.file.name)


def _index(view: CheckpointView, places: Mapping[str, TensorInfo]) -> Iterator[Finding]:
    """Report entries of the index that do not match the files.

    The findings are warnings, because vLLM only uses the set of file names in the index.
    """
    weight_map = read_json_object(view.index.root / INDEX_NAME).get("weight_map")
    listed = weight_map if isinstance(weight_map, dict) else {}
    stored = {name: tensor.file.name for name, tensor in places.items()}
    both = listed.keys() & stored.keys()
    for rule, names in (
        (rules.ENTRY_WITHOUT_TENSOR, listed.keys() - both),
        (rules.TENSOR_WITHOUT_ENTRY, stored.keys() - both),
        (rules.ENTRY_OF_OTHER_FILE, {name for name in both if listed[name] != stored[name]}),
    ):
        if names:
            yield Finding.at(rule, f"{INDEX_NAME}: {first_and_more(sorted(names))}")


def digests(view: CheckpointView) -> Iterator[Finding]:
    """Report files if their bytes differ from the digest in vexport.json or in `view.digests`.

    Also compare them with `view.hub_digests`. A file in `view.digests` must exist. A file that is
    only in vexport.json may be missing.
    """
    recorded = recorded_digests(view.index.root)
    existing = {name: recorded[name] for name in _existing(view, recorded)}
    if not _is_too_large(view, recorded):
        for name, actual in _other_digests(view, existing):
            yield Finding.at(
                digest_rules.CHANGED_FILE,
                str(view.index.root / name),
                actual=actual,
                digest=existing[name],
                key=DIGESTS,
                recipe=RECIPE,
            )
    listed = view.digests or {}
    for name, actual in _other_digests(view, listed, view.on_progress):
        where = str(view.index.root / name)
        if actual is None:
            yield Finding.at(digest_rules.MISSING_FILE, where, digest=listed[name])
        else:
            yield Finding.at(digest_rules.OTHER_FILE, where, actual=actual, digest=listed[name])
    yield from _against_hub(view)


def _against_hub(view: CheckpointView) -> Iterator[Finding]:
    known = _known_to_hub(view)
    for name, actual in _other_digests(view, known, view.on_progress):
        where = str(view.index.root / name)
        if actual is None:
            yield Finding.at(digest_rules.MISSING_FILE, where, digest=known[name])
        else:
            yield Finding.at(digest_rules.OTHER_THAN_HUB, where, actual=actual, digest=known[name])
    others = sorted(view.hub_digests.keys() - known.keys())
    if others:
        yield Finding.at(digest_rules.NOT_VERIFIED, first_and_more(others), count=len(others))


def _known_to_hub(view: CheckpointView) -> dict[str, str]:
    return {name: digest for name, digest in view.hub_digests.items() if digest is not None}


def values_not_judged(view: CheckpointView) -> Iterator[NotJudged]:
    """Yield an entry if the bytes of a weight file are compared with no digest.

    Without a digest and the source, checks find only values that are impossible or unusual.
    """
    try:
        recorded = recorded_digests(view.index.root)
    except InputError:  # `digests` reports it
        return
    root = view.index.root
    files = {os.path.relpath(each.file, root) for each in view.index.tensors.values()}
    files -= _known_to_hub(view).keys()
    missing = sorted(files - recorded.keys() - (view.digests or {}).keys())
    if missing:
        name = missing[0] if len(missing) == 1 else f"{len(missing):,} of {len(files):,} files"
        why = f"there is no digest of {name}; add --source MODEL, or --digests FILE"
        yield NotJudged(what=VALUES, why=why)
    elif files and _is_too_large(view, recorded):
        why = (
            f"weights of more than {MAX_BYTES / 1e9:.0f} GB are only compared with the digests in "
            f"{RECIPE} on request; add --digests {RECIPE}"
        )
        yield NotJudged(what=VALUES, why=why)


def _is_too_large(view: CheckpointView, recorded: Iterable[str]) -> bool:
    """Return True if the recorded digests are only compared with `--digests`."""
    sizes = [(view.index.root / name).stat().st_size for name in _existing(view, recorded)]
    return view.digests is None and sum(sizes) > MAX_BYTES


def _existing(view: CheckpointView, names: Iterable[str]) -> list[str]:
    return [name for name in names if (view.index.root / name).is_file()]


def _other_digests(
    view: CheckpointView, digests: Mapping[str, str], on_progress: OnProgress = silent
) -> Iterator[tuple[str, str | None]]:
    """Yield each file with another digest, with this digest, or None if the file is missing."""
    root = view.index.root
    names = _existing(view, digests)
    on_read = _Reading(on_progress, sum((root / name).stat().st_size for name in names))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        computed = pool.map(
            lambda name: digest_of(root / name, digests[name].partition(":")[0], on_read), names
        )
        try:
            actual = dict(zip(names, computed, strict=True))
        except BaseException:  # such as Ctrl-C: the pool waits for its threads
            on_read.stopped.set()
            raise
    for name, digest in digests.items():
        if actual.get(name) != digest:
            yield name, actual.get(name)


class _Reading:
    """Count the bytes that several threads read, show the megabytes, and stop the threads."""

    def __init__(self, on_progress: OnProgress, total: int) -> None:
        self.stopped = Event()
        self._on_progress = on_progress
        self._total = total
        self._done = 0
        self._lock = Lock()

    def __call__(self, count: int) -> None:
        if self.stopped.is_set():
            raise InterruptedError("stopped")
        with self._lock:
            before = self._done
            self._done += count
            done = self._done
        if done == self._total or done // (32 * _MEGABYTE) != before // (32 * _MEGABYTE):
            total = -(-self._total // _MEGABYTE)
            shown = total if done == self._total else done // _MEGABYTE
            self._on_progress("compare digests (MB)", shown, total)
