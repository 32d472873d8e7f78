"""Fixed prompts for any model: English where its tokenizer knows English, seeded tokens where it does not."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vexport.errors import InputError
from vexport.errors.escaping import first_line

TEXTS = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is",
    "Water boils at one hundred degrees Celsius at sea level, and it freezes at",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a small village at the edge of the forest, there lived an old clockmaker who",
    "Question: If a train travels 60 miles in one hour, how far does it travel in three hours?\nAnswer:",
    "The three primary colours are red, yellow and",
    "SELECT name, price FROM products WHERE price > 100 ORDER BY price DESC LIMIT 10; returns at most ten",
    "Le chat dort sur le canap\u00e9 pendant que les enfants jouent dans le jardin. Il fait beau et",
    "Der Zug nach Berlin f\u00e4hrt um acht Uhr von Gleis sieben ab. Die Fahrt dauert etwa vier",
    "To make bread you need flour, water, salt and yeast. Mix them, knead the dough for ten minutes, let it",
    'The response of the server was {"status": "ok", "count": 3, "items": ["apple", "banana", "cherry"]}, so',
    "The theory of evolution by natural selection was first set out by Charles Darwin in his book On the",
    "User: My laptop does not turn on any more. What should I try first?\nAssistant: Check that the",
    "Let x be a real number with 2x + 3 = 11. Subtracting 3 from both sides gives 2x = 8, and therefore x =",
    "The committee met on Tuesday to discuss the budget. After a long debate the members agreed that the",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf(",
)
# More unknown tokens than this and the tokenizer was not made for English text.
_MOST_UNKNOWN = 0.2
# Each is continued by 200 tokens, which costs more than its log-probabilities.
CONTINUED = 6
# Of each row of a text, as far as vocabularies are compared: vLLM answers in Python lists.
KL_TOKENS = 64
_SEED = 20240229
_TOKENS = 64
_SEEDED_TOKENS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Texts for greedy continuation, and the token ids whose log-probabilities are compared.

    Continuations of texts that are not `natural` language to the model say nothing by themselves.
    """

    natural: bool
    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]


def fixed_prompts(checkpoint: Path, *, texts: Sequence[str] = (), count: int = CONTINUED) -> Prompts:
    """At most `count` prompts of at most 64 tokens, the same for every export of a model.

    The first `CONTINUED` texts are continued. `texts` come first where given (rows of the calibration data,
    say); the built-in ones otherwise. A tokenizer that does not know the texts gets its own sequences
    tokens, from a fixed seed. InputError where there is none.
    """
    tokenizer = _tokenizer(checkpoint)
    known = [text for text in (texts or TEXTS) if _knows(tokenizer, text)]
    if not known:
        return _seeded(tokenizer, count, _SEEDED_TOKENS)
    tokens = [tuple(tokenizer(text)["input_ids"][:_TOKENS]) for text in known[:count]]
    return Prompts(
        natural=True, texts=tuple(known[:CONTINUED]), tokens=tuple(ids for ids in tokens if len(ids) > 1)
    )


def _tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint)
    except Exception as error:  # transformers raises any class for a file that it does not understand
        raise _no_tokenizer(checkpoint, first_line(error)) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes where no file is found
        raise _no_tokenizer(checkpoint, "no vocabulary")
    return tokenizer


def _no_tokenizer(checkpoint: Path, got: str) -> InputError:
    return InputError(
        str(checkpoint),
        got=f"no tokenizer that transformers reads ({got})",
        need="tokenizer.json, or the files of the model's own tokenizer",
        fix="copy the tokenizer's files from the source next to the weights",
    )


def _knows(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    unknown = sum(id_ == tokenizer.unk_token_id for id_ in ids)
    return len(ids) > 0 and unknown <= _MOST_UNKNOWN * len(ids)


def _seeded(tokenizer: PreTrainedTokenizerBase, count: int, length: int) -> Prompts:
    """Sequences over the vocabulary without its special tokens."""
    special = set(tokenizer.all_special_ids)
    ordinary = sorted(id_ for id_ in tokenizer.get_vocab().values() if id_ not in special)
    source = random.Random(_SEED)
    start = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    most = max(count, CONTINUED)
    tokens = [start + tuple(source.choices(ordinary, k=length - len(start))) for _ in range(most)]
    texts = tuple(tokenizer.decode(ids[1:9]) for ids in tokens[:CONTINUED])
    return Prompts(natural=False, texts=texts, tokens=tuple(tokens[:count]))
