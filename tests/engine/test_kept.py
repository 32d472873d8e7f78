"""What a session was told before its tasks is kept for the one that continues it, and for no other."""

from dataclasses import replace
from pathlib import Path

import pytest

from vexport.engine.kept import FILE, KeptParts
from vexport.engine.messages import SessionRequest, SessionResult
from vexport.types import Canary

CANARY = Canary(prompt="a", text="b", tokens=3, finish_reason="length", ended_after=None, non_finite=0)


@pytest.fixture
def request_(tmp_path: Path) -> SessionRequest:
    file = tmp_path / "logprobs.safetensors"
    return SessionRequest(
        checkpoint=tmp_path,
        name="a",
        identity="x",
        canaries=("a",),
        logprob_prompts=((1, 2),),
        logprobs_file=file,
    )


def test_answers_and_whole_files_are_kept(request_: SessionRequest) -> None:
    result = SessionResult(name="a", checkpoint=request_.checkpoint, platform="cpu")
    file = request_.logprobs_file
    assert file is not None
    first = KeptParts(request_, result)
    assert not first.canaries
    first.keep({"canaries": 1.5}, canaries=(CANARY,))
    second = KeptParts(request_, result)
    assert second.canaries == (CANARY,)
    assert not second.has(file), "it was interrupted before they were written"
    file.write_bytes(b"1")
    assert not second.has(file)
    second.keep({"logprobs": 2.0}, file=file)
    third = KeptParts(request_, result)
    assert third.has(file)
    assert third.seconds == {"canaries": 1.5, "logprobs": 2.0}
    file.unlink()
    assert not third.has(file)


@pytest.mark.parametrize(
    "change", [{"identity": "y"}, {"canaries": ("b",)}, {"logprob_prompts": ((1, 3),)}, {"text": ((1, 2),)}]
)
def test_another_session_is_told_everything_again(request_: SessionRequest, change: dict[str, str]) -> None:
    result = SessionResult(name="a", checkpoint=request_.checkpoint, platform="cpu")
    KeptParts(request_, result).keep({"canaries": 1.0}, canaries=(CANARY,))
    assert not KeptParts(replace(request_, **change), result).canaries  # type: ignore[arg-type]


def test_nothing_is_kept_without_an_identity(request_: SessionRequest) -> None:
    result = SessionResult(name="a", checkpoint=request_.checkpoint, platform="cpu")
    kept = KeptParts(replace(request_, identity=None), result)
    kept.keep({"canaries": 1.0}, canaries=(CANARY,))
    assert kept.canaries == (CANARY,)
    assert not (request_.checkpoint / FILE).exists()
