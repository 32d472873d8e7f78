"""The loss of accuracy by group of layers, and the choice of schemes from it."""
