"""Tests of vexport.

They run in parallel processes, so that each test uses a single core at most.
"""

import os

# Threads that wait for each other by spinning cost more than the micro models. An engine's start
# would take 40 s of CPU time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Two engines must not bind their threads to the same core.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
