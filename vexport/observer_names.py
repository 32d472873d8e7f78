"""Names of observers that something depends on before torch is loaded."""

# A weight is observed once, so these all give the range of its values.
MIN_MAX = ("memoryless_minmax", "static_minmax", "minmax")
# Searches by what calibration gathers.
IMPORTANCE = "imatrix_mse"
