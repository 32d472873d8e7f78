"""Record the copies that a model's loaders make.

For each part of a parameter, the record contains the tensors that fill it, and their dtypes.

All tensors are on the meta device, so that a copy has no data and is only recorded. A region is a
view's offset, shape and strides. Regions of the same storage are assumed to be equal or disjoint,
because vLLM's loaders copy in this way.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Self, TypeAlias

import safetensors
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vexport.architectures import with_stars
from vexport.checkpoint.tensors import TORCH_DTYPES
from vexport.engine.messages import Miscopy

Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
Region: TypeAlias = tuple[int, Layout]
_ATEN = torch.ops.aten
_COPIES = (_ATEN.copy_, _ATEN.index_put_, _ATEN.index_copy_)
_FILLS = (_ATEN.fill_, _ATEN.zero_)
# Comparisons with which loaders check that two values are equal, such as the input scales of an
# expert's w1 and w3. The audit has no values, so it treats them as equal.
_DIFFERENCES = (_ATEN.ne, _ATEN.gt, _ATEN.lt)
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = frozenset({torch.int16, torch.int32, torch.int64})
# Parameters that may have any dtype: weight_shape, which vLLM never reads, and unused placeholders
# of the KV cache.
_ANY_DTYPE = ("weight_shape", "k_zero_point", "v_zero_point", "q_zero_point")
# Endings of tensors that vLLM drops before it loads weights. Sources: get_checkpoint_weight_mapper
# in quantization/base_config.py for g_idx, and models/llama_eagle3.py for t2d, EAGLE-3's map of the
# target's vocabulary.
_DROPPED_SUFFIXES = (".g_idx", "t2d")
_MAX_NAMES = 4


@dataclass(slots=True, kw_only=True)
class _Written:
    """Regions of a parameter that were filled, and the first stored tensors that filled them."""

    regions: dict[Region, int] = field(default_factory=dict)
    sources: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Source:
    """A stored tensor and the copies of it.

    `read` maps each region that was read to its number of bytes. `casts` contains a pair of dtypes
    (before, after) for each conversion of the values. `targets` contains the storages that the
    values were copied to. If a copy repeated the values to fill a larger part of a parameter,
    `stretched` contains the shape of the values and the shape of the filled part. `padding` is the
    number of elements that the loader set to a constant in the rest of the parameter, as in the
    padded vocabulary of the last ranks (VocabParallelEmbedding.weight_loader).
    """

    tensor: torch.Tensor
    stretched: tuple[list[int], list[int]] | None = None
    padding: int = 0
    read: dict[Region, int] = field(default_factory=dict)
    casts: dict[tuple[torch.dtype, torch.dtype], None] = field(default_factory=dict)
    targets: dict[int, None] = field(default_factory=dict)


class Audit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of all copies while a model is loaded on the meta device.

    `.item()` returns a placeholder: False for a comparison that looks for a difference (`ne`, `gt`,
    `lt`), True for any other comparison, and 1 for a number. The model is loaded as one of `ranks`
    tensor parallel ranks. All ranks together must read every stored tensor completely, and each
    rank is assumed to read the same number of elements, including its padding.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.last_source = ""
        self.model_is_built = False
        self._ranks = ranks
        self.begin()

    def begin(self) -> None:
        """Reset the record for a new model."""
        self._written: dict[int, _Written] = {}
        self._sources: dict[str, _Source] = {}
        # Maps each storage to the stored tensors that it contains or was computed from. A tensor in
        # the value keeps the storage alive.
        self._origins: dict[int, tuple[tuple[str, ...], torch.Tensor]] = {}
        self._differences = set[int]()  # storages of the results of comparisons

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False.

        Otherwise torch would wrap `__torch_dispatch__`, and its calls would take a third longer.
        """
        return False

    def record_source(self, name: str, tensor: torch.Tensor) -> None:
        """Record that the loaders read the stored tensor `name`."""
        self.last_source = name
        self._sources[name] = _Source(tensor=tensor)
        self._origins[_storage(tensor)] = (name,), tensor

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is _ATEN._local_scalar_dense.default:
            return self._scalar(args[0])
        result = func(*args, **(kwargs or {}))
        tensors = list(_tensors(args))
        if func.overloadpacket in _COPIES:
            self._record_copy(tensors[0], tensors[-1])
        elif func.overloadpacket in _FILLS:
            self._record_copy(tensors[0], tensors[1] if len(tensors) > 1 else None)
        elif isinstance(result, torch.Tensor) and tensors:
            self._record_computation(func, tensors, result)
        return result

    def _record_copy(self, target: torch.Tensor, source: torch.Tensor | None) -> None:
        """Record that `target` got the values of `source`, or a constant if `source` is None."""
        written = self._written.setdefault(_storage(target), _Written())
        if source is None and _region(target) not in written.regions:
            for name in written.sources:
                self._sources[name].padding += target.numel()
        written.regions[_region(target)] = target.numel()
        if source is not None:
            for name in self._read(source):
                if len(written.sources) <= _MAX_NAMES:
                    written.sources[name] = None
                self._sources[name].casts[source.dtype, target.dtype] = None
                self._sources[name].targets[_storage(target)] = None
                if source.numel() < target.numel():
                    self._sources[name].stretched = list(source.shape), list(target.shape)

    def _record_computation(
        self, func: torch._ops.OpOverload, inputs: list[torch.Tensor], result: torch.Tensor
    ) -> None:
        """Record that `result` was computed from the same stored tensors as `inputs`.

        A view of an input has the input's storage, so nothing is recorded for it.
        """
        if any(_storage(tensor) == _storage(result) for tensor in inputs):
            return
        names = tuple(dict.fromkeys(name for tensor in inputs for name in self._read(tensor)))
        self._origins[_storage(result)] = names, result
        if func.overloadpacket in _DIFFERENCES:
            self._differences.add(_storage(result))
        if len(inputs) == 1 and result.dtype is not torch.bool:  # a comparison is not a cast
            for name in names:
                self._sources[name].casts[inputs[0].dtype, result.dtype] = None

    def _read(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """Return the names of the stored tensors that `tensor` was computed from.

        If `tensor` is a view of a stored tensor, its region is recorded as read.
        """
        names, _ = self._origins.get(_storage(tensor), ((), tensor))
        for name in names:
            source = self._sources[name]
            if _storage(source.tensor) == _storage(tensor):
                source.read[_region(tensor)] = tensor.numel() * tensor.element_size()
        return names

    def _scalar(self, tensor: object) -> float | bool:
        assert isinstance(tensor, torch.Tensor)
        self._read(tensor)
        if tensor.dtype is torch.bool:
            return _storage(tensor) not in self._differences
        return 1

    def faults(self, model: torch.nn.Module, *, optional: frozenset[str]) -> Iterator[Miscopy]:
        """Yield the faults of a finished load. vLLM raises no error for these faults.

        Parameters named in `optional` need no stored tensor.
        """
        for parameter in model.parameters():  # a loader may replace a parameter by a stored tensor
            self._read(parameter)
        layers = {_storage(parameter): _layer(name) for name, parameter in model.named_parameters()}
        yield from self._missing(model, optional)
        for name, source in self._sources.items():
            layer = next((layers[target] for target in source.targets if target in layers), "")
            yield from _source_faults(name, source, layer, self._ranks)

    def _missing(self, model: torch.nn.Module, optional: frozenset[str]) -> Iterator[Miscopy]:
        for name, parameter in model.named_parameters():
            if name in optional or _storage(parameter) in self._origins or parameter.numel() == 0:
                continue
            written = self._written.get(_storage(parameter), _Written())
            covered = sum(written.regions.values())
            if covered < parameter.numel():
                got = f"{covered} of {parameter.numel()} elements{_where_from(written, parameter)}"
                expected = f"shape {list(parameter.shape)}"
                yield Miscopy(
                    kind="missing", where=name, layer=_layer(name), got=got, expected=expected
                )


def _region(tensor: torch.Tensor) -> Region:
    layout = tuple(tensor.shape), tuple(tensor.stride())
    return int(tensor.storage_offset()) * tensor.element_size(), layout


def _source_faults(name: str, source: _Source, layer: str, ranks: int) -> Iterator[Miscopy]:
    fault, tensor = partial(Miscopy, where=name, layer=layer), source.tensor
    shape = list(tensor.shape)
    read = ranks * (sum(source.read.values()) // tensor.element_size() + source.padding)
    if name.endswith(_DROPPED_SUFFIXES):
        return
    if tensor.numel() and not source.read:
        yield fault(kind="unused", got=f"{_short(tensor.dtype)} {shape}", expected="")
    elif read < tensor.numel():
        yield fault(kind="narrowed", got=f"shape {shape}", expected=f"{read} elements")
    if source.stretched is not None:
        part, whole = source.stretched
        yield fault(kind="stretched", got=f"shape {part}", expected=f"shape {whole}")
    for before, after in source.casts:
        if _changes_kind(before, after) and not name.endswith(_ANY_DTYPE):
            yield fault(kind="cast", got=_short(before), expected=_short(after))


def _layer(parameter: str) -> str:
    return with_stars(parameter.rpartition(".")[0])


def _where_from(written: _Written, parameter: torch.Tensor) -> str:
    """Describe which part of a parameter is missing, for a message.

    For a parameter with experts, the text names the incomplete experts. For any other parameter, it
    names the stored tensors that fill a part of the parameter. The text is empty if there are no
    such tensors, or more than _MAX_NAMES.
    """
    if parameter.dim() == 3 and written.regions:
        size = parameter.stride(0)
        filled = dict.fromkeys(range(parameter.shape[0]), 0)
        for (offset, _), elements in written.regions.items():
            filled[offset // (size * parameter.element_size())] += elements
        short = [str(expert) for expert, elements in filled.items() if elements < size]
        return (
            f"; incomplete experts: "
            f"{', '.join(short[:_MAX_NAMES])}{' ...' if len(short) > _MAX_NAMES else ''}"
        )
    names = list(written.sources)
    return f" from {', '.join(names)}" if 0 < len(names) <= _MAX_NAMES else ""


def _changes_kind(before: torch.dtype, after: torch.dtype) -> bool:
    """Return True if a cast changes the kind of the values, such as float8 to float32.

    A cast between ordinary floats or between integers only changes the width.
    """
    return before != after and not any({before, after} <= kind for kind in (_FLOATS, _INTEGERS))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(values: tuple[object, ...]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(tuple(value))


class HeaderFile:
    """Replacement of vLLM's `safe_open` with tensors on the meta device.

    safetensors still validates the file's header.
    """

    def __init__(
        self, audit: Audit, filename: str, framework: str = "pt", device: str = "cpu"
    ) -> None:
        self._file, self._audit = safetensors.safe_open(filename, framework="np"), audit

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:  # later errors are not about the last tensor
            self._audit.last_source = ""
        self._file.__exit__(*error)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> object:
        """Return the attribute of the file, such as its names and metadata."""
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor with the stored shape and dtype, but without data."""
        header = self._file.get_slice(name)  # type: ignore[no-untyped-call]
        tensor = torch.empty(
            header.get_shape(), dtype=TORCH_DTYPES[header.get_dtype()], device="meta"
        )
        self._audit.record_source(name, tensor)
        return tensor
