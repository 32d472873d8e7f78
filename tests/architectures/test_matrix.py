"""`quantize` on all micro families: vLLM loads the output, or the refusal gives a remedy."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architectures.families import FAMILIES, save_family
from tests.architectures.test_families import REFUSED, plan_of
from tests.command import vexport
from vexport.engine.dry.load import DryLoad
from vexport.plan.build import PlanSettings

# Schemes with groups or blocks that two ranks may cut, and other schemes. Groups of 64 fit the
# micro models' sizes.
RANK_SCHEMES, OTHER_SCHEMES = ("NVFP4A16", "FP8_BLOCK"), ("FP8_DYNAMIC", "W4A16_G64")
# The first remedy in a refusal: options that replace the given options.
REMEDY = re.compile(
    r"--scheme (?P<scheme>\w+)|--group-size (?P<size>\d+)|(?P<keep>--on-unsupported-shape keep)"
)


def quantized(source: Path, out: Path, *options: str) -> str:
    """Quantize, and return the error, or an empty string if there is an output.

    The output is not verified here, because one worker loads all outputs.
    """
    ran = vexport(
        "quantize", source, out, *options, "--rounding", "nearest", "--no-verify", "--quiet"
    )
    assert (ran.code == 0) == out.exists(), ran.stderr
    return " ".join(ran.errors)


def remedy_options(message: str, scheme: str) -> tuple[str, ...]:
    found = REMEDY.search(message)
    assert found is not None, message
    if found["scheme"]:
        return ("--scheme", found["scheme"])
    more = ("--group-size", found["size"]) if found["size"] else found["keep"].split()
    return ("--scheme", scheme, *more)


def written(folder: Path) -> Iterator[tuple[Path, bool | None]]:
    """Write each family in one scheme, and in refused schemes with the remedy of the refusal.

    Yields each output, and whether it fits two ranks (None if this was not planned).
    """
    for number, family in enumerate(FAMILIES):
        source, refused = save_family(family, folder / family), REFUSED.get(family, ())
        for place, scheme in enumerate((*RANK_SCHEMES, *OTHER_SCHEMES)):
            if number % 4 != place and scheme.removesuffix("_G64") not in refused:
                continue
            out = folder / f"{family}-{scheme}"
            message = quantized(source, out, "--scheme", scheme)
            assert bool(message) == (scheme.removesuffix("_G64") in refused), (out, message)
            assert not message or quantized(source, out, *remedy_options(message, scheme)) == ""
            fits_ranks = not message and scheme in RANK_SCHEMES
            yield (
                out,
                not plan_of(source, scheme, PlanSettings(ranks=(2,))).refusals
                if fits_ranks
                else None,
            )


@pytest.mark.vllm
@pytest.mark.slow
def test_families_load_or_remedy_works(
    tmp_path: Path,
) -> None:
    """If the plan refuses two ranks, vLLM refuses them too."""
    made = dict(written(tmp_path))
    checked = vexport("check", *made)
    assert checked.code == 0, checked.stdout
    sizes: dict[tuple[int, ...], list[Path]] = {
        (1, 2): [out for out, fits in made.items() if fits is not None],
        (1,): [out for out, fits in made.items() if fits is None],
    }
    loads = {
        (Path(report.checkpoint), cell.tp): cell.status == "loads"
        for tp, outs in sizes.items()
        for report in DryLoad(checkpoints=outs, tp=tp).reports()
        for cell in report.cells
    }
    on_one_rank, on_two_ranks = (
        {out: fits for (out, tp), fits in loads.items() if tp == ranks} for ranks in (1, 2)
    )
    assert [out for out, fits in on_one_rank.items() if not fits] == []
    assert {out: fits for out, fits in made.items() if fits is not None} == on_two_ranks
    assert {*on_two_ranks.values()} == {True, False}
