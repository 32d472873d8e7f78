"""The inputs of experts that a model holds as three-dimensional parameters.

All experts run in a few grouped products, so that no hook sees what enters one of them. While a module of
experts is watched another forward stands in for its own: it makes the same products and tells what went in.
"""
