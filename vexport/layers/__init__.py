"""Layers as vLLM builds them: which are linear and fused, what a rank holds, what shapes it
refuses.
"""
