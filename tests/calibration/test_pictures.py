"""Calibration on pictures: rows, errors, the walk through models that see, and the command."""

import base64
import io
import json
import re
import shutil
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import PIL.Image
import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.calibration.models import configs, save
from tests.calibration.seeing import (
    FIRST_SPECIAL,
    IMAGE,
    NEEDING_TORCHVISION,
    SEEING,
    address,
    picture,
    png,
    question,
    save_needing_torchvision,
    save_seeing,
    write_rows,
)
from tests.command import ROOT, vexport
from tests.forked import command, start
from tests.models import VOCABULARY
from tests.texts import assert_contains
from vexport.calibration import Samples, read_samples
from vexport.calibration import capture as capture_module
from vexport.calibration.capture import Addition
from vexport.calibration.conversations import PICTURE, PICTURE_MARK, RowError
from vexport.calibration.data import require_rows
from vexport.calibration.file_rows import RawRow, content_of
from vexport.calibration.model import HiddenStates
from vexport.calibration.picture_rows import row_with_pictures
from vexport.calibration.pictures import digest_inputs, open_picture, sees_pictures
from vexport.calibration.rows import Row, parse_row
from vexport.calibration.walk import Layer, LayerWalk
from vexport.checkpoint.index import read_index
from vexport.errors import InputError
from vexport.errors.extras import MissingPackage, is_installed
from vexport.records import CalibrationData
from vexport.rules import calibration as rules

FIRST, SECOND, THIRD = picture(90, 70), picture(60, 150, 1), picture(40, 40, 2)
MIXED = (
    question(address(FIRST)),
    {"text": "a row of text"},
    question(address(SECOND), address(THIRD), text="which of them is longer?"),
)

pytestmark = pytest.mark.usefixtures("matmul_in_model_dtype")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing("llava", tmp_path_factory.mktemp("llava") / "model")


def read(
    folder: Path,
    data: Path,
    *,
    seq_len: int = 400,
    column: str | None = None,
    chat_template: bool = True,
    pack: bool | None = None,
) -> Samples:
    chosen = CalibrationData(
        name=str(data),
        samples=8,
        seq_len=seq_len,
        column=column,
        chat_template=chat_template,
        pack=pack,
    )
    return read_samples(chosen, folder, vocab_size=VOCABULARY, with_pictures=True)


def read_rows(folder: Path, tmp_path: Path, *rows: Mapping[str, object]) -> Samples:
    return read(folder, write_rows(tmp_path / "rows.jsonl", rows))


class StateRecorder:
    """Watcher that keeps the output of each layer, and the logits."""

    def __init__(self) -> None:
        self.states: dict[tuple[int, int], torch.Tensor] = {}

    def enter(self, layer: Layer) -> None:
        self._number = layer.number

    def row(self, index: int, hidden: torch.Tensor) -> None:
        self.states[index, self._number] = hidden.clone()

    def leave(self, layer: Layer) -> None:
        pass


def states_of_whole_model(
    folder: Path, layers: str, chosen: Samples
) -> dict[tuple[int, int], torch.Tensor]:
    """Return the outputs of the layers and the logits of transformers' own forward."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()
    states: dict[tuple[int, int], torch.Tensor] = {}
    for index, ids in enumerate(chosen.token_ids):
        outputs: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_hook(
                lambda module, inputs, output, outputs=outputs: outputs.append(
                    (output[0] if isinstance(output, tuple) else output).clone()
                )
            )
            for layer in model.get_submodule(layers)
        ]
        sample = chosen.pictures_of(index)
        inputs = {} if sample is None else sample.inputs()
        inputs = {
            name: value.to(torch.bfloat16) if value.is_floating_point() else value
            for name, value in inputs.items()
        }
        with torch.no_grad():
            outputs.append(model(input_ids=torch.tensor([ids]), use_cache=False, **inputs).logits)
        for hook in hooks:
            hook.remove()
        states |= {(index, number): value for number, value in enumerate(outputs)}
    return states


@pytest.mark.parametrize("family", SEEING)
def test_walk_equals_whole_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Towers, positions of three dimensions and deepstack: the states are equal bit by bit."""
    monkeypatch.setattr(capture_module, "LARGE_BYTES", 1 << 10)
    folder = save_seeing(family, tmp_path / "model")
    chosen = read(folder, write_rows(tmp_path / "rows.jsonl", MIXED))
    assert [sample is not None for sample in chosen.pictures] == [True, False, True]
    assert len(set(map(len, chosen.token_ids))) == 3
    assert_walk_equals_whole_model(folder, chosen)


