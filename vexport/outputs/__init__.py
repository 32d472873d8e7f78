"""Places to write to: apart from what is read, and only over what vexport itself made."""

# In a checkpoint that vexport wrote: how it was made, and the names and digests of what was
# written.
RECIPE = "vexport.json"
