"""Memory of temporary tensors."""

import resource
import subprocess
import sys

import pytest

CODE = """
import resource
import torch
from vexport.calibration.model import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        layer = [torch.ones(1 << 21) for _ in range(6)]
        del layer
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has these options")
def test_freed_memory_is_used_again() -> None:
    """Twenty times six tensors of 8 MiB cost fewer page faults than six of them have pages."""
    printed = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True).stdout
    assert int(printed) < (48 << 20) // resource.getpagesize()
