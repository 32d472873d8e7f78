"""What a running server states about its model: the start-up log of `vllm serve`."""
