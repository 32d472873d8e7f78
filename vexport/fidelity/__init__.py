"""How true a quantized checkpoint is to the one that it was made from."""
