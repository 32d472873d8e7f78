"""Compare `check --static` with the dry load of another vLLM, on micro checkpoints of the tests.

    PYTHONPATH=. .venv/bin/python scripts/version_agreement.py VLLM_PYTHON [--family NAME]...
        [--methods] [--write]

VLLM_PYTHON is the interpreter of an environment with that vLLM. Each family is quantized in a
single scheme. The output, and a copy that lacks a tensor, are checked by the rules of that version
and loaded dry on SM 90. The script prints the checkpoints that only the check or only the dry load
refuses, and the checkpoints that the dry load cannot judge. The exit code is 1 if they disagree.

The other quantization methods (GPTQ, AWQ, ...) are compared as well, by their sound and damaged
checkpoints from the tests. On some damaged checkpoints, the check and the pinned vLLM already
disagree, because vLLM's loaders overlook the damage. These checkpoints do not count. A method
agrees if the check and the other version agree on all its other checkpoints. `--methods` compares
only the methods. `--write` stores the names of agreeing methods in VERSION.json, in the folder
vexport/architectures/generated/versions. The check then judges these methods without a warning.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "VEXPORT_NO_VERIFY": "1"}

import argparse  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator, Mapping, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from tempfile import TemporaryDirectory  # noqa: E402

from safetensors.torch import load_file  # noqa: E402
from tables import FOLDER, write_table  # noqa: E402

from tests.architectures.families import FAMILIES, save_family  # noqa: E402
from tests.checks.quant_methods import CHECKPOINTS, write, write_gpt_oss  # noqa: E402
from tests.checks.spoiled_methods import SPOILED  # noqa: E402
from tests.command import vexport  # noqa: E402
from tests.models import save_llama  # noqa: E402
from tests.mutations.edits import WEIGHTS, drop, spoiled  # noqa: E402
from vexport.checks import check_checkpoint  # noqa: E402
from vexport.checks.vllm.quant_methods import method_name  # noqa: E402
from vexport.checks.vllm.view import Target  # noqa: E402
from vexport.engine.dry.load import DryLoad  # noqa: E402
from vexport.engine.installed import installed_version  # noqa: E402
from vexport.version import PINNED, Version, short_version  # noqa: E402

# Each family gets the first of these that fits its shapes. The order rotates from family to family,
# so that all schemes are used.
SCHEMES = ("FP8_DYNAMIC", "NVFP4A16", "W4A16_G64")


def main() -> int:
    """Print the disagreements. Return 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("vllm_python", type=Path, help="The interpreter with the other vLLM.")
    parser.add_argument("--family", action="append", help="Only this family; repeatable.")
    parser.add_argument(
        "--methods", action="store_true", help="Compare only the other quantization methods."
    )
    parser.add_argument("--write", action="store_true", help="Store the agreeing methods.")
    options = parser.parse_args()
    version, start = installed_version(options.vllm_python), time.monotonic()
    families = [] if options.methods else options.family or list(FAMILIES)
    with TemporaryDirectory() as name:
        folder = Path(name)
        checkpoints = list(written(families, folder))
        disagreements = disagreeing(checkpoints, options.vllm_python, version)
        by_method = {} if options.family else written_methods(folder)
        damaged = [path for paths in by_method.values() for path in paths]
        known = disagreeing(damaged, None, PINNED)
        new = disagreeing(damaged, options.vllm_python, version)
        differing = {path: text for path, text in new.items() if path not in known}
    for path, text in {**disagreements, **differing}.items():
        print(f"{path.name}: {text}")
    agreeing = [method for method, paths in by_method.items() if not {*paths} & {*differing}]
    judged = len(checkpoints) + len(damaged)
    minutes = (time.monotonic() - start) / 60
    print(
        f"vLLM {short_version(version)}: {len(disagreements) + len(differing)} of {judged} "
        f"checkpoints are judged differently ({minutes:.1f} min); {len(known)} damaged "
        f"checkpoints do not count, because vLLM {short_version(PINNED)} overlooks the damage"
    )
    print(f"methods that agree: {', '.join(agreeing) or 'none'}")
    if options.write:
        store(version, agreeing)
    return 1 if disagreements or differing else 0


def disagreeing(
    checkpoints: Sequence[Path], vllm_python: Path | None, version: Version
) -> Mapping[Path, str]:
    """Return the checkpoints that only the check or only vLLM refuses, with the reason.

    Checkpoints that vLLM cannot judge are printed.
    """
    if not checkpoints:
        return {}
    load = DryLoad(checkpoints=checkpoints, vllm_python=vllm_python, controlled=True)
    found = {}
    for folder, report in zip(checkpoints, load.reports(), strict=True):
        refused = [finding.got for finding in report.findings if finding.severity == "error"]
        errors = errors_of(folder, version)
        if report.not_judged and not refused:
            print(f"{folder.name}: vLLM cannot judge it: {report.not_judged[0].why}")
        elif bool(refused) != bool(errors):
            judge = "vLLM" if refused else "check"
            found[folder] = f"refused by {judge} alone: {(refused or errors)[0][:300]}"
    return found


def written_methods(folder: Path) -> Mapping[str, Sequence[Path]]:
    """Return sound and damaged checkpoints of each quantization method.

    Damaged values are left out, because a dry load reads no values.
    """
    llama = save_llama(folder / "llama")
    gpt_oss = save_family(
        "gpt-oss", folder / "gpt-oss-source", num_key_value_heads=4, intermediate_size=256
    )
    found: dict[str, list[Path]] = {"mxfp4": [write_gpt_oss(gpt_oss, folder / "gpt-oss")]}
    for name in CHECKPOINTS:
        sound = write(name, llama, folder / name)
        paths = found.setdefault(name_of_method(sound), [])
        paths.append(sound)
        for damage, (change, check, _) in SPOILED.get(name, {}).items():
            if check != "values":
                paths.append(spoiled(sound, folder / f"{name}, {damage}", change))
    return found


def name_of_method(checkpoint: Path) -> str:
    """Return the quantization method that vexport reads from a checkpoint's config."""
    config = json.loads((checkpoint / "config.json").read_text())
    name = method_name(config["quantization_config"])
    assert name is not None
    return name


def store(version: Version, methods: Sequence[str]) -> None:
    """Store the agreeing methods in the version's table."""
    target = FOLDER / "versions" / f"{short_version(version)}.json"
    table = {**json.loads(target.read_text()), "agreeing_methods": sorted(methods)}
    write_table(target, table, "schemes", "added", "classes")


def written(families: Sequence[str], folder: Path) -> Iterator[Path]:
    """Yield an output of each family, and a copy of it without its last scale."""
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
