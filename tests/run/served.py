"""A real `vllm serve`."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(
    log: Path, model: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Start vLLM's server of a model, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", port, "--enforce-eager", "--max-num-seqs", "16"]
    command += ["--distributed-executor-backend", "uni"]  # saves a process that imports vLLM
    variables = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        **(environment or {}),
    }
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, *options],
            stdout=output,
            stderr=output,
            env=variables,
            start_new_session=True,
        )
    try:
        while b"startup complete" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
