"""Data sets as folders, tables and several texts at once."""

import gzip
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import datasets
import pyarrow  # type: ignore[import-untyped]
import pytest
import yaml

from tests.command import vexport
from tests.texts import assert_contains, assert_raises
from vexport.calibration import Samples, read_samples
from vexport.calibration.folders import read_folder
from vexport.errors import InputError
from vexport.run.directory import data_digest
from vexport.scenario import Calibration

DEMO = Path(__file__).parents[2] / "scenarios" / "demo" / "model"
ROWS = [{"text": f"{number} 4 + 5 1 = 5"} for number in range(10, 22)]


def read(data: object, **settings: object) -> Samples:
    values = {"data": data, "samples": 50, "seq_len": 64, **settings}
    sources = Calibration.model_validate(values).sources()
    return read_samples(sources, DEMO, vocab_size=384)


def write_lines(path: Path, rows: Sequence[object] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def compress(path: Path, data: bytes) -> Path:
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.CompressedOutputStream(file, "zstd") as z:
        z.write(data)
    return path


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "lines.jsonl")


# Files beside the data, with their contents.
BESIDE = {
    "CHANGELOG.md": "# Changes\n\nMany.",
    "docs/format.txt": "How rows look.",
    "licence.txt": "You may.",
    "metadata.json": json.dumps({"@context": {}, "distribution": [{"@type": "File", "name": "a"}]}),
    "dataset_infos.json": json.dumps({"default": {"features": {"text": {}}}}),
    "stats.json": json.dumps({"rows": 12, "words": [1, 2]}, indent=2),
    ".cache/huggingface/part.jsonl": json.dumps({"text": "hidden"}),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".json"])
def test_documents_of_a_folder_are_no_data(tmp_path: Path, lines: Path, suffix: str) -> None:
    folder = tmp_path / "set"
    for name, text in BESIDE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    data = datasets.Dataset.from_list(ROWS)
    if suffix == ".parquet":
        data.to_parquet(folder / "rows.parquet")
    elif suffix == ".json":
        (folder / "rows.json").write_text(json.dumps(ROWS))
        (folder / "one.json").write_text(json.dumps({"text": "a single row"}))
    else:
        write_lines(folder / "rows.jsonl")
    samples = read(str(folder))
    one = read(str(lines))
    assert samples.token_ids[-len(one.token_ids) :] == one.token_ids
    assert len(samples.rows) == len(one.rows) + (suffix == ".json")
    assert_contains(samples.notes[0], "6 files not read as data", "CHANGELOG.md")


def test_folder_of_prose_is_read(tmp_path: Path) -> None:
    """A folder with prose alone is a text, without its card and licence."""
    for name in ("a.txt", "b.md", "README.md", "LICENSE-2.0.txt"):
        (tmp_path / name).write_text(f"{name} 4 + 5")
    assert [path.name for path in read_folder(tmp_path, None).files] == ["a.txt", "b.md"]
    for name in ("a.txt", "b.md"):
        (tmp_path / name).unlink()
    assert len(read_folder(tmp_path, None).files) == 2


METADATA: Mapping[str, str] = {
    "index.json": json.dumps({"books": {"a.txt": 1851}, "order": ["a.txt"]}, indent=2),
    "counts.jsonl": '{"words": 3}\n{"words": 5}\n',
    "years.tsv": "book\tyear\na\t1851\n",
    "names.json": '["Ishmael", "Ahab"]',
    "numbers.json": "[1, 2]",
    "empty.jsonl": "",
}


@pytest.mark.parametrize("name", METADATA)
def test_files_without_text_are_no_data(tmp_path: Path, name: str) -> None:
    """Files whose first row cannot become text are not read beside prose or rows."""
    (tmp_path / "a.txt").write_text("4 + 5")
    (tmp_path / name).write_text(METADATA[name])
    found = read_folder(tmp_path, None)
    assert ([*found.files], [*found.others]) == ([tmp_path / "a.txt"], [tmp_path / name])
    write_lines(tmp_path / "rows.jsonl")
    assert read_folder(tmp_path, None).files == (tmp_path / "rows.jsonl",)


