"""Files whose bytes have changed since they were written. Only digests can find this."""

import hashlib
import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from shutil import copytree

import pytest
import xxhash
from huggingface_hub._local_folder import write_download_metadata

from tests.command import findings, vexport
from tests.models import Good, errors, problems, quantize
from tests.mutations.edits import drop, put, spoiled
from vexport.checkpoint.index import read_index
from vexport.checks import CHECKS, check_checkpoint, shards
from vexport.checks.shards import VALUES
from vexport.records.gates import check_gates

DOWN = "model.layers.0.mlp.down_proj"


def flip_bits(folder: Path, parameter: str = "weight_packed") -> None:
    """Flip bits in the first 64 bytes of a tensor.

    The new values are as plausible as the old ones.
    """
    tensors = read_index(folder).tensors
    tensor = next(tensor for name, tensor in tensors.items() if name.endswith(parameter))
    with tensor.file.open("r+b") as file:
        file.seek(tensor.start)
        old = file.read(64)
        file.seek(tensor.start)
        file.write(bytes(byte ^ 0x11 for byte in old))


def digests_of(folder: Path) -> dict[str, str]:
    recorded: dict[str, str] = json.loads((folder / "vexport.json").read_text())["digests"]
    return recorded


def test_recorded_digests_cover_whole_files(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", "W4A16", "--max-shard-size", "100KB")
    weights = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(weights) > 2
    expected = {
        file.name: f"xxh3:{xxhash.xxh3_64_hexdigest(file.read_bytes())}" for file in weights
    }
    assert digests_of(tmp_path / "out") == expected


@pytest.mark.parametrize("listed", [None, "config.json", "model-00001"])
def test_weights_without_digest_are_not_judged(
    listed: str | None, llama: Path, tmp_path: Path
) -> None:
    """A weight file that has no digest may have a wrong scale. No other check would find it."""
    folder = tmp_path / "out"
    quantize(llama, folder, "W4A16", "--max-shard-size", "100KB")
    assert vexport("check", "--static", "--strict", folder).code == 0
    (folder / "vexport.json").unlink()
    options = ["--static", "--strict", "--format", "json"]
    if listed is not None:
        names = [file for file in folder.iterdir() if file.name.startswith(listed)]
        options += ["--digests", str(_sha256_list(names, tmp_path / "SHA256SUMS"))]
    ran = vexport("check", folder, *options)
    assert ran.code == 3
    ((entry,),) = (each["not_judged"] for each in json.loads(ran.stdout))
    assert entry["what"] == VALUES
    assert ("--source" in entry["why"], "--digests" in entry["why"]) == (True, True)
    every = _sha256_list(folder.glob("*.safetensors"), tmp_path / "SHA256SUMS")
    assert vexport("check", "--static", "--strict", folder, "--digests", every).code == 0


def test_source_judges_values(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    quantize(llama, folder, "NVFP4A16")
    (folder / "vexport.json").unlink()
    (entry,) = check_checkpoint(str(folder)).not_judged
    gates = check_gates(check_checkpoint(str(folder)), [*CHECKS])
    (gate,) = (each for each in gates if each.status == "SKIPPED")
    assert (gate.name, gate.status, gate.message) == (VALUES, "SKIPPED", entry.why)
    options = ("--static", "--strict", "--source")
    assert vexport("check", folder, *options, llama).code == 0
    partial = copytree(llama, tmp_path / "partial")
    drop(f"{DOWN}.weight")(partial)
    ran = vexport("check", folder, *options, partial)
    assert ran.code == 3
    assert f"1 layer could not be compared with the source: {DOWN}" in ran.stderr


def _sha256_list(files: Iterable[Path], out: Path) -> Path:
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    out.write_text("".join(lines))
    return out


def test_changed_bytes_are_found(good: Good, tmp_path: Path) -> None:
    folder = copytree(good("W4A16"), tmp_path / "out")
    assert problems(folder) == []
    flip_bits(folder)
    (finding,) = errors(folder)
    assert (finding.check, finding.where) == ("digests", str(folder / "model.safetensors"))
    ran = vexport("repair", folder, tmp_path / "repaired")
    assert ran.code == 1  # repair must not write a new digest for the wrong bytes
    assert not (tmp_path / "repaired").exists()


def test_large_files_need_option(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "MAX_BYTES", 1000)
    folder = copytree(good("W4A16"), tmp_path / "out")
    flip_bits(folder)
    assert problems(folder) == []
    (entry,) = check_checkpoint(str(folder)).not_judged
    assert (entry.what, "add --digests vexport.json" in entry.why) == (VALUES, True)
    assert vexport("check", folder).code == 0
    assert vexport("check", folder, "--strict").code == 3
    assert vexport("check", folder, "--digests", "vexport.json").code == 1
    assert vexport("check", good("W4A16"), "--digests", "vexport.json").code == 0


@pytest.mark.parametrize("option", ["--binary", "--tag"])
def test_sha256sum_list(option: str, llama: Path, tmp_path: Path) -> None:
    folder = copytree(llama, tmp_path / "other")
    (folder / "README.md").write_text("a model\n")
    names = sorted(file.name for file in folder.iterdir())
    wrote = subprocess.run(
        ["sha256sum", option, *names], cwd=folder, capture_output=True, check=True
    )
    listed = tmp_path / "SHA256SUMS"
    listed.write_bytes(wrote.stdout)
    assert vexport("check", folder, "--digests", listed).code == 0
    (folder / "README.md").unlink()
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    digests = [
        finding
        for finding in findings(folder, "--digests", listed)
        if finding["check"] == "digests"
    ]
    assert {Path(finding["where"]).name for finding in digests} == {"config.json", "README.md"}
    assert not any("hub" in finding["got"] for finding in digests)


@pytest.mark.parametrize("line", ["/etc/passwd", "no digest", "sub/../../config.json", None])
def test_unusable_digest_list_is_bad_input(line: str | None, llama: Path, tmp_path: Path) -> None:
    listed = tmp_path / "SHA256SUMS"
    if line is not None:
        digest = hashlib.sha256(b"").hexdigest()
        listed.write_text(f"{digest}  {line}\n" if "/" in line else f"{line}\n")
    ran = vexport("check", llama, "--digests", listed)
    assert ran.code == 2
    assert str(listed) in ran.stderr
    assert vexport("check", llama, "--digests", "vexport.json").code == 2


def test_repair_updates_digests(good: Good, tmp_path: Path) -> None:
    wrong = put(f"{DOWN}.weight_global_scale", lambda scale: 1 / scale)
    folder = spoiled(good("NVFP4A16"), tmp_path / "out", wrong)
    assert vexport("repair", folder, tmp_path / "repaired").code == 0
    written = (tmp_path / "repaired" / "model.safetensors").read_bytes()
    assert digests_of(tmp_path / "repaired") == {
        "model.safetensors": f"xxh3:{xxhash.xxh3_64_hexdigest(written)}"
    }
    assert problems(tmp_path / "repaired") == []


def test_layer_with_far_larger_scales_is_warning(good: Good, tmp_path: Path) -> None:
    """Without digests, a factor on all scales of a layer shows only beside the other layers."""
    folder = copytree(good("W4A16"), tmp_path / "out")
    scales = [name for name in read_index(folder).tensors if name.endswith("up_proj.weight_scale")]
    assert len(scales) >= 3
    put(scales[1], lambda scale: scale * 8)(folder)
    (digest,) = errors(folder)
    assert digest.check == "digests"
    (folder / "vexport.json").unlink()
    (found,) = (each for each in findings(folder) if each["check"] == "values")
    assert (found["severity"], found["where"]) == ("warning", scales[1])
    assert found["rule"] == "values/unusual-weights"


def _hub_name(data: bytes, name: str) -> str:
    if name.endswith(".safetensors"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def cached(source: Path, cache: Path) -> Path:
    """Copy a checkpoint to a cache folder in the layout of huggingface_hub."""
    root = cache / "models--org--model" / "snapshots" / ("0" * 40)
    blobs = root.parents[1] / "blobs"
    root.mkdir(parents=True)
    blobs.mkdir()
    for file in source.iterdir():
        data = file.read_bytes()
        blob = blobs / _hub_name(data, file.name)
        blob.write_bytes(data)
        (root / file.name).symlink_to(Path("../../blobs") / blob.name)
    return root


def local_dir(source: Path, folder: Path) -> Path:
    """Copy a checkpoint to a folder as `hf download --local-dir` does."""
    copytree(source, folder)
    for file in source.iterdir():
        etag = _hub_name(file.read_bytes(), file.name)
        write_download_metadata(folder, file.name, "0" * 40, etag)
    return folder


def hub_rules(folder: Path) -> dict[str, str]:
    found = findings(folder, "--static", "--hub-digests")
    return {str(each["rule"]): str(each["where"]) for each in found if each["check"] == "digests"}


@pytest.mark.parametrize("download", [cached, local_dir])
def test_hub_digests(download: Callable[[Path, Path], Path], llama: Path, tmp_path: Path) -> None:
    folder = download(llama, tmp_path / "hub")
    options = ("--static", "--hub-digests", "--strict")
    assert vexport("check", folder, *options).code == 0
    assert hub_rules(folder) == {}
    (folder / "mine.txt").write_text("added\n")
    assert hub_rules(folder) == {"digests/not-verified": "mine.txt"}
    flip_bits(folder, "norm.weight")
    assert vexport("check", folder, llama, *options[:2]).code == 2  # llama is no download
    assert vexport("check", folder, *options[:2]).code == 1
    found = hub_rules(folder)
    assert found["digests/other-than-hub"] == str(folder / "model.safetensors")


def test_changed_small_file_differs_from_hub(llama: Path, tmp_path: Path) -> None:
    folder = local_dir(llama, tmp_path / "out")
    with (folder / "config.json").open("a") as file:
        file.write("\n")
    assert hub_rules(folder) == {"digests/other-than-hub": str(folder / "config.json")}


def test_missing_blob(llama: Path, tmp_path: Path) -> None:
    folder = cached(llama, tmp_path)
    (folder / "notes.md").symlink_to("../../blobs/" + "a" * 40)
    assert hub_rules(folder) == {"digests/missing-file": str(folder / "notes.md")}


def test_deleted_file_of_a_download(llama: Path, tmp_path: Path) -> None:
    folder = local_dir(llama, tmp_path / "out")
    write_download_metadata(folder, "code/model.py", "0" * 40, "a" * 40)
    assert hub_rules(folder) == {"digests/missing-file": str(folder / "code" / "model.py")}


@pytest.mark.parametrize("etag", ['W/"0123"', "a" * 39, ""])
def test_etag_without_digest_is_not_verified(etag: str, llama: Path, tmp_path: Path) -> None:
    folder = local_dir(llama, tmp_path / "out")
    write_download_metadata(folder, "config.json", "0" * 40, etag)
    assert hub_rules(folder) == {"digests/not-verified": "config.json"}


def test_folder_without_hub_digests_is_bad_input(llama: Path) -> None:
    ran = vexport("check", llama, "--static", "--hub-digests")
    assert (ran.code, "hf download" in ran.stderr) == (2, True)
