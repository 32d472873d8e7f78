"""Settings are declared only in the models. Options, documents and the schema follow from them."""

import inspect
import json
import re
import runpy
from pathlib import Path

import click
import jsonschema
import pytest
import yaml
from pydantic import BaseModel, ValidationError

import vexport.api
from tests.command import ROOT
from tests.command import vexport as call
from vexport.cli.options import SettingOption
from vexport.cli.settings import (
    PLAIN,
    SETTINGS,
    Syntax,
    given_settings,
    setting_option,
    setting_options,
)
from vexport.errors import InputErrors
from vexport.scenario import Calibration, Evaluate, Planning, Rule, Scenario, Serve
from vexport.scenario.declaring import Option, declaration, options_of

SCHEMAS = runpy.run_path(str(ROOT / "scripts" / "generate_schemas.py"))
GENERATOR = runpy.run_path(str(ROOT / "scripts" / "generate_settings.py"))
MODELS: dict[str, type[BaseModel]] = GENERATOR["SECTIONS"]
OPTIONS = [(section, key) for section, options in SETTINGS.items() for key in options]


def parsed(section: str, key: str, *words: str, syntax: Syntax = PLAIN) -> object:
    """Return the value of a setting that click parses from words."""
    found: list[object] = []

    @click.command()
    @setting_option(section, key, syntax)
    @click.pass_context
    def command(context: click.Context, /, **values: object) -> None:
        found.append(given_settings(section).get(key))

    command.main(list(words), standalone_mode=False)
    return found[0]


def test_generated_files_are_current() -> None:
    remedy = "run scripts/generate_settings.py"
    assert GENERATOR["OPTIONS"].read_text(encoding="utf-8") == GENERATOR["options_text"](), remedy
    page = GENERATOR["REFERENCE"].read_text(encoding="utf-8")
    assert page == GENERATOR["reference_text"](page), remedy
    schema = SCHEMAS["SCENARIO"].read_text(encoding="utf-8")
    assert schema == SCHEMAS["SCENARIO_SCHEMA"], "run scripts/generate_schemas.py"


def test_options_follow_fields() -> None:
    """An option has the type, bounds and default of its field."""
    (samples,) = (each for each in options_of(Calibration) if each.key == "samples")
    assert (samples.type, samples.low, samples.open_low, samples.default) == (
        "integer",
        0,
        True,
        "128",
    )
    (alpha,) = (each for each in options_of(Evaluate) if each.key == "alpha")
    assert (alpha.low, alpha.high, alpha.open_low, alpha.open_high) == (0, 0.5, True, True)
    rounding = SETTINGS["quantize"]["rounding"]
    assert tuple(rounding.choices) == ("nearest", "gptq", "refit")
    assert SETTINGS["plan"]["tp"].repeatable
    assert SETTINGS["evaluate"]["tasks"].names == ["--task", "--tasks"]


@pytest.mark.parametrize(("section", "key"), OPTIONS)
def test_option_bounds_equal_field_bounds(section: str, key: str) -> None:
    """A number near a bound is valid for click if it is valid for the field."""
    record = SETTINGS[section][key]
    for bound in (record.low, record.high):
        if bound is None or record.type not in ("integer", "number") or record.repeatable:
            continue
        for value in (bound - 1, bound, bound + 1):
            assert is_accepted_by_click(section, key, value) == is_accepted_by_field(
                section, key, value
            ), value


def is_accepted_by_click(section: str, key: str, value: float) -> bool:
    try:
        parsed(section, key, f"{SETTINGS[section][key].names[0]}={value}")
    except click.BadParameter:
        return False
    return True


def is_accepted_by_field(section: str, key: str, value: float) -> bool:
    field = MODELS[section].model_fields[key]

    class One(MODELS[section]):  # type: ignore[misc, valid-type]
        """The field alone."""

    try:
        One.__pydantic_validator__.validate_assignment(One.model_construct(), key, value)
    except ValidationError as error:
        return not any(detail["loc"] == (key,) for detail in error.errors())
    return field is not None


