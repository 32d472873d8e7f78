"""Fixed prompts for any model: texts if its tokenizer supports them, or else random tokens."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vexport.architectures.config import text_config
from vexport.errors import InputError, first_line
from vexport.rules import prompts as rules

TEXTS = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is",
    "Water boils at one hundred degrees Celsius at sea level, and it freezes at",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a small village at the edge of the forest, there lived an old "
    "clockmaker who",
    "Question: If a train travels 60 miles in one hour, how far does it travel in three "
    "hours?\nAnswer:",
    "The three primary colours are red, yellow and",
    "SELECT name, price FROM products WHERE price > 100 ORDER BY price DESC LIMIT 10; returns "
    "at most ten",
    "Le chat dort sur le canap\u00e9 pendant que les enfants jouent dans le jardin. Il fait "
    "beau et",
    "Der Zug nach Berlin f\u00e4hrt um acht Uhr von Gleis sieben ab. Die Fahrt dauert etwa vier",
    "To make bread you need flour, water, salt and yeast. Mix them, knead the dough for ten "
    "minutes, let it",
    'The response of the server was {"status": "ok", "count": 3, "items": ["apple", "banana", '
    '"cherry"]}, so',
    "The theory of evolution by natural selection was first set out by Charles Darwin in his "
    "book On the",
    "User: My laptop does not turn on any more. What should I try first?\nAssistant: Check "
    "that the",
    "Let x be a real number with 2x + 3 = 11. Subtracting 3 from both sides gives 2x = 8, and "
    "therefore x =",
    "The committee met on Tuesday to discuss the budget. After a long debate the members "
    "agreed that the",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf(",
)
# Maximum share of unknown tokens. With more, the tokenizer was not made for the texts.
_MAX_UNKNOWN = 0.2
# Number of prompts to continue. It is small because generating 200 tokens takes longer than
# computing the log-probabilities of a prompt.
CONTINUED_PROMPTS = 6
_SEED = 20240229
_TOKENS = 64
_SEEDED_TOKENS = 48
_MAX_LENGTH = 512
# Keys of configs for the maximum sequence length
# (vllm/transformers_utils/model_arch_config_convertor.py).
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Texts for greedy continuation, and token ids for the comparison of log-probabilities.

    If `natural` is False, the texts are random tokens. Their continuations then do not show whether
    the model works.
    """

    natural: bool
    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]


def fixed_prompts(
    checkpoint: Path, *, texts: Sequence[str] = (), count: int = CONTINUED_PROMPTS
) -> Prompts:
    """Return prompts that are the same in every call with the same tokenizer and arguments.

    The prompts are `texts` (such as rows of the calibration data), or built-in texts if `texts` is
    empty. The first `CONTINUED_PROMPTS` texts are for continuation. For log-probabilities, the
    first `count` texts are cut to 64 tokens. If the tokenizer does not support the texts, the
    prompts are random tokens from a fixed seed.

    Raises InputError if `checkpoint` has no tokenizer.
    """
    tokenizer = _tokenizer(checkpoint)
    known = [text for text in (texts or TEXTS) if _supports(tokenizer, text)]
    if not known:
        return _seeded(tokenizer, count)
    tokens = [tuple(tokenizer(text)["input_ids"][:_TOKENS]) for text in known[:count]]
    return Prompts(
        natural=True,
        texts=tuple(known[:CONTINUED_PROMPTS]),
        tokens=tuple(ids for ids in tokens if len(ids) > 1),
    )


def _tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint)
        # If there is no file, transformers makes a tokenizer with special tokens alone.
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError("no vocabulary")
    except Exception as error:  # transformers raises any class for a file that it cannot read
        reason = first_line(error)
        raise InputError.of(rules.TOKENIZER, str(checkpoint), reason=reason) from error
    return tokenizer


def _supports(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return len(ids) > 0 and ids.count(tokenizer.unk_token_id) <= _MAX_UNKNOWN * len(ids)


def _seeded(tokenizer: PreTrainedTokenizerBase, count: int) -> Prompts:
    """Return random sequences from a fixed seed, without special tokens except a first BOS."""
    special = set(tokenizer.all_special_ids)
    ordinary = sorted(id_ for id_ in tokenizer.get_vocab().values() if id_ not in special)
    source = random.Random(_SEED)
    start = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    most = max(count, CONTINUED_PROMPTS)
    tokens = [
        start + tuple(source.choices(ordinary, k=_SEEDED_TOKENS - len(start))) for _ in range(most)
    ]
    texts = tuple(tokenizer.decode(ids[1:9]) for ids in tokens[:CONTINUED_PROMPTS])
    return Prompts(natural=False, texts=texts, tokens=tuple(tokens[:count]))


def limited_length(checkpoint: Path, length: int = _MAX_LENGTH) -> int:
    """Return `length`, or the model's maximum sequence length if it is smaller.

    vLLM reserves its KV cache for sequences of this length.
    """
    text = text_config(json.loads((checkpoint / "config.json").read_text(encoding="utf-8")))
    return min([length, *(limit for key in _LENGTHS if isinstance(limit := text.get(key), int))])
