"""Write outputs: apart from inputs, and only over files that vexport itself wrote."""

# File in a checkpoint that vexport wrote: how it was made, and the names and digests of its files.
RECIPE = "vexport.json"
