"""The stages, and a run directory around them."""
