"""Answers only: the tokens of answers are found, and only they count in statistics that average."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.calibration.models import (
    batches_of,
    calibrated,
    configs,
    expert_configs,
    inputs_of_whole_model,
    mean_squares,
    plan_for,
    range_of,
    samples,
    save,
)
from tests.calibration.seeing import address, picture, question, save_seeing
from tests.calibration.templates import PLAIN, STRICT
from tests.calibration.test_gradients import gradient_of_last_token
from tests.calibration.test_rows import DEMO, decode, model_with, read, write_rows
from tests.command import vexport
from tests.models import VOCABULARY, save_llama
from tests.texts import assert_contains, breaks
from vexport.calibration import Samples, read_samples
from vexport.calibration.attention import causal_attention
from vexport.calibration.data import require_rows
from vexport.calibration.gradients import Gradients
from vexport.calibration.inputs import (
    CountedTokens,
    RoutedTokens,
    Site,
    counted_rows,
    counted_value,
)
from vexport.calibration.smoothing import Smoother, find_smoothing
from vexport.calibration.walk import Layer, LayerWalk
from vexport.checkpoint.index import read_index
from vexport.files import digest_file
from vexport.plan.build import PlanSettings
from vexport.quantize.input_moments import InputMoments
from vexport.quantize.layer_groups import find_layer_groups
from vexport.quantize.moments import Moments
from vexport.quantize.rounding_walk import round_weights
from vexport.quantize.scale_search import decode_importance
from vexport.quantize.sensitivity import measure
from vexport.records import CalibrationData, silent
from vexport.records.calibration import NO_CALIBRATION
from vexport.rules import calibration as rules
from vexport.scenario import Auto, Calibration, Rule

# A template with the tags around the assistant's turns, and around a header in front of them.
MARKING = """{% for message in messages %}<|{{ message['role'] }}|>
{% if message['role'] == 'assistant' %}{%- generation -%}
{{ message['content'] }}{{ eos_token }}{%- endgeneration -%}
{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}
{% endfor %}"""
USER = {"role": "user", "content": "1 + 2 ="}
ANSWER = {"role": "assistant", "content": "3"}
TURNS = [USER, ANSWER, {"role": "user", "content": "2 + 6 ="}, {**ANSWER, "content": "8"}]


def answers(samples: Samples, model: Path = DEMO) -> list[str]:
    """Return the text of the counted tokens of each sample."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        tokenizer.decode([token for token, counts in zip(ids, counted, strict=True) if counts])
        for ids, counted in zip(samples.token_ids, samples.counted, strict=True)
    ]


@pytest.fixture
def marking(tmp_path: Path) -> Path:
    return model_with(tmp_path / "marking", MARKING)


@pytest.mark.parametrize("template", [MARKING, STRICT], ids=["marking", "strict"])
def test_marked_turns_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    model = model_with(tmp_path / "model", template)
    rows = write_rows(tmp_path / "rows.jsonl", {"messages": TURNS})
    found = read(rows, model, calibrate_on="answers", seq_len=128)
    expected = AutoTokenizer.from_pretrained(model).apply_chat_template(
        TURNS, return_assistant_tokens_mask=True, return_dict=True
    )
    assert list(found.token_ids[0]) == expected["input_ids"]
    assert list(map(int, found.counted[0])) == expected["assistant_masks"]
    assert 0 < sum(found.counted[0]) < len(found.token_ids[0])


MARKED: Mapping[str, tuple[Mapping[str, object], Sequence[int]]] = {
    "loss mask": ({"loss_mask": [0, 1, 1, 0]}, [6, 7]),
    "floats": ({"loss_mask": [0.0, 1.0, True, False]}, [6, 7]),
    "transformers": ({"assistant_masks": [0, 0, 1, 1]}, [7, 8]),
    "completion of TRL": ({"completion_mask": [0, 0, 0, 1]}, [8]),
    "labels": ({"labels": [-100, -100, 7, 8]}, [7, 8]),
    "all": ({"labels": [-100, 6, 7, 8], "loss_mask": [1, 1, 0, 1]}, [6, 8]),
    "padding": ({"loss_mask": [0, 1, 0, 1], "attention_mask": [1, 0, 1, 1]}, [8]),
}


