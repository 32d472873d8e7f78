"""Calibration: samples go through the model layer by layer while observers watch the inputs."""

from vexport.calibration.data import Samples, read_samples
from vexport.calibration.forward import calibrate
from vexport.calibration.statistics import Calibration, InputRange

__all__ = ["Calibration", "InputRange", "Samples", "calibrate", "read_samples"]
