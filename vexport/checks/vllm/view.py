"""One checkpoint under check."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from vexport.architectures.built import BuiltModel
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checks.vllm.layers import StoredLayers
from vexport.checks.vllm.lookup import GroupLookup
from vexport.checks.vllm.quantization import Quantization
from vexport.records import Finding
from vexport.version import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The vLLM and GPUs that a checkpoint is to be served with.

    Tensor parallel sizes and compute capabilities (90 for SM 9.0), each of which must do; the vLLM,
    by default `PINNED` or the first later version that has the model's class; the method of
    speculative decoding, empty for none.
    """

    tp: Sequence[int] = ()
    sm: Sequence[int] = ()
    vllm: Version | None = None
    speculative: str = ""


ANY = Target()
CheckFunction = Callable[["CheckpointView"], Iterator[Finding]]


class CheckpointView:
    """One checkpoint under check: its files, and what vLLM makes of them.

    Each subject is computed once, at its first use: `model` is what vLLM builds, `quantization`
    the quantization config, `lookup` finds the config group of a layer, and `layers` has the
    linear layers with their tensors.
    """

    # Parameters that stand for their reciprocals in the files: vLLM's largest is the smallest here.
    reciprocals: Set[str] = frozenset()

    def __init__(
        self,
        index: SourceIndex,
        reader: Reader,
        target: Target = ANY,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        self.index = index
        self.reader = reader
        self.target = target
        # Digests by path, besides those in vexport.json; None if not asked for.
        self.digests = digests
        self.config_path = str(index.root / "config.json")
        self.model = BuiltModel(index, target.vllm, self._is_layer)
        self.quantization = Quantization(index, self.model)

    @cached_property
    def lookup(self) -> GroupLookup:
        """Finds the config group of a fused layer."""
        return GroupLookup(self.model, self.quantization)

    @cached_property
    def layers(self) -> StoredLayers:
        """The linear layers with their tensors and config groups."""
        return StoredLayers(self.model, self.lookup)

    def _is_layer(self, module: str) -> bool:
        return not self.quantization.is_transform(module)
