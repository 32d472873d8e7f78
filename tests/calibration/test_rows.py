"""Rows as people store them: rows that are read, left out with a note, or refused."""

import gzip
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.calibration.templates import PARTS, PLAIN, TOOLS
from tests.command import vexport
from tests.texts import assert_contains, assert_raises
from vexport.calibration import Samples, read_samples
from vexport.calibration.conversations import render_conversation
from vexport.calibration.rows import read_row
from vexport.errors import InputError
from vexport.scenario import Calibration

DEMO = Path(__file__).parents[2] / "scenarios" / "demo" / "model"
VOCABULARY = 384
USER = {"role": "user", "content": "one plus two"}
ANSWER = {"role": "assistant", "content": "three"}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"one": "two"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "3"}
TOOL = {"name": "add", "parameters": {"type": "object"}}
TURNS = [USER, ANSWER]
SYSTEM = {"role": "system", "content": "Be brief."}


def model_with(folder: Path, template: str | None = None, **config: object) -> Path:
    """Save the demo model with another chat template, and with other values in its config."""
    shutil.copytree(DEMO, folder)
    if template is None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    else:
        (folder / "chat_template.jinja").write_text(template)
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def read(name: object, model: Path = DEMO, **settings: object) -> Samples:
    values = {"data": str(name), "samples": 8, "seq_len": 64, **settings}
    source = Calibration.model_validate(values).sources()
    return read_samples(source, model, vocab_size=VOCABULARY)


def decode(samples: Samples, model: Path = DEMO) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer.decode(ids) for ids in samples.token_ids]


SAME_TURNS: Mapping[str, object] = {
    "text of turns": {"messages": json.dumps(TURNS)},
    "text of ShareGPT": {
        "conversations": json.dumps(
            [{"from": "human", "value": "one plus two"}, {"from": "gpt", "value": "three"}]
        )
    },
    "another name": {"dialogue": TURNS},
    "list": TURNS,
    "query": {"query": "one plus two", "response": "three"},
    "question": {"question": "one plus two", "answer": "three"},
    "instruction": {"instruction": "one plus two", "input": "", "output": "three"},
    "prompt of turns": {"prompt": [USER], "completion": [ANSWER]},
    "prompt and turn": {"prompt": "one plus two", "completion": [ANSWER]},
    "chosen": {"prompt": "one plus two", "chosen": "three", "rejected": "four"},
    "chosen turns": {"prompt": "one plus two", "chosen": TURNS, "rejected": [USER]},
    "chosen turns after turns": {"prompt": [USER], "chosen": TURNS},
    "text of a turn": {
        "messages": [{"role": "user", "text": "one plus two"}, {"role": "gpt", "content": "three"}]
    },
    "pairs": {"conversation": [{"human": "one plus two", "assistant": "three"}]},
    "log": {"request": {"messages": [USER]}, "response": {"choices": [{"message": ANSWER}]}},
    "batch": {
        "body": {"messages": [USER]},
        "response": {"body": {"choices": [{"message": ANSWER}]}},
    },
}


@pytest.mark.parametrize("row", SAME_TURNS.values(), ids=SAME_TURNS)
def test_spellings_of_a_conversation(row: object) -> None:
    found = read_row(row, None).conversation
    assert found is not None
    assert [(turn["role"], turn["content"]) for turn in found.messages] == [
        ("user", "one plus two"),
        ("assistant", "three"),
    ]


@pytest.mark.parametrize("answer", [[ANSWER], TURNS, [SYSTEM, *TURNS]])
def test_system_prompt_of_a_pair_is_kept(answer: list[object]) -> None:
    """The answer has no question, the question, or the question with its system prompt."""
    found = read_row({"prompt": [SYSTEM, USER], "chosen": answer}, None).conversation
    assert found is not None
    assert list(found.messages) == [SYSTEM, *TURNS]


@pytest.mark.parametrize("prompt", [[SYSTEM], [SYSTEM, *TURNS]])
def test_answer_continues_a_conversation(prompt: list[object]) -> None:
    found = read_row({"prompt": prompt, "completion": TURNS}, None).conversation
    assert found is not None
    assert list(found.messages) == [*prompt, *TURNS]