def test_named_column_is_no_metadata(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("4 + 5")
    (tmp_path / "rows.jsonl").write_text('{"body": "1 + 2"}\n')
    (tmp_path / "more.json").write_text('{"rows": [{"text": "4"')
    assert [path.name for path in read_folder(tmp_path, None, "body").files] == [
        "more.json",
        "rows.jsonl",
    ]


def test_metadata_alone_is_an_error(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": 3}))
    with assert_raises(InputError, "a.json", "the keys rows"):
        read(str(tmp_path))


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (["train-00000-of-00001", "test-00000-of-00001"], None, ["train-00000-of-00001"]),
        (["data/validation/a", "data/training/b", "extra"], None, ["data/training/b", "extra"]),
        (["test_sft", "train_sft"], None, ["train_sft"]),
        (["test_sft", "train_sft"], "test_sft", ["test_sft"]),
        (["eval", "dev"], None, ["dev", "eval"]),
        (["eval", "train"], "test", ["eval"]),
        (["latest", "constraints"], None, ["constraints", "latest"]),
    ],
)
def test_split_of_a_folder(
    tmp_path: Path, names: list[str], split: str | None, expected: list[str]
) -> None:
    for name in names:
        write_lines(tmp_path / f"{name}.jsonl")
    files = read_folder(tmp_path, split).files
    assert [path.relative_to(tmp_path).with_suffix("").as_posix() for path in files] == expected
    with assert_raises(InputError, "no file of the split unknown"):
        read_folder(tmp_path, "unknown")


