"""Tasks of lm-eval with pictures (`doc_to_image`) against a server."""

import base64
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from tests.command import ROOT, Ran, vexport
from tests.inference import seeing
from tests.inference.replying import replying
from tests.texts import assert_contains
from vexport.inference.pictures import PictureQuestion, data_address, picture_questions
from vexport.inference.shipped import SHIPPED
from vexport.inference.shipped.base import ShippedPart
from vexport.rules import sight as rules

pytestmark = pytest.mark.slow

DEMO = ROOT / "scenarios" / "demo" / "model-sight"
TASK = """\
task: looks
dataset_path: json
dataset_kwargs: {data_files: {test: looks.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "<image>{{question}}"
doc_to_image: image
doc_to_target: answer
metric_list: [{metric: exact_match}]
generation_kwargs: {until: [], max_gen_toks: 8, do_sample: false}
filter_list:
  - name: word
    filter:
      - {function: regex, regex_pattern: '([a-z0-9]+)\\.?$'}
      - {function: take_first}
"""
DOCUMENTS = 12
Rows = Sequence[Mapping[str, Any]]


def rows_of(
    shown: Callable[[int, PictureQuestion], object], documents: int = DOCUMENTS
) -> list[dict[str, Any]]:
    """Return the first documents of the task `sight`, with pictures in a form of the test."""
    return [
        {
            "image": shown(number, each),
            "question": each.topic.prompt,
            "answer": each.topic.choices[each.answer],
        }
        for number, each in enumerate(picture_questions(400, 0))
        if number < documents
    ]


