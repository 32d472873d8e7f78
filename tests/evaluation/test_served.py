"""The real `vllm serve`, killed in the middle of an evaluation and started again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vexport.evaluation.endpoint import API_KEY

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
DEMO = Path(__file__).parents[2] / "scenarios" / "demo"
KEY = "sk-of-nobody-else"


@contextmanager
def serving(port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """vLLM's server of the demo model, which asks for the key."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO / "model")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-num-seqs", "16"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env={**environment, "TORCHDYNAMO_DISABLE": "1"},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def answers(folder: Path) -> list[tuple[object, object, object]]:
    (file,) = folder.glob("samples_addition_*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted((row["doc_id"], row["prompt_hash"], row["resps"]) for row in rows)


def kept(folder: Path) -> list[str]:
    return [line for file in folder.glob("answers-*.jsonl") for line in file.read_text().splitlines()]


def test_a_server_that_is_killed_and_started_again_gives_the_answers_of_an_engine(tmp_path: Path) -> None:
    port, out = free_port(), tmp_path / "out"
    url = f"http://127.0.0.1:{port}/v1"
    task = ("--task", str(DEMO / "tasks" / "addition.yaml"), "--limit", "600", "--concurrency", "4")
    command = [sys.executable, "-m", "vexport", "eval", url, "--baseline", str(DEMO / "model"), *task]
    command += ["--format", "json", "--output-dir", str(out)]
    with serving(port, tmp_path / "server.log") as server:
        while b"startup complete" not in (tmp_path / "server.log").read_bytes():
            assert server.poll() is None
            time.sleep(0.2)
        evaluation = subprocess.Popen(
            command, env={**os.environ, API_KEY: KEY}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        while len(kept(out / "candidate")) < 100:
            assert evaluation.poll() is None, evaluation.communicate()
            time.sleep(0.02)
    before = len(kept(out / "candidate"))
    with serving(port, tmp_path / "server.log"):
        shown, told = evaluation.communicate()
    assert before < 600
    assert evaluation.returncode == 0, told
    (task_verdict,) = json.loads(shown)["tasks"]
    assert (task_verdict["outcome"], task_verdict["flip_rate"]) == ("PASS", 0)
    assert answers(out / "baseline") == answers(out / "candidate")
    log = (tmp_path / "server.log").read_text()
    asked = log.count('"POST /v1/completions HTTP/1.1" 200')
    assert 600 + 200 - 4 <= asked <= 600 + 200 + 4  # an answer may come before its line in the log
    files = [file.read_bytes() for file in out.rglob("*") if file.is_file()]
    assert not any(KEY.encode() in content for content in (*files, shown, told))
