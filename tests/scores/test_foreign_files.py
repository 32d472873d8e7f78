"""Values of results, baselines and stored responses are usable, or an error with their place."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as parquet  # type: ignore[import-untyped]
import pytest

from vexport import foreign
from vexport.errors import InputError
from vexport.inference.stored_responses import StoredResponses
from vexport.judge.verdict import decide
from vexport.rules import file as rules
from vexport.rules.book import Rule
from vexport.scores.readers import parquet_rows
from vexport.scores.readers.accepted import read_accepted
from vexport.scores.reading import read_scores

NAME = "details_sums|0_2026-11-27T10-00-00.123456.parquet"


def json_rows(file: Path, *rows: object) -> Path:
    """Write rows: values as JSON, and texts as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def row(number: int, **fields: object) -> dict[str, object]:
    return {"task": "sums", "id": number, "score": number % 3 > 0, **fields}


@pytest.mark.parametrize(
    ("last", "rule"),
    [
        ('{"task": "sums", "id": 2, "score": -1' + "0" * 400 + "}", rules.FINITE_NUMBER),
        ('{"task": "sums", "id": 2, "score": ' + "7" * 6000 + "}", rules.FINITE_NUMBER),
        ('{"task": "sums", "id": 2, "score": NaN}', rules.FINITE_NUMBER),
        ('{"task": "sums", "id": 2, "score": -2e51}', rules.NUMBER_RANGE),
        ('{"task": "sums", "id": 2, "score": 1' + "0" * 307 + "}", rules.NUMBER_RANGE),
        ('{"task": "sums", "id": ' + "7" * 6000 + ', "score": 1}', rules.IDENTITY),
        ('{"task": "sums", "id": 2, "seed": 1e400, "score": 1}', rules.WHOLE_NUMBER),
        ('{"task": "sums", "id": 2, "score": 1, "score": 0}', rules.FIELD_TWICE),
        ('[{"task": "sums"}]', rules.JSON_OBJECT),
        ('{"task": "sums", "id": 2, "score": ' + "[" * 200 + "]" * 200 + "}", rules.DEPTH),
        ('{"task": "sums", "id": 2, "score": ' + "[" * 9000 + "]" * 9000 + "}", rules.DEPTH),
    ],
)
def test_unusable_values_name_row_and_field(last: str, rule: Rule, tmp_path: Path) -> None:
    file = json_rows(tmp_path / "rows.jsonl", row(0), row(1), last)
    with pytest.raises(InputError) as caught:
        read_scores(file)
    assert (caught.value.where, caught.value.rule) == (f"{file}:3", rule.id)


@pytest.mark.parametrize("sides", [1, 2])
def test_largest_scores_are_judged(sides: int, tmp_path: Path) -> None:
    """All powers and sums of the largest usable scores stay finite."""
    plain, large = [row(number) for number in range(90)], row(0, score=-foreign.LARGEST_SCORE)
    files = [
        json_rows(tmp_path / f"{side}.jsonl", large if side < sides else row(0), *plain[1:])
        for side in range(2)
    ]
    assert decide(*files, margin=None, alpha=0.05).outcome in ("PASS", "INCONCLUSIVE")


def test_broken_characters_cost_nothing(tmp_path: Path) -> None:
    """A response with half a surrogate pair has the same verdict as any other response."""
    verdicts = []
    for number, text in enumerate(("a ? b", "a \udfff b")):
        rows = [row(each, answer=text, finish_reason=text) for each in range(200)]
        sides = [json_rows(tmp_path / f"{side}{number}.jsonl", *rows) for side in ("old", "new")]
        verdicts.append(decide(*sides, margin=0.05, alpha=0.05, gate={}))
    assert verdicts[0].tasks == verdicts[1].tasks
    names = json_rows(tmp_path / "names.jsonl", row(0, task="\ud83d"), row(1, task="\ud83d"))
    assert [*read_scores(names).tasks] == ["?"]


