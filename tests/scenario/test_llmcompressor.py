"""Recipes of llm-compressor become rules.

Anything that vexport does not support is refused by name, with all errors at once.
"""

import json
import re
from pathlib import Path

import pytest
from compressed_tensors.quantization import QuantizationScheme

from tests.command import vexport
from tests.texts import assert_contains
from vexport.errors import InputError, InputErrors
from vexport.quantize.gptq import GPTQ
from vexport.scenario.llmcompressor import _GROUP_KEYS, GPTQ_DAMPING, Recipe, read_recipe

SIMPLE = """
default_stage:
  default_modifiers:
    {modifier}:
      targets: [Linear]
      ignore: [lm_head]
      {keys}
"""
GROUPS = """
quant_stage:
  quant_modifiers:
    GPTQModifier:
      sequential_update: true
      block_size: 128
      dampening_frac: 0.05
      actorder: static
      ignore: [lm_head, "re:.*layers.0.*"]
      config_groups:
        group_0:
          weights: {num_bits: 8, type: float, strategy: channel, symmetric: true, dynamic: false}
          input_activations: {num_bits: 8, type: float, strategy: token, symmetric: true, dynamic: true}
          targets: [Linear]
        group_1:
          weights: {num_bits: 4, type: int, strategy: group, group_size: 64, symmetric: false, observer: mse}
          targets: ["re:.*down_proj"]
      kv_cache_scheme: {num_bits: 8, type: float, strategy: tensor, dynamic: false, symmetric: true}
"""


def read_text(folder: Path, text: str) -> Recipe:
    """Write a recipe and read it."""
    path = folder / "recipe.yaml"
    path.write_text(text)
    return read_recipe(path)


def rules_of(read: Recipe) -> list[tuple[str, str, str | None, str | None]]:
    return [(rule.match, rule.scheme, rule.observer, rule.method) for rule in read.rules]


def test_schemes_in_all_notations(tmp_path: Path) -> None:
    """A scheme may be a name or a table of targets. A recipe may have stages or be flat."""
    text = SIMPLE.format(modifier="QuantizationModifier", keys="scheme: FP8_DYNAMIC")
    head, others = ("lm_head", "keep", None, None), ("Linear", "FP8_DYNAMIC", None, "nearest")
    assert rules_of(read_text(tmp_path, text)) == [head, others]
    text = SIMPLE.format(modifier="GPTQModifier", keys="scheme: W4A16\n      weight_observer: mse")
    assert rules_of(read_text(tmp_path, text))[1] == ("Linear", "W4A16", "mse", "gptq")
    text = (
        "QuantizationModifier: {scheme: {FP8_DYNAMIC: [Linear], NVFP4A16: ['re:.*mlp.*']}, "
        "ignore: lm_head}"
    )
    found = [rule[:2] for rule in rules_of(read_text(tmp_path, text))]
    assert found == [("lm_head", "keep"), ("re:.*mlp.*", "NVFP4A16"), ("Linear", "FP8_DYNAMIC")]
    text = (
        "quant_stage:\n  quant_modifiers:\n    IMatrixGatherer: {ignore: [lm_head]}\n"
        "    QuantizationModifier: {scheme: W4A16, weight_observer: imatrix_mse}\n"
    )
    assert rules_of(read_text(tmp_path, text)) == [("Linear", "W4A16", "imatrix_mse", "nearest")]


def test_config_groups_and_kv_cache(tmp_path: Path, llama: Path) -> None:
    read = read_text(tmp_path, GROUPS)
    down = ("re:.*down_proj", "W4A16_ASYM_G64", "mse", "gptq")
    assert rules_of(read)[2:] == [down, ("Linear", "FP8_DYNAMIC", None, "gptq")]
    assert (
        read_text(tmp_path, GROUPS.replace('["re:.*down_proj"]', "re:.*down_proj")).rules
        == read.rules
    )
    assert read.kv_cache == "fp8"
    assert "dampening_frac 0.05 is ignored" in read.notes[0]
    ran = vexport("plan", llama, "--recipe", tmp_path / "recipe.yaml")
    assert ran.code == 0, ran.stderr
    assert "W4A16_ASYM_G64" in ran.stdout
    assert "KV cache" in ran.stdout
    assert "dampening_frac" in ran.stderr