@pytest.mark.parametrize("family", NEEDING_TORCHVISION)
def test_walk_of_families_whose_processors_need_torchvision(family: str, tmp_path: Path) -> None:
    """The processors' parts without torchvision made the inputs."""
    chosen = save_needing_torchvision(family, tmp_path / "model")
    assert_walk_equals_whole_model(tmp_path / "model", chosen)


def assert_walk_equals_whole_model(folder: Path, chosen: Samples) -> None:
    walk = LayerWalk(read_index(folder))
    watcher = StateRecorder()
    with walk.start(chosen) as hidden:
        walk.forward(hidden, watcher)
        walk.run_head(hidden, watcher)
    expected = states_of_whole_model(folder, walk.name, chosen)
    assert watcher.states.keys() == expected.keys()
    for place, states in watcher.states.items():
        assert torch.equal(states, expected[place]), place


def test_additions_between_layers_must_be_sums(tmp_path: Path) -> None:
    """A model that scales the states between its layers cannot run layer by layer."""
    folder = save_seeing("qwen3-vl", tmp_path / "model")
    chosen = read(folder, write_rows(tmp_path / "rows.jsonl", MIXED))
    walk = LayerWalk(read_index(folder))
    decoder = walk.model.get_decoder()
    own = decoder._deepstack_process

    def scaled(states: torch.Tensor, *more: object) -> torch.Tensor:
        changed: torch.Tensor = own(states, *more)
        return 2 * changed

    decoder._deepstack_process = scaled
    with pytest.raises(InputError) as raised, walk.start(chosen):
        pass
    assert raised.value.rule == rules.LAYER_ORDER.id


def test_addition_changes_only_its_tokens() -> None:
    difference = torch.zeros(1, 5, 4, dtype=torch.bfloat16)
    difference[0, 2] = 1
    added = Addition.of(difference, HiddenStates())
    assert added is not None
    states = torch.randn(1, 5, 4).to(torch.bfloat16)
    assert torch.equal(added.to(states), states + difference)
    assert Addition.of(torch.zeros(1, 5, 4), HiddenStates()) is None


def parts(row: Row) -> list[list[str]]:
    """Return the parts of each turn: texts, and `*` for a picture."""
    assert row.conversation is not None
    return [
        ["*" if part is PICTURE else part["text"] for part in message["content"]]
        for message in row.conversation.messages
    ]


