"""The parts of a quantization become one checkpoint: the bytes of a single run."""

import shutil
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from pathlib import Path

from vexport.checkpoint.header import read_header
from vexport.checkpoint.index import INDEX_NAME, SINGLE_NAME
from vexport.errors import InputError, raise_all
from vexport.files import digest_bytes, read_json_object
from vexport.outputs import is_being_written, refuse_existing, resumable_directory, unfinished_folder
from vexport.outputs.replaceable import checkpoint_files
from vexport.quantize.parts import (
    CALIBRATION,
    CONFIG,
    LOCK,
    MANIFEST,
    Manifest,
    part_folder,
    parts_begun,
    parts_folder,
    read_manifest,
)
from vexport.types import Merged, OnProgress, Part

NEED = "a file of weights of one of the parts"
AGAIN = "run the parts again, with --overwrite"


def merge(out: Path, *, overwrite: bool, on_progress: OnProgress) -> Merged:
    """Put together the parts of OUT, whose folder is removed then; nothing is copied but small files.

    A call that was broken off is continued by the next one. InputError where a part is missing, unfinished,
    being written or incomplete, or where parts are not of one checkpoint.
    """
    begun = parts_begun(out)
    manifests = tuple(one for part in begun if (one := read_manifest(out, part)) is not None)
    if not _is_published(out, manifests):
        _require_all(out, begun, manifests)
        refuse_existing(out, overwrite=overwrite)
        raise_all([*_strange(out, manifests), *_broken(out, manifests)])
        raise_all(list(_unreadable(out, manifests)))
        digest = digest_bytes(repr((manifests[0].made_from, begun)).encode())
        with resumable_directory(out, input_digest=digest, overwrite=overwrite) as folder:
            _gather(out, manifests, folder, on_progress)
    _remove_parts(out, begun)
    weights = sorted(out.glob("*.safetensors"))
    return Merged(
        checkpoint=str(out),
        parts=begun[0].of,
        files=len(weights),
        num_bytes=sum(file.stat().st_size for file in weights),
    )


def _is_published(out: Path, manifests: Sequence[Manifest]) -> bool:
    """Whether a call died after OUT was published and before all parts were removed."""
    names = [(one, name) for one in manifests for name in one.files]
    left = any(_places(out, one, name) for one, name in names)
    return bool(names) and not left and all(_size(out / name) == one.files[name] for one, name in names)


def _places(out: Path, manifest: Manifest, name: str) -> list[Path]:
    """Where a file of a part is while it is not published."""
    folders = (part_folder(out, manifest.part), unfinished_folder(out))
    return [folder / name for folder in folders if (folder / name).is_file()]


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def _require_all(out: Path, begun: Sequence[Part], manifests: Sequence[Manifest]) -> None:
    """InputError where parts are missing, or are not of one checkpoint."""
    if not begun:
        got, fix = f"no parts in {parts_folder(out)}", "run them first, or check the path"
        if checkpoint_files(out) is not None:
            got, fix = f"{got}, and a checkpoint of vexport's", "do nothing if they are merged already"
        raise InputError(
            str(out), got=got, need="those that `vexport quantize SOURCE OUT --part i/n` writes", fix=fix
        )
    counts = sorted({part.of for part in begun})
    if len(counts) > 1:
        raise InputError(
            str(parts_folder(out)),
            got=f"parts of {' and of '.join(map(str, counts))}",
            need="parts of one number",
            fix="remove the folders of the parts that are not meant",
        )
    _require_finished(out, counts[0], {manifest.part for manifest in manifests})
    for manifest in manifests[1:]:
        if manifest.made_from != manifests[0].made_from:
            raise InputError(
                str(part_folder(out, manifest.part)),
                got=f"another {manifests[0].made_from.differences(manifest.made_from)} than in part 1",
                need="parts of one checkpoint",
                fix="run the parts that are not as meant again, with --overwrite",
            )