def test_long_numbers_are_names(tmp_path: Path) -> None:
    digits = "12" * 3000
    results = read_scores(json_rows(tmp_path / "rows.jsonl", row(0), row(1, id=digits)))
    assert [sample.doc_id for sample in results.tasks["sums"].rows.values()] == [0, digits]


def test_line_length_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "LONGEST_LINE", 1 << 20)
    file = json_rows(tmp_path / "rows.jsonl", row(0), row(1, answer="one " * (1 << 18)))
    with pytest.raises(InputError, match=r"rows.jsonl:2: got a longer line, need at most 1 MB"):
        read_scores(file)


def test_links_in_a_circle(tmp_path: Path) -> None:
    link = tmp_path / "results"
    link.symlink_to(link)
    with pytest.raises(InputError):
        read_scores(link)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("17", rules.JSON_OBJECT),
        ('{"b": {"te', rules.JSON),
        ('[["k", {}]]', rules.JSON_OBJECT),
        ("[" * 9000, rules.DEPTH),
    ],
)
def test_journal_lines_are_objects(line: str, rule: Rule, tmp_path: Path) -> None:
    answers = {"a": {"text": "2"}}
    file = json_rows(tmp_path / "answers.jsonl", answers, {"c": "3\ud800"})
    assert StoredResponses(file) == {**answers, "c": "3?"}
    json_rows(file, answers, line)
    with pytest.raises(InputError) as caught:
        StoredResponses(file)
    assert (caught.value.where, caught.value.rule) == (f"{file}:2", rule.id)


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    """An accepted baseline of two tasks in a group."""
    scores = {"0-99": "10" * 50, "100-103": "0.5 0.25 0.125 0.0625"}
    task = {
        **{"metric": "acc", "filter": "none", "higher_is_better": True, "documents": 104},
        **{"score": 0.489784, "scores": scores, "endings": None},
        "questions": {"0-99": "abc" * 100, "100-103": "abc" * 4},
    }
    content = {
        **{"vexport_baseline": 1, "fingerprint": {"limit": "104"}, "groups": {"all": ["a", "b"]}},
        "tasks": {"a": task, "b": task},
    }
    file = tmp_path / "accepted.json"
    file.write_text(json.dumps(content))
    assert read_accepted(file).names == ("all",)
    return file


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["groups"].update(all=["a", "z"]), "groups.all: got ['a', 'z'], need tasks of"),
        (lambda c: c["groups"].update(none=[]), "groups.none: got [], need tasks of"),
        (lambda c: c["tasks"]["a"].update(score=0.48979), "tasks.a: got score 0.48979, but"),
        (lambda c: c["tasks"]["b"].update(score=10**400), "tasks.b.score: got"),
        (lambda c: c["tasks"]["a"]["scores"].update({"104-" + "9" * 30: "1"}), "tasks.a: got 104-"),
        (lambda c: c["tasks"]["a"]["scores"].update({"104-99999999999": "1"}), "tasks.a: got 104-"),
        (lambda c: c["tasks"]["b"]["scores"].update({"²-3": "1"}), "tasks.b: got ²-3"),
    ],
)
def test_tampered_baselines_name_the_field(
    change: Callable[[dict[str, Any]], object], words: str, baseline: Path
) -> None:
    content = json.loads(baseline.read_text())
    change(content)
    baseline.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        read_accepted(baseline)
    assert str(baseline) in str(caught.value)
    assert words in str(caught.value)


def test_merged_baseline_has_each_field_once(baseline: Path) -> None:
    baseline.write_text(baseline.read_text().replace('"b": {', '"a": {', 1))
    with pytest.raises(InputError, match="the field 'a' twice"):
        read_accepted(baseline)


def details(folder: Path, columns: dict[str, pa.Array], *, parts: int = 1) -> Path:
    """Write details of lighteval. Repeated values are stored once."""
    folder.mkdir(exist_ok=True)
    table = pa.table(columns)
    with parquet.ParquetWriter(
        folder / NAME, table.schema, compression="zstd", use_dictionary=True
    ) as writer:
        for _ in range(parts):
            writer.write_table(table)
    return folder


