"""What blocks need, and whether this machine has it."""

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def machine() -> str:
    """Return the class of this machine, such as `2 CPU cores`."""
    cores = f"{len(os.sched_getaffinity(0))} CPU cores"
    named = [cores] if platform.machine() == "x86_64" else [cores, platform.machine()]
    return ", ".join([*named, *_gpus()[:1]])


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.stdout.split("\n")[:-1] if ran.returncode == 0 else []


def _reaches_hub() -> bool:
    try:
        socket.create_connection(("huggingface.co", 443), timeout=5).close()
    except OSError:
        return False
    return True


NEEDS: Mapping[str, tuple[str, Callable[[], bool]]] = {
    "demo": ("scripts/setup", lambda: True),
    "hours": ("hours of one CPU core", lambda: True),
    "real-model": ("scripts/real-model", lambda: (ROOT / "real").is_dir()),
    "peer": ("scripts/bench/setup-peer", lambda: (ROOT / ".venv-peer").is_dir()),
    "gpu": ("a GPU with CUDA", lambda: bool(_gpus())),
    "download": ("models of the hub", _reaches_hub),
}
"""What provides each need, and a function that returns True if this machine has it."""