SAME_CALLS: Mapping[str, Mapping[str, object]] = {
    "wire": {
        "messages": [USER, CALLING, RESULT],
        "tools": [{"type": "function", "function": TOOL}],
    },
    "text": {
        "messages": [USER, {**CALLING, "tool_calls": json.dumps([CALL])}, RESULT],
        "tools": json.dumps([TOOL]),
    },
    "flat": {
        "messages": [USER, {**CALLING, "tool_calls": [CALL["function"]]}, RESULT],
        "tools": [json.dumps(TOOL)],
    },
    "objects": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "tool_calls": [
                    {"function": {"name": "add", "arguments": {"one": "two"}}, "id": None}
                ],
            },
            RESULT,
        ],
        "tools": [TOOL],
    },
    "before tools": {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "function_call": CALL["function"]},
            {"role": "function", "name": "add", "content": "3"},
        ],
        "functions": [TOOL],
    },
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": "one plus two"},
            {"from": "function_call", "value": json.dumps(CALL["function"])},
            {"from": "observation", "value": "3"},
        ],
        "tools": json.dumps([TOOL]),
    },
    "pair": {"prompt": [USER], "completion": [CALLING, RESULT], "tools": [TOOL]},
}


@pytest.mark.parametrize("template", [TOOLS, PARTS], ids=["tools", "parts"])
def test_spellings_of_tools(tmp_path: Path, template: str) -> None:
    """Tools are noted only if the template does not render them."""
    model = model_with(tmp_path / "model", template)
    samples = read(write_rows(tmp_path / "rows.jsonl", *SAME_CALLS.values()), model, seq_len=512)
    assert len(samples.token_ids) == len(SAME_CALLS)
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = [read_row(row, None).conversation for row in SAME_CALLS.values()]
    texts = {render_conversation(tokenizer, template, each) for each in found if each is not None}
    (text,) = texts
    assert all(word in text for word in ("add", "one", "3"))
    assert any("tools" in note for note in samples.notes) == (
        template == PARTS
    )  # the template PARTS does not render tools
    assert not any("tool_calls" in note for note in samples.notes)


def test_unrendered_tools_are_noted(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", PLAIN)
    rows = [{"messages": [USER, CALLING, RESULT, ANSWER], "tools": [TOOL]}, {"messages": TURNS}]
    broken = {
        "messages": [
            USER,
            {**CALLING, "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]},
        ]
    }
    samples = read(write_rows(tmp_path / "rows.jsonl", *rows, *rows, broken), model)
    calls, tools, arguments = samples.notes
    assert_contains(calls, "chat template", "tool_calls of 3 rows")
    assert_contains(tools, "chat template", "tools of 2 rows")
    assert_contains(arguments, "1 row", "tool_calls", "arguments", "JSON object")
    assert len(samples.rows) == 5


def test_long_system_prompt_keeps_user_turn(tmp_path: Path) -> None:
    """The text is much longer than its tokenized part."""
    template = (
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ "
        "raise_exception('no user') }}"
    )
    template += "{% endif %}" + PLAIN
    model = model_with(tmp_path / "model", template)
    system = {"role": "system", "content": "one plus two " * 100_000}
    samples = read(write_rows(tmp_path / "rows.jsonl", {"messages": [system, *TURNS]}), model)
    assert [len(ids) for ids in samples.token_ids] == [64]


TEXT_PART = {"type": "text", "text": "one"}
MULTIMODAL: Mapping[str, Mapping[str, object]] = {
    "image": {
        "messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, TEXT_PART]}]
    },
    "image_url": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}
        ]
    },
    "no type": {"messages": [{"role": "user", "content": [{"image_url": "a"}, TEXT_PART]}]},
    "input_image": {
        "messages": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]
    },
    "video": {
        "messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}, TEXT_PART]}]
    },
    "video_url": {
        "messages": [
            {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "a"}}]}
        ]
    },
    "input_audio": {
        "messages": [
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "a"}}]}
        ]
    },
    "audio": {"messages": [{"role": "user", "content": [{"type": "audio", "audio_url": "a"}]}]},
    "result": {
        "messages": [USER, CALLING, {"role": "tool", "content": [{"type": "image", "image": "a"}]}]
    },
    "system": {"messages": [{"role": "system", "content": [{"type": "image"}]}, *TURNS]},
    "column": {"messages": [{**USER, "content": "<image>one"}, ANSWER], "images": ["a.png"]},
    "column alone": {"messages": TURNS, "image": {"bytes": "a", "path": "b"}},
    "placeholder": {
        "conversations": [
            {"from": "human", "value": "<image>\nwhat"},
            {"from": "gpt", "value": "a"},
        ]
    },
    "second placeholder": {"prompt": "look:\n<video>", "completion": "one"},
    "path": {"messages": [{**USER, "content": "Picture 1: <img>a.png</img>\nwhat"}, ANSWER]},
    "numbered": {"messages": [{**USER, "content": "<image 1> what"}, ANSWER]},
    "key of a turn": {"messages": [{**USER, "images": ["a.png"]}, ANSWER]},
    "answer": {"messages": [USER, {"role": "assistant", "content": None, "audio": {"id": "a"}}]},
    "text": {"text": "<audio> one", "audios": ["a.wav"]},
    "pair": {"question": "what", "answer": "one", "image": "a.png"},
}


