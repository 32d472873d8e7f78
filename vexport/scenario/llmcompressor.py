"""Convert llm-compressor's recipes to rules.

Supports QuantizationModifier, GPTQModifier, and the strength of SmoothQuantModifier.
IMatrixGatherer is skipped. Every other modifier is an error.

Source: llmcompressor/modifiers/quantization/quantization/mixin.py, gptq/base.py and
transform/smoothquant/base.py of llm-compressor 0.14.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue, ValidationError

from vexport.config_files import load_yaml
from vexport.errors import InputError, InputErrors, nearest_hint
from vexport.errors.validation import validation_problems
from vexport.formats.arguments import parse_args
from vexport.formats.schemes import KEEP, get_scheme
from vexport.records import KvCache
from vexport.records.patterns import REGEX
from vexport.rules import scenario as book
from vexport.scenario.rules import IgnoredLayers, Rule
from vexport.words import shown

QUANTIZATION, GPTQ = "QuantizationModifier", "GPTQModifier"
MODIFIERS = (QUANTIZATION, GPTQ)
SMOOTHING, STRENGTH = "SmoothQuantModifier", "smoothing_strength"
# Keys that choose the layers to smooth. Recipes saved by llm-compressor always contain them.
_LAYER_KEYS = ("mappings", "ignore")
# llm-compressor's default strength.
SMOOTHING_STRENGTH = 0.5
# Modifier that collects the importance for imatrix_mse. In vexport the observer collects it.
IMPORTANCE_MODIFIER = "IMatrixGatherer"
# Name of a modifier's class. Stages and groups of modifiers have names such as `quant_stage`,
# `DEFAULT_stage` and `quant_modifiers`.
_CLASS = re.compile(r"[A-Z][A-Za-z0-9]+")
_COMMON_KEYS = (
    *("config_groups", "targets", "ignore", "scheme", "kv_cache_scheme"),
    *("weight_observer", "input_observer", "output_observer", "observer"),
)
# Settings that change how llm-compressor runs but not its result.
_IGNORED_KEYS = (
    *("block_size", "sequential_update", "sequential_targets", "offload_hessians", "index"),
    *("start", "end", "group", "bypass_divisibility_checks"),
)
_GPTQ_KEYS = ("dampening_frac", "actorder")
# Fields of compressed-tensors' QuantizationScheme, which is not imported here because it imports
# torch. A test checks that they are equal. `format` has no effect: vexport writes the format of the
# scheme.
_GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations", "format")
# Default of llm-compressor and of vexport.quantize.gptq. A test checks that they are equal.
GPTQ_DAMPING = 0.01
_STATIC_ORDERS = (None, "static", "weight")
# Result of `_match_rank` for a class such as Linear.
_CLASS_RANK = 2
# Parts of regular expressions: a numbered reference to a group, and flags of the whole expression.
_REFERENCE = re.compile(r"\\[1-9]|\(\?\(|\(\?P")
_FLAGS = re.compile(r"\(\?([aimsux]+)\)")
# Observers that vexport supports for keys and values in the KV cache.
_CACHE_OBSERVERS = (None, "static_minmax")
Keys = Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe's rules and settings, and notes on the keys of the recipe that have no effect."""

    rules: tuple[Rule, ...]
    kv_cache: KvCache | None
    smoothing: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Modifier:
    """A modifier of a recipe, and the problems found in it."""

    name: str
    keys: Keys
    where: str
    problems: list[InputError] = field(default_factory=list)

    def refuse(self, key: str, got: str, need: str, fix: str = "remove it") -> None:
        """Add an error at a key of the modifier to `problems`."""
        where = f"{self.where}.{key}"
        self.problems.append(
            InputError.of(book.MODIFIER_KEY, where, found=got, need=need, remedy=fix)
        )

    @property
    def observers(self) -> Mapping[str, JsonValue]:
        """The observers of `weights` and of `input`, from any of the keys that may name them."""
        both = self.keys.get("observer")
        named = both if isinstance(both, dict) else {"weights": both}
        inputs = (
            self.keys.get("input_observer") or named.get("input") or named.get("input_activations")
        )
        return {
            "weights": self.keys.get("weight_observer") or named.get("weights"),
            "input": inputs,
        }


