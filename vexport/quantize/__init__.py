"""Turn a plan into a written checkpoint: stream fusion groups, and record the inputs."""
