"""Tests of vexport. They run in parallel processes, so each test uses at most one core."""

import os

# Threads that wait for each other by spinning cost more than the micro models: an engine's start 40
# s of CPU.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No engine may bind its threads to the same core as another.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