def read_recipe(path: Path) -> Recipe:
    """Read a recipe's file. Raise InputErrors that name every unsupported key."""
    content = load_yaml(path, "a recipe")
    all_modifiers = list(_modifiers(content, str(path)))
    modifiers = [modifier for modifier in all_modifiers if modifier.name != SMOOTHING]
    if not modifiers:
        raise InputError.of(book.NO_MODIFIER, str(path), names=MODIFIERS)
    for modifier in modifiers:
        _refuse_unknown(modifier)
    smoothers = [modifier for modifier in all_modifiers if modifier.name == SMOOTHING]
    smoothings = [_smoothing(modifier) for modifier in smoothers]
    for second in smoothers[1:]:
        second.refuse(STRENGTH, f"a second {SMOOTHING}", f"a single {SMOOTHING}")
    rules = _all_rules(modifiers)
    found = [(modifier, _kv_cache(modifier)) for modifier in modifiers]
    caches = [(modifier, cache) for modifier, cache in found if cache is not None]
    kv_cache = caches[0][1] if caches else None
    for modifier, cache in caches:
        if cache != kv_cache:
            modifier.refuse("kv_cache_scheme", cache, f"{kv_cache}, as in an earlier modifier")
    # All targets of a group share its arguments: report each problem once.
    problems = {
        str(problem): problem for modifier in all_modifiers for problem in modifier.problems
    }
    if problems:
        raise InputErrors(list(problems.values()))
    return Recipe(
        rules=rules,
        kv_cache=kv_cache,
        smoothing=next(iter(smoothings), None),
        notes=tuple(note for modifier in all_modifiers for note in _notes(modifier)),
    )


def _modifiers(content: object, where: str) -> Iterator[_Modifier]:
    """Yield the modifiers of all stages in order. Stages and groups may have any name."""
    if isinstance(content, list):
        for number, item in enumerate(content):
            yield from _modifiers(item, f"{where}: {number}")
    if not isinstance(content, dict):
        return
    for name, value in content.items():
        inside = f"{where}: {name}" if ": " not in where else f"{where}.{name}"
        if name == IMPORTANCE_MODIFIER:
            continue
        if isinstance(name, str) and _CLASS.fullmatch(name):
            yield _Modifier(name=name, keys=value if isinstance(value, dict) else {}, where=inside)
        else:
            yield from _modifiers(value, inside)


def _smoothing(modifier: _Modifier) -> float:
    """Return the strength of a SmoothQuantModifier.

    vexport finds the layers to smooth itself, so the keys that choose layers are ignored.
    """
    known = (STRENGTH, *_LAYER_KEYS, *_IGNORED_KEYS)
    for key, value in modifier.keys.items():
        if key not in known and value is not None:
            modifier.refuse(key, "a key that vexport does not support", f"only {STRENGTH}")
    strength = modifier.keys.get(STRENGTH, SMOOTHING_STRENGTH)
    if isinstance(strength, int | float) and not isinstance(strength, bool) and 0 <= strength <= 1:
        return float(strength)
    modifier.refuse(STRENGTH, shown(strength), "a number from 0 to 1", "correct it")
    return 0.0


def _refuse_unknown(modifier: _Modifier) -> None:
    if modifier.name not in MODIFIERS:
        error = InputError.of(book.MODIFIER, modifier.where, names=MODIFIERS)
        modifier.problems.append(error)
        return
    known = (*_COMMON_KEYS, *_IGNORED_KEYS, *(_GPTQ_KEYS if modifier.name == GPTQ else ()))
    _refuse_unknown_keys(modifier, modifier.keys, known, f"a key of {modifier.name}")
    order = modifier.keys.get("actorder")
    if order not in _STATIC_ORDERS:
        need = "static or null, because vLLM refuses groups in another order"
        modifier.refuse("actorder", shown(order), need, "set actorder to static")


def _refuse_unknown_keys(
    modifier: _Modifier, keys: Keys, known: Sequence[str], need: str, place: str = ""
) -> None:
    for key in map(str, keys):  # a key of YAML may be a number
        if key not in known:
            fix = f"remove it{nearest_hint(key, known)}"
            modifier.refuse(f"{place}{key}", "an unknown key", need, fix)


def _all_rules(modifiers: Sequence[_Modifier]) -> tuple[Rule, ...]:
    """Return the rules of all modifiers. The first rule that matches a layer decides.

    Rules for layers that every modifier ignores come first. If only some modifiers ignore a
    pattern, it is excluded from their rules, so that another modifier can quantize these layers.
    """
    followed = [modifier for modifier in modifiers if modifier.name in MODIFIERS] or modifiers
    ignored = [_ignored(modifier) for modifier in followed]
    by_all = [rule for rule in ignored[0] if all(rule in rules for rules in ignored)]
    ignored_by_some = {
        modifier.where: [rule for rule in rules if rule not in by_all]
        for modifier, rules in zip(followed, ignored, strict=True)
    }
    if not any(ignored_by_some.values()):
        return (*by_all, *(rule for modifier in modifiers for rule in _rules(modifier)))
    narrow: list[Rule] = []
    broad: list[tuple[_Modifier, list[Rule]]] = []
    for modifier in modifiers:
        rules = _rules(modifier)
        excluded = ignored_by_some.get(modifier.where, [])
        narrow += [
            _without_excluded(modifier, rule, excluded)
            for rule in rules
            if _match_rank(rule.match) < _CLASS_RANK
        ]
        classes = [rule for rule in rules if _match_rank(rule.match) == _CLASS_RANK]
        if classes:
            broad.append((modifier, [*excluded, *classes]))
    if len(broad) > 1:
        last, _ = broad[-1]
        got = "a list that differs from an earlier modifier's, and both modifiers target Linear"
        need = "targets that assign each layer to one modifier"
        fix = "list the layers of each modifier in its targets (names or re:...)"
        last.refuse("ignore", got, need, fix)
    return (*by_all, *narrow, *(rule for _, rules in broad for rule in rules))