TURN = {"role": "user", "content": "What is this?"}
SHARE = [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "A box"}]
BYTES = {"bytes": b"1", "path": None}
OTHER = {"bytes": b"2", "path": "2.png"}
FORMS: Mapping[str, tuple[Mapping[str, object], list[list[str]], list[object]]] = {
    "image_url": (
        question("data:1", "data:2", text="?", answer="!"),
        [["*", "*", "?"], ["!"]],
        ["data:1", "data:2"],
    ),
    "address without an object": (
        {"messages": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
        [["*"]],
        ["u"],
    ),
    "anthropic": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "data": "x"}},
                        {"type": "text", "text": "?"},
                    ],
                }
            ]
        },
        [["*", "?"]],
        ["x"],
    ),
    "sharegpt": (
        {"image": "a.png", "conversations": SHARE},
        [["*", "What is this?"], ["A box"]],
        ["a.png"],
    ),
    "column of datasets": (
        {"images": [BYTES, BYTES], "messages": [TURN]},
        [["*", "*", "What is this?"]],
        [BYTES, BYTES],
    ),
    "slots": (
        {
            "images": ["a", "b"],
            "messages": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1"}]},
                {"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "image"}]},
            ],
        },
        [["*", "1"], ["2", "*"]],
        ["a", "b"],
    ),
    "question": (
        {"image": BYTES, "question": "?", "answer": "!"},
        [["*", "?"], ["!"]],
        [BYTES],
    ),
    "bytes before an address": (
        {"image_url": "http://x", "image": BYTES, "question": "?", "answer": "!"},
        [["*", "?"], ["!"]],
        [BYTES],
    ),
    "middle of a sentence": (
        {"images": ["a", "b"], "question": "Compare <image> with <image>.", "answer": "!"},
        [["Compare ", "*", " with ", "*", "."], ["!"]],
        ["a", "b"],
    ),
    "several turns": (
        {
            "images": ["a", "b"],
            "messages": [
                {"role": "user", "content": "<image>\nIs it a box?"},
                {"role": "assistant", "content": "Yes"},
                {"role": "user", "content": "And in <image>?"},
            ],
        },
        [["*", "Is it a box?"], ["Yes"], ["And in ", "*", "?"]],
        ["a", "b"],
    ),
    "word in a sentence, and a placeholder": (
        {"image": "a", "question": "<image>\nWhat does <image> mean?", "answer": "!"},
        [["*", "What does <image> mean?"], ["!"]],
        ["a"],
    ),
    "numbered columns": (
        {
            "question": "<image 3>\nIs it like <image 1>, or <image 3>?",
            "answer": "!",
            "image_1": BYTES,
            "image_2": None,
            "image_3": OTHER,
            "image_4": {"bytes": None, "path": None},
        },
        [["*", "Is it like ", "*", ", or ", "*", "?"], ["!"]],
        [OTHER, BYTES, OTHER],
    ),
    "numbered columns without placeholders": (
        {"image_1": "a", "image_2": "b", "question": "?", "answer": "!"},
        [["*", "*", "?"], ["!"]],
        ["a", "b"],
    ),
    "numbers of a list": (
        {"images": ["a", "b"], "question": "<|image_2|> or <|image_1|>?", "answer": "!"},
        [["*", " or ", "*", "?"], ["!"]],
        ["b", "a"],
    ),
    "numbers from zero": (
        {"images": ["a", "b"], "question": "<image_1> or <image_0>?", "answer": "!"},
        [["*", " or ", "*", "?"], ["!"]],
        ["b", "a"],
    ),
    "column of another name": (
        {"screenshot": BYTES, "question": "?", "answer": "!"},
        [["*", "?"], ["!"]],
        [BYTES],
    ),
    "usual names before other names": (
        {"mask": OTHER, "image": BYTES, "question": "<image>?", "answer": "!"},
        [["*", "?"], ["!"]],
        [BYTES],
    ),
    "key of a turn": (
        {"messages": [{**TURN, "images": ["a"]}, {"role": "assistant", "content": "x"}]},
        [["*", "What is this?"], ["x"]],
        ["a"],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_rows(form: str) -> None:
    raw, expected, stored = FORMS[form]
    row = row_with_pictures(raw, parse_row(raw, None), None)
    assert row is not None
    assert [part for part in parts(row) if part] == expected
    assert [each.stored for each in row.pictures] == stored


PAGE = (ROOT / "vexport/docs/picture-rows.md").read_text(encoding="utf-8")
DOCUMENTED = re.findall(r"^\| `(\{.*\})`.* \| .* \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("literal", DOCUMENTED)
def test_documented_rows(literal: str, tmp_path: Path) -> None:
    line = literal.replace(": ...,", ': "x",').encode()
    raw = content_of(RawRow(place="", number=1, content=line, file=tmp_path / "metadata.jsonl"))
    row = row_with_pictures(raw, parse_row(raw, None), None)
    assert row is not None
    assert len(row.pictures) == (2 if "b.png" in literal else 1)


def test_all_forms_are_documented() -> None:
    assert len(DOCUMENTED) == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a box", f"{PICTURE_MARK}{PICTURE_MARK}\na box"),
        ("<image>\n<image>\na box", f"{PICTURE_MARK}{PICTURE_MARK}a box"),
    ],
)
def test_text_with_pictures(text: str, expected: str) -> None:
    raw = {"text": text, "images": ["a", "b"]}
    row = row_with_pictures(raw, parse_row(raw, None), None)
    assert row is not None
    assert row.text == expected