@pytest.mark.parametrize("row", MULTIMODAL.values(), ids=MULTIMODAL)
def test_multimodal_rows_are_left_out(tmp_path: Path, row: object) -> None:
    model = model_with(tmp_path / "model", PARTS)
    with assert_raises(InputError, "2 rows", "images, video or sound"):
        read(write_rows(tmp_path / "rows.jsonl", row, row), model)
    samples = read(write_rows(tmp_path / "mixed.jsonl", row, {"messages": TURNS}, row), model)
    assert samples.rows == (2,)
    (note,) = samples.notes
    assert_contains(note, "skipped 2 of 3 rows", "images, video or sound")
    assert_contains(note, f"{tmp_path / 'mixed.jsonl'}: line 1")


def test_text_about_images_is_text(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", PARTS)
    page = "<video>\n<source>\n</video>"
    merged = {"type": "text", "text": "one", "image": None, "image_url": None}
    rows = [
        {"messages": [USER, {**ANSWER, "content": page}]},
        {"messages": [{**USER, "content": page}, ANSWER]},
        {"messages": [{**USER, "content": [merged]}, ANSWER], "images": [], "image": None},
        {"text": "one", "video_id": "x"},
    ]
    samples = read(write_rows(tmp_path / "rows.jsonl", *rows), model)
    assert (samples.rows, samples.notes) == ((1, 2, 3, 4), ())
    assert "image" not in decode(samples, model)[2]


def test_named_column_is_text(tmp_path: Path) -> None:
    """An image in another column counts only if the text refers to it."""
    plain, marked = {"body": "one", "image": "a.png"}, {"body": "<image> one", "image": "a.png"}
    assert read(write_rows(tmp_path / "rows.jsonl", plain, marked), column="body").rows == (1,)


def test_rows_with_image_tokens_are_left_out(tmp_path: Path) -> None:
    """Image tokens are found in config.json, in configs of a model's parts, and by token names."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    word = tokenizer.encode("riga", add_special_tokens=False)[0]
    assert word != tokenizer.unk_token_id
    rows = write_rows(
        tmp_path / "rows.jsonl",
        {"text": "one plus two"},
        {"text": "riga"},
        {"input_ids": [word, 5]},
    )
    assert read(rows).rows == (1, 2, 3)
    for number, config in enumerate(
        ({"image_token_id": word}, {"vision": {"video_token_index": word}})
    ):
        samples = read(rows, model_with(tmp_path / str(number), **config))
        assert samples.rows == (1,)
        assert "2 of 3 rows" in samples.notes[0]
    model = model_with(tmp_path / "added", PLAIN)
    content = json.loads((model / "tokenizer.json").read_text())
    token = {"id": 300, "content": "<|image_pad|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({**token, **flags})
    (model / "tokenizer.json").write_text(json.dumps(content))
    mentioned = {"messages": [USER, {**ANSWER, "content": "a <|image_pad|> b"}]}
    rows = write_rows(
        tmp_path / "added.jsonl", {"text": "one <|image_pad|> two"}, mentioned, {"text": "one"}
    )
    assert read(rows, model).rows == (3,)


def without_bos(folder: Path) -> Path:
    """Save the demo model with a tokenizer that does not begin prompts with BOS."""
    model_with(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_packed_samples_start_with_bos(tmp_path: Path) -> None:
    """Each sample begins like a prompt of the tokenizer. Without BOS, the text is only cut."""
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join(f"the city of riga is {number % 7} + 1" for number in range(60)))
    bare = without_bos(tmp_path / "bare")
    plain, packed = read(book, bare, seq_len=16), read(book, seq_len=16)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    bos = tokenizer.encode("", add_special_tokens=True)
    assert len(bos) == 1
    assert {ids[0] for ids in packed.token_ids} == {bos[0]}
    assert all(ids.count(bos[0]) == 1 and len(ids) == 16 for ids in packed.token_ids)
    stream = [token for ids in plain.token_ids for token in ids]
    assert bos[0] not in stream
    text = [token for ids in packed.token_ids for token in ids[1:]]
    assert text == stream[: len(text)]


def test_packed_rows_never_have_two_bos(tmp_path: Path) -> None:
    """This includes rows that end with a sample, and texts or templates that contain the token."""
    bos = AutoTokenizer.from_pretrained(DEMO).bos_token_id
    four = write_rows(tmp_path / "four.jsonl", *({"text": "one plus two"} for _ in range(9)))
    length = len(read(four, seq_len=99).token_ids[0]) + 1  # with the token that ends a row
    samples = read(four, pack=True, seq_len=length)
    assert {ids[:2].count(bos) for ids in samples.token_ids} == {1}
    itself = write_rows(tmp_path / "itself.jsonl", {"text": "<bos> one plus two"})
    assert read(itself).token_ids[0].count(bos) == 1
    model = model_with(tmp_path / "model", "{{ bos_token }}" + PLAIN)
    chats = write_rows(tmp_path / "chats.jsonl", *({"messages": TURNS} for _ in range(9)))
    packed = read(chats, model, pack=True, seq_len=12)
    assert all(ids[0] == bos and ids[1] != bos for ids in packed.token_ids)
    assert (
        read(
            write_rows(tmp_path / "ids.jsonl", {"input_ids": [5] * 30}), pack=True, seq_len=8
        ).token_ids[1]
        == (5,) * 8
    )
    assert read(four, pack=True, seq_len=1).token_ids[0] == (bos,)


REFUSED: Mapping[str, tuple[bytes, tuple[str, ...]]] = {
    "latin1": (
        '{"text": "caf\xe9 au lait"}\n'.encode("latin-1") * 8,
        ("0xe9 at position 13", "iconv -f latin1"),
    ),
    "utf16": ('{"text": "one"}\n'.encode("utf-16") * 8, ("no text", "iconv -f utf-16")),
    "utf16 bare": (('{"text": "one"}\n' * 8).encode("utf-16-be"), ("no text",)),
    "damaged": ('{"text": "caf\xe9 na\xefve"}\n'.encode()[:-9] + b"\xff\xff\n", ("not UTF-8",)),
    "tensors": (b"\x40\0\0\0\0\0\0\0" + b'{"a": {}}'.ljust(64) + bytes(64), ("no text",)),
    "parquet": (b"PAR1" + bytes(9), ("PAR1", ".parquet")),
    "gzip": (gzip.compress(b'{"text": "one"}\n'), ("no text", ".jsonl.gz")),
    "zip": (b"PK\x03\x04" + bytes(30), ("PK",)),
    "object": (
        json.dumps({"data": [{"text": "one"}] * 8}).encode(),
        ("key data", "list of 8 objects"),
    ),
    "pretty object": (
        json.dumps({"data": [{"text": "one"}] * 8}, indent=1).encode(),
        ("key data", "jq -c '.data[]'"),
    ),
    "pretty rows": (
        json.dumps({"messages": TURNS}, indent=1).encode() * 8,
        ("several lines", "jq -c ."),
    ),
    "keys": (
        b'{"body": "one", "title": "two"}\n' * 8,
        ("and 7 more rows", "body, title", ":COLUMN"),
    ),
    "no content": (b'{"messages": [{"role": "user"}]}\n' * 8, ("user", "without")),
    "no turns": (b'{"messages": []}\n' * 8, ("without turns",)),
    "Python": (b"{\"messages\": \"[{'role': 'user'}]\"}\n" * 8, ("not valid JSON", "role")),
}


@pytest.mark.parametrize(("content", "words"), REFUSED.values(), ids=REFUSED)
def test_unreadable_rows_are_one_line(
    tmp_path: Path, content: bytes, words: tuple[str, ...]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read(path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert str(path) in message
    assert [word for word in words if word not in message] == []


def test_column_of_a_file(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"body": "one plus two", "talk": json.dumps(TURNS)})
    model = model_with(tmp_path / "model", PLAIN)
    as_text = write_rows(tmp_path / "t.jsonl", {"text": "one plus two"})
    assert read(f"{path}:body").token_ids == read(as_text).token_ids
    conversation = read_row({"talk": json.dumps(TURNS)}, "talk").conversation
    assert conversation is not None
    assert conversation.messages[1]["role"] == "assistant"
    assert len(read(f"{path}:talk", model).rows) == 1
    with assert_raises(InputError, "no column other", "body, talk"):
        read(f"{path}:other")


def test_pipes_are_refused(tmp_path: Path) -> None:
    """Nothing writes into the pipe, so that reading it would block forever."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match="a pipe or a device"):
        read(tmp_path / "pipe.jsonl")
    evaluated = (
        "eval",
        DEMO,
        "--baseline",
        DEMO,
        "--text",
        tmp_path / "pipe.jsonl",
        "--output-dir",
        tmp_path / "o",
    )
    planned = ("plan", DEMO, "--scheme", "FP8", "--calibration", tmp_path / "pipe.jsonl")
    checked = ("check", DEMO, "--static", "--digests", tmp_path / "pipe.jsonl")
    for command in (planned, evaluated, checked):
        ran = vexport(*command, "--quiet")
        assert ran.code == 2, ran.stderr
        assert "got a pipe or a device" in ran.errors[0]


@pytest.mark.parametrize("template", ["{{ '%10000000000d' % 1 }}", "{{ 'x' * 20000000000 }}"])
def test_template_memory_is_limited(tmp_path: Path, template: str) -> None:
    model = model_with(tmp_path / "model", template)
    with assert_raises(InputError, "chat template", "more than 2 GB"):
        read(write_rows(tmp_path / "rows.jsonl", {"messages": TURNS}), model)


def test_notes_of_the_command(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", PLAIN)
    rows = write_rows(
        tmp_path / "rows.jsonl", MULTIMODAL["image"], {"messages": [USER, CALLING, ANSWER]}
    )
    words = ("--scheme", "FP8", "--calibration", rows, "--seq-len", "16", "--quiet")
    ran = vexport("quantize", model, tmp_path / "out", *words)
    assert ran.code == 0, ran.stderr
    assert "note: " in ran.stderr
    assert_contains(ran.stderr, "skipped 1 of 2 rows", "chat template", "tool_calls of 1 row")


def hidden(ids: list[int], mask: object, **columns: object) -> dict[str, object]:
    return {"input_ids": ids, "attention_mask": mask, **columns}


@pytest.mark.parametrize(
    "mask",
    [
        [0, 0, 1, 1, 1, 0],
        [False, False, True, True, True, False],
        [0.0, 0.0, 1.0, 1.0, 1.0, 0.0],
        [0, 0, 2, 2, 7, 0],
    ],
)
def test_masked_tokens_are_no_text(tmp_path: Path, mask: object) -> None:
    """Masked tokens are dropped before rows are cut, packed or searched for image tokens."""
    rows = write_rows(tmp_path / "rows.jsonl", *[hidden([9, 1, 5, 6, 7, 2], mask)] * 3)
    assert read(rows, seq_len=2).token_ids == ((5, 6),) * 3
    assert read(rows, seq_len=4, pack=True).token_ids == ((5, 6, 7, 5), (6, 7, 5, 6), (7,))
    model = model_with(tmp_path / "model", image_token_id=9)
    assert read(rows, model).token_ids == ((5, 6, 7),) * 3


def test_other_columns_of_tokens_are_noted(tmp_path: Path) -> None:
    """A column with a value for each token is not used, and a note names it."""
    row = {"input_ids": [5, 6], "attention_mask": None, "loss_mask": [0, 1], "topics": [1]}
    rows = write_rows(tmp_path / "rows.jsonl", row, {**row, "weights": [0.5, 2.0]})
    samples = read(rows)
    assert samples.token_ids == ((5, 6), (5, 6))
    (note,) = samples.notes
    assert_contains(note, "loss_mask and weights", "2 rows", "not used: all tokens")
    assert "topics" not in note


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        ([1, 1], "attention_mask with 2 values for 3 input_ids"),
        ([0, 0, 0], "attention_mask that hides all tokens"),
        ("111", "attention_mask that is not a list of numbers"),
        ([[1, 1, 1]], "attention_mask that is not a list of numbers"),
    ],
)
def test_broken_masks_are_refused(tmp_path: Path, mask: object, problem: str) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", hidden([5, 6, 7], mask))
    with assert_raises(InputError, "rows.jsonl: line 1", problem):
        read(rows)