def test_presets_in_list_of_modifiers(tmp_path: Path, llama: Path) -> None:
    """A config group may be a preset's name with targets. A stage's modifiers may be a list."""
    text = (
        "default_stage:\n  default_modifiers:\n  - QuantizationModifier:\n"
        "      config_groups: {FP8_DYNAMIC: ['re:.*mlp.*'], W8A8: ['re:.*self_attn.*']}\n"
        "      ignore: [lm_head, 're:visual.*', 're:.*mlp.gate$']\n"
    )
    found = [rule[:2] for rule in rules_of(read_text(tmp_path, text))]
    assert found[3:] == [("re:.*mlp.*", "FP8_DYNAMIC"), ("re:.*self_attn.*", "W8A8")]
    # A recipe's ignore is written for many models. A pattern without a layer is at most a warning.
    ran = vexport("plan", llama, "--recipe", tmp_path / "recipe.yaml")
    assert ran.code == 0, ran.stderr
    assert_contains(ran.stdout, "[rules/no-layer-ignored]")
    assert "mlp.gate$" not in ran.stdout
    typed = vexport("plan", llama, "--scheme", "W8A8", "--ignore", "re:visual.*")
    assert (typed.code, "[rules/no-layer]" in typed.stderr) == (2, True)


def test_one_error_per_config_group(tmp_path: Path) -> None:
    text = SIMPLE.format(
        modifier="QuantizationModifier",
        keys="config_groups: {a: {targets: [q_proj]}, b: {targets: [q_proj, k_proj, v_proj], "
        "weights: "
        "{num_bits: 4, type: int, strategy: group, group_size: 64, observer_kwargs: {grid: 9}}}}",
    )
    (tmp_path / "recipe.yaml").write_text(text)
    errors = vexport("plan", tmp_path, "--recipe", tmp_path / "recipe.yaml").errors
    assert len(errors) == 2
    assert "config_groups.a: got no weights" in errors[0]
    assert "config_groups.b.weights.observer_kwargs: got" in errors[1]


def test_saved_recipe_of_llm_compressor(tmp_path: Path) -> None:
    """It has SmoothQuant's mappings, and observers without effect on inputs quantized by token."""
    smoothing = (
        "    SmoothQuantModifier:\n      smoothing_strength: 0.8\n      mappings:\n"
        "      - - ['re:.*q_proj', 're:.*k_proj', 're:.*v_proj']\n        - re:.*input_layernorm\n"
        "      ignore: []\n      num_calibration_steps: null\n"
    )
    text = GROUPS.replace("0.05", "0.01").replace(
        "dynamic: true", "dynamic: true, observer: memoryless"
    )
    read = read_text(tmp_path, text.replace("    GPTQModifier", f"{smoothing}    GPTQModifier"))
    assert read.rules == read_text(tmp_path, GROUPS).rules
    assert read.smoothing == 0.8
    (note,) = read.notes
    assert re.search(r"SmoothQuantModifier\.mappings\b.*\bignored\b", note)
    assert GPTQ.ridge == GPTQ_DAMPING
    assert read_text(tmp_path, GROUPS.replace("0.05", "0.01")).notes == ()


def test_keys_of_a_group_are_those_of_compressed_tensors() -> None:
    assert set(_GROUP_KEYS) == set(QuantizationScheme.model_fields)


def test_quantize_follows_a_recipe(tmp_path: Path, llama: Path) -> None:
    text = SIMPLE.format(modifier="QuantizationModifier", keys="scheme: W8A8")
    read_text(tmp_path, text)
    by_recipe, by_scheme = tmp_path / "a", tmp_path / "b"
    assert vexport("quantize", llama, by_recipe, "--recipe", tmp_path / "recipe.yaml").code == 0
    assert vexport("quantize", llama, by_scheme, "--scheme", "W8A8").code == 0
    recipe_bytes, scheme_bytes = (
        (folder / "model.safetensors").read_bytes() for folder in (by_recipe, by_scheme)
    )
    assert recipe_bytes == scheme_bytes


