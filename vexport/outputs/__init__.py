"""Places for outputs: separate from inputs, and replacing only vexport's files."""

# File in a checkpoint that vexport wrote: how it was made, and the names and digests of its files.
RECIPE = "vexport.json"
