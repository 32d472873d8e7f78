"""Planning from headers, rules and vLLM's architectures.

A plan contains the treatment of each layer, and the layers that vLLM would refuse.
"""
