"""Run the predicates of known faults on vLLM's wheels, and record the results.

    PYTHONPATH=. .venv/bin/python scripts/generate_faults.py VERSION|FOLDER...

VERSION is a release of vLLM (0.33.0), whose wheel is downloaded into a cache. FOLDER has the
packages of an environment with vLLM, or files of a wheel. The results go to
vexport/architectures/generated/faults.json, with the results of other versions that it already
has. The table of entries and versions is printed, and replaces the table in
vexport/docs/known-faults.md.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from generate_versions import Wheel
from tables import FOLDER

from vexport.architectures.faults import FAULTS, Fault, Source, found_in, installed_source

TABLE = FOLDER / "faults.json"
PAGE = Path("vexport/docs/known-faults.md")
MARKS = "<!-- table of known faults: scripts/generate_faults.py -->"
WORDS = {True: "yes", False: "", None: "?"}
# Results by version and entry.
Results = Mapping[str, Mapping[str, bool | None]]


def source_of(name: str) -> tuple[str, Source]:
    """Return the version (0.33) and the files of a vLLM."""
    if not Path(name).is_dir():
        return name.rpartition(".")[0], Wheel(name).text
    (metadata,) = Path(name).glob("vllm-*.dist-info/METADATA")
    found = re.search(r"^Version: (\d+\.\d+)", metadata.read_text(), re.MULTILINE)
    assert found is not None
    return found[1], installed_source(Path(name))


def table(results: Results) -> Iterator[str]:
    """Yield the lines of a Markdown table: a row for each entry, a column for each version."""
    versions = sorted(results, key=lambda version: [*map(int, version.split("."))])
    yield f"| layers | kernel, GPUs | effect | {' | '.join(versions)} | repaired in |"
    yield f"|---|---|---|{'---|' * len(versions)}---|"
    for fault in FAULTS.values():
        cells = (WORDS[results[version].get(fault.name)] for version in versions)
        repaired = f"[{fault.repaired or 'no version'}]({fault.thread})"
        effect = fault.effect.replace("-", " ")
        yield f"| {fault.layers} | {where(fault)} | {effect} | {' | '.join(cells)} | {repaired} |"


def where(fault: Fault) -> str:
    gpus = [f"SM {', '.join(map(str, fault.sms))}"] if fault.sms else []
    return ", ".join([fault.library, *gpus])


def main() -> None:
    """Record the results, and print the table."""
    results: dict[str, Mapping[str, bool | None]] = json.loads(TABLE.read_text())
    for name in sys.argv[1:]:
        version, source = source_of(name)
        results[version] = found_in(source)
    ordered = sorted(results, key=lambda version: [*map(int, version.split("."))])
    lines = (f" {json.dumps(each)}: {json.dumps(results[each])}" for each in ordered)
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    text = "\n".join(table(results))
    print(text)
    before, _, rest = PAGE.read_text().partition(MARKS)
    _, _, after = rest.partition(MARKS)
    PAGE.write_text(f"{before}{MARKS}\n\n{text}\n\n{MARKS}{after}")


if __name__ == "__main__":
    main()