def test_parsed_values() -> None:
    assert parsed("calibration", "pack", "--no-pack") is False
    assert parsed("calibration", "all_experts", "--calibrate-all-experts") is True
    assert parsed("calibration", "samples") is None
    assert parsed("quantize", "ignore", "--ignore", "a", "--ignore", "b") == ("a", "b")
    assert parsed("quantize", "rounding", "--rounding", "gptq") == "gptq"
    assert parsed("quantize", "recipe", "--recipe", "~/r.yaml") == Path.home() / "r.yaml"
    comma = Syntax(whole=lambda text: tuple(map(int, text.split(","))))
    assert parsed("quantize", "tp", "--tp", "1,2", syntax=comma) == (1, 2)
    joined = Syntax(combine=lambda context, parameter, values: "+".join(values))
    assert parsed("evaluate", "gate", "--gate", "a", "--gate", "b", syntax=joined) == "a+b"
    with pytest.raises(AssertionError, match="no settings of plan"):
        setting_options("plan", {"sceme": comma})


def test_help_shows_default_and_range() -> None:
    help_of = call("quantize", "--help").stdout
    words = " ".join(help_of.split())
    assert re.search(r"--samples [^\[]*\[default: 128\]", words)
    assert "else 0; 0<=x<=1]" in words
    assert re.search(r"--max-shard-size [^\[]*\[default: 5GB\]", words)
    assert "; repeatable." in words


def test_fields_have_help() -> None:
    """The help of a key and of an option is a sentence."""
    for model in (Scenario, Rule, Calibration, Serve, Evaluate, Planning):
        for key, field in model.model_fields.items():
            declared = declaration(field)
            assert declared is not None, f"{model.__name__}.{key}"
            assert declared.help[0].isupper() or declared.help[0] == "`"
            assert declared.help.endswith(".")
            assert not declared.unset.endswith(".")


@pytest.mark.parametrize(
    ("command", "section"), [("plan", "plan"), ("quantize", "quantize"), ("verdict", "verdict")]
)
def test_functions_have_field_keywords(command: str, section: str) -> None:
    keywords = inspect.signature(getattr(vexport.api, command)).parameters
    for key, field in MODELS[section].model_fields.items():
        assert keywords[key].kind is inspect.Parameter.KEYWORD_ONLY
        assert keywords[key].default == field.default
    assert {key for key in SETTINGS[section]} <= set(keywords)


def test_functions_refuse_invalid_settings(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="sceme"):
        vexport.api.plan(tmp_path, sceme="FP8")  # type: ignore[call-arg]
    with pytest.raises(InputErrors, match=r"quantize: smoothing: got 2"):
        vexport.api.quantize(tmp_path, tmp_path / "out", scheme="FP8", smoothing=2)
    with pytest.raises(InputErrors, match=r"plan_schemes: group_size: got 0"):
        vexport.api.plan_schemes(tmp_path, group_size=0)
    assert vexport.api.quantize.__name__ == "quantize"


def test_errors_name_options() -> None:
    demo = ROOT / "scenarios" / "demo" / "model"
    ran = call("quantize", demo, "out", "--scheme", "FP8", "--observer", "foo")
    assert ran.code == 2
    assert ran.errors[0].startswith("error: --observer: got 'foo', need ")


@pytest.mark.parametrize("path", [*(ROOT / "scenarios").glob("*.yaml")], ids=lambda path: path.stem)
def test_schema_accepts_scenarios(path: Path) -> None:
    schema = json.loads(SCHEMAS["SCENARIO"].read_text(encoding="utf-8"))
    jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), schema)


def test_schema_has_help_and_bounds() -> None:
    schema = json.loads(SCHEMAS["SCENARIO"].read_text(encoding="utf-8"))
    samples = schema["$defs"]["Calibration"]["properties"]["samples"]
    assert (samples["default"], samples["exclusiveMinimum"]) == (128, 0)
    declared = declaration(Calibration.model_fields["samples"])
    assert declared is not None
    assert samples["description"] == declared.help
    for rule in ({"match": "Linear"}, {"match": "Linear", "scheme": "W4A16", "shceme": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"name": "a", "source": "b", "rules": [rule]}, schema)
    weights = {"match": "Linear", "weights": {"num_bits": 4}}
    jsonschema.validate({"name": "a", "source": "b", "rules": [weights]}, schema)


def test_keys_without_option() -> None:
    """A field declared with `Option` becomes an option. A field declared with `Key` does not."""
    options = {each.key for each in options_of(Evaluate)}
    declared = {
        key
        for key, field in Evaluate.model_fields.items()
        if isinstance(declaration(field), Option)
    }
    assert options == declared
    assert "kl_prompts" not in options
    assert issubclass(SettingOption, click.Option)
