"""A quantization in parts: which files of weights a part writes, and what parts must have in common.

The files are those of a single run. Part 3 of 8 of OUT is the folder `OUT.parts/part-00003-of-00008`, which
appears whole or not at all; its manifest says what it was made from. In `OUT.parts` is also what calibration
has shown, which the first part that needs it finds out for all.
"""

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vexport.checkpoint.dtypes import BITS
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.writer import Shard, WriteUnit
from vexport.errors import InputError
from vexport.files import digest_bytes, from_json, to_json, write_text
from vexport.outputs.separate import resolved
from vexport.types import AttentionLayer, Calibration, OnProgress, Part, Plan, TensorInfo, WrittenPart
from vexport.version import __version__

MANIFEST = "part.json"
# The merged checkpoint's config.json, in the first part's folder, which is no checkpoint.
CONFIG = "config.json.part"
CALIBRATION, LOCK = "calibration.json", "calibration.lock"
_NAME = re.compile(r"\.?part-(\d{5})-of-(\d{5})(\.partial)?")
# How many places of the weights tell one source from another, and the bytes that are read at each.
SAMPLES, SAMPLE_BYTES = 1024, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFrom:
    """What the bytes of a part depend on, as digests: equal in all parts of a checkpoint.

    `source` does not depend on where the source lies, nor on times: each host may have a copy of its own.
    """

    vexport: str
    source: str
    plan: str
    settings: str
    calibration: str = ""

    def calibrated(self, calibration: Calibration | None) -> "MadeFrom":
        """The same, with what calibration has shown."""
        return replace(self, calibration=digest_bytes(repr(calibration).encode()) if calibration else "")

    def differences(self, other: "MadeFrom") -> str:
        """The names of what differs: `plan and settings`."""
        mine, theirs = asdict(self), asdict(other)
        return " and ".join(name for name in mine if mine[name] != theirs[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A finished part: what it was made from, and the bytes of its files of weights by their names."""

    part: Part
    made_from: MadeFrom
    files: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Statistics:
    """What calibration has shown, and what it was made from."""

    made_from: MadeFrom
    calibration: Calibration


def parts_folder(out: Path) -> Path:
    """Where the parts of OUT lie until they are merged."""
    return resolved(out).parent / f"{resolved(out).name}.parts"


def part_folder(out: Path, part: Part) -> Path:
    """Where one part lies."""
    return parts_folder(out) / f"part-{part.number:05}-of-{part.of:05}"


def parts_begun(out: Path) -> list[Part]:
    """The parts of which there is a folder, finished or not."""
    names = parts_folder(out).iterdir() if parts_folder(out).is_dir() else ()
    found = (_NAME.fullmatch(entry.name) for entry in names)
    return sorted({Part(number=int(name[1]), of=int(name[2])) for name in found if name})


def read_manifest(out: Path, part: Part) -> Manifest | None:
    """What a finished part says of itself; None where it is not finished."""
    file = part_folder(out, part) / MANIFEST
    return from_json(Manifest, file) if file.is_file() else None


def written_part(out: Path, part: Part) -> WrittenPart:
    """A finished part as `quantize` answers it."""
    manifest = read_manifest(out, part)
    assert manifest is not None
    return WrittenPart(
        number=part.number,
        of=part.of,
        folder=str(part_folder(out, part)),
        files=tuple(manifest.files),
        num_bytes=sum(manifest.files.values()),
    )


def write_manifest(part: Part, made_from: MadeFrom, shards: Sequence[Shard], folder: Path) -> None:
    """Write a part's manifest into its folder, where its shards are whole."""
    files = {shard.name: (folder / shard.name).stat().st_size for shard in shards}
    write_text(folder / MANIFEST, to_json(Manifest(part=part, made_from=made_from, files=files)))


def own_shards(shards: Sequence[Shard], part: Part, index: SourceIndex) -> tuple[Shard, ...]:
    """The shards that a part writes. InputError where there are fewer shards than parts."""
    if part.of > len(shards):
        files = f"{len(shards):,} file{'s' if len(shards) > 1 else ''}"
        fewer = f"use at most {len(shards):,} parts" if len(shards) > 1 else "leave --part out"
        raise InputError(
            f"--part {part.number}/{part.of}",
            got=f"{part.of:,} parts of a checkpoint of {files}",
            need="at least one file for each part",
            fix=f"{fewer}, or give all of them a smaller --max-shard-size (5GB unless given)",
        )
    return dealt(shards, part.of, index)[part.number - 1]


def dealt(shards: Sequence[Shard], count: int, index: SourceIndex) -> list[tuple[Shard, ...]]:
    """The shards dealt to so many writers: the largest first, each to the one with least to read."""
    work = [sum(bytes_read(unit, index) for unit in shard.units) for shard in shards]
    loads, owners = [0] * count, dict[int, int]()
    for number in sorted(range(len(shards)), key=lambda number: -work[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += work[number]
    return [
        tuple(shard for number, shard in enumerate(shards) if owners[number] == owner)
        for owner in range(count)
    ]


def bytes_read(unit: WriteUnit, index: SourceIndex) -> int:
    """The bytes of the source that a unit is made of."""
    if isinstance(unit.source, TensorInfo):
        return unit.source.num_bytes
    if isinstance(unit.source, AttentionLayer):
        return 0
    return sum(
        member.out_features * member.in_features * BITS[index.tensors[member.weight].dtype] // 8
        for member in unit.source.members
    )


def made_from(index: SourceIndex, plan: Plan, settings: object) -> MadeFrom:
    """What parts of a checkpoint are made from; `settings` is all else that decides their bytes."""
    return MadeFrom(
        vexport=__version__,
        source=source_digest(index),
        plan=digest_bytes(repr((plan.groups, plan.attention, plan.kv_cache, plan.smoothing)).encode()),
        settings=digest_bytes(repr(settings).encode()),
    )


def source_digest(index: SourceIndex) -> str:
    """SHA-256 of a source's config, its headers, and its weights at SAMPLES evenly spread places."""
    digest = hashlib.sha256(repr(sorted(index.config.items())).encode())
    step, position, place = max(1, index.num_bytes // SAMPLES), 0, 0
    for tensor in index.tensors.values():
        digest.update(repr((tensor.name, tensor.dtype, tensor.shape, tensor.file.name)).encode())
        end = position + tensor.num_bytes
        if place < end:
            with tensor.file.open("rb", buffering=0) as file:
                for offset in range(tensor.start + place - position, tensor.end, step):
                    digest.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
                    place += step
        position = end
    return digest.hexdigest()


def require_fitting(out: Path, part: Part, own: MadeFrom, *, overwrite: bool) -> None:
    """InputError where other parts of OUT are of another number, or are made from something else.

    With `overwrite` all parts may be on their way to be replaced; merging looks at them again.
    """
    counts = sorted({other.of for other in parts_begun(out)} - {part.of})
    if counts:
        raise InputError(
            str(parts_folder(out)),
            got=f"parts of {counts[0]}",
            need=f"parts of {part.of} alone",
            fix=f"use --part i/{counts[0]}, or remove {parts_folder(out)}",
        )
    if overwrite:
        return
    for other in parts_begun(out):
        manifest = read_manifest(out, other)
        if manifest is not None:
            _require_equal(part_folder(out, other), manifest.made_from, own)
    if (parts_folder(out) / CALIBRATION).is_file():
        file = parts_folder(out) / CALIBRATION
        _require_equal(file, from_json(_Statistics, file).made_from, own)


def _require_equal(place: Path, found: MadeFrom, own: MadeFrom) -> None:
    if different := own.differences(replace(found, calibration="")):
        raise InputError(
            str(place),
            got=f"another {different}",
            need="the one of this part",
            fix="give all parts the same arguments; to begin again, run all of them with --overwrite",
        )


def unsuited(part: Part, *, is_rounded: bool) -> InputError:
    """The error for work that cannot be done in parts, or that torchrun shares out."""
    ranks = "run `torchrun --nproc-per-node N -m vexport quantize ...` without --part"
    return InputError(
        f"--part {part.number}/{part.of}",
        got="a rounding that needs all layers in their order" if is_rounded else "torchrun as well",
        need="weights that are quantized one by one" if is_rounded else "one of them",
        fix=f"use --rounding nearest, or {ranks}" if is_rounded else ranks,
    )


def shared_calibration(
    out: Path, own: MadeFrom, calibrate: Callable[[], Calibration | None], on_progress: OnProgress
) -> Calibration | None:
    """What calibration shows: found out by the first part that asks, and read by all others, who wait.

    A part that dies leaves it to the next.
    """
    folder = parts_folder(out)
    with _alone(folder / LOCK, lambda: on_progress("wait for the part that calibrates", 0, 1)):
        if (folder / CALIBRATION).is_file():
            known = from_json(_Statistics, folder / CALIBRATION)
            if known.made_from == own:
                return known.calibration
        calibration = calibrate()
        if calibration is not None:
            known = _Statistics(made_from=own, calibration=calibration)
            write_text(folder / CALIBRATION, to_json(known))
        return calibration


@contextmanager
def _alone(file: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Within the block no other process has the lock; it goes with a process that dies."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