@pytest.mark.parametrize(
    "tag",
    [
        "<image>",
        "<Image>",
        "<|image|>",
        "<|image_pad|>",
        "<image_1>",
        "<image 1>",
        "<|image_1|>",
        "<start_of_image>",
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|begin_of_image|><|image|><|end_of_image|>",
        "<IMG_CONTEXT>",
        "<ImageHere>",
        "<image_placeholder>",
        "[IMG]",
        "<img>a.png</img>",
    ],
)
def test_placeholders_of_families(tag: str) -> None:
    """They are recognized in a sentence, and at its begin and its end."""
    for text, expected in (
        (f"See {tag} here", ["See ", "*", " here"]),
        (f"{tag}What is it?", ["*", "What is it?"]),
        (f"What is it?\n{tag}", ["What is it?", "*"]),
    ):
        raw = {"image": "a", "question": text, "answer": "!"}
        row = row_with_pictures(raw, parse_row(raw, None), None)
        assert row is not None
        assert parts(row)[0] == expected


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (
            {"image": "a", "question": "In <image> or <image>?", "answer": "!"},
            "2 placeholders for 1 picture",
        ),
        (
            {"images": ["a", "b"], "question": "In <image>?", "answer": "!"},
            "1 placeholder for 2 pictures",
        ),
        (
            {"image_1": "a", "image_2": "b", "text": "<image 1> or <image 3>?"},
            "2 placeholders for 2 pictures (no picture for <image 3>)",
        ),
        ({"messages": [{**TURN, "content": [{"type": "image"}]}]}, "1 placeholder for 0 pictures"),
    ],
)
def test_other_numbers_of_placeholders_and_pictures(raw: Mapping[str, object], reason: str) -> None:
    with pytest.raises(RowError) as raised:
        row_with_pictures(raw, parse_row(raw, None), None)
    assert (raised.value.rule, raised.value.reason) == (rules.PLACEHOLDERS, reason)


@pytest.mark.parametrize(
    "raw",
    [
        {"text": "plain"},
        {"text": "plain", "image_1": None, "images": [], "image": {"bytes": None, "path": None}},
        {"text": "plain", "sound": {"bytes": b"x", "path": "a.wav"}},
        {"text": "plain", "meta": {"path": "a.png"}},
        {"text": "<image>\nno picture"},
        {"messages": [TURN], "video": "a.mp4", "image": "a.png"},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "data": "x"}]}]},
        {"input_ids": [1, 2], "image": "a.png"},
    ],
)
def test_rows_without_usable_pictures(raw: Mapping[str, object]) -> None:
    assert row_with_pictures(raw, parse_row(raw, None), None) is None


def header_of_bomb(side: int) -> bytes:
    """Return the begin of a PNG with a square of pixels."""
    content = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + content + struct.pack(">I", zlib.crc32(content))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 4) + b"IDAT"


