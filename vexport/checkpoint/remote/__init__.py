"""Checkpoints in object storage, by fsspec: their headers in a local folder, their weights by ranges."""
