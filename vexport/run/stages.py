"""Stages of a run: what is done is not done again."""

import time
from collections.abc import Callable
from pathlib import Path

from vexport.run.directory import Digests, RunDirectory
from vexport.run.serving import EngineOptions
from vexport.scenario import Scenario


class Stages:
    """What every stage of a run needs: the scenario, the folder, how engines start and what is done."""

    def __init__(self, scenario: Scenario, folder: Path, options: EngineOptions) -> None:
        self.scenario = scenario
        self.folder = folder
        self.options = options
        self.directory = RunDirectory(folder)

    def once(self, name: str, inputs: Digests, make: Callable[[], None]) -> None:
        """Call `make` unless the stage was finished from the same inputs; InputError from others."""
        if self.directory.is_done(name, inputs):
            return
        start = time.monotonic()
        make()
        self.directory.finish(name, inputs, time.monotonic() - start)
