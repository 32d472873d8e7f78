"""How questions are shared among engines; test_lm_eval_runner runs two of them."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.command import vexport
from vexport.evaluation.replicas import Question, Replica, devices_of

# Reads questions and answers so many of them.
ANSWERS = """\
import json, sys
for key, *_ in json.loads(sys.stdin.readline())[:{count}]:
    print(json.dumps([key, "", None]), flush=True)
sys.exit(3)
"""


@contextmanager
def replica(count: int) -> Iterator[Replica]:
    command = [sys.executable, "-c", ANSWERS.format(count=count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Replica(number=1, process=process, requests=process.stdin, answers=process.stdout)


def questions(count: int) -> list[Question]:
    from vllm import SamplingParams, TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=[1, 2])
    return [Question(f"key-{number}", prompt, SamplingParams()) for number in range(count)]


@pytest.mark.vllm
def test_a_replica_that_ends_is_named_and_its_answers_are_kept() -> None:
    kept: list[bytes] = []
    with replica(2) as engine, pytest.raises(RuntimeError, match=r"^replica 1 .* ended, exit code 3$"):
        engine.ask(questions(3), kept.append)
    assert kept == [b'["key-0", "", null]\n', b'["key-1", "", null]\n']


@pytest.mark.parametrize(
    ("number", "arguments", "devices"),
    [
        (0, {}, ["a"]),
        (2, {}, ["c"]),
        (1, {"tensor_parallel_size": 2}, ["c", "d"]),
        (1, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, ["e", "f", "g", "h"]),
    ],
)
def test_each_replica_has_its_own_devices(number: int, arguments: dict[str, int], devices: list[str]) -> None:
    assert devices_of(number, list("abcdefgh"), arguments) == devices


def test_what_has_no_documents_to_share_is_refused() -> None:
    ran = vexport("load", "model", "--engine-arg", "data_parallel_size=2")
    assert ran.code == 2
    assert "replicas share the documents of an evaluation" in ran.stderr
