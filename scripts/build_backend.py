"""Build with setuptools, and add the parts that pyproject.toml cannot describe.

The demo goes into the wheel, the tests into the sdist.

scenarios/ stays at the top of the repository. A wheel has the demo's files as vexport/scenarios. An
editable installation reads them from scenarios/.
"""

import runpy
from pathlib import Path

from setuptools.build_meta import *  # noqa: F403 - the hooks of a backend
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import manifest_maker

ROOT = Path(__file__).parent.parent

# Used instead of a MANIFEST.in at the top of the repository.
manifest_maker.template = "scripts/sdist.in"


class BuildPy(build_py):  # type: ignore[misc]
    """Copies the demo into the built package."""

    def run(self) -> None:
        """Build modules and data as setuptools does, then add the demo."""
        super().run()
        if self.editable_mode:
            return
        source = ROOT / "scenarios"
        for file in runpy.run_path(str(ROOT / "vexport" / "scenario" / "shipped.py"))["demo_files"](
            source
        ):
            target = Path(self.build_lib) / "vexport" / "scenarios" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(source / file), str(target))