@pytest.mark.parametrize(
    ("broken", "place", "problem"),
    [
        ('{"text": "a" "b"}', "line 7", "invalid JSON, column 14"),
        ('{"text": "never closed}', "line 7", "invalid JSON, column 10"),
        ("{'text': 'a'}", "line 7", "invalid JSON, column 2"),
        ('{"texts": "a"}', "line 7", "a row with the keys texts"),
        ('{"messages": []}', "line 7", "a conversation without turns"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--seed", "4"), ("--pack", "--seq-len", "512")])
def test_plan_finds_broken_rows(
    tmp_path: Path, broken: str, place: str, problem: str, options: tuple[str, ...]
) -> None:
    """Plan checks the rows that `quantize` would read, and no others."""
    rows = [json.dumps({"text": f"text {number}"}) for number in range(20)]
    rows[6] = broken
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(rows))
    command = ("plan", DEMO, "--scheme", "W4A16_G64", "--calibration", path)
    ran = vexport(*command, *options)
    assert ran.code == 2
    assert_contains(ran.errors[0], f"{path}: {place}: got {problem}")
    if not options:
        assert vexport(*command, "--samples", "6").code == 0


def test_broken_list_names_line(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[{"text": "a"},\n {"text": "b"},\n {"text" "c"}]')
    with assert_raises(InputError, "rows.json: line 3", "invalid JSON, column 10"):
        read(tmp_path / "rows.json")


def test_short_text_is_noted_before_it_runs(tmp_path: Path) -> None:
    """Plan knows the most tokens that the settings allow, and `quantize` the number of tokens."""
    rows = write_rows(tmp_path / "rows.jsonl", *[{"text": "9 4 + 5 1 = 5 4 1 ."}] * 4)
    options = ("--scheme", "W4A16_G64", "--calibration", rows, "--samples", "4")
    planned = vexport("plan", DEMO, *options, "--seq-len", "16", "--ignore", "re:.*mlp.*")
    assert_contains(
        planned.stderr, "note: at most 64 tokens", "model.layers.*.self_attn.o_proj", "1,536"
    )
    assert "too few" not in vexport("plan", DEMO, *options, "--seq-len", "4096").stderr
    ran = vexport("quantize", DEMO, tmp_path / "out", *options, "--no-verify", "--seq-len", "64")
    assert ran.code == 0, ran.stderr
    note = ran.stderr.index("of calibration text are too few")
    assert note < ran.stderr.index("measure gradients (layers) ...")


def test_long_numbers_and_half_characters(tmp_path: Path) -> None:
    """Values that Python or the tokenizer cannot read are usable, or one plain sentence."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "4 + 5", "id": ' + "7" * 5000 + "}\n")
    assert len(read(file).rows) == 1
    file.write_text('{"input_ids": [1, ' + "7" * 5000 + "]}\n")
    with assert_raises(InputError, "line 1", "input_ids that are not a list of integers"):
        read(file)
    table = tmp_path / "rows.csv"
    table.write_text('input_ids\n"[1, 7]"\n')
    with assert_raises(InputError, "row 1", "input_ids that are not a list of integers"):
        read(table)
    for text in ("4 \\ud83d 5", "4 \\udc00"):
        file.write_text(f'{{"text": "{text}"}}\n')
        with assert_raises(InputError, "line 1", "half of a surrogate pair"):
            read(file)
    file.write_text('{"text": "4 \\ud83d\\ude00 5"}\n')
    assert len(read(file).rows) == 1