def test_tables_and_arrow(tmp_path: Path, lines: Path) -> None:
    """All formats give the same tokens, and `datasets` copies nothing to its cache."""
    expected = read(str(lines)).token_ids
    folder = tmp_path / "with [brackets]"
    folder.mkdir()
    data = datasets.Dataset.from_list(ROWS)
    data.to_csv(folder / "rows.csv")
    data.to_csv(folder / "rows.tsv", sep="\t")
    data.save_to_disk(folder / "saved")
    datasets.DatasetDict({"test": data.select([0]), "train": data}).save_to_disk(folder / "both")
    table = data.data.table
    with (
        pyarrow.OSFile(str(folder / "file.arrow"), "wb") as file,
        pyarrow.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
    stored = next((folder / "saved").glob("*.arrow"))
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    before = set(cache.rglob("*.arrow"))
    for name in ("rows.csv", "rows.tsv", "saved", "both", "file.arrow", stored):
        assert read(str(folder / name)).token_ids == expected, name
    assert set(cache.rglob("*.arrow")) == before
    assert len(read(str(folder / "both"), split="test").rows) == 1
    with assert_raises(InputError, "both", "no split other", "test, train"):
        read(str(folder / "both"), split="other")


def test_values_of_a_table_are_text(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text('question,answer\n007,NA\n"a, b",3.50\n')
    samples = read(str(path))
    rows = [{"question": "007", "answer": "NA"}, {"question": "a, b", "answer": "3.50"}]
    assert samples.token_ids == read(str(write_lines(tmp_path / "p.jsonl", rows))).token_ids
    packed = tmp_path / "pairs.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read(str(packed)).token_ids == samples.token_ids


@pytest.mark.parametrize("row", ["a,b,c", '"a'])
def test_broken_table_is_refused(tmp_path: Path, row: str) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text(f"question,answer\na,b\n{row}\n")
    with pytest.raises(InputError) as caught:
        read(str(path))
    assert (caught.value.rule, caught.value.facts["suffix"]) == ("calibration/table", ".csv")


@pytest.mark.parametrize(
    "name", ["../saved/data-00000-of-00001.arrow", "/etc/passwd", "a/../../b.arrow", "", None, 3]
)
def test_saved_files_stay_inside(tmp_path: Path, name: object) -> None:
    data = datasets.Dataset.from_list(ROWS)
    for folder in ("saved", "other"):
        data.save_to_disk(tmp_path / folder)
    state = tmp_path / "other" / "state.json"
    state.write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with assert_raises(InputError, "other/state.json", "not in its folder"):
        read(str(tmp_path / "other"))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": [name or ".."]}))
    with assert_raises(InputError, "dataset_dict.json"):
        read(str(tmp_path))


def test_zstd_is_bounded(tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = lines.read_bytes()
    expected = read(str(lines)).token_ids
    assert read(str(compress(tmp_path / "a.jsonl.zst", data))).token_ids == expected
    assert read(str(compress(tmp_path / "a.zst", data))).token_ids == expected
    compress(tmp_path / "two.jsonl.zst", data)
    with (tmp_path / "two.jsonl.zst").open("ab") as file:
        file.write((tmp_path / "a.zst").read_bytes())
    assert read(str(tmp_path / "two.jsonl.zst")).token_ids == expected * 2
    text = compress(tmp_path / "a.txt.zst", b"4 + 5\n\n1 = 5\n")
    assert len(read(str(text)).rows) == 1
    monkeypatch.setattr("vexport.calibration.file_rows.FREE_EXPANSION", 1 << 20)
    for name, part in (("blank", b"\n"), ("line", b" "), ("rows", data)):
        bomb = compress(tmp_path / f"{name}.jsonl.zst", part * ((1 << 23) // len(part)))
        with assert_raises(InputError, bomb.name, "expands to more than 100 times"):
            read(str(bomb), samples=10**6)
    cut = tmp_path / "cut.jsonl.zst"
    cut.write_bytes((tmp_path / "a.zst").read_bytes()[:-9])
    with assert_raises(InputError, "cut.jsonl.zst", "Truncated"):
        read(str(cut))
    whole = gzip.compress(data)
    for number, broken in enumerate((whole[:-9], whole[:30] + bytes(20) + whole[50:])):
        path = tmp_path / f"{number}.jsonl.gz"
        path.write_bytes(broken)
        with assert_raises(InputError, path.name, "check the path"):
            read(str(path))


def test_lists_by_split(tmp_path: Path, lines: Path) -> None:
    expected = read(str(lines)).token_ids
    path = tmp_path / "splits.json"
    for indent in (None, 2):
        path.write_text(json.dumps({"validation": ROWS[:2], "train": ROWS}, indent=indent))
        assert read(str(path)).token_ids == expected
        assert read(str(path), split="validation").token_ids == expected[:2]
    with assert_raises(InputError, "splits.json", "no split test", "validation, train"):
        read(str(path), split="test")


WITHOUT_PYARROW = """
import sys
sys.modules["pyarrow"] = None
from tests.command import vexport
for name in sys.argv[2:]:
    ran = vexport("plan", sys.argv[1], "--scheme", "NVFP4", "--calibration", name)
    print(ran.code, ran.errors[-1] if ran.errors else "")
"""


def test_missing_extra_is_named(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    data.to_parquet(tmp_path / "rows.parquet")
    data.save_to_disk(tmp_path / "saved")
    names = [str(tmp_path / "rows.parquet"), str(tmp_path / "saved")]
    command = [sys.executable, "-c", WITHOUT_PYARROW, str(DEMO), *names]
    root = Path(__file__).parents[2]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    answers = ran.stdout.splitlines()
    assert len(answers) == 2, ran.stderr
    for answer in answers:
        assert answer.startswith("4 ")
        assert_contains(answer, "needs pyarrow", "[data]")


@pytest.mark.parametrize(
    ("shares", "samples", "numbers"),
    [
        ((None, None, None), 8, [3, 3, 2]),
        ((0.7, None, None), 10, [7, 2, 1]),
        ((0.98, 0.01, 0.01), 10, [8, 1, 1]),
        ((0.5, 0.5), 7, [4, 3]),
    ],
)
def test_samples_are_shared(
    tmp_path: Path, shares: Sequence[float | None], samples: int, numbers: list[int]
) -> None:
    data = [
        {"path": str(write_lines(tmp_path / f"{number}.jsonl")), "share": share}
        for number, share in enumerate(shares)
    ]
    sources = Calibration.model_validate({"data": data, "samples": samples}).sources()
    assert [source.samples for source in sources] == numbers
    mixed = read(data, samples=samples)
    assert len(mixed.rows) == samples
    assert [mixed.origins.count(str(each["path"])) for each in data] == numbers
    if len(data) == 2:
        assert len(set(mixed.origins[:2])) == len(set(mixed.origins[-3:])) == 2


@pytest.mark.parametrize(
    ("data", "place", "words"),
    [
        ([{"path": "a", "share": 0.7}, {"path": "b", "share": 0.7}], "data", "add up to 1"),
        ([{"path": "a", "share": 1.0}, "b"], "data", "add up to 1"),
        ([{"path": "a", "shares": 0.7}], "data.0.shares", "one of path, share"),
        ([{"share": 0.7}], "data.0.path", "the key is missing"),
        ([], "data", "a path, or a list"),
        (["a", "b", "c"], "samples", "at least 3"),
    ],
)
def test_wrong_shares_name_their_key(tmp_path: Path, data: object, place: str, words: str) -> None:
    content = {
        "name": "x",
        "source": str(DEMO),
        "rules": [{"match": "Linear", "scheme": "NVFP4"}],
        "calibration": {"data": data, "samples": 2},
    }
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(content))
    ran = vexport("plan", tmp_path / "scenario.yaml")
    assert ran.code == 2
    assert_contains(ran.errors[0], f"scenario.yaml: calibration.{place}:", words)


def test_chat_template_of_one_text(tmp_path: Path) -> None:
    """Without the template, the turns of a conversation are joined."""
    turns = [{"role": "user", "content": "4 + 5"}, {"role": "assistant", "content": "9"}]
    chats = write_lines(tmp_path / "chats.jsonl", [{"messages": turns}] * 3)
    plain = write_lines(tmp_path / "plain.jsonl", [{"text": "4 + 5\n\n9"}] * 3)
    without = {"path": str(chats), "chat_template": False}
    assert read(without).token_ids == read(str(plain)).token_ids
    (tmp_path / "scenario.yaml").write_text(
        yaml.safe_dump(
            {
                "name": "x",
                "source": str(DEMO),
                "rules": [{"match": "Linear", "scheme": "NVFP4"}],
                "calibration": {"data": [{**without, "path": "chats.jsonl"}, "plain.jsonl"]},
            }
        )
    )
    ran = vexport("plan", tmp_path / "scenario.yaml")
    assert ran.code == 0, ran.stderr
    assert_contains(ran.stdout, "chats.jsonl, ")


def test_digest_covers_all_texts(tmp_path: Path) -> None:
    paths = [write_lines(tmp_path / name) for name in ("a.jsonl", "b/c.jsonl", "d.jsonl")]
    settings = Calibration.model_validate({"data": [paths[0], paths[1].parent, paths[2]]})
    digests = [data_digest(settings)]
    for path in paths:
        write_lines(path, [*ROWS, {"text": "more"}])
        digests.append(data_digest(settings))
    write_lines(tmp_path / "b" / "README.md")
    assert len(set(digests)) == 4
    assert data_digest(settings) == digests[-1]


def test_several_texts_on_the_command_line(tmp_path: Path, lines: Path) -> None:
    other = write_lines(tmp_path / "other.jsonl", [{"text": "5 1"}])
    texts = ("--calibration", lines, "--calibration", other)
    out = tmp_path / "out"
    scheme = ("--scheme", "NVFP4", "--rounding", "nearest", "--no-verify", "--seq-len", "32")
    ran = vexport("quantize", DEMO, out, *scheme, *texts, "--samples", "6")
    assert ran.code == 0, ran.stderr
    assert_contains(ran.stdout, "4 samples of", "lines.jsonl (3 samples)", "other.jsonl (1 sample)")
    assert_contains(ran.stderr, "other.jsonl: 1 sample instead of 3")
    recorded = json.loads((out / "vexport.json").read_text())["scenario"]["calibration"]["data"]
    assert [each["path"] for each in recorded] == ["../lines.jsonl", "../other.jsonl"]
    planned = vexport("plan", out / "vexport.json")
    assert planned.code == 0, planned.stderr
    broken = write_lines(tmp_path / "broken.jsonl", [{"texts": 1}])
    words = ("--calibration", lines, "--calibration", broken)
    ran = vexport("plan", DEMO, "--scheme", "NVFP4", *words)
    assert ran.code == 2
    assert_contains(ran.errors[0], "broken.jsonl: line 1", "the keys texts")
    ran = vexport("plan", DEMO, "--scheme", "NVFP4", *texts, "--samples", "1")
    assert ran.code == 2
    assert_contains(ran.errors[0], "calibration: samples: got 1, need at least 2")
