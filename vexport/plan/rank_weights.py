"""The weights that one rank holds, and which of them a token goes through; from headers alone."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from vexport.architectures import resolve
from vexport.architectures.fusion import moe_layer
from vexport.architectures.text_config import text_config
from vexport.checkpoint.dtypes import num_bytes
from vexport.checkpoint.index import SourceIndex
from vexport.formats.partition import is_head
from vexport.formats.schemes import get_scheme
from vexport.plan.kv_tokens import MODEL_BYTES
from vexport.plan.linears import (
    PREDICTION,
    SMALL_BUT_DECISIVE,
    STACK,
    Names,
    is_embedding,
    is_unknown_experts,
    names_of,
)
from vexport.plan.shapes import repeated, split_of
from vexport.types import FusionGroup, Json, LinearPlan, Plan, TensorInfo

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
Shape = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How many routed experts a layer has, and how many a token goes through; (1, 1) without experts."""

    number: int = 1
    chosen: int = 1

    def read(self, tokens: int) -> float:
        """The share of the experts that so many tokens go through, if each is as likely as any other."""
        return 1.0 - (1.0 - self.chosen / self.number) ** tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Weights that a token goes through: `number` fused layers alike, if `routed` of chosen experts.

    `shapes` are the (out, in) of the layers that can be quantized, cut to a rank; without any they are
    `weights` numbers that stay in the model's dtype. `head` sees the last token of a prompt only.
    """

    number: int
    weights: int
    shapes: tuple[Shape, ...] = ()
    routed: bool = False
    head: bool = False

    def num_bytes(self, scheme: str | None) -> int:
        """Bytes of all of them; None as a scheme is unquantized."""
        if scheme is None or not self.shapes:
            return self.number * self.weights * MODEL_BYTES
        return self.number * sum(_layer_bytes(scheme, shape) for shape in self.shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """All that a rank holds: what is read in each step, and `held_bytes` that are not.

    Those are the table of tokens, of which a step reads `row_bytes` a token, and towers for images, taken as
    whole on each rank. vLLM's own buffers (rotary positions) are not counted.
    """

    parts: tuple[Part, ...]
    experts: Experts
    held_bytes: int
    row_bytes: int

    def num_bytes(self, scheme: str | None) -> int:
        """Bytes of the rank's weights in a scheme."""
        return self.held_bytes + sum(part.num_bytes(scheme) for part in self.parts)


def rank_weights(index: SourceIndex, plan: Plan, tp: int) -> RankWeights:
    """What one of `tp` ranks holds of a model, of which `plan` quantizes all that can be."""
    names = names_of(index, resolve(index.architecture, index.config)[0])
    text = text_config(index.config)
    kept = [index.tensors[name] for name in plan.kept]
    # Models of vLLM are given the language model's config, whatever the outer one says.
    tied = text.get("tie_word_embeddings", index.config.get("tie_word_embeddings")) is True
    heads = [one for one in kept if is_head(_module(one)) and not tied]
    table = _table(kept, text)
    others: Counter[Part] = Counter()
    # A tied head is the table of tokens: held and read once.
    for head in heads or ([table] if table else []):
        others[Part(number=1, weights=prod(head.shape) // tp, head=True)] += 1
    held = 0
    for tensor in kept:
        if is_head(_module(tensor)) or (tensor is table and not heads) or _predicts(tensor, names):
            continue
        part = _kept_part(tensor, names, tp)
        if part is not None:
            others[part] += 1
        else:
            held += MODEL_BYTES * prod(tensor.shape) // (tp if tensor is table else 1)
    row = MODEL_BYTES * table.shape[1] if table else 0
    parts = (
        *_quantizable(plan.groups, names, tp, text),
        *(replace(one, number=n) for one, n in others.items()),
    )
    return RankWeights(parts=parts, experts=_experts(text), held_bytes=held, row_bytes=row)


def group_parts(
    index: SourceIndex, choices: Iterable[Sequence[FusionGroup]], tp: int
) -> Iterator[list[Part]]:
    """The parts of each choice of a plan's groups, cut to one of `tp` ranks."""
    names, text = names_of(index, resolve(index.architecture, index.config)[0]), text_config(index.config)
    for groups in choices:
        yield _quantizable(groups, names, tp, text)


def _table(kept: Sequence[TensorInfo], text: Mapping[str, Json]) -> TensorInfo | None:
    """The table of tokens: (vocabulary, hidden); positions and tables of a layer have other sizes."""
    hidden = text.get("hidden_size")
    tables = [
        one
        for one in kept
        if is_embedding(_module(one)) and len(one.shape) == 2 and hidden in (None, one.shape[1])
    ]
    return max(tables, key=lambda table: table.shape[0], default=None)


def _quantizable(
    groups: Sequence[FusionGroup], names: Names, tp: int, text: Mapping[str, Json]
) -> list[Part]:
    """The groups, alike in shapes, routing and how they are cut, as one part each."""
    counted: Counter[tuple[bool, tuple[Shape, ...]]] = Counter()
    for group in groups:
        split = split_of(group, names)
        routed = moe_layer(group.members[0].name) is not None
        counted[routed, tuple(_cut(one, split, tp, text) for one in group.members)] += 1
    return [
        Part(number=number, weights=sum(map(prod, shapes)), shapes=shapes, routed=routed)
        for (routed, shapes), number in counted.items()
    ]


def _cut(member: LinearPlan, split: str, tp: int, text: Mapping[str, Json]) -> Shape:
    """(out, in) of a rank's part."""
    whole = repeated(member, tp, text)
    rows, columns = {"out": (tp, 1), "in": (1, tp)}.get(split, (1, 1))
    return whole.out_features // rows, whole.in_features // columns


def _kept_part(tensor: TensorInfo, names: Names, tp: int) -> Part | None:
    """A tensor that stays as it is, where each token goes through it; None where it is only held."""
    module, weights = _module(tensor), prod(tensor.shape)
    if is_unknown_experts(tensor, names):
        return Part(number=1, weights=weights // tp, routed=True)
    if names.in_decoder(module):
        whole = len(tensor.shape) < 2 or SMALL_BUT_DECISIVE.match(module)
        routed = moe_layer(module) is not None
        return Part(number=1, weights=weights // (1 if whole else tp), routed=routed)
    last_norm = len(tensor.shape) == 1 and STACK.search(tensor.name) is None
    return Part(number=1, weights=weights) if last_norm else None


def _predicts(tensor: TensorInfo, names: Names) -> bool:
    """Whether a tensor is of layers for further tokens, which vLLM loads only to draft with."""
    stack = STACK.search(tensor.name)
    beyond = stack is not None and names.layers is not None and int(stack[1]) >= names.layers
    return beyond or PREDICTION.search(tensor.name) is not None


def _module(tensor: TensorInfo) -> str:
    return tensor.name.rpartition(".")[0]


def _experts(text: Mapping[str, Json]) -> Experts:
    number = next((value for key in _EXPERTS if isinstance(value := text.get(key), int) and value > 0), 1)
    chosen = next((value for key in _CHOSEN if isinstance(value := text.get(key), int) and value > 0), 1)
    return Experts(number=number, chosen=min(chosen, number))


@cache
def _layer_bytes(scheme: str, shape: Shape) -> int:
    """Bytes of a quantized layer's tensors on a rank; scales in the model's dtype are bfloat16."""
    layer = LinearPlan(name="", weight="", out_features=shape[0], in_features=shape[1])
    return sum(num_bytes(spec.dtype, spec.shape) for spec in get_scheme(scheme).layout(layer, "BF16"))
