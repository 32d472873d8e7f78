"""The model of vLLM: how it reads a checkpoint's config, which layers it fuses and what it
refuses.
"""