def _require_finished(out: Path, count: int, finished: Set[Part]) -> None:
    """InputError that names the parts that are being written, and those that have to be run."""
    parts = [Part(number=number, of=count) for number in range(1, count + 1)]
    running = [part for part in parts if is_being_written(part_folder(out, part))]
    missing = [part for part in parts if part not in finished and part not in running]
    if not running and not missing:
        return
    states = [
        f"{word} {', '.join(str(part.number) for part in some)}"
        for word, some in (("being written:", running), ("missing or unfinished:", missing))
        if some
    ]
    raise InputError(
        str(out),
        got=f"{len(finished)} of {count} parts ({'; '.join(states)})",
        need="all parts, finished",
        fix=f"run --part {missing[0].number}/{count} (again), then merge" if missing else "wait, then merge",
    )


def _broken(out: Path, manifests: Sequence[Manifest]) -> Iterator[InputError]:
    """An error for each file of a part that is not there as it was written, nor merged already."""
    for manifest in manifests:
        folder = part_folder(out, manifest.part)
        for name, size in manifest.files.items():
            sizes = [_size(file) for file in _places(out, manifest, name)]
            if sizes[:1] != [size]:
                got = f"{sizes[0]:,} bytes" if sizes else "no such file"
                fix = f"run --part {manifest.part.number}/{manifest.part.of} again, with --overwrite"
                yield InputError(
                    str(folder / name), got=got, need=f"the {size:,} bytes of {manifest.part}", fix=fix
                )


def _strange(out: Path, manifests: Sequence[Manifest]) -> Iterator[InputError]:
    """An error for what no part writes: names that are none of a file of weights, folders, links, pipes."""
    for manifest in manifests:
        folder = part_folder(out, manifest.part)
        for name in manifest.files:
            if Path(name).name != name or not name.endswith(".safetensors"):
                place, fix = f"{folder / MANIFEST}: files", "run the part again, with --overwrite"
                yield InputError(place, got=repr(name), need="names of files of weights", fix=fix)
        for entry in sorted(folder.iterdir()):
            if entry.is_symlink() or not entry.is_file():
                need = "the files that the part has written"
                yield InputError(str(entry), got="a link, a folder or a pipe", need=need, fix="remove it")


def _unreadable(out: Path, manifests: Sequence[Manifest]) -> Iterator[InputError]:
    """An error for each file of weights whose header is broken, and for each that no part has."""
    for manifest in manifests:
        for name in manifest.files:
            try:
                read_header(_places(out, manifest, name)[0])
            except InputError as error:
                yield error
    first, files = part_folder(out, manifests[0].part), {name for one in manifests for name in one.files}
    # A checkpoint of one file has no index.
    written = (CONFIG,) if files == {SINGLE_NAME} else (CONFIG, INDEX_NAME)
    for name in written:
        if not (first / name).is_file():
            yield InputError(str(first / name), got="no such file", need="what part 1 writes", fix=AGAIN)
            return
    if INDEX_NAME not in written:
        return
    named = read_json_object(first / INDEX_NAME).get("weight_map")
    needed = {str(file) for file in named.values()} if isinstance(named, dict) else set()
    for missing in sorted(needed - files):
        yield InputError(str(first / INDEX_NAME), got=f"{missing}, which no part has", need=NEED, fix=AGAIN)


def _gather(out: Path, manifests: Sequence[Manifest], folder: Path, on_progress: OnProgress) -> None:
    """Move the weights of all parts, copy what the first part has for all; config.json last."""
    for done, manifest in enumerate(manifests, start=1):
        for name in manifest.files:
            with suppress(FileNotFoundError):  # a call that was broken off has moved it
                (part_folder(out, manifest.part) / name).rename(folder / name)
        on_progress("merge (parts)", done, len(manifests))
    first = part_folder(out, manifests[0].part)
    for file in sorted(first.iterdir()):
        if file.name not in (MANIFEST, CONFIG, *manifests[0].files):
            shutil.copyfile(file, folder / file.name)
    shutil.copyfile(first / CONFIG, folder / "config.json")


def _remove_parts(out: Path, parts: Sequence[Part]) -> None:
    """Remove what parts have left; what else lies there stays."""
    for part in reversed(parts):
        shutil.rmtree(part_folder(out, part), ignore_errors=True)
    for name in (CALIBRATION, LOCK):
        (parts_folder(out) / name).unlink(missing_ok=True)
    with suppress(OSError):
        parts_folder(out).rmdir()
