"""Checkpoints in object storage: the same answers and bytes as from a folder, and faults in words."""

import json
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import Ran, vexport
from tests.models import quantize, save_llama, write_calibration
from vexport.checkpoint.remote import storage
from vexport.files import digest_file

pytest.importorskip("moto", reason="needs moto and s3fs, which scripts/setup installs")
pytest.importorskip("s3fs")
from tests.checkpoint.s3 import Refused, Server, faithful, s3_server  # noqa: E402

# Blocks of fewer bytes, so that small models come in several requests.
SMALL = 1 << 15


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with pytest.MonkeyPatch.context() as patches:
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patches.setenv(key, "test")
        with s3_server() as server:
            patches.setenv("AWS_ENDPOINT_URL", server.url)
            yield server


@pytest.fixture
def s3(running: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server without faults, a cache of its own, and requests that are soon made again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(storage, "WAITS", (0.0, 0.0))
    monkeypatch.setattr("vexport.checkpoint.remote.ranges.REQUEST_BYTES", SMALL)
    monkeypatch.setattr("vexport.checkpoint.remote.ranges.BLOCK_BYTES", SMALL)
    running.fault = faithful
    running.sent.clear()
    return running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("s3") / "model", num_hidden_layers=2, intermediate_size=512)


def digests(folder: Path) -> dict[str, str]:
    own = ("recipe.yaml", "vexport.json")  # which name the source
    return {file.name: digest_file(file) for file in folder.iterdir() if file.name not in own}


def remote_quantize(url: str, out: Path) -> Ran:
    return vexport("quantize", url, out, "--scheme", "NVFP4A16", "--max-shard-size", "500KB", "--quiet")


def test_a_plan_reads_headers_alone(s3: Server, model: Path) -> None:
    url = s3.put(model, "planned")
    far, near = (
        vexport("plan", name, "--scheme", "W4A16", "--format", "json", "--quiet") for name in (url, model)
    )
    assert far.code == 0, far.stderr
    plans = [json.loads(ran.stdout) for ran in (far, near)]
    assert plans[0].pop("source") == url
    assert plans[1].pop("source") == str(model)
    assert {**plans[0], "outlook": None} == {**plans[1], "outlook": None}
    sent = s3.sent["/models/planned/model.safetensors"]
    assert 0 < sent <= 100_000 < (model / "model.safetensors").stat().st_size


def test_quantize_and_check_from_storage(s3: Server, model: Path, tmp_path: Path) -> None:
    """The bytes and findings of a folder; the weights are fetched once, and nothing of them is left."""
    url = s3.put(model, "whole")
    ran = remote_quantize(url, tmp_path / "far")
    assert ran.code == 0, ran.stderr
    near = quantize(model, tmp_path / "near", "NVFP4A16", "--max-shard-size", "500KB")
    assert digests(tmp_path / "far") == digests(near)
    size = (model / "model.safetensors").stat().st_size
    assert s3.sent["/models/whole/model.safetensors"] < 1.3 * size
    kept = tmp_path / "cache" / "vexport" / "remote" / "s3" / "models" / "whole" / "model.safetensors"
    assert kept.stat().st_size == size
    assert kept.stat().st_blocks * 512 < size / 4
    made = s3.put(near, "made")
    calls = [("check", made, "--source", url), ("check", near, "--source", model)]
    reports = [vexport(*call, "--format", "json", "--quiet") for call in calls]
    assert [ran.code for ran in reports] == [0, 0], reports[0].stderr
    texts = [ran.stdout.replace(str(name), "NAME") for ran, name in zip(reports, (made, near), strict=True)]
    assert len(json.loads(texts[0])[0]["findings"]) == len(json.loads(texts[1])[0]["findings"])


def test_calibration_reads_from_storage(s3: Server, model: Path, tmp_path: Path) -> None:
    """Layer by layer, and the weights a second time to be rounded."""
    text = write_calibration(tmp_path / "text.jsonl", rows=4)
    options = ("--scheme", "NVFP4", "--rounding", "gptq", "--calibration", text, "--device", "cpu", "--quiet")
    ran = vexport("quantize", s3.put(model, "seen"), tmp_path / "far", *options)
    assert ran.code == 0, ran.stderr
    near = vexport("quantize", model, tmp_path / "near", *options)
    assert near.code == 0, near.stderr
    assert digests(tmp_path / "far") == digests(tmp_path / "near")


