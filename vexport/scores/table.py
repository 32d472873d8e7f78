"""Types of columns of scores."""

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