def _ignored(modifier: _Modifier) -> list[IgnoredLayers]:
    rules = []
    for pattern in _strings(modifier, "ignore"):
        try:
            rules.append(IgnoredLayers(match=pattern, scheme=KEEP))
        except ValidationError as error:
            need = validation_problems(error)[0].need
            modifier.refuse("ignore", shown(pattern), need, "correct the pattern")
    return rules


def _without_excluded(modifier: _Modifier, rule: Rule, excluded: Sequence[Rule]) -> Rule:
    """Return the rule changed so that it does not match layers of the `excluded` rules.

    `rule` matches a name or a pattern, not a class.
    """
    if not excluded:
        return rule
    try:
        outside = "".join(f"(?!{_expression(each.match)})" for each in excluded)
        match = f"{REGEX}{outside}{_expression(rule.match)}"
        return Rule.model_validate({**rule.model_dump(), "match": match})
    except ValueError:
        got = f"{shown(rule.match)} and an ignore list that only some modifiers have"
        need = "patterns that can be combined"
        fix = "list the layers of each modifier in its targets, and use one ignore list for all"
        modifier.refuse("targets", got, need, fix)
        return rule


def _expression(match: str) -> str:
    """Return a rule's `match` as a regular expression to use inside another expression.

    Raises ValueError for a pattern with numbered references, because the numbers would change.
    """
    if not match.startswith(REGEX):
        return rf"(?:(?:.*\.)?{re.escape(match)}$)"
    text = match.removeprefix(REGEX)
    if _REFERENCE.search(text):
        raise ValueError(match)
    flags = _FLAGS.match(text)
    return f"(?{flags[1]}:{text[flags.end() :]})" if flags else f"(?:{text})"


def _rules(modifier: _Modifier) -> list[Rule]:
    """Return the rules of a modifier: first names, then patterns, then classes.

    compressed-tensors matches in this order.
    """
    rules: list[Rule] = []
    rounding = "gptq" if modifier.name == GPTQ else "nearest"
    common = {"rounding": rounding, "observer": modifier.observers["weights"]}
    for where, targets, scheme in _groups(modifier):
        for target in sorted(targets, key=_match_rank):
            if _match_rank(target) == _CLASS_RANK and target != "Linear":
                need = "Linear, the name of a layer, or re:..."
                modifier.refuse(where, f"the class {target}", need, "name the layers")
                continue
            try:
                rules.append(
                    _rule({"match": target, **common, **scheme}, modifier.observers["input"])
                )
            except ValidationError as error:
                for problem in validation_problems(error):
                    place = _place(modifier, where, problem.keys)
                    modifier.refuse(place, problem.found, problem.need, "correct the value")
    return sorted(rules, key=lambda rule: _match_rank(rule.match))


def _rule(keys: Keys, input_observer: JsonValue) -> Rule:
    """Return the rule with these keys.

    `input_observer` is dropped if the scheme has no static input scales, because it has no effect.
    """
    given = {key: value for key, value in keys.items() if value is not None}
    rule = Rule.model_validate(given)
    if input_observer is None or rule.scheme == KEEP or not get_scheme(rule.scheme).args.calibrated:
        return rule
    return Rule.model_validate({**given, "input_observer": input_observer})


def _place(modifier: _Modifier, where: str, keys: Sequence[str]) -> str:
    """Return the key of the recipe from which a rule's key was made, as the place of an error.

    `keys` is the path of the rule's key. `where` is returned if the modifier has no key of its own.
    """
    first = keys[0] if keys else ""
    rest = "".join(f".{key}" for key in keys[1:])
    if first.endswith("observer_kwargs"):
        part = "input_activations" if first.startswith("input") else "weights"
        return f"{where}.{part}.observer_kwargs{rest}"
    named = {"observer": "weight_observer", "input_observer": "input_observer"}.get(first, "")
    return named if named in modifier.keys else where


