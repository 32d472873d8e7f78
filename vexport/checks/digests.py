"""Files against the bytes that were written: by vexport's own record, or by a list (--digests)."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from vexport.checks.vllm.view import CheckpointView, error
from vexport.outputs import RECIPE
from vexport.outputs.digests import DIGESTS, digest_of, recorded_digests
from vexport.records import Finding

NAME = "digests"
DESCRIPTION = "files have the bytes that were written (vexport.json, --digests)"
# Weights that are read for their digests unasked; all else that is checked takes a second or two.
MOST_BYTES = 8_000_000_000


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on files whose bytes have another digest than the one in vexport.json or in `view.digests`."""
    root = view.index.root
    recorded = {name: digest for name, digest in recorded_digests(root).items() if (root / name).is_file()}
    num_bytes = sum((root / name).stat().st_size for name in recorded)
    if num_bytes > MOST_BYTES and view.digests is None:
        yield Finding(
            check=NAME,
            severity="info",
            where=f"{root / RECIPE}: {DIGESTS}",
            expected="each file of weights compared with its digest",
            got=f"none: {num_bytes / 1e9:,.0f} GB, above {MOST_BYTES / 1e9:.0f} GB they are read when asked",
            fix=f"add --digests {RECIPE}",
        )
        recorded = {}
    yield from _compared(view, recorded, f"remove {DIGESTS!r} from {RECIPE} if it was changed on purpose")
    yield from _compared(view, view.digests or {}, "compare the list with the one of who made the checkpoint")


def _compared(view: CheckpointView, digests: Mapping[str, str], otherwise: str) -> Iterator[Finding]:
    root = view.index.root
    names = [name for name in digests if (root / name).is_file()]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        computed = pool.map(lambda name: digest_of(root / name, digests[name].partition(":")[0]), names)
        actual = dict(zip(names, computed, strict=True))
    for name, digest in digests.items():
        if actual.get(name) != digest:
            expected = f"the bytes that were written, {digest}"
            got = f"others, {actual[name]}" if name in actual else "no such file"
            fix = f"download or export it again; {otherwise}"
            yield error(NAME, str(root / name), expected=expected, got=got, fix=fix)