BAD: Mapping[str, tuple[str, str, str]] = {
    "missing": ("nothing.png", rules.PICTURE.id, "no file 'nothing.png'"),
    "parent": ("../outside.png", rules.PICTURE.id, "leaves the folder"),
    "absolute": ("/etc/hostname", rules.PICTURE.id, "leaves the folder"),
    "link": ("link.png", rules.PICTURE.id, "leaves the folder"),
    "folder": ("inside", rules.PICTURE.id, "which is no file"),
    "text": ("text.png", rules.PICTURE.id, "data that is no picture"),
    "cut": ("cut.png", rules.PICTURE.id, "a broken picture"),
    "bomb": ("bomb.png", rules.PICTURE_SIZE.id, "more than 89,478,485 pixels"),
    "small bomb": ("small-bomb.png", rules.PICTURE_SIZE.id, "10,000 x 10,000 pixels"),
    "remote": ("https://example.org/a.png", rules.REMOTE_PICTURE.id, "not fetched"),
    "hub": ("hf://datasets/org/name/a.png", rules.REMOTE_PICTURE.id, "not fetched"),
    "base64": ("data:image/png;base64,%%", rules.PICTURE.id, "not valid base64"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_picture_names_its_place(case: str, llava: Path, tmp_path: Path) -> None:
    """The error names the file, the row, the field and the reason."""
    data = tmp_path / "data"
    (data / "inside").mkdir(parents=True)
    (tmp_path / "outside.png").write_bytes(png(FIRST))
    (data / "link.png").symlink_to(tmp_path / "outside.png")
    (data / "text.png").write_text("text")
    (data / "cut.png").write_bytes(png(FIRST)[:100])
    (data / "bomb.png").write_bytes(header_of_bomb(100_000))
    (data / "small-bomb.png").write_bytes(header_of_bomb(10_000))
    url, rule, reason = BAD[case]
    file = write_rows(data / "rows.jsonl", [{"text": "good"}, question(address(FIRST), url)])
    with pytest.raises(InputError) as raised:
        read(llava, file)
    assert raised.value.rule == rule
    assert_contains(str(raised.value), f"{file}: line 2: ", "messages[0].content[1]: ", reason)


@pytest.mark.parametrize("form", ["plain", "url", "folder"])
def test_picture_beside_the_data(form: str, llava: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "part"
    (folder / "pictures").mkdir(parents=True)
    (folder / "pictures" / "a.png").write_bytes(png(FIRST))
    name = f"file://{folder}/pictures/a.png" if form == "url" else "pictures/a.png"
    file = write_rows(folder / "rows.jsonl", [question(name)])
    found = read(llava, tmp_path / "data" if form == "folder" else file)
    assert found.digest == read_rows(llava, tmp_path, question(address(FIRST))).digest


def test_picture_column_of_parquet(llava: Path, tmp_path: Path) -> None:
    """The feature Image of `datasets` stores pictures as bytes, or as paths beside the data."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.png").write_bytes(png(FIRST))
    values = [{"bytes": png(FIRST), "path": None}, {"bytes": None, "path": "a.png"}]
    rows = [{"image": value, "question": "what is it?", "answer": "a box"} for value in values]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    found = read(llava, tmp_path / "data.parquet")
    same = read_rows(llava, tmp_path, question(address(FIRST)), question(address(FIRST)))
    assert found.digest == same.digest


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_folder_of_pictures_with_metadata(suffix: str, llava: Path, tmp_path: Path) -> None:
    """The folder is read as `datasets` reads an `imagefolder`."""
    folder = tmp_path / "data"
    (folder / "train").mkdir(parents=True)
    rows: list[dict[str, object]] = []
    for number, image in enumerate((FIRST, SECOND)):
        (folder / "train" / f"{number}.png").write_bytes(png(image))
        rows.append({"file_name": f"train/{number}.png", "text": "a box"})
    file = folder / f"metadata.{suffix}"
    if suffix == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), file)
    elif suffix == "csv":
        lines = [",".join(map(str, row.values())) for row in rows]
        file.write_text("\n".join(["file_name,text", *lines]))
    else:
        write_rows(file, rows)
    same = [{"text": "a box", "image": address(image)} for image in (FIRST, SECOND)]
    expected = read_rows(llava, tmp_path, *same)
    for data in (folder, file):
        assert read(llava, data).digest == expected.digest


def test_metadata_with_lists_and_other_names(llava: Path, tmp_path: Path) -> None:
    for number, image in enumerate((FIRST, SECOND)):
        (tmp_path / f"{number}.png").write_bytes(png(image))
    names = ["0.png", "1.png"]
    rows: list[dict[str, object]] = [
        {"file_names": names, "text": "a box"},
        {"left_file_name": "0.png", "text": "a box"},
    ]
    found = read(llava, write_rows(tmp_path / "metadata.jsonl", rows))
    same = [[address(FIRST), address(SECOND)], [address(FIRST)]]
    expected = read_rows(llava, tmp_path, *({"text": "a box", "images": each} for each in same))
    assert found.digest == expected.digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_digest_of_inputs(dtype: torch.dtype) -> None:
    """Llama 4's processor returns bfloat16, which numpy does not have."""
    inputs = [{"a": torch.tensor([[0, 1]]).to(dtype)}, {"a": torch.tensor([[1, 0]]).to(dtype)}]
    assert len({digest_inputs(each) for each in (*inputs, *inputs)}) == 2


def test_text_models_accept_rows_whose_pictures_do_not_fit(tmp_path: Path) -> None:
    rows = [{"image": "a.png", "text": "<image> <image>"}, {"text": "a row of text"}]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    require_rows(CalibrationData(name=str(file), samples=8, seq_len=400))


def test_digest_depends_on_pictures(llava: Path, tmp_path: Path) -> None:
    chosen = [read_rows(llava, tmp_path, question(address(each))) for each in (FIRST, SECOND)]
    assert chosen[0].token_ids == chosen[1].token_ids
    assert chosen[0].digest != chosen[1].digest


def test_rows_are_cut_behind_their_pictures(llava: Path, tmp_path: Path) -> None:
    """A row is skipped if its pictures do not fit in a sample."""
    rows = [question(address(FIRST)), question(*[address(FIRST)] * 4)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    whole = read(llava, file)
    most = whole.token_ids[0].index(IMAGE) + whole.token_ids[0].count(IMAGE)
    cut = read(llava, file, seq_len=most + 3)
    assert list(map(len, cut.token_ids)) == [most + 3]
    (sample,) = cut.pictures
    assert sample is not None
    assert sample.inputs().keys() == {"pixel_values"}
    assert_contains(cut.notes[0], "skipped 1 of 2 rows", f"{most + 3} tokens")
    with pytest.raises(InputError) as raised:
        read(llava, file, seq_len=most - 1)
    assert raised.value.rule == rules.PICTURE_TOKENS.id
    assert_contains(str(raised.value), f"{most} tokens", "--seq-len")


def test_packing_leaves_rows_with_pictures_alone(llava: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [*MIXED, {"text": "more text"}])
    found = read(llava, file, pack=True)
    assert [sample is not None for sample in found.pictures] == [True, True, False]
    assert found.rows == (1, 3, 2)


def test_pictures_without_chat_template(llava: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [question(address(FIRST))])
    found = read(llava, file, chat_template=False)
    assert found.token_ids[0].count(IMAGE) == 16
    assert FIRST_SPECIAL + 1 not in found.token_ids[0]


def test_template_without_pictures(llava: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llava, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].role }}")
    with pytest.raises(InputError) as raised:
        read_rows(folder, tmp_path, question(address(FIRST)))
    assert_contains(
        str(raised.value), "1 picture, but 0 in the text that the chat template renders"
    )


def test_missing_processor(llava: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llava, tmp_path / "model")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink()
    with pytest.raises(InputError) as raised:
        read_rows(folder, tmp_path, question(address(FIRST)))
    assert raised.value.rule == rules.PROCESSOR.id


@pytest.mark.skipif(is_installed("torchvision"), reason="torchvision is installed")
@pytest.mark.parametrize("processor", ["Gemma4Processor", "Llama4Processor", "SmolVLMProcessor"])
def test_missing_torchvision_is_named(processor: str, llava: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llava, tmp_path / "model")
    image_processor = processor.replace("Processor", "ImageProcessor")
    for name in ("preprocessor_config.json", "processor_config.json"):
        content = {"processor_class": processor, "image_processor_type": image_processor}
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(MissingPackage) as raised:
        read_rows(folder, tmp_path, question(address(FIRST)))
    assert (raised.value.exit_code, raised.value.module) == (4, "torchvision")


def test_missing_pillow_is_named(
    llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vexport.errors.extras.find_spec", lambda name: None)
    with pytest.raises(MissingPackage) as raised:
        read_rows(llava, tmp_path, question(address(FIRST)))
    assert raised.value.exit_code == 4
    assert_contains(str(raised.value), "needs PIL", "[vision]")


def test_transparency_becomes_white() -> None:
    image = PIL.Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    row = row_with_pictures({"text": "", "image": png(image)}, Row(text=""), None)
    assert row is not None
    opened = open_picture(png(image), row.pictures[0])
    assert (opened.mode, opened.getpixel((0, 0))) == ("RGB", (255, 255, 255))


def test_orientation_is_applied() -> None:
    stream = io.BytesIO()
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.new("RGB", (8, 4)).save(stream, "JPEG", exif=exif)
    row = row_with_pictures({"text": "", "image": b"x"}, Row(text=""), None)
    assert row is not None
    assert open_picture(stream.getvalue(), row.pictures[0]).size == (4, 8)


def test_only_models_with_a_vision_config_see(llava: Path, tmp_path: Path) -> None:
    text = save(configs()["llama"], tmp_path / "llama")
    answers = [
        sees_pictures(json.loads((folder / "config.json").read_text())) for folder in (llava, text)
    ]
    assert answers == [True, False]


def call_of_quantize(folder: Path, data: Path, out: Path) -> Sequence[object]:
    return (
        *("quantize", folder, out, "--scheme", "NVFP4", "--calibration", data, "--no-verify"),
        *("--samples", 4, "--seq-len", 256),
    )


def quantize(folder: Path, data: Path, out: Path) -> str:
    ran = vexport(*call_of_quantize(folder, data, out))
    assert ran.code == 0, ran.stderr
    return ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-vl", "gemma3"])
def test_quantize_on_pictures(family: str, tmp_path: Path) -> None:
    """Smoothing, gradients and rounding run on rows with pictures, and pictures matter."""
    folder = save_seeing(family, tmp_path / "model")
    results = []
    for name, image in (("a", FIRST), ("b", SECOND)):
        data = write_rows(tmp_path / f"{name}.jsonl", [question(address(image)), *MIXED])
        quantize(folder, data, tmp_path / name)
        results.append((tmp_path / name / "model.safetensors").read_bytes())
    assert results[0] != results[1]
    ran = vexport("check", tmp_path / "a", "--static", "--source", folder)
    assert ran.code == 0, ran.stdout


def kill_after_first_layer(folder: Path, data: Path, out: Path) -> None:
    """Kill `quantize` when it has stored the first rounded layer."""
    process = start(out.with_suffix(".log"), command, *call_of_quantize(folder, data, out))
    deadline = time.monotonic() + 120
    while not list(out.parent.rglob("layer-0000.json")) and time.monotonic() < deadline:
        assert process.is_alive()
        time.sleep(0.002)
    process.kill()
    process.join()
    assert not out.exists()


@pytest.mark.slow
def test_killed_call_on_pictures_resumes_to_same_bytes(tmp_path: Path) -> None:
    """Another picture of the same size starts again, although the token ids are equal."""
    folder = save_seeing("qwen3-vl", tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", MIXED)
    whole, out = tmp_path / "whole", tmp_path / "out"
    quantize(folder, data, whole)
    kill_after_first_layer(folder, data, out)
    assert_contains(quantize(folder, data, out), "resumes", "layers are already rounded")
    assert written_by(out) == written_by(whole)

    shutil.rmtree(out)
    kill_after_first_layer(folder, data, out)
    write_rows(data, [question(address(picture(90, 70, 5))), *MIXED[1:]])
    assert "already rounded" not in quantize(folder, data, out)
    shutil.rmtree(whole)
    quantize(folder, data, whole)
    assert written_by(out) == written_by(whole)


def written_by(out: Path) -> Mapping[str, bytes]:
    return {file.name: file.read_bytes() for file in out.iterdir()}


def test_text_models_skip_pictures_with_a_note(tmp_path: Path, llava: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", MIXED)
    data = CalibrationData(name=str(file), samples=8, seq_len=400)
    found = read_samples(data, llava, vocab_size=VOCABULARY)
    assert found.pictures == ()
    assert_contains(found.notes[0], "skipped 2 of 3 rows", "calibration uses only text")


def test_other_spellings_of_addresses(llava: Path, tmp_path: Path) -> None:
    """Schemes have no case, file addresses are percent-encoded, and base64 needs no scheme."""
    (tmp_path / "a b.png").write_bytes(png(FIRST))
    data = base64.b64encode(png(FIRST)).decode()
    addresses = (
        address(FIRST),
        f"DATA:image/png;BASE64,{data}",
        data,
        "a b.png",
        f"FILE://{tmp_path}/a%20b.png",
    )
    chosen = read_rows(llava, tmp_path, *map(question, addresses))
    digests = [sample.digest for sample in chosen.pictures if sample is not None]
    assert (len(digests), len(set(digests))) == (len(addresses), 1)
