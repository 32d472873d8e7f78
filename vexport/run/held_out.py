"""Held-out text whose log-probabilities decide: its rows as a model's tokens, and the request to read it."""

from dataclasses import replace
from pathlib import Path

from vexport.calibration.data import read_samples
from vexport.checkpoint.index import read_index
from vexport.engine.load import shortest_length
from vexport.engine.messages import SessionRequest
from vexport.evaluation.held_out import Rows
from vexport.quantize.samples import vocab_size
from vexport.scenario import Evaluate
from vexport.types import CalibrationData

# What each token of the text cost.
FILE = "text.safetensors"
# Of each row, as far as the whole vocabulary is compared: vLLM answers in Python lists.
KL_TOKENS = 64


def read_rows(settings: Evaluate, checkpoint: Path, longest: int | None, *, trust_remote_code: bool) -> Rows:
    """The rows of the text as the checkpoint's tokens; none where tasks decide.

    They are as long as asked, or as the sequences that the engine (`longest`) or the model allows; what is
    left of the text after the last whole row is not read, unless it is all there is.
    """
    if settings.text is None:
        return ()
    needed = settings.text_tokens + 1  # vLLM generates a token after each
    tokens = min(needed, longest or shortest_length(checkpoint, needed)) - 1
    data = CalibrationData(name=settings.text, samples=settings.text_rows, seq_len=tokens, pack=True)
    size = vocab_size(read_index(checkpoint))
    read = read_samples(data, checkpoint, vocab_size=size, trust_remote_code=trust_remote_code).token_ids
    return tuple(row for row in read if len(row) == tokens) or tuple(row for row in read if len(row) > 1)


def with_text(request: SessionRequest, rows: Rows, folder: Path) -> SessionRequest:
    """The request that reads the rows too, whose scores go to `folder`."""
    if not rows:
        return request
    length = max(request.max_model_len or 0, *(len(row) + 1 for row in rows))
    return replace(request, text=rows, text_file=folder / FILE, max_model_len=length)
