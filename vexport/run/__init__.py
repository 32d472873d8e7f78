"""Run the stages of making and judging a checkpoint, in a run directory."""
