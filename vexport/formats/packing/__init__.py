"""From a weight's rows to the bytes that are stored, without torch: the kernels of each format."""
