"""Make sessions with a text from given logits. The files are like those of vLLM's worker."""

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional

from vexport.engine.messages import SERVER, SessionResult
from vexport.inference.answers import Rows, ServedSession
from vexport.inference.prompts import Prompts
from vexport.inference.text_scores import rows_to_repeat


def session(
    folder: Path,
    rows: Rows,
    logits: torch.Tensor,
    *,
    beginning: int = 64,
    top: int,
    again: torch.Tensor | None = None,
    is_server: bool = False,
) -> ServedSession:
    """Return a session. `logits` has the shape (rows, tokens - 1, vocabulary).

    The files have the whole vocabulary for the `beginning` of each row, and the `top` most likely
    tokens at all places.
    `again` has the logits of the second reading.
    """
    folder.mkdir()
    tables = functional.log_softmax(logits, -1)
    scores: dict[str, torch.Tensor] = {}
    first: dict[str, torch.Tensor] = {}
    for number, (row, table) in enumerate(zip(rows, tables, strict=True)):
        scores |= _scores("", number, row, table, top)
        first[f"prompt.{number}"] = table[: beginning - 1].contiguous()
    if again is not None:
        for number in range(rows_to_repeat(len(rows))):
            table = functional.log_softmax(again[number], -1)
            scores |= _scores("again.", number, rows[number], table, top)
    save_file(scores, folder / "text.safetensors")
    save_file(first, folder / "logprobs.safetensors")
    prompts = Prompts(natural=True, texts=(), tokens=tuple(row[:beginning] for row in rows))
    result = SessionResult(
        checkpoint=folder,
        platform=SERVER if is_server else "cpu",
        logprobs_file=folder / "logprobs.safetensors",
        text_file=folder / "text.safetensors",
    )
    return ServedSession(result=result, prompts=prompts, rows=rows)


def _scores(
    prefix: str, number: int, row: tuple[int, ...], table: torch.Tensor, top: int
) -> dict[str, torch.Tensor]:
    own = torch.tensor(row[1:])[:, None]
    best = table.topk(top).indices
    tokens = torch.cat([own, best.masked_fill(best == own, -1)], dim=1)
    logprobs = table.gather(1, tokens.clamp(min=0)).masked_fill(tokens < 0, math.nan)
    return {
        f"{prefix}nll.{number}": -table.gather(1, own)[:, 0],
        f"{prefix}likeliest.{number}": table.argmax(-1),
        f"{prefix}tokens.{number}": tokens.to(torch.int32),
        f"{prefix}logprobs.{number}": logprobs,
    }


def random_text(
    count: int, tokens: int, vocabulary: int, seed: int = 0
) -> tuple[Rows, torch.Tensor, torch.Generator]:
    """Return random rows, and logits of a model that predicts them well."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (count, tokens), generator=generator)
    rows = tuple(tuple(row) for row in ids.tolist())
    logits = torch.randn(count, tokens - 1, vocabulary, generator=generator)
    logits.scatter_add_(2, ids[:, 1:, None], torch.full((count, tokens - 1, 1), 3.0))
    return rows, logits, generator
