"""Stream a checkpoint from safetensors to safetensors. Reader, kernels and writer run at the same
time.

A few rows at a time are read, quantized and written, so that memory does not grow with the model.
Only a search for scales imports torch.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from vexport.checkpoint.dtypes import num_bytes
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.smoothed import reader_of
from vexport.checkpoint.writer import Array, Chunk, Shard, ShardWriter, WriteUnit, split_shards
from vexport.errors import InputError
from vexport.errors.extras import require_extra
from vexport.files import digest_bytes
from vexport.formats.config import kv_scales
from vexport.formats.packing.base import (
    STORAGES,
    Packing,
    PackingInputs,
    RoundedWeight,
    kernel_input,
    not_finite,
)
from vexport.formats.plan import FusionGroup, Plan
from vexport.numerics.arithmetic import largest_magnitude
from vexport.numerics.ranks import rank_and_size
from vexport.plan.blocks import Block, blocks, group_layout, output_blocks
from vexport.plan.rules import calibration_need, needs_search
from vexport.records import (
    AttentionLayer,
    CalibrationRecord,
    LinearPlan,
    OnProgress,
    TensorInfo,
    observer_names,
    silent,
)
from vexport.records.calibration import NO_CALIBRATION
from vexport.rules.quantize import FOLDER_REPLACED
from vexport.version import __version__

# The bytes of tensors by name.
Stored = Mapping[str, Array]
# Elements that a thread reads, quantizes and writes at once (4 MiB of bf16).
CHUNK_ELEMENTS = 1 << 21
# Maximum number of chunks per thread that wait to be written.
CHUNKS_AHEAD = 2


def write_shards(
    index: SourceIndex,
    plan: Plan,
    calibration: CalibrationRecord | None,
    folder: Path,
    shards: Sequence[Shard[Block]],
    *,
    finished: Mapping[str, Array] | None = None,
    on_progress: OnProgress = silent,
) -> None:
    """Write some shards of a quantized checkpoint into `folder`, and record the progress of each.

    `folder` is empty, or it was left by an interrupted call with the same arguments. In the second
    case this call resumes the work. `finished` has the bytes of rounded tensors. `on_progress`
    receives the number of bytes passed to the writer. Raises InputError if a scheme needs a
    calibration and there is none, or if a weight is not finite.
    """
    if calibration is None and (need := calibration_need(plan)):
        raise need.missing()
    if needs_search(plan):
        require_extra("torch", "an observer that searches for scales")
    total = sum(shard.num_bytes for shard in shards)
    threads = len(os.sched_getaffinity(0))
    done = 0
    record = calibration or NO_CALIBRATION
    with (
        reader_of(record.smoothing) as reader,
        ThreadPoolExecutor(threads) as pool,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("once")  # not for every weight
        stream = Stream(
            index=index, calibration=record, reader=reader, pool=pool, finished=finished or {}
        )
        identity = folder.stat()
        for shard in shards:
            if not os.path.samestat(identity, folder.stat()):
                raise InputError.of(FOLDER_REPLACED, str(folder))
            with ShardWriter(folder, shard, ahead=CHUNKS_AHEAD * threads) as writer:
                done += sum(unit.num_bytes for unit in shard.units[: writer.done])
                for unit in shard.units[writer.done :]:
                    for chunk in stream.chunks(unit):
                        writer.write(chunk)
                    done += unit.num_bytes
                    on_progress("quantize (bytes)", done, total)


def planned_shards(index: SourceIndex, plan: Plan, shard_bytes: int) -> tuple[Shard[Block], ...]:
    """Return the weight files of the quantized checkpoint, with the contents of each file."""
    sources = blocks(index, plan.groups, plan.attention)
    specs = output_blocks(index, plan.groups, plan.attention)
    units = [
        WriteUnit(source=unit, tensors=tensors)
        for unit, tensors in zip(sources, specs, strict=True)
    ]
    return split_shards(units, shard_bytes=shard_bytes)


def shards_of_this_rank(shards: Sequence[Shard[Block]]) -> Sequence[Shard[Block]]:
    """Return the files that this rank writes.

    The files are assigned from largest to smallest, each to the rank with the fewest bytes so far.
    """
    rank, size = rank_and_size()
    loads, shards_of_rank = [0] * size, list[Shard[Block]]()
    for shard in sorted(shards, key=lambda shard: -shard.num_bytes):
        owner = loads.index(min(loads))
        loads[owner] += shard.num_bytes
        if owner == rank:
            shards_of_rank.append(shard)
    return shards_of_rank if size > 1 else shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Turns units of a checkpoint into the chunks to write. The threads of `pool` compute them."""

    index: SourceIndex
    calibration: CalibrationRecord
    reader: Reader
    pool: ThreadPoolExecutor
    rounded: Mapping[str, RoundedWeight] = field(default_factory=dict)
    finished: Mapping[str, Array] = field(default_factory=dict)

    def chunks(self, unit: WriteUnit[Block]) -> Iterator[Chunk]:
        """Yield the chunks of a unit in order.

        A unit is a kept tensor, scales of the KV cache, or the packed weights of a group.
        """
        if isinstance(unit.source, TensorInfo):
            is_in_file = unit.source.name not in self.calibration.smoothing
            yield unit.source if is_in_file else partial(self.stored, unit.source)
            return
        if isinstance(unit.source, AttentionLayer):
            for scale in kv_scales(unit.source, self.calibration.kv_ranges):
                yield partial(np.asarray, scale)
            return
        yield from self.packed_group(unit.source)

    def stored(self, tensor: TensorInfo) -> Array:
        """Return the bytes of a kept tensor."""
        data = np.frombuffer(self.reader.raw(tensor), np.uint8)
        self.reader.release([tensor])
        return data

    def packed_group(self, group: FusionGroup) -> Iterator[Callable[[], Array]]:
        """Yield the tensors of a group, member by member and a few rows at a time.

        Kernels compute the rows, unless the group's bytes are finished.
        """
        layout = group_layout(group, self.index.tensors)
        if layout[0].name in self.finished:
            yield from (partial(self.finished.__getitem__, spec.name) for spec in layout)
            return
        scheme = group.scheme
        inputs = static_scales(group, self.calibration)
        for member, known in zip(group.members, self.packing_inputs(group), strict=True):
            dtype = self.index.tensors[member.weight].dtype
            packing = scheme.format.packing(member, dtype, scheme.args.weights, known)
            _, *others = scheme.layout(member, dtype)
            for rows in row_chunks(member, packing.multiple):
                self.prefetch(member, rows)
                yield self.pool.submit(self.packed, member, packing, rows).result
            # The writer calls these functions after it has written all chunks of rows. `packing`
            # has then computed the scales of all rows.
            for spec in others:
                name = spec.name.removeprefix(f"{member.name}.")
                yield partial(inputs.__getitem__ if name in inputs else packing.tensor, name)

    def packed(self, member: LinearPlan, packing: Packing, rows: slice) -> Array:
        """Return the stored bytes of some rows of a weight, and release the rows' pages."""
        if member.name in self.rounded:
            return packing.pack(kernel_input(self.rounded[member.name].values[rows]), rows.start)
        view = self.view(member, rows)
        packed = packing.pack(kernel_input(view), rows.start)
        self.reader.release_view(self.index.tensors[member.weight], view)
        return packed

    def packing_inputs(self, group: FusionGroup) -> Sequence[PackingInputs]:
        """Return the values that must be known before the first rows of a member are packed.

        They are the scales if they were searched for. Otherwise they are the group's largest
        magnitude if all rows share a scale.
        """
        if group.members[0].name in self.rounded:
            return [
                PackingInputs(scales=self.rounded[member.name].scales) for member in group.members
            ]
        if group.observer not in observer_names.MIN_MAX:
            from vexport.quantize.scale_search import search_scales

            searched = search_scales(group, self.index, self.calibration, self.reader)
            return [PackingInputs(scales=scales) for scales in searched]
        if not group.scheme.args.weights.shares_scale:
            return [PackingInputs()] * len(group.members)
        largest = []
        for member in group.members:
            for rows in row_chunks(member):
                self.prefetch(member, rows)
                largest.append(self.pool.submit(self.largest, member, rows))
        return [PackingInputs(largest=max(part.result() for part in largest))] * len(group.members)

    def largest(self, member: LinearPlan, rows: slice) -> np.float32:
        """Return the largest magnitude in some rows.

        Raises InputError if a weight is not finite.
        """
        storage = STORAGES[self.index.tensors[member.weight].dtype]
        view = self.view(member, rows)
        largest = np.float32(largest_magnitude(kernel_input(view).reshape(-1), storage))
        self.reader.release_view(self.index.tensors[member.weight], view)
        if not np.isfinite(largest):
            raise not_finite(member.weight)
        return largest

    def prefetch(self, member: LinearPlan, rows: slice) -> None:
        """Make the operating system read some rows ahead of the thread that needs them."""
        self.reader.prefetch_view(self.index.tensors[member.weight], self.view(member, rows))

    def view(self, member: LinearPlan, rows: slice) -> Array:
        """Return some rows of a weight as they are stored in the file."""
        return self.reader.weight(self.index.tensors[member.weight], member.part)[rows]


