"""How vLLM reads a quantization config, and which group of it each layer gets."""