def columns(rows: int = 3, query: str = "q", **changed: pa.Array) -> dict[str, pa.Array]:
    docs = [{"id": str(number), "query": query} for number in range(rows)]
    return {
        "doc": pa.array(docs),
        "metric": pa.array([{"em": 1.0}] * rows),
        "model_response": pa.array([{"text": ["x"]}] * rows),
    } | changed


def test_expanded_size_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = details(tmp_path / "details", columns(2000, "q" * 10_000), parts=8)
    assert (folder / NAME).stat().st_size < 200_000
    assert len(read_scores(folder).tasks["sums|0"].rows) == 16_000
    monkeypatch.setattr(parquet_rows, "LARGEST_CONTENT", 50_000_000)
    with pytest.raises(InputError) as caught:
        read_scores(folder)
    assert caught.value.rule == rules.TOO_LARGE.id


def test_large_repeated_values_are_read_in_small_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of 2 MB, stored once and used in 200 rows, is expanded 8 times at once."""
    monkeypatch.setattr(parquet_rows, "LARGEST_CONTENT", 1 << 27)
    monkeypatch.setattr(parquet_rows, "_BATCH_BYTES", 1 << 24)
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 200), pa.array(["q" * (1 << 21)]))
    table = pa.table(columns(200, doc=_struct("query", text)))
    with parquet.ParquetWriter(tmp_path / NAME, table.schema, store_schema=False) as writer:
        writer.write_table(table)
    usual, pool = pa.default_memory_pool(), pa.system_memory_pool()
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(InputError) as caught:
            read_scores(tmp_path)
        assert caught.value.rule == rules.TOO_LARGE.id
    finally:
        pa.set_memory_pool(usual)
    assert pool.max_memory() < 1 << 26


def _struct(name: str, value: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([value], [name])


ODD = {
    "time": _struct("em", pa.array([0, 0, 2**62], pa.timestamp("us"))),
    "date": _struct("em", pa.array([0, 2**31 - 1, 0], pa.int32()).cast(pa.date32())),
    "duration": _struct("em", pa.array([2**62, 0, 0], pa.duration("s"))),
    "fields twice": pa.StructArray.from_arrays([pa.array([1.0] * 3)] * 2, ["em", "em"]),
    "text": _struct("em", pa.array(["1", "2", "3"])),
    "bytes": _struct("em", pa.array([b"1", b"2", b"3"])),
    "infinite": _struct("em", pa.array([1.0, float("inf"), 0.0])),
    "nothing": pa.nulls(3),
    "numbers": pa.array([1, 2, 3]),
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_columns_name_row_and_field(odd: str, tmp_path: Path) -> None:
    folder = details(tmp_path / "details", columns(metric=ODD[odd]))
    with pytest.raises(InputError, match="row [123]: got|no response with a score"):
        read_scores(folder)


def test_broken_text_names_row(tmp_path: Path) -> None:
    texts = pa.array([b"a", b"\xff\xfe", b"c"], pa.binary()).view(pa.string())
    folder = details(tmp_path / "details", columns(doc=_struct("query", texts)))
    with pytest.raises(InputError, match="row 2: got doc: UnicodeDecodeError"):
        read_scores(folder)


def test_damaged_parquet_is_input_error(tmp_path: Path) -> None:
    """Flipped, removed and added bytes. The random seed is fixed."""
    folder, chance = details(tmp_path / "details", columns(200)), random.Random(0)
    sound = (folder / NAME).read_bytes()
    for _ in range(150):
        data = bytearray(sound)
        for _ in range(chance.choice((1, 1, 4))):
            at = chance.randrange(len(data))
            data[at : at + chance.choice((0, 1, 1, 9))] = chance.randbytes(chance.choice((0, 1, 4)))
        (folder / NAME).write_bytes(data)
        try:
            read_scores(folder)
        except InputError:
            continue