def quantized_group(
    group: FusionGroup,
    index: SourceIndex,
    calibration: CalibrationRecord,
    reader: Reader,
    rounded: Mapping[str, RoundedWeight],
) -> dict[str, Array]:
    """Return the bytes of all tensors that replace a group's weights, by name, in memory.

    `rounded` has weights that are already rounded, by layer name. They replace the source's
    weights. Raises InputError if a weight is not finite.
    """
    stored: dict[str, Array] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        stream = Stream(
            index=index, calibration=calibration, reader=reader, pool=pool, rounded=rounded
        )
        chunks = stream.packed_group(group)
        for spec in group_layout(group, index.tensors):
            parts, missing = list[Array](), num_bytes(spec.dtype, spec.shape)
            while missing:
                parts.append(np.ascontiguousarray(next(chunks)()).reshape(-1).view(np.uint8))
                missing -= parts[-1].size
            stored[spec.name] = np.concatenate(parts)
    return stored


def static_scales(group: FusionGroup, calibration: CalibrationRecord) -> dict[str, Array]:
    """Return the static input scales of a group, by their names without the layer's name.

    All members of the group share the scales. Returns an empty dictionary for other schemes.
    """
    scheme = group.scheme
    if not scheme.args.calibrated:
        return {}
    ranges = [calibration.ranges[member.name] for member in group.members]
    largest = np.float32(max(max(-input_range.low, input_range.high) for input_range in ranges))
    return dict(scheme.format.static_inputs(scheme.args, largest))


def row_chunks(member: LinearPlan, multiple: int = 1) -> Iterator[slice]:
    """Yield the rows of a weight in chunks, which a thread computes one at a time.

    The number of rows is a multiple of `multiple` in all chunks except for the last.
    """
    rows = max(1, CHUNK_ELEMENTS // max(1, member.in_features) // multiple) * multiple
    for start in range(0, member.out_features, rows):
        yield slice(start, min(start + rows, member.out_features))


def input_digest(
    index: SourceIndex, plan: Plan, known: CalibrationRecord | None, text: str, *, shard_bytes: int
) -> str:
    """Return a digest of everything that the written bytes depend on.

    The digest covers the sizes and times of the source's files, not their contents. `known` is the
    result of an earlier calibration. `text` is a digest of the calibration text and its settings.
    """
    files = [(str(file), *status) for file, status in index.statuses.items()]
    parts = (__version__, files, index.config, plan, known, text, shard_bytes)
    return digest_bytes(repr(parts).encode())
