"""From a plan to a written checkpoint: a stream of fusion groups, and what the checkpoint was made
from.
"""