@pytest.mark.parametrize(("marks", "expected"), MARKED.values(), ids=MARKED)
def test_marks_of_token_ids(
    tmp_path: Path, marks: Mapping[str, object], expected: Sequence[int]
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"input_ids": [5, 6, 7, 8], **marks})
    found = read(rows, calibrate_on="answers")
    pairs = zip(found.token_ids[0], found.counted[0], strict=True)
    assert [token for token, counts in pairs if counts] == expected
    assert not any("not used" in note for note in found.notes)
    assert read(rows).counted == ()


WRONG: Mapping[str, tuple[Mapping[str, object], str]] = {
    "length": ({"loss_mask": [1, 1]}, "loss_mask with 2 values for 4 input_ids"),
    "value": ({"loss_mask": [0, 1, 2, 1]}, "loss_mask with the value 2"),
    "share": ({"assistant_masks": [0, 1, 0.5, 1]}, "assistant_masks with the value 0.5"),
    "nested": ({"loss_mask": [[0, 1, 1, 0]]}, "loss_mask with 1 values"),
    "text": ({"labels": "0110"}, "labels with a string"),
    "length of labels": ({"labels": ["a"]}, "labels with 1 values for 4 input_ids"),
    "type of labels": ({"labels": [5, 6, "a", 8]}, "labels with the value 'a' instead of"),
    "float label": ({"labels": [5, 6, 0.5, 8]}, "labels with the value 0.5"),
    "nested label": ({"labels": [[5], 6, 7, 8]}, "labels with the value [5]"),
    "no label": ({"labels": [None, 6, 7, 8]}, "labels with the value None"),
    "negative label": ({"labels": [-1, 6, 7, 8]}, "instead of a token id or -100"),
    "text in a mask": ({"loss_mask": ["1", 0, 0, 1]}, "loss_mask with the value '1'"),
    "list in a mask": ({"loss_mask": [[], 0, 0, 1]}, "loss_mask with the value []"),
}


@pytest.mark.parametrize(("marks", "problem"), WRONG.values(), ids=WRONG)
def test_wrong_marks_are_errors_of_rows(
    tmp_path: Path, marks: Mapping[str, object], problem: str
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"input_ids": [5, 6, 7, 8], **marks})
    with breaks(rules.ROW, "line 1", problem):
        read(rows, calibrate_on="answers")
    with breaks(rules.ROW, "line 1", problem):
        require_rows(CalibrationData(name=str(rows), samples=1, seq_len=8, answers_only=True))
    assert len(read(rows).token_ids) == 1


WEIGHTED: Mapping[str, Mapping[str, object]] = {
    "weight": {"messages": [USER, {**ANSWER, "weight": 0}, *TURNS[2:]]},
    "mask of turns": {"messages": TURNS, "loss_mask": [0, 0, 0, 1]},
    "system": {"system": "be brief", "messages": TURNS, "loss_mask": [0, 0, 0, 1]},
}


@pytest.mark.parametrize("row", WEIGHTED.values(), ids=WEIGHTED)
def test_turns_without_weight_do_not_count(
    tmp_path: Path, marking: Path, row: Mapping[str, object]
) -> None:
    found = read(write_rows(tmp_path / "rows.jsonl", row), marking, calibrate_on="answers")
    assert answers(found, marking)[0].split() == ["8", "<eos>"]


@pytest.mark.parametrize("mask", [[0, 1], [1, 0, 0, 1], [0, 3, 0, 1], "1"])
def test_wrong_masks_of_turns_are_errors(tmp_path: Path, marking: Path, mask: object) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"messages": TURNS, "loss_mask": mask})
    with breaks(rules.ROW, "line 1"):
        read(rows, marking, calibrate_on="answers")
    assert len(read(rows, marking).token_ids) == 1


def test_pairs_without_chat_template(tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl",
        {"prompt": "1 + 2 = ", "completion": "3"},
        {"question": "1 + 2 =", "answer": "3"},
    )
    found = read(rows, model_with(tmp_path / "model"), calibrate_on="answers")
    assert [text.strip() for text in answers(found)] == ["3", "3"]


def test_turns_as_plain_text(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"messages": TURNS})
    settings = {"samples": 8, "seq_len": 64, "calibrate_on": "answers"}
    source = {"data": [{"path": str(rows), "chat_template": False}], **settings}
    found = read_samples(Calibration.model_validate(source).sources(), DEMO, vocab_size=384)
    assert decode(found) == ["<bos> 1 + 2 = 3 2 + 6 = 8"]
    assert answers(found) == ["3 8"]


