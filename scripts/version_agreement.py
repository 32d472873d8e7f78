"""Compare `check --static` with the dry load of another vLLM, on every micro family of the tests.

    PYTHONPATH=. .venv/bin/python scripts/version_agreement.py VLLM_PYTHON [--family NAME]...

VLLM_PYTHON is the interpreter of an environment with that vLLM. Each family is quantized in a
single scheme. The output, and a copy that lacks a tensor, are checked by the rules of that version
and loaded dry on SM 90. The script prints the checkpoints that only the check or only the dry load
refuses, and the checkpoints that the dry load cannot judge. The exit code is 1 if they disagree.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "VEXPORT_NO_VERIFY": "1"}

import argparse  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from tempfile import TemporaryDirectory  # noqa: E402

from safetensors.torch import load_file  # noqa: E402

from tests.architectures.families import FAMILIES, save_family  # noqa: E402
from tests.command import vexport  # noqa: E402
from tests.mutations.edits import WEIGHTS, drop, spoiled  # noqa: E402
from vexport.checks import check_checkpoint  # noqa: E402
from vexport.checks.vllm.view import Target  # noqa: E402
from vexport.engine.dry.load import DryLoad  # noqa: E402
from vexport.engine.installed import installed_version  # noqa: E402
from vexport.version import Version, short_version  # noqa: E402

# Each family gets the first of these that fits its shapes. Each family starts at a different
# scheme.
SCHEMES = ("FP8_DYNAMIC", "NVFP4A16", "W4A16_G64")


def main() -> int:
    """Print the disagreements. Return 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("vllm_python", type=Path, help="The interpreter with the other vLLM.")
    parser.add_argument("--family", action="append", help="Only this family; repeatable.")
    options = parser.parse_args()
    version, start = installed_version(options.vllm_python), time.monotonic()
    with TemporaryDirectory() as name:
        checkpoints = list(written(options.family or list(FAMILIES), Path(name)))
        static = {folder: errors_of(folder, version) for folder in checkpoints}
        load = DryLoad(checkpoints=checkpoints, vllm_python=options.vllm_python, controlled=True)
        disagreements = 0
        for folder, report in zip(checkpoints, load.reports(), strict=True):
            refused = [finding.got for finding in report.findings if finding.severity == "error"]
            if report.not_judged and not refused:
                print(f"{folder.name}: vLLM cannot judge it: {report.not_judged[0].why}")
            elif bool(refused) != bool(static[folder]):
                disagreements += 1
                print(f"{folder.name}: refused by {'vLLM' if refused else 'check'} alone:")
                print(f"  {(refused or static[folder])[0][:300]}")
    minutes = (time.monotonic() - start) / 60
    print(
        f"vLLM {short_version(version)}: {disagreements} of {len(checkpoints)} checkpoints "
        f"are judged differently ({minutes:.1f} min)"
    )
    return 1 if disagreements else 0


def written(families: Sequence[str], folder: Path) -> Iterator[Path]:
    """Yield an output of each family, and a copy of it without its last quantized weight."""
    for number, family in enumerate(families):
        source = save_family(family, folder / f"{family}-source")
        for scheme in (*SCHEMES[number % 3 :], *SCHEMES[: number % 3]):
            out = folder / f"{family}-{scheme}"
            words = ("--scheme", scheme, "--rounding", "nearest", "--no-verify", "--quiet")
            if vexport("quantize", source, out, *words).code == 0:
                yield out
                names = sorted(each for each in load_file(out / WEIGHTS) if "_scale" in each)
                yield spoiled(
                    out, folder / f"{family}-{scheme} without {names[-1]}", drop(names[-1])
                )
                break
        else:
            print(f"{family}: no scheme of {', '.join(SCHEMES)} fits")


def errors_of(folder: Path, version: Version) -> list[str]:
    """Return the errors of `check --static` by the rules of a version."""
    report = check_checkpoint(str(folder), Target(vllm=version))
    return [finding.got for finding in report.findings if finding.severity == "error"]


if __name__ == "__main__":
    sys.exit(main())
