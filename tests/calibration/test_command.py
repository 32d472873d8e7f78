"""Settings of calibration on the command line and in scenarios."""

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.calibration.models import expert_configs, samples, save
from tests.command import ROOT, vexport
from tests.texts import assert_contains, assert_raises
from vexport.calibration import Samples, read_samples
from vexport.calibration.sources import shuffled
from vexport.checkpoint.source import DEFAULT_FILE, parse_data
from vexport.errors import EnvironmentFault, InputError
from vexport.records import CalibrationData
from vexport.scenario import Calibration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a mixture of experts, and samples that reach all experts."""
    root = tmp_path_factory.mktemp("command")
    rows = [json.dumps({"input_ids": ids}) for ids in samples((30, 41, 35)).token_ids]
    (root / "samples.jsonl").write_text("\n".join(rows))
    save(expert_configs()["qwen3_moe"], root / "model")
    return root


def input_scales(folder: Path, out: Path, *options: str) -> tuple[str, dict[str, float]]:
    command = ("quantize", folder / "model", out, "--scheme", "FP8", "--quiet")
    ran = vexport(*command, "--calibration", folder / "samples.jsonl", *options)
    assert ran.code == 0, ran.stderr
    tensors = load_file(out / "model.safetensors")
    return ran.stdout, {
        name: float(value) for name, value in tensors.items() if name.endswith("input_scale")
    }


def test_experts_with_routed_tokens(folder: Path, tmp_path: Path) -> None:
    """With routed tokens alone, ranges are at most the ranges with all tokens.

    The output shows how many tokens reached the experts.
    """
    answer, every = input_scales(folder, tmp_path / "all")
    _, routed = input_scales(
        folder, tmp_path / "routed", "--no-calibrate-all-experts", "--device", "cpu"
    )
    assert every.keys() == routed.keys()
    experts = {name for name in every if ".experts." in name}
    assert len(experts) == 2 * 8 * 3
    assert all(routed[name] <= every[name] for name in experts)
    assert any(routed[name] < every[name] for name in experts)
    assert all(routed[name] == every[name] for name in every.keys() - experts)
    assert answer.startswith(f"{tmp_path / 'all'}: FP8: ")
    (reached,) = re.findall(r"^ *experts +(16 .*)$", answer, re.MULTILINE)
    assert_contains(reached, "16 experts", "2 layers")
    assert re.search(r" [1-9]\d* to \d+ .*\bmedian \d+$", reached)


def test_unreached_experts_and_unknown_device(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text(json.dumps({"input_ids": [5]}))
    command = ("quantize", folder / "model", tmp_path / "out", "--scheme", "FP8", "--quiet")
    ran = vexport(*command, "--calibration", tmp_path / "few.jsonl")
    assert ran.code == 0, ran.stderr
    assert_contains(ran.stdout, "16 experts", "2 layers", "0 to 1", "median 0")
    assert_contains(ran.stdout, "12 experts", "model.layers.0.mlp.experts")
    command = ("quantize", folder / "model", tmp_path / "other", "--scheme", "FP8", "--quiet")
    ran = vexport(*command, "--calibration", folder / "samples.jsonl", "--device", "gpu")
    assert ran.code == 2
    assert_contains(ran.errors[0], "device 'gpu'", "cpu", "cuda:0")
    assert not (tmp_path / "other").exists()


DEMO = Path(__file__).parents[2] / "scenarios" / "demo" / "model"
VOCABULARY = 384
TURNS = [{"role": "user", "content": "one plus two"}, {"role": "assistant", "content": "three"}]
SHARED = [{"from": "human", "value": "one plus two"}, {"from": "gpt", "value": "three"}]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def read(name: object, model: Path = DEMO, **settings: object) -> Samples:
    values = {"data": name, "samples": 8, "seq_len": 16, **settings}
    source = Calibration.model_validate(values).sources()
    return read_samples(source, model, vocab_size=VOCABULARY)


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def test_conversation_formats_give_same_ids(chat: Path, tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl",
        {"messages": TURNS},
        {"conversations": SHARED},
        {"prompt": "one plus two", "completion": "three"},
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
    )
    samples = read(rows, chat, seq_len=99)
    assert len(set(samples.token_ids)) == 1
    assert len(samples.token_ids) == 4
    plain = write_rows(tmp_path / "text.jsonl", {"text": "user: one plus two\nassistant: three\n"})
    assert read(plain, chat, seq_len=99).token_ids[0][1:] == samples.token_ids[0]
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps([{"conversations": SHARED}]))
    assert read(listed, chat, seq_len=99).token_ids == samples.token_ids[:1]


def test_prompt_and_completion_are_joined(tmp_path: Path) -> None:
    pair = write_rows(tmp_path / "pair.jsonl", {"prompt": "one plus ", "completion": "two"})
    text = write_rows(tmp_path / "text.jsonl", {"text": "one plus two"})
    assert read(pair).token_ids == read(text).token_ids


def test_missing_chat_template_is_no_fault_of_a_row(tmp_path: Path) -> None:
    """`plan` and `quantize` print the same error."""
    model = ROOT / "scenarios" / "demo" / "model"
    turns = write_rows(tmp_path / "turns.jsonl", {"messages": TURNS}, {"messages": TURNS})
    options = ("--scheme", "W4A16", "--group-size", 64, "--calibration", turns)
    planned = vexport("plan", model, *options, "--quiet")
    made = vexport("quantize", model, tmp_path / "out", *options, "--quiet")
    assert (planned.code, made.code) == (2, 2)
    assert planned.stderr == made.stderr
    assert_contains(made.stderr, f"error: {model}:", "without a chat template", "FILE:COLUMN")
    assert "row 1" not in made.stderr
    assert len(made.stderr.splitlines()) == 1


def test_parquet_text_and_folders(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"body": ["one plus two", "three"], "other": [1, 2]})
    parquet.write_table(table, tmp_path / "b.parquet")
    rows = write_rows(tmp_path / "a.jsonl", {"body": "one plus two"}, {"body": "three"})
    from_lines, from_parquet = (
        read(path, column="body") for path in (rows, tmp_path / "b.parquet")
    )
    assert from_lines.token_ids == from_parquet.token_ids
    both = read(tmp_path, column="body")
    assert both.token_ids == from_lines.token_ids * 2
    assert both.rows == (1, 2, 3, 4)
    with assert_raises(InputError, "no column text", "body, other"):
        read(tmp_path / "b.parquet", column="text")


def test_text_is_packed_by_default(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(f"paragraph {number} of the book" for number in range(60)))
    packed = read(path)
    assert {len(ids) for ids in packed.token_ids} == {16}
    assert len(packed.token_ids) == 8
    alone = read(path, pack=False, seq_len=99)
    assert len(set(map(len, alone.token_ids))) <= 2
    assert packed.token_ids[0][: len(alone.token_ids[0])] == alone.token_ids[0]
    assert packed.token_ids[0].count(alone.token_ids[0][0]) == 1  # the BOS token
    folder = tmp_path / "books"
    folder.mkdir()
    path.rename(folder / path.name)
    assert read(folder).token_ids == packed.token_ids
    rows = write_rows(tmp_path / "rows.jsonl", *({"input_ids": [3, 4, 5]} for _ in range(20)))
    joined = read(rows, pack=True, samples=3, seq_len=8)
    assert joined.token_ids == (
        (3, 4, 5, 3, 4, 5, 3, 4),
        (5, 3, 4, 5, 3, 4, 5, 3),
        (4, 5, 3, 4, 5, 3, 4, 5),
    )
    assert joined.rows == (1, 3, 6)


def test_seed_chooses_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl", *({"input_ids": [number]} for number in range(3, 200))
    )
    first, again, other = (read(rows, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.rows != other.rows
    assert read(rows).rows == tuple(range(1, 9))
    monkeypatch.setattr("vexport.calibration.sources.SHUFFLE_BUFFER", 7)
    assert sorted(shuffled(range(50), 3)) == list(range(50))


def test_unneeded_rows_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as stream:
        stream.write(json.dumps({"text": "a " * 5_000_000}) + "\n")
        stream.write('{"text": "b"}\n' * 3)
        stream.write("this row is broken, and nobody asked for it\n")
    samples = read(path, samples=4)
    assert [len(ids) for ids in samples.token_ids][0] == 16
    with pytest.raises(InputError, match=r"rows.jsonl: line 5: got invalid JSON, column 1"):
        read(path, samples=5)


@pytest.mark.parametrize(
    "template",
    ["{{ 1/0 }}", "{% if %}", "{{ raise_exception('no\x1b[2J') }}", "{{ messages.x.y }}"],
)
def test_error_in_chat_template_names_row(tmp_path: Path, template: str) -> None:
    shutil.copytree(DEMO, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    with pytest.raises(InputError, match="the chat template refuses") as caught:
        read(write_rows(tmp_path / "rows.jsonl", {"messages": TURNS}), tmp_path / "model")
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("content", ["[1]", "[" * 50_000, '{"tokenizer_class": 5}'])
def test_unreadable_tokenizer_names_folder(tmp_path: Path, content: str) -> None:
    shutil.copytree(DEMO, tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text(content)
    with pytest.raises(InputError, match="no usable tokenizer"):
        read(write_rows(tmp_path / "rows.jsonl", {"text": "a"}), tmp_path / "model")


def test_kinds_of_data_names(tmp_path: Path) -> None:
    hub = parse_data("HuggingFaceH4/ultrachat_200k@abc:train_sft:messages")
    assert (hub.split, hub.column) == ("train_sft", "messages")
    assert str(hub.hub) == "HuggingFaceH4/ultrachat_200k@abc"
    assert hub.kind == "hub"
    assert parse_data("default").kind == "default"
    assert parse_data(str(tmp_path)).kind == "path"
    assert parse_data("missing/rows.jsonl").kind == "path"
    assert parse_data("ultrachat").kind == "path"


def test_default_text_is_noted(llama: Path, tmp_path: Path) -> None:
    assert 50_000 < DEFAULT_FILE.stat().st_size < 300_000
    shutil.copytree(DEMO, tmp_path / "model")
    ran = vexport(
        "quantize", tmp_path / "model", tmp_path / "out", "--scheme", "NVFP4", "--samples", "2"
    )
    assert ran.code == 0, ran.stderr
    (note,) = [line for line in ran.stderr.splitlines() if line.startswith("note: calibrating")]
    assert_contains(note, "ships with vexport", "NVFP4A16 needs no text")
    (calibrated,) = re.findall(r"^ *calibrated +(.*)$", ran.stdout, re.MULTILINE)
    assert_contains(calibrated, "2 samples", "default", "sha256")
    recipe = json.loads((tmp_path / "out" / "vexport.json").read_text())
    assert recipe["scenario"]["calibration"]["data"] == "default"


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_dataset_is_read_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    data = CalibrationData(name="org/chats", samples=2, seq_len=3)
    with assert_raises(EnvironmentFault, "dataset org/chats", "`hf download`"):
        read_samples(data, DEMO, vocab_size=VOCABULARY)
    repository = tmp_path / "datasets--org--chats"
    snapshot = repository / "snapshots" / ("a" * 40)
    for path, text in (
        (snapshot / "train.jsonl", '{"input_ids": [3, 4, 5]}\n' * 4),
        (repository / "refs/main", "a" * 40),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert read_samples(data, DEMO, vocab_size=VOCABULARY).token_ids == ((3, 4, 5),) * 2
