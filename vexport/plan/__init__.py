"""From headers, rules and vLLM's architectures to a plan: what is quantized how, what vLLM would
refuse.
"""