def test_cuts_and_short_answers_are_asked_again(s3: Server, model: Path, tmp_path: Path) -> None:
    """Every third answer ends in the middle."""
    url, asked = s3.put(model, "cut"), list[str]()

    def cut(path: str, wanted: str, body: bytes) -> bytes:
        asked.append(path)
        return body[: len(body) // 2] if path.endswith(".safetensors") and len(asked) % 3 == 0 else body

    s3.fault = cut
    ran = remote_quantize(url, tmp_path / "far")
    assert ran.code == 0, ran.stderr
    assert digests(tmp_path / "far") == digests(
        quantize(model, tmp_path / "near", "NVFP4A16", "--max-shard-size", "500KB")
    )


def test_a_connection_that_stays_away_is_resumed(s3: Server, model: Path, tmp_path: Path) -> None:
    url, served = s3.put(model, "away"), list[str]()

    def gone(path: str, wanted: str, body: bytes) -> bytes:
        served.append(path)
        return body[:1] if path.endswith(".safetensors") and len(served) > 30 else body

    s3.fault = gone
    ran = remote_quantize(url, tmp_path / "out")
    assert ran.code == 4
    (line,) = ran.errors
    assert f"{url}/model.safetensors: got " in line
    assert "run the same command again" in line
    s3.fault = faithful
    ran = remote_quantize(url, tmp_path / "out")
    assert ran.code == 0, ran.stderr
    near = quantize(model, tmp_path / "near", "NVFP4A16", "--max-shard-size", "500KB")
    assert digests(tmp_path / "out") == digests(near)


def test_an_object_that_is_replaced_ends_the_work(s3: Server, model: Path, tmp_path: Path) -> None:
    """Of the same size, after its header was read."""
    url, other = s3.put(model, "replaced"), tmp_path / "other"
    shutil.copytree(model, other)
    with (other / "model.safetensors").open("r+b") as stream:
        stream.seek(-100, 2)
        stream.write(b"\x01\x02")

    def replace(path: str, wanted: str, body: bytes) -> bytes:
        if path.endswith(".safetensors") and not wanted.startswith("bytes=0-"):
            s3.fault = faithful
            s3.put(other, "replaced")
        return body

    s3.fault = replace
    ran = remote_quantize(url, tmp_path / "out")
    assert ran.code == 2
    (line,) = ran.errors
    assert f"{url}/model.safetensors: got another object than when its header was read" in line
    assert not (tmp_path / "out").exists()
    assert vexport("plan", url, "--scheme", "W4A16", "--quiet").code == 0


def test_what_is_missing_or_refused(s3: Server, model: Path, tmp_path: Path) -> None:
    url = s3.put(model, "refused")
    for name in ("s3://models/nothing", "s3://nowhere/model"):
        ran = vexport("check", name, "--quiet")
        assert ran.code == 2, ran.stderr
        assert f"{name}: got no such object" in ran.errors[0]

    def refuse(path: str, wanted: str, body: bytes) -> bytes:
        raise Refused

    s3.fault = refuse
    ran = vexport("plan", url, "--scheme", "W4A16", "--quiet")
    assert ran.code == 2
    assert f"{url}: got no access" in ran.errors[0]
    s3.fault = faithful
    sharded = quantize(
        model, tmp_path / "sharded", "W4A16", "--group-size", "32", "--max-shard-size", "300KB"
    )
    next(iter(sorted(sharded.glob("*.safetensors")))).unlink()
    ran = vexport("check", s3.put(sharded, "sharded"), "--quiet")
    assert ran.code == 2
    assert "model-00001-of-" in ran.errors[0]
    assert "no such object" in ran.errors[0]
    for command in (("load", url), ("plan", "nothing://models/x", "--scheme", "W4A16")):
        assert vexport(*command, "--quiet").code in (2, 4)


@pytest.mark.parametrize("url", ["zip://model", "zip://model::FILE", "tar://model::FILE", "github://a/b"])
def test_a_url_that_names_no_folder_is_wrong_and_not_tried_again(url: str, tmp_path: Path) -> None:
    """A folder or a text where an archive is needed, and nothing of what the protocol asks for."""
    (tmp_path / "text").write_text("no archive")
    wrong = url.replace("FILE", str(tmp_path / "text"))
    begun = time.monotonic()
    ran = vexport("check", wrong, "--quiet")
    assert (ran.code, len(ran.errors)) == (2, 1), ran.stderr
    assert ran.errors[0].startswith(f"error: {wrong}: got ")
    assert time.monotonic() - begun < storage.WAITS[-1]


def test_an_answer_that_never_comes_ends_in_time(
    s3: Server, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = s3.put(model, "slow")
    monkeypatch.setattr(storage, "REQUEST_SECONDS", 1.0)

    def sleep(path: str, wanted: str, body: bytes) -> bytes:
        time.sleep(3)
        return body

    s3.fault = sleep
    since = time.monotonic()
    ran = vexport("plan", url, "--scheme", "W4A16", "--quiet")
    assert time.monotonic() - since < 30
    assert ran.code == 4
    assert "no answer within 1 s" in ran.errors[0]
