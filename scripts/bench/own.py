"""Runs one command of vexport and prints the seconds that it took without imports.

    .venv/bin/python scripts/bench/own.py quantize MODEL OUT --scheme W4A16 ...

The benchmarks run it: `{"seconds": ..., "cpu": ...}` is the last line of stdout.
"""

import json
import sys
import time

from vexport.cli.entry import cli
from vexport.quantize import job

IMPORTED = [job]
if "--calibration" in sys.argv:  # what the command imports when it calibrates
    from transformers import AutoModelForCausalLM, AutoTokenizer

    IMPORTED += [AutoModelForCausalLM, AutoTokenizer]

if __name__ == "__main__":
    start, cpu = time.perf_counter(), time.process_time()
    cli.main(sys.argv[1:], standalone_mode=False)
    print(json.dumps({"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}))