def write_task(folder: Path, rows: Rows, **changes: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "looks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = TASK
    for key, value in changes.items():
        lines = [line for line in text.splitlines() if not line.startswith(f"{key}:")]
        text = "\n".join([*lines, f"{key}: {value}", ""])
    file = folder / "looks.yaml"
    file.write_text(text)
    return file


def write_files(folder: Path, documents: int = DOCUMENTS) -> Path:
    """Write pictures as files beside the data."""
    (folder / "shots").mkdir(parents=True)

    def saved(number: int, each: PictureQuestion) -> str:
        each.picture.save(folder / f"shots/{number}.png")
        return f"shots/{number}.png"

    return write_task(folder, rows_of(saved, documents))


def write_addresses(folder: Path) -> Path:
    return write_task(folder, rows_of(lambda _, each: data_address(each.picture)))


def write_parquet(folder: Path) -> Path:
    """Write pictures into a column that `datasets` decodes."""
    rows = rows_of(lambda _, each: each.picture)
    features = datasets.Features(
        image=datasets.Image(), question=datasets.Value("string"), answer=datasets.Value("string")
    )
    return _parquet(
        folder, lambda file: datasets.Dataset.from_list(rows, features).to_parquet(file)
    )


def write_bytes(folder: Path) -> Path:
    """Write a list of stored bytes."""
    rows = rows_of(lambda _, each: base64.b64decode(data_address(each.picture).split(",")[1]))
    return _parquet(folder, datasets.Dataset.from_list(rows).to_parquet)


def _parquet(folder: Path, write: Callable[[Path], object]) -> Path:
    kwargs = "{data_files: {test: looks.parquet}}"
    images = {"doc_to_image": "[image]"}
    file = write_task(folder, [], dataset_path="parquet", dataset_kwargs=kwargs, **images)
    write(folder / "looks.parquet")
    return file


def write_folder(folder: Path, dataset: str) -> Path:
    """Write a folder of pictures with metadata.jsonl."""
    shots = folder / "shots"
    shots.mkdir(parents=True)
    rows = rows_of(lambda number, _: f"{number}.png")
    for number, each in enumerate(picture_questions(DOCUMENTS, 0)):
        each.picture.save(shots / f"{number}.png")
    lines = [json.dumps({"file_name": row.pop("image"), **row}) for row in rows]
    (shots / "metadata.jsonl").write_text("\n".join(lines))
    kwargs = "{data_dir: shots}" if dataset == "imagefolder" else "null"
    splits = {"dataset_kwargs": kwargs, "test_split": "train"}
    return write_task(folder, [], dataset_path=dataset, **splits)


def evaluated(task: Path, candidate: str, baseline: str, folder: Path, *options: object) -> Ran:
    given = ["--tokenizer", DEMO, "--output-dir", folder, "--quiet", "--format", "json"]
    return vexport("eval", candidate, "--baseline", baseline, "--task", task, *given, *options)


@pytest.mark.parametrize("write", [write_files, write_addresses, write_parquet, write_bytes])
def test_servers_get_the_conversations_of_sight(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    task = write(tmp_path / "tasks")
    right, wrong = seeing.SeeingServer(), seeing.SeeingServer(seeing.wrong_colours)
    options = ("--margin", "0.05", "--no-attribution")
    with replying(right.reply) as old, replying(wrong.reply) as new:
        ran = evaluated(task, new, old, tmp_path / "run", *options)
    assert ran.code in (1, 3), ran.stderr
    verdict: dict[str, Any] = json.loads(ran.stdout)
    (looks,) = verdict["tasks"]
    assert (looks["documents"], looks["baseline"]["value"]) == (DOCUMENTS, 1)
    assert looks["candidate"]["value"] < 1
    documents = SHIPPED["sight"].documents(ShippedPart(task="sight", name="sight"))[:DOCUMENTS]
    expected = [[*each.conversations[0].messages] for each in documents]
    for messages in expected:
        assert messages in [each["messages"] for each in right.asked]
    samples = _samples(tmp_path / "run")
    assert {len(each) for each in _by_document(samples, "doc_hash")} == {1}
    assert len({each["prompt_hash"] for each in samples}) == DOCUMENTS


@pytest.mark.parametrize("dataset", ["imagefolder", "./shots"])
def test_folder_of_pictures(dataset: str, tmp_path: Path) -> None:
    """A changed picture or description is a changed input of the finished evaluation."""
    task, out = write_folder(tmp_path / "tasks", dataset), tmp_path / "run"
    server = seeing.SeeingServer()
    with replying(server.reply) as url:
        codes = [evaluated(task, url, url, out, "--margin", "0.5").code for _ in range(2)]
        metadata = tmp_path / "tasks/shots/metadata.jsonl"
        replace_content(metadata, metadata.read_bytes().replace(b"What", b"what"))
        changed = evaluated(task, url, url, out)
    assert codes == [0, 0]
    assert changed.code == 2
    assert_contains(changed.stderr, "another content of the tasks")


def _samples(folder: Path) -> list[dict[str, Any]]:
    files = [*folder.rglob("samples_*.jsonl")]
    assert len(files) == 2
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def _by_document(samples: Rows, key: str) -> list[set[str]]:
    return [{each[key] for each in samples if each["doc_id"] == at} for at in range(DOCUMENTS)]


def test_changed_picture_is_another_question(tmp_path: Path) -> None:
    task, accepted = write_files(tmp_path / "tasks"), tmp_path / "accepted.json"
    given = ("--tokenizer", DEMO, "--quiet", "--margin", "0.5")
    with replying(seeing.SeeingServer().reply) as url:
        first = ("--task", task, "--accept", accepted, "--output-dir", tmp_path / "first")
        assert vexport("eval", url, *first, *given).code == 0
        later = ("--against", accepted, "--task", task)
        assert vexport("eval", url, *later, *given, "--output-dir", tmp_path / "same").code == 0
        first_shot, second_shot = (tmp_path / f"tasks/shots/{number}.png" for number in (0, 1))
        first_shot.write_bytes(second_shot.read_bytes())
        ran = vexport("eval", url, *later, *given, "--output-dir", tmp_path / "other")
    assert ran.code == 2
    assert_contains(ran.stderr, "1 of 12 questions changed")


def replace_content(file: Path, content: bytes) -> None:
    """Write other bytes of the same number, and keep the file's time."""
    before = file.stat()
    assert len(content) == before.st_size
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_finished_evaluation_notices_changed_picture(tmp_path: Path) -> None:
    """Another picture has the same name, size and time."""
    task, out = write_files(tmp_path / "tasks"), tmp_path / "run"
    shots = sorted((tmp_path / "tasks/shots").iterdir())
    for shot in shots:
        Image.open(shot).convert("RGB").save(shot, "BMP")
    server = seeing.SeeingServer()
    with replying(server.reply) as url:
        codes = [evaluated(task, url, url, out).code for _ in range(2)]
        asked = len(server.asked)
        replace_content(shots[1], shots[0].read_bytes())
        changed = evaluated(task, url, url, out)
    assert codes[0] == codes[1]
    assert (changed.code, len(server.asked)) == (2, asked)
    assert_contains(changed.stderr, f"another {shots[1]}", "--overwrite")


def test_order_system_and_beginning_of_response(tmp_path: Path) -> None:
    addresses = [data_address(Image.new("RGB", (8, 8), colour)) for colour in ("red", "blue")]
    rows = [{"a": addresses[0], "b": addresses[1], "answer": "ok"}]
    changes = {
        "doc_to_text": "'Compare <image> with <image>'",
        "doc_to_image": "[a, b]",
        "gen_prefix": "'Answer:'",
        "description": "'Look well.'",
    }
    task = write_task(tmp_path / "tasks", rows, **changes)
    asked: list[dict[str, Any]] = []
    server = seeing.SeeingServer()

    def reply(path: str, body: dict[str, Any]) -> Any:
        if path.endswith("/chat/completions"):
            asked.append(body)
            body = {**body, "messages": [{"content": "none"}]}
        return server.reply(path, body)

    with replying(reply) as url:
        ran = evaluated(task, url, url, tmp_path / "run")
    assert ran.code in (0, 1, 3), ran.stderr
    shown = [{"type": "image_url", "image_url": {"url": address}} for address in addresses]
    texts = [{"type": "text", "text": text} for text in ("Compare ", " with ")]
    content = [texts[0], shown[0], texts[1], shown[1]]
    assert asked[0]["messages"] == [
        {"role": "system", "content": "Look well."},
        {"role": "user", "content": content},
        {"role": "assistant", "content": "Answer:"},
    ]
    assert (asked[0]["add_generation_prompt"], asked[0]["continue_final_message"]) == (False, True)


RED = data_address(Image.new("RGB", (8, 8), "red"))


@pytest.mark.parametrize(
    ("image", "changes", "rule", "words"),
    [
        ("no.png", {}, rules.DOCUMENT, "no file 'no.png'"),
        ("../looks.png", {}, rules.DOCUMENT, "which leaves the folder"),
        ("https://host/a.png", {}, rules.DOCUMENT, "which is not fetched"),
        ("data:image/png;base64,AAAA", {}, rules.DOCUMENT, "data that is no picture"),
        ("bomb.png", {}, rules.DOCUMENT, "pixels"),
        (RED, {"doc_to_text": "question"}, rules.DOCUMENT, "1 picture, but 0 <image>"),
        (RED, {"doc_to_text": "'<image> <image>'"}, rules.DOCUMENT, "1 picture, but 2 <image>"),
        (RED, {"doc_to_image": "'{{question}}'"}, rules.DOCUMENT, "`doc_to_image`"),
        (None, {}, rules.DOCUMENT, "0 pictures, but 1 <image>"),
        (7, {}, rules.DOCUMENT, "number instead of a picture"),
        (
            RED,
            {
                "output_type": "multiple_choice",
                "doc_to_choice": "['red', 'blue']",
                "metric_list": "[{metric: acc}]",
                "generation_kwargs": "null",
            },
            rules.TASK,
            "multiple_choice",
        ),
        (RED, {"doc_to_audio": "question"}, rules.TASK, "sound"),
    ],
)
def test_unusable_documents_are_refused(
    image: object, changes: Mapping[str, str], rule: Any, words: str, tmp_path: Path
) -> None:
    rows = [{"image": image, "question": "What colour?", "answer": "red"}]
    task = write_task(tmp_path / "tasks", rows, **changes)
    Image.new("L", (8, 8)).save(tmp_path / "looks.png")
    if image == "bomb.png":
        Image.new("1", (10_000, 9_000)).save(tmp_path / "tasks/bomb.png")
    server = seeing.SeeingServer()
    with replying(server.reply) as url:
        ran = evaluated(task, url, url, tmp_path / "run")
    assert ran.code == 2, ran.stderr
    assert_contains(ran.stderr, words, rule.id)
    assert not server.asked


def test_bomb_in_a_column_is_refused(tmp_path: Path) -> None:
    bomb = Image.new("1", (10_000, 9_000))
    rows = [{"image": bomb, "question": "What colour?", "answer": "red"}]
    features = datasets.Features(
        image=datasets.Image(), question=datasets.Value("string"), answer=datasets.Value("string")
    )
    made = datasets.Dataset.from_list(rows, features)
    task = _parquet(tmp_path / "tasks", made.to_parquet)
    with replying(seeing.SeeingServer().reply) as url:
        ran = evaluated(task, url, url, tmp_path / "run")
    assert ran.code == 2, ran.stderr
    assert_contains(ran.stderr, "pixels", rules.DOCUMENT.id)
