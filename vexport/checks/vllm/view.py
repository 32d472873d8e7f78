"""View of a checkpoint for the checks."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from vexport.architectures.built import BuiltModel
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checks.vllm.layers import StoredLayers
from vexport.checks.vllm.lookup import GroupLookup
from vexport.checks.vllm.quantization import Quantization
from vexport.records import Finding, OnProgress, silent
from vexport.version import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """vLLM version and GPUs that the checkpoint should be served with.

    `tp` has tensor parallel sizes and `sm` compute capabilities (90 for SM 9.0). The checkpoint
    must work with each of them. `vllm` is the vLLM version, by default `PINNED` or the first later
    version that has the model's class. `speculative` is the method of speculative decoding, or
    empty.
    """

    tp: Sequence[int] = ()
    sm: Sequence[int] = ()
    vllm: Version | None = None
    speculative: str = ""


ANY = Target()
CheckFunction = Callable[["CheckpointView"], Iterator[Finding]]


class CheckpointView:
    """Checkpoint that is checked: its files, and how vLLM reads them.

    Each part is computed at its first use. `model` describes the layers that vLLM builds, and
    `quantization` is the quantization config. `lookup` finds the config group of a layer, and
    `layers` has the linear layers with their tensors.
    """

    # Parameters that the files store as reciprocals of compressed-tensors' values. The largest
    # value in the files is the smallest value in this view.
    reciprocals: Set[str] = frozenset()
    # Names in the files of places with other names in this view.
    stored_names: Mapping[str, str] = {}

    def __init__(
        self,
        index: SourceIndex,
        reader: Reader,
        target: Target = ANY,
        digests: Mapping[str, str] | None = None,
        hub_digests: Mapping[str, str | None] | None = None,
        on_progress: OnProgress = silent,
    ) -> None:
        self.index = index
        self.reader = reader
        self.target = target
        # Digests by path, in addition to those in vexport.json, or None if none were given.
        self.digests = digests
        # Digests of the hub by path, with None for a file without a digest.
        self.hub_digests = hub_digests or {}
        self.on_progress = on_progress
        self.config_path = str(index.root / "config.json")
        self.model = BuiltModel(index, target.vllm, self._is_layer)
        self.quantization = Quantization(index, self.model)

    @cached_property
    def lookup(self) -> GroupLookup:
        """Lookup of the config group of a fused layer."""
        return GroupLookup(self.model, self.quantization)

    @cached_property
    def layers(self) -> StoredLayers:
        """Linear layers with their tensors and config groups."""
        return StoredLayers(self.model, self.lookup)

    @cached_property
    def translated(self) -> "CheckpointView":
        """View with the tensors of compressed-tensors, which the checks of stored numbers need."""
        if self.quantization.method is None:
            return self
        from vexport.checks.vllm.translated import translate

        return translate(self)

    def _is_layer(self, module: str) -> bool:
        return not self.quantization.is_transform(module)
