"""Dry load: vLLM's model classes and weight loaders without weights and without a GPU."""
