"""Calibrates folders under torchrun's environment, one after the other; writes what this rank ends with."""

import os
import sys
from pathlib import Path

from tests.calibration.make import plan_for, samples
from vexport.calibration import calibrate
from vexport.errors import CheckpointFailed
from vexport.files import to_json

if __name__ == "__main__":
    out, *folders = map(Path, sys.argv[1:])
    for folder in folders:
        index, plan = plan_for(folder, observer="imatrix_mse", kv_cache="fp8")
        try:
            text = to_json(calibrate(index, plan, samples()))
        except CheckpointFailed as error:
            text = str(error)
        (out / f"{folder.name}-{os.environ['RANK']}.json").write_text(text)
