"""How vLLM reads a quantization config, and which of its groups each layer gets."""
