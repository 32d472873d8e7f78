"""The forward of calibration: one decoder layer in memory at a time, whatever the size of the model.

Samples run one by one by default, so that every statistic equals that of a whole-model run, to the bit:
in bf16 a batched matrix product rounds differently (by up to 0.1 in the last hidden states of a small
Llama), and a moving average takes one step per forward.
"""

import base64
from collections.abc import Mapping

import torch

from vexport.calibration.attention import CachedStates
from vexport.calibration.data import Samples
from vexport.calibration.device import require_device
from vexport.calibration.hidden import MEMORY_BYTES, hidden_states
from vexport.calibration.layerwise import Batch, LayerByLayer, OnLayer
from vexport.calibration.watch import Watched, watched_by
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.smoothed import reader_of
from vexport.errors import CheckpointFailed, InputError
from vexport.numerics.ranks import add_up, all_reduce, gather, process_group, rank_and_size
from vexport.observers import Importance, Observer
from vexport.types import Calibration, InputRange, KeyValueRanges, Plan, Smoothing


def calibrate(
    index: SourceIndex,
    plan: Plan,
    samples: Samples,
    *,
    on_layer: OnLayer = lambda done, total: None,
    trust_remote_code: bool = False,
    all_experts: bool = True,
    device: str = "cpu",
    batch_size: int = 1,
    memory_bytes: int = MEMORY_BYTES,
    smoothing: Mapping[str, Smoothing] | None = None,
) -> Calibration:
    """Run the samples through the model and record what static scales, importance and the KV cache need.

    With `all_experts` the statistics of every expert see all tokens, else those routed to it; what the model
    computes is the same. The rest is as for `watch`, which raises what it raises; CheckpointFailed also where
    a layer saw no token.
    """
    watched = watched_by(plan, all_experts=all_experts)
    if watched.layers or watched.cached is not None:
        watch(
            index,
            watched,
            samples,
            on_layer=on_layer,
            trust_remote_code=trust_remote_code,
            device=device,
            batch_size=batch_size,
            memory_bytes=memory_bytes,
            smoothing=smoothing,
        )
    return Calibration(
        rows=samples.rows,
        digest=samples.digest,
        tokens=sum(len(ids) for ids in samples.token_ids),
        ranges={name: _input_range(name, observer) for name, observer in watched.inputs.items()},
        importance={name: _importance(name, one) for name, one in watched.importance.items()},
        kv_ranges=_kv_ranges(index, watched.cached),
        data=samples.data,
        smoothing=smoothing or {},
        routed={name: tuple(counts.tolist()) for name, counts in watched.routed.items()},
    )


def watch(
    index: SourceIndex,
    watched: Watched,
    samples: Samples,
    *,
    on_layer: OnLayer = lambda done, total: None,
    trust_remote_code: bool = False,
    device: str = "cpu",
    batch_size: int = 1,
    memory_bytes: int = MEMORY_BYTES,
    smoothing: Mapping[str, Smoothing] | None = None,
) -> None:
    """Run the samples through the model; what it computes goes into `watched`.

    `on_layer(done, total)` reports progress. Layers run on the torch device `device`; what waits for its
    turn, and every statistic in the end, is in main memory. `batch_size` samples of equal length run at once
    (see above for what that changes); hidden states beyond `memory_bytes` go to a temporary file. The source
    is read as smoothed. Under torchrun, or in a process group, the batches are dealt to the ranks and every
    rank ends with the statistics of all. Raises CheckpointFailed where an activation is not finite,
    InputError for a model that cannot run layer by layer and for an unusable device.
    """
    require_device(device)
    with process_group(), torch.no_grad():
        rank, size = rank_and_size()
        batches = make_batches(samples, batch_size)[rank::size]
        with reader_of(smoothing or {}) as reader, hidden_states(memory_bytes) as hidden:
            model = LayerByLayer(
                index, reader, batches, hidden, watched, trust_remote_code=trust_remote_code, device=device
            )
            failure = model.run(on_layer if rank == 0 else _quiet) if batches else None
        if failure:
            raise failure.found.error(failure.row)
        _sync(watched)


def _sync(watched: Watched) -> None:
    """Give every rank, also one that saw nothing, the statistics of all."""
    for observer in watched.inputs.values():
        observer.sync_activation_stats()
    for gathered in watched.importance.values():
        all_reduce(gathered.total)
        gathered.tokens = sum(gather(gathered.tokens))
    add_up(watched.routed)
    if watched.cached is not None:
        add_up(watched.cached)


def make_batches(samples: Samples, batch_size: int) -> list[Batch]:
    """The samples in batches of equal length, in the order in which each length first comes."""
    lengths: dict[int, list[int]] = {}
    for position, ids in enumerate(samples.token_ids):
        lengths.setdefault(len(ids) if batch_size > 1 else -position, []).append(position)
    chunks = [
        positions[start : start + batch_size]
        for positions in lengths.values()
        for start in range(0, len(positions), batch_size)
    ]
    return [
        Batch(
            ids=torch.tensor([samples.token_ids[position] for position in chunk]),
            rows=tuple(samples.rows[position] for position in chunk),
        )
        for chunk in chunks
    ]


def _quiet(done: int, total: int) -> None:
    """Progress of the ranks that report none."""


def _input_range(name: str, observer: Observer) -> InputRange:
    _require_tokens(name, observer.tokens, "its static input scale")
    low, high = observer.range()
    return InputRange(low=float(low.min()), high=float(high.max()), tokens=observer.tokens)


def _importance(name: str, gathered: Importance) -> str:
    _require_tokens(name, gathered.tokens, "the importance of its input channels")
    return encode_channels(gathered.mean())


def _kv_ranges(index: SourceIndex, cached: Mapping[str, CachedStates] | None) -> dict[str, KeyValueRanges]:
    if cached is not None and not cached:
        raise InputError(
            f"{index.root}: KV cache",
            got="no attention layer that calls transformers' attention interface",
            need="one, to see keys and values",
            fix="leave the KV cache unquantized",
        )
    return {name: states.ranges() for name, states in (cached or {}).items()}


def encode_channels(values: torch.Tensor) -> str:
    """A vector as JSON text: base64 of its little-endian float32 bytes."""
    return base64.b64encode(values.cpu().numpy().astype("<f4").tobytes()).decode("ascii")


def _require_tokens(name: str, tokens: int, purpose: str) -> None:
    if not tokens:
        raise CheckpointFailed(
            name,
            got="0 tokens in calibration",
            need=f"at least one for {purpose}",
            fix="add samples that reach this layer (an expert: calibrate all), or choose a dynamic scheme",
        )