def test_rows_without_answers_are_skipped(tmp_path: Path, marking: Path) -> None:
    """A row whose answer comes after `seq_len` tokens has no answer, either."""
    long = {"role": "user", "content": "1 + 2 = " * 30}
    rows = write_rows(
        tmp_path / "rows.jsonl",
        {"text": "1 + 2 ="},
        {"messages": [long, ANSWER]},
        {"input_ids": [5, 6]},
        {"input_ids": [5, 6], "loss_mask": [0, 0]},
        {"messages": TURNS},
    )
    found = read(rows, marking, calibrate_on="answers", pack=False)
    assert found.rows == (5,)
    counted, skipped = found.notes
    number = sum(found.counted[0])
    assert_contains(counted, f"{number} of {found.tokens} tokens are answers")
    assert_contains(skipped, "skipped 4 samples without an answer in 64 tokens")


def test_packed_samples_keep_marks(tmp_path: Path) -> None:
    row = {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}
    rows = write_rows(tmp_path / "rows.jsonl", *[row] * 3)
    found = read(rows, calibrate_on="answers", seq_len=2, pack=True)
    assert found.token_ids == ((7, 5), (6, 7), (7,))
    assert found.counted == ((True, False), (False, True), (True,))


def quantize(source: Path, out: Path, rows: Path, *options: object) -> tuple[int, str]:
    ran = vexport("quantize", source, out, "--scheme", "W4A16", "--calibration", rows, *options)
    return ran.code, ran.stderr


def test_no_answers_are_refused(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "llama")
    rows = write_rows(tmp_path / "rows.jsonl", {"input_ids": [5, 6, 7]})
    code, text = quantize(source, tmp_path / "out", rows, "--calibrate-on", "answers")
    assert code == 2
    assert_contains(text, str(rows), "1 sample without an answer", "leave out --calibrate-on")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["plan", "quantize"])
def test_unmarked_template_is_refused(tmp_path: Path, command: str) -> None:
    model = model_with(tmp_path / "model", PLAIN)
    rows = write_rows(tmp_path / "rows.jsonl", {"messages": TURNS})
    out = (tmp_path / "out",) if command == "quantize" else ()
    call = (command, model, *out, "--scheme", "W4A16", "--calibration", rows)
    ran = vexport(*call, "--calibrate-on", "answers")
    assert ran.code == 2
    assert_contains(ran.stderr, "does not mark", "endgeneration", "chat_template.jinja")
    assert vexport("plan", *call[1:2], *call[-4:]).code == 0


def test_plan_shows_answers_only(tmp_path: Path, marking: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"messages": TURNS})
    call = ("plan", marking, "--scheme", "W4A16", "--calibration", rows)
    ran = vexport(*call, "--calibrate-on", "answers")
    assert ran.code == 0, ran.stderr
    assert_contains(ran.stdout, "answers only", "--calibrate-on answers")


def masked(chosen: Samples, seed: int = 5) -> Samples:
    """Return samples of which about half of the tokens count. The first token never counts."""
    generator = torch.Generator().manual_seed(seed)
    counted = [
        (False, True, *(torch.rand(len(ids) - 2, generator=generator) < 0.5).tolist())
        for ids in chosen.token_ids
    ]
    return replace(chosen, counted=tuple(counted))


def counted_tokens(chosen: Samples) -> torch.Tensor:
    return torch.tensor([each for row in chosen.counted for each in row])


def test_importance_is_of_answers_and_ranges_of_all_tokens(tmp_path: Path) -> None:
    folder = save(configs()["llama"], tmp_path / "llama")
    chosen = masked(samples())
    planned = plan_for(folder, scheme="FP8", observer="imatrix_mse")
    record = calibrated(planned, chosen)
    expected = inputs_of_whole_model(folder, record.ranges, batches_of(chosen))
    answer = counted_tokens(chosen)
    assert record.tokens == int(answer.sum())
    for name, values in expected.items():
        assert record.ranges[name] == range_of(values)
        torch.testing.assert_close(
            decode_importance(record.importance[name]),
            mean_squares(values[answer]),
            rtol=1e-4,
            atol=0,
        )


