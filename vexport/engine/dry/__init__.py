"""Dry load: vLLM's model classes and weight loaders without weights and without a GPU.

A cell is a combination of tensor parallel size and compute capability.
"""