def _groups(modifier: _Modifier) -> Iterator[tuple[str, list[str], dict[str, JsonValue]]]:
    """Yield (recipe's key, targets, keys of a rule) for the scheme or for each config group."""
    groups, scheme = (
        _without_empty_groups(modifier.keys.get("config_groups")),
        modifier.keys.get("scheme"),
    )
    targets = _strings(modifier, "targets") or ["Linear"]
    if isinstance(groups, dict):
        for name, group in groups.items():
            where = f"config_groups.{name}"
            if isinstance(
                group, list
            ):  # a preset's name and its targets, a form of compressed-tensors
                yield where, [str(target) for target in group], {"scheme": _scheme(name)}
            elif not isinstance(group, dict) or group.get("weights") is None:
                got = "no weights" if isinstance(group, dict) else shown(group)
                need = (
                    "the arguments of weights, or the name of a preset with the list of its targets"
                )
                modifier.refuse(where, got, need, "correct the group")
            elif group.get("output_activations") is not None:
                need = "no output_activations, because vLLM does not quantize outputs"
                modifier.refuse(f"{where}.output_activations", "quantized outputs", need)
            else:
                _refuse_unknown_keys(
                    modifier, group, _GROUP_KEYS, "a key of a config group", f"{where}."
                )
                named = targets if group.get("targets") is None else group["targets"]
                names = [str(target) for target in (named if isinstance(named, list) else [named])]
                inputs = _inputs(group.get("input_activations"))
                yield where, names, {"weights": group["weights"], "input_activations": inputs}
    elif isinstance(scheme, dict):
        for name, own_targets in scheme.items():
            listed = own_targets if isinstance(own_targets, list) else [own_targets]
            yield f"scheme.{name}", [str(target) for target in listed], {"scheme": _scheme(name)}
    elif isinstance(scheme, str):
        yield "scheme", targets, {"scheme": _scheme(scheme)}
    elif modifier.name in MODIFIERS and "kv_cache_scheme" not in modifier.keys:
        modifier.refuse("scheme", "nothing", "scheme or config_groups", "add one of them")


def _without_empty_groups(groups: JsonValue) -> JsonValue:
    """Return the config groups without empty groups.

    Recipes that only quantize the KV cache contain an empty group.
    """
    if not isinstance(groups, dict):
        return groups
    return {
        name: group
        for name, group in groups.items()
        if not (
            isinstance(group, dict) and group.get("targets") == [] and group.get("weights") is None
        )
    }


def _inputs(raw: JsonValue) -> JsonValue:
    """Return the arguments of inputs. Drop the observer if the scales are dynamic."""
    if not isinstance(raw, dict) or raw.get("dynamic") is not True:
        return raw
    return {key: value for key, value in raw.items() if key not in ("observer", "observer_kwargs")}


def _scheme(name: str) -> str:
    return KEEP if name.upper() == "UNQUANTIZED" else name


def _match_rank(target: str) -> int:
    """Return 0 for a layer's name, 1 for a pattern, 2 for a class."""
    return 1 if target.startswith(REGEX) else _CLASS_RANK * target[:1].isupper()


def _strings(modifier: _Modifier, key: str) -> list[str]:
    """Return a key's list of strings. A single string becomes a list. Other values are errors."""
    value = modifier.keys.get(key)
    listed = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(listed, Sequence) or not all(isinstance(item, str) for item in listed):
        modifier.refuse(key, shown(value), "a list of names", "correct the value")
        return []
    return [str(item) for item in listed]


def _kv_cache(modifier: _Modifier) -> KvCache | None:
    raw = modifier.keys.get("kv_cache_scheme")
    args = parse_args(raw) if raw is not None else None
    if isinstance(args, str):
        modifier.refuse("kv_cache_scheme", args, "quantization arguments", "correct them")
    if args is None or isinstance(args, str):
        return None
    if args.observer not in _CACHE_OBSERVERS or args.observer_kwargs:
        need = "static_minmax, the only observer of vexport for the KV cache"
        modifier.refuse("kv_cache_scheme.observer", shown(args.observer), need)
    kinds: dict[str, KvCache] = {"tensor": "fp8", "attn_head": "fp8_per_head"}
    is_fp8 = args.is_float and args.num_bits == 8 and args.symmetric and not args.dynamic
    if not is_fp8 or args.strategy not in kinds:
        need = "static symmetric 8-bit floats with strategy tensor or attn_head, for vLLM"
        modifier.refuse("kv_cache_scheme", "another scheme", need, "correct it")
        return None
    return kinds[args.strategy]


def _notes(modifier: _Modifier) -> Iterator[str]:
    for key in _LAYER_KEYS if modifier.name == SMOOTHING else ():
        if modifier.keys.get(key):
            yield f"{modifier.where}.{key} is ignored: vexport finds the layers to smooth itself"
    damping = modifier.keys.get("dampening_frac")
    if damping is not None and damping != GPTQ_DAMPING:
        yield (
            f"{modifier.where}.dampening_frac {damping} is ignored: vexport uses {GPTQ_DAMPING}, "
            "and ten times as much if that is not enough"
        )