def test_moments_are_of_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No earlier layer is rounded in front of the first inputs, so they equal the source's."""
    folder = save(configs()["llama"], tmp_path / "llama")
    chosen, found, complete = masked(samples()), dict[str, torch.Tensor](), InputMoments.of

    def keep(self: InputMoments, site: Site) -> Moments:
        moments = complete(self, site)
        found[site.name] = moments.hessian.clone()
        return moments

    monkeypatch.setattr(InputMoments, "of", keep)
    index, plan = plan_for(folder, scheme="W4A16_G32")
    groups = tuple(replace(group, rounding="gptq") for group in plan.groups)
    record = calibrated((index, replace(plan, groups=())), chosen)
    round_weights(LayerWalk(index), replace(plan, groups=groups), record, chosen, tmp_path)
    name = "model.layers.0.self_attn.q_proj"
    values = inputs_of_whole_model(folder, [name], batches_of(chosen))[name]
    answer = values[counted_tokens(chosen)].float()
    torch.testing.assert_close(found[name], answer.T @ answer, rtol=1e-3, atol=1e-3)


def test_routed_tokens_are_those_of_answers() -> None:
    """The routes are places among the counted tokens, and keep their weights."""
    tokens = torch.arange(10.0).view(5, 2)
    routes = (torch.tensor([0, 2, 4]), torch.tensor([1, 3]))
    weights = (torch.tensor([[0.1], [0.2], [0.4]]), torch.tensor([[0.3], [0.5]]))
    routed = RoutedTokens(tokens=tokens, routes=routes, weights=weights)
    answer = CountedTokens.of([False, True, True, False, True], "cpu")
    found = counted_value(routed, answer, "experts")
    assert isinstance(found, RoutedTokens)
    assert torch.equal(found.tokens, tokens[[1, 2, 4]])
    assert [route.tolist() for route in found.routes] == [[1, 2], [0]]
    assert torch.equal(found.weights[0], weights[0][1:])
    assert torch.equal(found.weights[1], weights[1][:1])


def test_coverage_of_experts_is_of_answers(tmp_path: Path) -> None:
    folder = save(expert_configs()["qwen3_moe"], tmp_path / "qwen3_moe")
    chosen = masked(samples((12, 20)))
    record = calibrated(plan_for(folder, scheme="FP8"), chosen)
    of_answers = int(counted_tokens(chosen).sum())
    for counts in record.routed.values():
        assert sum(counts) % of_answers == 0
        assert sum(counts) < sum(len(ids) for ids in chosen.token_ids) * 8


