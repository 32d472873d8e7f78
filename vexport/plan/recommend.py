"""How vLLM runs each scheme on a GPU, and which schemes to start with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vexport.formats.gpus import CARDS, GENERATIONS, Card
from vexport.formats.schemes import get_scheme
from vexport.records import GpuOutlook, Recommendation, SchemeOnGpu, SchemeOutlook, SchemeTable


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Scheme to start with, and the reason. Choices are in order of preference."""

    bits: int
    scheme: str
    reason: str


# For each number of bits, vexport recommends the first scheme that the GPU runs natively and that
# fits the model. FP8_DYNAMIC comes before W8A8, because vLLM has INT8 kernels only below SM 100.
# vexport/docs/results.md has measurements of accuracy and size.
_CHOICES = (
    _Choice(bits=8, scheme="FP8_DYNAMIC", reason="FP8 tensor cores"),
    _Choice(bits=8, scheme="W8A8", reason="INT8 tensor cores; this GPU has none for FP8"),
    _Choice(bits=8, scheme="W8A16", reason="native, with 16-bit inputs"),
    _Choice(bits=4, scheme="NVFP4", reason="FP4 tensor cores"),
    _Choice(
        bits=4,
        scheme="W4A16",
        reason="native, with 16-bit inputs; this GPU has no FP4 tensor cores",
    ),
)


def table_for_gpu(table: SchemeTable, sm: int, card: Card | None = None) -> SchemeTable:
    """Return the table for a GPU: native schemes first, with recommendations."""
    schemes = [replace(outlook, on_gpu=_on_gpu(outlook.scheme, sm)) for outlook in table.schemes]
    schemes.sort(key=_rank)
    gpu = GpuOutlook(
        name=card.name if card else "",
        sm=sm,
        usable_bytes=card.usable_bytes if card else None,
        recommended=tuple(_recommended(schemes)),
    )
    return replace(table, schemes=tuple(schemes), gpu=gpu)


def recommended_generations(table: SchemeTable) -> Mapping[str, Sequence[str]]:
    """Return the schemes recommended for any GPU of the table of GPUs, with these generations."""
    found: dict[str, dict[str, None]] = {}
    for sm in sorted({card.sm for card in CARDS.values()}):
        gpu = table_for_gpu(table, sm).gpu
        for each in gpu.recommended if gpu else ():
            found.setdefault(each.scheme, {})[GENERATIONS[sm]] = None
    bits = {outlook.scheme: outlook.bits for outlook in table.schemes}
    return {
        scheme: tuple(found[scheme]) for scheme in sorted(found, key=bits.__getitem__, reverse=True)
    }


def _on_gpu(name: str, sm: int) -> SchemeOnGpu:
    scheme = get_scheme(name)
    support = scheme.format.gpu_support(scheme.args)
    if support.refuses(sm):
        return SchemeOnGpu(input_bits=None, native=False)
    bits = support.bits(sm)
    return SchemeOnGpu(input_bits=bits, native=bits == support.stored_bits)


def _is_choice(outlook: SchemeOutlook) -> bool:
    return outlook.fits and outlook.is_native


def _rank(outlook: SchemeOutlook) -> tuple[bool, bool, bool]:
    """Return the sort key: native schemes, other schemes that run, and then unusable schemes."""
    return (not _is_choice(outlook), not outlook.runs_on_gpu, not outlook.fits)


def _recommended(schemes: Sequence[SchemeOutlook]) -> Iterator[Recommendation]:
    """Yield the first choice for each number of bits.

    If only another group size of the scheme fits the model, the scheme with that size is yielded.
    """
    native = [outlook.scheme for outlook in schemes if _is_choice(outlook)]
    runnable = {outlook.scheme for outlook in schemes if outlook.is_native}
    found: set[int] = set()
    # Better schemes that the GPU runs natively but that do not fit the model, by number of bits.
    unfit: dict[int, str] = {}
    for choice in _CHOICES:
        if choice.bits in found:
            continue
        names = [
            name for name in native if name == choice.scheme or _is_regrouped(name, choice.scheme)
        ]
        if names:
            found.add(choice.bits)
            better = unfit.get(choice.bits)
            reason = f"{better} does not fit this model" if better else choice.reason
            yield Recommendation(bits=choice.bits, scheme=names[0], reason=reason)
        elif choice.scheme in runnable:
            unfit.setdefault(choice.bits, choice.scheme)


def _is_regrouped(name: str, scheme: str) -> bool:
    """Return True if `name` is `scheme` with another group size: W4A16_G64 of W4A16."""
    return name.startswith(f"{scheme}_G")


def schemes_on(schemes: Sequence[str], sm: int) -> Iterator[tuple[str, SchemeOnGpu]]:
    """Yield how vLLM runs each of these schemes on a GPU with compute capability `sm`."""
    for name in schemes:
        yield name, _on_gpu(name, sm)
