"""What attention layers would write to the KV cache: seen where transformers hands it to the attention.

Keys are seen after rotary embedding and before they are repeated for the query heads. Multi-head latent
attention (DeepSeek) caches something else; vLLM reads no scales for it and plans refuse them.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vexport.calibration.extremes import channel_extremes
from vexport.calibration.model import joined
from vexport.types import HeadRanges, KeyValueRanges

# An attention function of transformers: its outputs, and its probabilities or None.
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(slots=True)
class CachedStates:
    """Running ranges of one layer's keys and values: (2, heads), minima and maxima, float32 on the CPU."""

    key: torch.Tensor
    value: torch.Tensor
    tokens: int

    def __add__(self, other: "CachedStates") -> "CachedStates":
        """The ranges of both."""
        return CachedStates(
            _union(self.key, other.key), _union(self.value, other.value), self.tokens + other.tokens
        )

    def ranges(self) -> KeyValueRanges:
        """The same as a value of a calibration."""
        return KeyValueRanges(key=_heads(self.key), value=_heads(self.value), tokens=self.tokens)


def head_extremes(states: torch.Tensor) -> torch.Tensor:
    """Minima and maxima by head of states (batch, heads, tokens, head size): (2, heads), float32, CPU."""
    heads, size = states.shape[1], states.shape[3]
    rows = channel_extremes(states.transpose(1, 2).reshape(-1, heads * size)).view(2, heads, size)
    return torch.stack((rows[0].amin(-1), rows[1].amax(-1))).float().cpu()


@contextmanager
def watching_attention(
    module: torch.nn.Module,
    prefix: str,
    stored_name: Callable[[str], str],
    seen: dict[str, CachedStates],
) -> Iterator[None]:
    """Within the block the attention layers below `module` add to `seen`, by name in the checkpoint."""
    names = {id(child): joined(prefix, name) for name, child in module.named_modules()}

    def observe(attention: torch.nn.Module, key: torch.Tensor, value: torch.Tensor) -> None:
        found = CachedStates(head_extremes(key), head_extremes(value), key.shape[0] * key.shape[2])
        name = stored_name(names[id(attention)])
        seen[name] = seen[name] + found if name in seen else found

    with _observed_attention(observe):
        yield


@contextmanager
def _observed_attention(
    observe: Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], None],
) -> Iterator[None]:
    """Within the block every attention of transformers shows its keys and values first."""
    # "eager" is in no table: each file of transformers brings its own.
    own: Mapping[str, Attend | None] = {**ALL_ATTENTION_FUNCTIONS, "eager": None}

    def observing(attend: Attend | None) -> Attend:
        def run(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *args: object,
            **kwargs: object,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            observe(module, key, value)
            function: Attend = attend or sys.modules[type(module).__module__].eager_attention_forward
            return function(module, query, key, value, *args, **kwargs)

        return run

    with replaced_attention({name: observing(attend) for name, attend in own.items()}):
        yield


@contextmanager
def replaced_attention(functions: Mapping[str, Attend]) -> Iterator[None]:
    """Within the block transformers calls these attention functions under these names."""
    before = dict(ALL_ATTENTION_FUNCTIONS)
    for name, attend in functions.items():
        ALL_ATTENTION_FUNCTIONS[name] = attend
    try:
        yield
    finally:
        for name in functions:
            del ALL_ATTENTION_FUNCTIONS[name]
            if name in before and ALL_ATTENTION_FUNCTIONS[name] is not before[name]:
                ALL_ATTENTION_FUNCTIONS[name] = before[name]


def _union(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.stack((torch.minimum(one[0], other[0]), torch.maximum(one[1], other[1])))


def _heads(rows: torch.Tensor) -> HeadRanges:
    return HeadRanges(low=tuple(rows[0].tolist()), high=tuple(rows[1].tolist()))