@pytest.mark.usefixtures("matmul_in_model_dtype")
def test_gradients_are_of_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is of answers, and the squares are averaged over their tokens."""
    folder = save(configs()["llama"], tmp_path / "llama")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    monkeypatch.setattr(Gradients, "_logits_gradient", gradient_of_last_token)
    chosen = masked(samples((16, 11)))
    _, found = find_smoothing(
        LayerWalk(read_index(folder)), chosen, smoothed=(), strength=0.0, weighs_tokens=True
    )
    name = "model.layers.1.mlp.down_proj"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    gradients = list[torch.Tensor]()

    def see(module: torch.nn.Module, inputs: object, made: torch.Tensor) -> None:
        made.register_hook(gradients.append)  # type: ignore[no-untyped-call]

    model.get_submodule(name).register_forward_hook(see)
    sums, counts = torch.zeros(5), torch.zeros(5)
    for ids, counted in zip(chosen.token_ids, chosen.counted, strict=True):
        logits = model(input_ids=torch.tensor([ids])).logits[0, list(counted)]
        (-torch.log_softmax(logits, -1)[..., -1].sum()).backward()  # type: ignore[no-untyped-call]
        for place, gradient in enumerate(gradients.pop()[0]):
            if counted[place]:
                sums[place.bit_length()] += gradient.square().sum()
                counts[place.bit_length()] += 1
    expected = torch.where(counts > 0, sums / counts.clamp_min(1), sums.sum() / counts.sum())
    assert counts[0] == 0
    torch.testing.assert_close(torch.tensor(found[name]), expected, rtol=1e-3, atol=1e-5)


def test_smoothing_is_by_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(configs()["llama"], tmp_path / "llama")
    chosen, found, leave = masked(samples()), dict[str, torch.Tensor](), Smoother.leave

    def keep(self: Smoother, layer: Layer) -> None:
        found.update({f"{layer.name}.{name}": sums for name, sums in self._squares.items()})
        leave(self, layer)

    monkeypatch.setattr(Smoother, "leave", keep)
    index, plan = plan_for(folder, scheme="W8A8")
    find_smoothing(
        LayerWalk(index), chosen, smoothed=plan.groups, strength=0.5, weighs_tokens=False
    )
    answer = counted_tokens(chosen)
    with causal_attention("cpu"):
        inputs = inputs_of_whole_model(folder, found, batches_of(chosen))
    for name, values in inputs.items():
        expected = values[answer].float().square().sum(0)
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-4)


def test_losses_are_of_answers(tmp_path: Path) -> None:
    """The loss over all tokens is the mean of the losses over both parts, by their tokens."""
    folder = save_llama(tmp_path / "llama", num_hidden_layers=1)
    index, whole = read_index(folder), samples((12, 20))
    part = masked(whole)
    rest = replace(part, counted=tuple(tuple(not each for each in row) for row in part.counted))
    auto = Auto(candidates=("FP8_DYNAMIC", "keep"), share=0.5)
    units = find_layer_groups(index, (Rule(match="Linear", scheme="auto"),), auto, PlanSettings())

    def losses(chosen: Samples) -> torch.Tensor:
        found = measure(
            index,
            units,
            NO_CALIBRATION,
            chosen,
            file=tmp_path / "trials.json",
            on_progress=silent,
            trust_remote_code=False,
            device="cpu",
        )
        assert found.tokens == chosen.counted_tokens
        return torch.tensor([each.loss for group in found.groups for each in group.schemes])

    mean = part.counted_tokens * losses(part) + rest.counted_tokens * losses(rest)
    torch.testing.assert_close(mean / whole.tokens, losses(whole), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("scheme", ["NVFP4", "W4A16"])
def test_marks_of_all_tokens_change_nothing(tmp_path: Path, scheme: str) -> None:
    """With other marks, the weights change, and an interrupted call is not resumed."""
    source, digests = save_llama(tmp_path / "llama"), list[str]()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 384, (6, 24), generator=generator).tolist()
    for number, mask in enumerate(([1] * 24, [1] * 24, [0] * 8 + [1] * 16)):
        rows = tmp_path / f"{number}.jsonl"
        write_rows(rows, *[{"input_ids": row, "loss_mask": mask} for row in ids])
        answers = ("--calibrate-on", "answers") if number else ()
        call = ("quantize", source, "--scheme", scheme, "--calibration", rows, *answers)
        ran = vexport(*call, out := tmp_path / str(number), "--no-verify")
        assert ran.code == 0, ran.stderr
        digests.append(digest_file(out / "model.safetensors"))
    assert digests[0] == digests[1] != digests[2]
    recipe = json.loads((out / "vexport.json").read_text())
    assert recipe["scenario"]["calibration"]["calibrate_on"] == "answers"
    assert recipe["calibration"]["tokens"] == 6 * 16


def test_other_marks_are_not_resumed() -> None:
    plain = samples()
    digests = [each.counted_digest for each in (plain, masked(plain), masked(plain, seed=6))]
    assert digests[0] == ""
    assert len(set(digests)) == 3
    assert {each.digest for each in (plain, masked(plain))} == {plain.digest}


def test_lists_of_experts_are_refused() -> None:
    """The input of such an expert does not show which of its tokens are answers."""
    site = Site(name="experts.0.w1", module="experts.0.w1", columns=4, groups=(), is_aligned=False)
    site.require_order(None)
    with breaks(rules.ANSWERS_OF_EXPERTS, "experts.0.w1"):
        site.require_order(CountedTokens.of([True], "cpu"))
    with breaks(rules.ANSWERS_OF_EXPERTS, "adapter"):
        counted_rows(torch.zeros(3, 4), CountedTokens.of([True, False], "cpu"), "adapter")


@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen2.5-vl"])
def test_answers_about_pictures(tmp_path: Path, family: str) -> None:
    """The processor puts several tokens in the place of a picture, none of which is an answer."""
    model = save_seeing(family, tmp_path / "model")
    file = model / "chat_template.jinja"
    text = "{{- part.text -}}"
    marked = f"{{% generation %}}{text}{{% endgeneration %}}"
    template = file.read_text()
    assert text in template
    either = f"{{%- if message.role == 'user' -%}}{text}{{%- else -%}}{marked}{{%- endif -%}}"
    file.write_text(template.replace(text, either))
    rows = write_rows(
        tmp_path / "rows.jsonl", question(address(picture(90, 70)), answer="yes"), {"text": "no"}
    )
    data = CalibrationData(name=str(rows), samples=4, seq_len=400, answers_only=True)
    found = read_samples(data, model, vocab_size=VOCABULARY, with_pictures=True)
    assert found.rows == (1,)
    assert found.pictures_of(0) is not None
    assert answers(found, model) == ["yes"]
