"""Settings of prompts: defaults from the models' files, and models whose prompts differ."""

import json
import shutil
from pathlib import Path

import click
import pytest
from transformers import AutoTokenizer

from tests.texts import breaks
from vexport.checkpoint.chat_template import chat_templates
from vexport.cli.prompting import EVALUATE_SYNTAXES
from vexport.cli.settings import given_settings, setting_options
from vexport.inference.lm_eval_model import ServedChat
from vexport.inference.prompting import lm_eval_settings
from vexport.rules import prompts as rules
from vexport.rules.book import Rule
from vexport.scenario import Evaluate
from vexport.scenario.evaluate import LmEvalSettings

DEMO = Path(__file__).parents[2] / "scenarios" / "demo" / "model"
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
CHAT = {"chat_template.jinja": TEMPLATE}
RAG = {"additional_chat_templates/rag.jinja": TEMPLATE}
SPACED = TEMPLATE.replace("}}{% endfor", "}} {% endfor")
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def model(folder: Path, files: dict[str, str] | None = None) -> Path:
    """Save the demo model, which has no chat template, and add files."""
    shutil.copytree(DEMO, folder)
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def in_settings(template: object) -> str:
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    return json.dumps(settings | {"chat_template": template})


NAMED_TEMPLATES = [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": SPACED}]


@pytest.mark.parametrize(
    "files",
    [
        {},
        CHAT,
        {**CHAT, "tokenizer_config.json": in_settings("old")},
        {"tokenizer_config.json": in_settings(TEMPLATE)},
        {"tokenizer_config.json": in_settings(NAMED_TEMPLATES[:1])},
        {"tokenizer_config.json": in_settings(NAMED_TEMPLATES)},
        {**CHAT, **RAG},
        RAG,
    ],
    ids=["none", "file", "file first", "settings", "list of one", "list", "folder", "no default"],
)
def test_templates_equal_transformers(files: dict[str, str], tmp_path: Path) -> None:
    root = model(tmp_path / "model", files)
    found = AutoTokenizer.from_pretrained(root).chat_template
    named = found if isinstance(found, dict) else {"default": found} if found else {}
    assert chat_templates(root) == named


def test_template_is_applied_if_models_have_one(tmp_path: Path) -> None:
    plain = model(tmp_path / "plain")
    chat = {name: model(tmp_path / name, CHAT) for name in ("old", "new")}
    settings = Evaluate(tasks=("a",))
    base = lm_eval_settings(settings, {"baseline": plain, "candidate": plain})
    assert (base.apply_chat_template, base.fewshot_as_multiturn) == (False, False)
    settings_used = lm_eval_settings(settings, chat)
    assert (settings_used.apply_chat_template, settings_used.fewshot_as_multiturn) == (True, True)
    one_turn = settings.model_copy(update={"fewshot_as_multiturn": False})
    assert lm_eval_settings(one_turn, chat).fewshot_as_multiturn is False
    without = settings.model_copy(update={"apply_chat_template": False})
    assert lm_eval_settings(without, chat).apply_chat_template is False


@pytest.mark.parametrize(
    ("old", "new", "settings", "rule", "parts"),
    [
        ({}, {}, {"apply_chat_template": True}, rules.NO_TEMPLATE, ["baseline: chat template"]),
        ({}, {}, {"fewshot_as_multiturn": True}, rules.MULTITURN, ["baseline"]),
        (CHAT, {}, {}, rules.NO_TEMPLATE, ["candidate: chat template"]),
        ({}, CHAT, {}, rules.NO_TEMPLATE, ["baseline: chat template"]),
        (
            CHAT,
            {"chat_template.jinja": SPACED},
            {},
            rules.OTHER_TEMPLATE,
            ["new:", "character 36", "' <assistant>Paris. ", "'<assistant>Paris.<"],
        ),
        (
            CHAT,
            CHAT,
            {"apply_chat_template": "rag"},
            rules.NO_SUCH_TEMPLATE,
            ["rag", "default"],
        ),
        (
            {**RAG, "additional_chat_templates/tool.jinja": TEMPLATE},
            RAG,
            {},
            rules.NO_SUCH_TEMPLATE,
            ["default", "rag and tool"],
        ),
    ],
)
def test_models_with_different_prompts_are_refused(
    old: dict[str, str],
    new: dict[str, str],
    settings: dict[str, bool | str],
    rule: Rule,
    parts: list[str],
    tmp_path: Path,
) -> None:
    models = {"baseline": model(tmp_path / "old", old), "candidate": model(tmp_path / "new", new)}
    with breaks(rule, *parts):
        lm_eval_settings(Evaluate(tasks=("a",), **settings), models)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("temperature=0,max_gen_toks=512",), {"temperature": 0, "max_gen_toks": 512}),
        (("top_p=0.9", "do_sample=true,top_p=1e-1"), {"top_p": 0.1, "do_sample": True}),
        (('until=["a, b", "c"],stop=None',), {"until": ["a, b", "c"], "stop": None}),
        (('{"until": ["\\n"], "temperature": 0.5}',), {"until": ["\n"], "temperature": 0.5}),
        (("stop='a, b',seed=3",), {"stop": "a, b", "seed": 3}),
        (("until=Q:",), {"until": "Q:"}),
    ],
)
def test_gen_kwargs_notations(given: tuple[str, ...], expected: dict[str, object]) -> None:
    @click.command()
    @setting_options("evaluate", EVALUATE_SYNTAXES)
    @click.pass_context
    def read(context: click.Context, /, **values: object) -> None:
        assert given_settings("evaluate") == {"gen_kwargs": expected}

    arguments = [part for value in given for part in ("--gen-kwargs", value)]
    read.main(arguments, standalone_mode=False)


def test_endless_template_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vexport.inference.lm_eval_model.TEMPLATE_SECONDS", 0.3)
    chat = ServedChat()
    chat.tokenizer = AutoTokenizer.from_pretrained(DEMO)
    chat.hf_chat_template = ENDLESS
    chat.enable_thinking = None
    chat.settings = LmEvalSettings()
    with breaks(rules.TEMPLATE, "chat template", "0.3 s"):
        chat.apply_chat_template([{"role": "user", "content": "hello"}])


def test_comparison_of_endless_templates_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vexport.inference.prompting.TEMPLATE_SECONDS", 0.3)
    models = {
        "baseline": model(tmp_path / "baseline", CHAT),
        "candidate": model(tmp_path / "candidate", {"chat_template.jinja": ENDLESS}),
    }
    with breaks(rules.OTHER_TEMPLATE, "candidate", "0.3 s"):
        lm_eval_settings(Evaluate(tasks=("gsm8k",)), models)
