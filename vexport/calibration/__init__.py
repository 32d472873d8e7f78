"""Calibration: samples go through the model layer by layer while observers watch the inputs."""

from vexport.calibration.data import Samples, read_samples
from vexport.calibration.forward import calibrate

__all__ = ["Samples", "calibrate", "read_samples"]