@pytest.mark.parametrize(
    ("modifier", "keys", "words"),
    [
        ("SmoothQuantModifier", "mappings: [a]", "scenario/no-modifier"),
        ("AWQModifier", "scheme: W4A16", "AWQModifier: got a modifier"),
        ("HessianGatherer", "scheme: W4A16", "HessianGatherer: got a modifier"),
        ("GPTQModifier", "{scheme: W4A16, actorder: group}", "actorder: got 'group'"),
        ("QuantizationModifier", "scheme: W4A17", "scheme: got 'W4A17'"),
        ("QuantizationModifier", "schema: W4A16", "(did you mean scheme?)"),
        (
            "QuantizationModifier",
            "{scheme: FP8, input_observer: mine}",
            "input_observer: got 'mine'",
        ),
        (
            "QuantizationModifier",
            "{scheme: FP8, input_observer: imatrix_mse}",
            "which only weights have",
        ),
        (
            "QuantizationModifier",
            "{scheme: FP8, kv_cache_scheme: {num_bits: 8, type: float, observer: minmax}}",
            "kv_cache_scheme.observer: got 'minmax'",
        ),
        ("QuantizationModifier", "{scheme: FP8, targets: [Embedding]}", "got the class Embedding"),
        ("QuantizationModifier", "ignore: []", "scheme: got nothing"),
        ("QuantizationModifier", "{scheme: FP8, weight_observer: mine}", "observer"),
        (
            "QuantizationModifier",
            "config_groups: {g: {targets: [Linear], weights: {num_bits: 4, type: float, "
            "strategy: channel}}}",
            "config_groups.g",
        ),
        (
            "QuantizationModifier",
            "config_groups: {g: {targets: [Linear], weights: {num_bits: 8}, input_activation: {}}}",
            "config_groups.g.input_activation: got an unknown key",
        ),
        (
            "QuantizationModifier",
            "config_groups: {g: {targets: [Linear], weights: {num_bits: 8}, 1: {}}}",
            "config_groups.g.1: got an unknown key",
        ),
        ("QuantizationModifier", "{scheme: FP8_DYNAMIC, 1: 2}", "Modifier.1: got an unknown key"),
        (
            "QuantizationModifier",
            "config_groups: {g: {targets: [Linear], weights: {num_bits: 8}, "
            "output_activations: {a: 8}}}",
            "output_activations: got quantized outputs",
        ),
        (
            "QuantizationModifier",
            "{scheme: FP8, kv_cache_scheme: {num_bits: 8, type: int}}",
            "kv_cache_scheme: got another scheme",
        ),
    ],
)
def test_unsupported_modifiers_are_refused(
    tmp_path: Path, llama: Path, modifier: str, keys: str, words: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{modifier}: {keys if keys.startswith('{') else f'{{{keys}}}'}\n")
    ran = vexport("quantize", llama, tmp_path / "out", "--recipe", path)
    assert ran.code == 2
    assert any(words in line for line in ran.errors), ran.stderr
    assert not (tmp_path / "out").exists()


def test_only_one_strength_and_one_cache(tmp_path: Path) -> None:
    cache = "kv_cache_scheme: {num_bits: 8, type: float, strategy: %s}"
    text = (
        "a: {SmoothQuantModifier: {smoothing_strength: 0.5}, QuantizationModifier: "
        "{scheme: W8A8, targets: ['re:.*q_proj'], %s}}\n"
        "b: {SmoothQuantModifier: {smoothing_strength: 0.8}, QuantizationModifier: "
        "{scheme: W8A8, targets: ['re:.*k_proj'], %s}}\n"
    )
    with pytest.raises(InputErrors) as raised:
        read_text(tmp_path, text % (cache % "tensor", cache % "attn_head"))
    smoothing, other = map(str, raised.value.problems)
    assert "SmoothQuantModifier.smoothing_strength: got a second SmoothQuantModifier" in smoothing
    assert "kv_cache_scheme: got fp8_per_head, need fp8, as in an earlier modifier" in other


def test_recipe_excludes_other_options(tmp_path: Path, llama: Path) -> None:
    read_text(tmp_path, SIMPLE.format(modifier="QuantizationModifier", keys="scheme: W8A8"))
    for options in ([], ["--scheme", "W8A8"], ["--group-size", "64"]):
        call = ("--recipe", tmp_path / "recipe.yaml") if options else ()
        assert vexport("quantize", llama, tmp_path / "out", *call, *options).code == 2
    with pytest.raises(InputError, match="no such file"):
        read_recipe(tmp_path / "none.yaml")


def test_unsupported_modifier_is_the_only_error(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "AWQModifier: {duo_scaling: true}\nGPTQModifier: {scheme: W8A8, ignore: [lm_head]}\n"
    )
    with pytest.raises(InputError) as caught:
        read_recipe(path)
    (line,) = str(caught.value).splitlines()
    place, _, rest = line.partition(": got ")
    assert place.endswith("AWQModifier")
    assert_contains(rest, "QuantizationModifier or GPTQModifier")
    path.write_text('recipe = [GPTQModifier(scheme="W8A8", targets="Linear")]\n')
    with pytest.raises(InputError, match="recipe.yaml"):
        read_recipe(path)


TWO_MODIFIERS = """
default_stage:
  default_modifiers:
    QuantizationModifier:
      targets: [{targets}]
      scheme: FP8_DYNAMIC
      ignore: [lm_head, '{own}']
    GPTQModifier:
      targets: [Linear]
      scheme: W4A16
      ignore: [lm_head, 're:.*self_attn.*']
"""


@pytest.mark.parametrize(
    ("targets", "own"),
    [
        ("'re:.*self_attn.*proj$'", "re:.*mlp.*"),
        ("'re:model.*proj$'", "re:(?i)MODEL[.]layers[.].*[.]mlp.*"),
        ("'re:.*self_attn.*proj$'", "mlp.down_proj"),
    ],
)
def test_ignore_applies_to_its_modifier(
    targets: str, own: str, tmp_path: Path, llama: Path
) -> None:
    """A layer that a modifier ignores may be quantized by another modifier."""
    file = tmp_path / "recipe.yaml"
    file.write_text(TWO_MODIFIERS.format(targets=targets, own=own))
    ran = vexport("plan", llama, "--recipe", file, "--format", "json", "--quiet")
    assert ran.code == 0, ran.stderr
    plan = json.loads(ran.stdout)
    schemes = {
        str(member): group["scheme"] for group in plan["groups"] for member in group["members"]
    }
    assert len(schemes) == 21
    for name, scheme in schemes.items():
        assert scheme == ("FP8_DYNAMIC" if "self_attn" in name else "W4A16"), name
    assert "matched by an earlier rule" not in ran.stdout


@pytest.mark.parametrize(
    ("targets", "own"),
    [("Linear", "re:.*mlp.*"), ("'re:.*attn.*'", r"re:.*(m)lp.*\1.*"), ("a", "re:[")],
)
def test_unclear_ignore_names_the_remedy(targets: str, own: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(TWO_MODIFIERS.format(targets=targets, own=own))
    remedy = "correct the pattern" if targets == "a" else "targets"
    with pytest.raises(InputError, match=rf"\bignore\b.*{remedy}"):
        read_recipe(file)


def test_broken_ignore_is_an_input_error(tmp_path: Path, llama: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("QuantizationModifier: {scheme: FP8_DYNAMIC, ignore: ['re:[']}\n")
    ran = vexport("plan", llama, "--recipe", file)
    assert ran.code == 2
    assert_contains(ran.errors[0], "QuantizationModifier.ignore:", "'re:['", "regular expression")


def test_recipe_with_only_kv_cache(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    cache = "{num_bits: 8, type: float, symmetric: true, strategy: tensor, dynamic: false}"
    file.write_text(
        f"QuantizationModifier: {{config_groups: {{group_0: {{targets: []}}}}, "
        f"kv_cache_scheme: {cache}}}"
    )
    recipe = read_recipe(file)
    assert (recipe.rules, recipe.kv_cache) == ((), "fp8")
