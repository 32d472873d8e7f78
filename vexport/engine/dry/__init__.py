"""Dry load: vLLM's own model classes and weight loaders without weights and without a GPU."""
