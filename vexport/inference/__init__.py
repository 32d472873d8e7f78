"""Ask a model: prompts go in, text and log-probabilities come out."""
