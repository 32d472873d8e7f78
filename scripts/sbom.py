"""Licenses of the pinned packages, and the software bill of materials that the build puts into the wheel.

`python scripts/sbom.py licenses` lists what is installed here: scripts/lock calls it. The bill is CycloneDX
1.6 (cyclonedx.org/docs/1.6/json), in the folder of the wheel's metadata that PEP 770 names.
"""

import json
import re
import sys
import tomllib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

SCRIPTS = Path(__file__).parent
LICENSES = SCRIPTS / "licenses.tsv"
UNKNOWN = "not stated"
# What a package says in a text of its own length is not a name.
_LONGEST = 60
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def pins() -> list[tuple[str, str]]:
    """The name and version of every package of the set-up, each once, as scripts/requirements.txt has it."""
    return [*dict.fromkeys(_PIN.findall((SCRIPTS / "requirements.txt").read_text(encoding="utf-8")))]


def stated_license(name: str) -> str:
    """What an installed package says of its license: an SPDX expression, a name, classifiers or a heading."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return UNKNOWN
    stated = package.metadata
    classifiers = (
        text.rpartition(" :: ")[2] for text in stated.get_all("Classifier") or () if "License ::" in text
    )
    files = (
        file.read_text()
        for file in package.files or ()
        if ".dist-info" in str(file.parent) and "LICENSE" in file.name
    )
    candidates = (
        stated["License-Expression"],
        _heading(stated["License"]),
        ", ".join(sorted(classifiers)),
        *map(_heading, files),
    )
    return next(filter(None, candidates), UNKNOWN)


def _heading(text: str | None) -> str:
    """The first line of a text, where that is short enough to be a name."""
    line = next((" ".join(line.split()) for line in (text or "").splitlines() if line.strip()), "")
    return line if len(line) <= _LONGEST else ""


def license_lines() -> str:
    """Name, version and license of every pinned package, separated by tabs."""
    return "".join(f"{name}\t{version}\t{stated_license(name)}\n" for name, version in pins())


def bill(version: str) -> str:
    """The bill of materials of vexport's wheel as JSON; the same bytes whenever it is made."""
    listed = [line.split("\t") for line in LICENSES.read_text(encoding="utf-8").splitlines()]
    components = [_component(name, number, license_) for name, number, license_ in listed]
    itself = f"pkg:pypi/vexport@{version}"
    direct = {name.lower() for name in _declared()}
    own: Mapping[str, object] = {
        "type": "application",
        "bom-ref": itself,
        "name": "vexport",
        "version": version,
        "purl": itself,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    refs = [_purl(name, number) for name, number, _ in listed if name.lower().replace("_", "-") in direct]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
        "dependencies": [{"ref": itself, "dependsOn": refs}],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document))
    return json.dumps({**document, "serialNumber": f"urn:uuid:{serial}"}, indent=1) + "\n"


def _component(name: str, version: str, license_: str) -> Mapping[str, object]:
    purl = _purl(name, version)
    licenses: Sequence[object] = [] if license_ == UNKNOWN else [{"license": {"name": license_}}]
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "licenses": licenses,
    }


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name.lower()}@{version.replace('+', '%2B')}"


def _declared() -> Iterator[str]:
    """The packages that vexport itself asks for, with every extra but that of its development."""
    project = tomllib.loads((SCRIPTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    texts = [
        *project["dependencies"],
        *(text for extra in extras if extra != "dev" for text in extras[extra]),
    ]
    for text in texts:
        if (name := _NAME.match(text)) is not None and name[0] != "vexport":
            yield name[0].replace("_", "-")


if __name__ == "__main__":
    assert sys.argv[1:] == ["licenses"], "usage: sbom.py licenses"
    LICENSES.write_text(license_lines(), encoding="utf-8")
