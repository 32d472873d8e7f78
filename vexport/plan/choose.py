"""Which scheme to start with: by what runs in full, what fits and the bound. Accuracy has to be measured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vexport.formats.schemes import preset_of
from vexport.types import Candidate

# In the order in which they are looked at: without calibration data first, coarser inputs only where tensor
# cores multiply them (docs/schemes.md).
EIGHT_BITS = ("FP8_DYNAMIC", "W8A8")
FOUR_BITS = ("NVFP4", "W4AFP8", "W4A16")
# Where none of these runs in full: weights alone.
WEIGHTS_ONLY = ("FP8_DYNAMIC", "W8A16", "NVFP4A16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A scheme, empty where nothing fits, and the one that only accuracy decides against."""

    scheme: str = ""
    alternative: str = ""
    reasons: tuple[str, ...]


def choose(schemes: Sequence[Candidate], source: Candidate) -> Choice:
    """The scheme to start with: 8 bits in full, with 4 bits as what an evaluation has to be asked about."""
    rows: dict[str, Candidate] = {}
    for row in sorted(schemes, key=lambda row: not row.fits):  # in other groups where its own do not fit
        rows.setdefault(preset_of(row.scheme), row)
    eight, four = _first(rows, EIGHT_BITS), _first(rows, FOUR_BITS)
    if eight and four:
        return Choice(
            scheme=eight.scheme,
            alternative=four.scheme,
            reasons=(*_against_source(eight, source), *_both(eight, four)),
        )
    others = (*(rows[name] for name in WEIGHTS_ONLY if name in rows), *schemes)
    chosen = eight or four or next((row for row in others if row.fits), None)
    if chosen is None:
        return Choice(reasons=(_nothing(schemes),))
    why = f"{chosen.scheme} is the first scheme that fits; it runs {_how(chosen)}"
    return Choice(scheme=chosen.scheme, reasons=(why, *_against_source(chosen, source)))


def _how(row: Candidate) -> str:
    return row.runs if row.runs == "in full" else f"with {row.runs}"


def _fits(rows: Mapping[str, Candidate], name: str) -> bool:
    return name in rows and rows[name].fits


def _first(rows: Mapping[str, Candidate], names: Sequence[str]) -> Candidate | None:
    return next((rows[name] for name in names if _fits(rows, name) and rows[name].runs == "in full"), None)


def _against_source(row: Candidate, source: Candidate) -> Iterator[str]:
    if not source.fits:
        yield "unquantized the model does not fit"
    elif faster := _faster(row, source):
        yield f"{row.scheme} is ahead of the unquantized model at batch 1 {faster}"


def _both(eight: Candidate, four: Candidate) -> Iterator[str]:
    """What memory and bound say about 8 and 4 bits, and what they do not."""
    yield f"{eight.scheme} runs in full and fits" + (
        "" if eight.needs_calibration else " without calibration"
    )
    if faster := _faster(four, eight):
        yield f"{four.scheme} is ahead of {eight.scheme} at batch 1 {faster}"
    if four.kv_tokens is not None and eight.kv_tokens is not None:
        yield f"{four.scheme} leaves room for {four.kv_tokens:,} tokens of KV cache, not {eight.kv_tokens:,}"
    yield (
        f"the data does not decide between {eight.scheme} and {four.scheme}: "
        "what 4 bits lose has to be measured (vexport eval)"
    )


def _faster(row: Candidate, other: Candidate) -> str:
    """By how much a row is ahead at batch 1, and whether the intervals say so; empty where it is not."""
    if row.speed is None or other.speed is None:
        return ""
    fast, slow = row.speed.decode[0], other.speed.decode[0]
    if fast.low is None or fast.high is None or slow.high is None or fast.high <= slow.high:
        return ""
    sure = "beyond the interval" if fast.low > slow.high else "within it: the intervals overlap"
    return f"({fast.high / slow.high:.2f} times by the bound, {sure})"


def _nothing(schemes: Sequence[Candidate]) -> str:
    loading = [row for row in schemes if row.runs_by_itself]
    if not loading:
        return "no scheme runs there: " + next((row.reason for row in schemes if row.reason), "")
    return "in no scheme the weights leave room for one sequence: use more GPUs (--tp) or a larger one"
