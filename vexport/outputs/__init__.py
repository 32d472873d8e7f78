"""Write outputs. They must not overlap inputs, and they replace only files that vexport wrote."""

# The recipe, a file in each checkpoint that vexport wrote. It records how the checkpoint was made,
# and the names and digests of the checkpoint's files.
RECIPE = "vexport.json"
