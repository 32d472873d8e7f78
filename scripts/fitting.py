"""Find expressions of config keys for the layers and the sizes of a class's tensors."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import chain, combinations, islice, product
from operator import and_, or_
from typing import Any

from samples import (
    PLAIN,
    Literals,
    Model,
    Numbers,
    Sample,
    Values,
    changed,
    is_number,
    leaves,
    part_of,
    with_traces,
)

from vexport.architectures import with_stars
from vexport.architectures.config import Unknown, evaluate, size
from vexport.architectures.layout_table import ConfigValues

# Numbers of layers and patterns of layer kinds, for configs that lack a list.
MANY_SCALES, PATTERNS = 8, ("M-*EM*E-", "*EM-")
# With more tables of simple conditions than this, conditions of four keys are not tried.
FEW_TABLES = 60
# A number in an expression, except the number of an entry of a list.
BEFORE = r"(?<![\w.\[])"
LITERAL = re.compile(rf"{BEFORE}\d+")
# At most MOST_CANDIDATES fitting conditions are compared. The compared configs differ from the
# first config in at most MOST_CHANGED_KEYS keys.
MOST_CANDIDATES, MOST_CHANGED_KEYS = 40, 3
# The most configs that are tried to decide between the conditions of a tensor.
MOST_QUESTIONS = 20
# The most keys that may stand for a number if the code left no trace of the number's key.
MOST_NAMES = 4
KEY, WORD = re.compile(r"[A-Za-z_][\w.]*"), re.compile(r"'[^']*'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A size under a config, or the set of layers (of `layers`) that have a tensor under it."""

    sample: Sample
    result: Any
    i: int = -1
    layers: int = -1

    def read(self, expression: str) -> object:
        """Return the value of an expression, or None if it cannot be evaluated."""
        with suppress(Unknown):
            return evaluate(expression, self.sample.values, i=self.i, layers=self.layers)
        return None


def fitted(observed: Iterable[Observed], literals: Literals, *, deeper: bool = True) -> str:
    """Return the expression that gives the size under every config, or "" if there is none.

    The expression is computed by the model's code, or it combines two such expressions: the first
    if a key is set, the second if it is not. Expressions with numbers outside of `literals` are
    ignored. Such a number may be the value of a key that the class read in a way that leaves no
    trace.
    """
    observed = list({(id(each.sample), each.i, each.result): each for each in observed}.values())
    first = observed[0]
    texts = sorted(first.sample.made.get(first.result, ()), key=len)
    lists = (
        f"len({path})" for path, value in first.sample.keys.items() if isinstance(value, list | str)
    )
    candidates = (*texts, *lists, str(first.result))
    with_keys = {
        changed: None for text in candidates for changed in named_numbers(text, first, literals)
    }
    fitting = [
        text for text in with_keys if all(each.read(text) == each.result for each in observed)
    ]
    if fitting:
        return "" if differ(fitting, first) else fitting[0]
    sets: list[set[str]] = [
        {path for path, value in each.sample.keys.items() if value} for each in observed
    ]
    for key in sorted(set[str]().union(*sets) - sets[0].intersection(*sets[1:])) if deeper else ():
        parts = [
            [each for each in observed if bool(each.read(key)) is wanted]
            for wanted in (True, False)
        ]
        if all(parts):
            if_set, if_unset = (fitted(part, literals, deeper=False) for part in parts)
            if if_set and if_unset:
                return (
                    f"({key} or {if_unset})"
                    if if_set == key
                    else f"({if_set} if {key} else {if_unset})"
                )
    return ""


def named_numbers(text: str, observed: Observed, literals: Literals) -> Iterator[str]:
    """Yield an expression with a key for each number that is not in `literals`.

    Python's `int` drops the key that a number comes from. Any key with this value may be the
    source. Other values of the key show whether it is.
    """
    foreign = next(
        (number for number in LITERAL.findall(text) if int(number) not in literals.numbers), None
    )
    if foreign is None:
        yield text
        return
    values = ((key, observed.sample.keys.get(key)) for key in sorted(literals.keys))
    keys = [key for key, value in values if is_number(value) and value == int(foreign)]
    number = re.compile(rf"{BEFORE}{foreign}\b")
    for key in keys if len(keys) <= MOST_NAMES else ():
        yield from named_numbers(number.sub(key, text), observed, literals)


def differ(expressions: Sequence[str], observed: Observed) -> bool:
    """Return True if expressions with equal values here would differ under another config.

    The expressions have equal values under every observed config.
    """
    for path in (
        {key for text in expressions for key in KEY.findall(text)} if len(expressions) > 1 else ()
    ):
        value = observed.sample.keys.get(path)
        raw = changed(observed.sample.config, path, 2 * value if isinstance(value, int) else 0)
        values = ConfigValues(raw or {}, PLAIN)
        with suppress(Unknown):
            sizes = {
                evaluate(text, values, i=observed.i, layers=observed.layers) for text in expressions
            }
            if len(sizes) > 1:
                return True
    return False


def fitted_condition(observed: Sequence[Observed], keys: Sequence[str]) -> str:
    """Return the simplest condition that holds for the observed layers, or "" if there is none."""
    return next(fitting_conditions(observed, keys), "")


def fitting_conditions(observed: Sequence[Observed], keys: Sequence[str]) -> Iterator[str]:
    """Yield the conditions that hold for exactly the observed layers, the simplest first."""
    tables: dict[int, list[str]] = {}
    places = [
        (each, i) for each in observed for i in (range(each.layers) if each.layers >= 0 else (-1,))
    ]
    for atom in conditions(observed, keys):
        with suppress(Unknown):
            holds = [
                evaluate(atom, each.sample.values, i=i, layers=each.layers) for each, i in places
            ]
            tables.setdefault(bits(map(bool, holds)), []).append(atom)
    wanted = bits(i in each.result for each, i in places)
    for form, chosen in chain(joined_alike(tables, wanted), nested(tables, wanted)):
        for atoms in product(*(tables[table] for table in chosen)):
            yield form.format(*atoms)


Tables = Mapping[int, Sequence[str]]


def joined_alike(tables: Tables, wanted: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield combinations of at most three conditions. Either all of them must hold, or any of them.

    Each combination is a text with a place for each condition, and the tables of the conditions for
    these places.
    """
    necessary = [table for table in tables if not wanted & ~table]
    sufficient = [table for table in tables if not table & ~wanted]
    for chosen, join, word in ((necessary, and_, " and "), (sufficient, or_, " or ")):
        for count in (1, 2, 3):
            for few in combinations(chosen, count):
                if reduce(join, few) == wanted:
                    yield word.join(["{}"] * count), few


def nested(tables: Tables, wanted: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield combinations of a necessary condition with either of two further conditions.

    The second of these can itself consist of two conditions.
    """
    necessary = [table for table in tables if not wanted & ~table]
    for first in necessary:
        for second, third in combinations(tables, 2):
            if first & (second | third) == wanted:
                yield "{} and ({} or {})", (first, second, third)
    for first, second in product(necessary, tables) if len(tables) <= FEW_TABLES else ():
        for third, fourth in combinations(tables, 2):
            if first & (second | third & fourth) == wanted:
                yield "{} and ({} or {} and {})", (first, second, third, fourth)


def bits(values: Iterable[bool]) -> int:
    return sum(value << at for at, value in enumerate(values))


def conditions(observed: Sequence[Observed], keys: Sequence[str]) -> Iterator[str]:
    """Yield conditions with a single key each, the simplest first."""
    yield "1"
    layered = any(each.layers >= 0 for each in observed)
    for key in keys:
        seen = [each.sample.keys.get(key) for each in observed]
        items = {
            item
            for value in seen
            if isinstance(value, list | str)
            for item in value
            if isinstance(item, str)
        }
        if layered and items:
            yield from (
                f"{key}[i] {sign} '{item}'" for sign in ("==", "!=") for item in sorted(items)
            )
        elif layered and any(isinstance(value, list) for value in seen):
            yield from (f"i in {key}", f"i not in {key}", f"{key}[i]", f"not {key}[i]")
        yield from (
            f"{key} == '{word}'"
            for word in sorted({value for value in seen if isinstance(value, str)})
        )
        yield from (key, f"not {key}", f"{key} == None", f"{key} != None")
        yield from (
            f"{key} == {number}" for number in sorted({each for each in seen if type(each) is int})
        )
        if layered and any(map(is_number, seen)):
            yield from (f"i >= {key}", f"i < {key}", f"i < layers - {key}", f"i >= layers - {key}")
            yield from (f"{i} % {key} {sign} 0" for sign in ("==", "!=") for i in ("(i + 1)", "i"))
            yield from (
                f"i % {other} {sign} {key}"
                for other in keys
                if other != key
                for sign in ("==", "!=")
            )
    if layered:
        yield from ("i >= 1", "i < 1", "i < layers - 1", "i >= layers - 1")


def with_prefixes(name: str) -> Iterator[tuple[str, str]]:
    """Yield each part of a name, with the name up to this part and a dot."""
    prefix = ""
    for part in name.split("."):
        prefix += f"{part}."
        yield part, prefix


Seen = Mapping[Numbers, tuple[int, ...]]


@dataclass(kw_only=True)
class Fitter:
    """Finds the rows of a class's table, by tensor name."""

    model: Model
    # The configs that were tried to decide between conditions, as JSON.
    tried: set[str] = field(default_factory=set)

    @cached_property
    def literal(self) -> set[str]:
        """Return the names, with stars, up to numbers that are the same under every config.

        Such numbers do not count anything.
        """
        seen: dict[str, set[frozenset[str]]] = {}
        for sample in self.model.samples:
            own: dict[str, set[str]] = {}
            for name in sample.tensors:
                for part, prefix in with_prefixes(name):
                    if part.isdigit():
                        own.setdefault(with_stars(prefix), set()).add(part)
            for prefix, numbers in own.items():
                seen.setdefault(prefix, set()).add(frozenset(numbers))
        return {prefix for prefix, sets in seen.items() if len(sets) == 1}

    @cached_property
    def tables(self) -> dict[int, dict[str, dict[Numbers, tuple[int, ...]]]]:
        """Return the tensors of each sample, by name and numbers."""
        return {id(sample): self.table(sample) for sample in self.model.samples}

    def table(self, sample: Sample) -> dict[str, dict[Numbers, tuple[int, ...]]]:
        table: dict[str, dict[Numbers, tuple[int, ...]]] = {}
        for name, shape in sample.tensors.items():
            pattern, numbers = self.split(name)
            table.setdefault(pattern, {})[numbers] = shape
        return table

    def split(self, name: str) -> tuple[str, Numbers]:
        """Return a name with stars for the numbers that count something, and these numbers."""
        counting = [
            (part, part.isdigit() and with_stars(prefix) not in self.literal)
            for part, prefix in with_prefixes(name)
        ]
        pattern = ".".join("*" if counts else part for part, counts in counting)
        return pattern, tuple(int(part) for part, counts in counting if counts)

    def seen(self, sample: Sample, pattern: str) -> Seen:
        return self.tables[id(sample)].get(pattern, {})

    def entry(self) -> dict[str, Any]:
        """Return `counts` and `rows` of the table."""
        counts: dict[str, str] = {}
        rows: dict[str, list[str]] = {}
        for pattern in dict.fromkeys(name for table in self.tables.values() for name in table):
            stars = [prefix.rstrip(".") for part, prefix in with_prefixes(pattern) if part == "*"]
            for number, prefix in enumerate(stars):
                if prefix not in counts:
                    counts[prefix] = self.count(prefix, number)
            for condition, shape in self.row(pattern, counts[stars[0]] if stars else ""):
                rows.setdefault(json.dumps({"condition": condition, "shape": shape}), []).append(
                    pattern
                )
        return {
            "counts": counts,
            "rows": [{"names": names, **json.loads(row)} for row, names in rows.items()],
        }

    def count(self, prefix: str, star: int) -> str:
        found = []
        for sample in self.model.samples:
            tensors = self.tables[id(sample)].items()
            inside = [
                n[star]
                for name, seen in tensors
                if f"{name}.".startswith(f"{prefix}.")
                for n in seen
            ]
            if inside:
                found.append(Observed(sample=sample, result=max(inside) + 1))
        return fitted(found, self.model.literals)

    def row(self, pattern: str, count: str) -> Iterator[tuple[str, list[str] | None]]:
        """Yield (condition, shape) for each kind of layers with a tensor."""
        observed = self.observed(pattern, count)
        if observed is None:
            yield "", None
            return
        keys = self.keys(pattern, lambda before, after: before.keys() != after.keys())
        used = set(KEY.findall(count))
        condition = self.condition(pattern, count, keys - used) or self.condition(
            pattern, count, keys
        )
        for part, shape in self.shapes(pattern, observed, keys):
            yield f"{condition} and {part}" if condition and part else condition, shape

    def observed(self, pattern: str, count: str) -> list[Observed] | None:
        """Return the layers that have a tensor under each config.

        Returns None if a model has the tensor but its config does not give the number of layers.
        """
        observed = []
        for sample in self.model.samples:
            seen = self.seen(sample, pattern)
            present = {numbers[0] if numbers else -1 for numbers in seen}
            try:
                layers = size(count, sample.values) if "*" in pattern else -1
            except Unknown:
                if seen:
                    return None
                continue
            observed.append(Observed(sample=sample, result=present, layers=layers))
        return observed

    def condition(self, pattern: str, count: str, keys: Set[str]) -> str:
        """Return the condition under which layers have a tensor, or "" if it cannot be found.

        Several conditions may fit the observed configs. In that case models are made from configs
        under which the conditions differ, until a single condition is left or no further config
        makes a model.
        """
        for _ in range(MOST_QUESTIONS):
            observed = distinct(self.observed(pattern, count) or [], keys)
            fitting = list(islice(fitting_conditions(observed, sorted(keys)), MOST_CANDIDATES))
            if len(fitting) < 2 or not self.decide(fitting, count if "*" in pattern else ""):
                break
        return fitting[0] if fitting else ""

    def decide(self, conditions: Sequence[str], count: str) -> bool:
        """Add the model of a config under which conditions differ.

        Return False if there is no such model.
        """
        names = {name for each in conditions for name in KEY.findall(WORD.sub("", each))}
        first = self.model.samples[0]
        values: dict[str, dict[str, Any]] = {}
        for sample in self.model.samples:
            for name in sorted(names & sample.keys.keys()):
                value = sample.keys[name]
                values.setdefault(name, {}).setdefault(json.dumps(value), value)
        for chosen in chain.from_iterable(
            combinations(values, n) for n in range(1, MOST_CHANGED_KEYS + 1)
        ):
            for new in product(*(values[name].values() for name in chosen)):
                config, raw = (
                    with_values(given, chosen, new) for given in (first.config, first.raw)
                )
                text = json.dumps(raw)
                if (
                    config is None
                    or raw is None
                    or text in self.tried
                    or not disagree(conditions, config, count)
                ):
                    continue
                self.tried.add(text)
                made = self.model.sample(raw)
                if made is not None:
                    self.model.samples.append(made)
                    self.tables[id(made)] = self.table(made)
                    return True
        return False

    def keys(self, pattern: str, differ: Callable[[Seen, Seen], bool]) -> set[str]:
        changes = self.model.changes
        return {
            each.path
            for each in changes
            if differ(self.seen(each.before, pattern), self.seen(each.after, pattern))
        }

    def shapes(
        self, pattern: str, observed: Sequence[Observed], keys: set[str]
    ) -> Iterator[tuple[str, list[str] | None]]:
        """Yield (condition, shape): for all layers, or for two kinds of layers."""
        seen, literals = (
            [(each, self.seen(each.sample, pattern)) for each in observed],
            self.model.literals,
        )
        if all(len({*own.values()}) <= 1 for _, own in seen):
            yield (
                "",
                shape([(each, next(iter(own.values()))) for each, own in seen if own], literals),
            )
            return
        of_layers = [
            (replace(each, i=numbers[0]), sizes)
            for each, own in seen
            for numbers, sizes in own.items()
        ]
        sides = shape(of_layers, literals)
        if sides is not None and all(sides):
            yield "", sides
            return
        keys = keys | self.keys(
            pattern,
            lambda before, after: any(before[n] != after[n] for n in before.keys() & after.keys()),
        )
        for atom in conditions(observed, sorted(keys)):
            parts: list[list[tuple[Observed, tuple[int, ...]]]] = [[], []]
            with suppress(Unknown):
                for each, own in seen:
                    kinds: tuple[set[tuple[int, ...]], set[tuple[int, ...]]] = (set(), set())
                    for numbers, sizes in own.items():
                        holds = evaluate(atom, each.sample.values, i=numbers[0], layers=each.layers)
                        kinds[not holds].add(sizes)
                    if max(map(len, kinds)) > 1:
                        break
                    for part, side in zip(parts, kinds, strict=True):
                        part += [(each, sizes) for sizes in side]
                else:
                    if all(parts):
                        yield f"({atom})", shape(parts[0], literals)
                        yield f"not ({atom})", shape(parts[1], literals)
                        return
        yield "", None


def with_values(raw: Values, names: Sequence[str], values: Sequence[Any]) -> Values | None:
    """Return a config with other values of some keys, or None if a key's part is missing."""
    for name, value in zip(names, values, strict=True):
        other = changed(raw, name, value)
        if other is None:
            return None
        raw = other
    return raw


def disagree(conditions: Sequence[str], config: Values, count: str) -> bool:
    """Return True if conditions differ for a layer of a config's model, or for the model itself."""
    values = ConfigValues(config, PLAIN)
    with suppress(Unknown):
        layers = size(count, values) if count else -1
        places = range(layers) if layers >= 0 else (-1,)
        return any(
            len({bool(evaluate(each, values, i=i, layers=layers)) for each in conditions}) > 1
            for i in places
        )
    return False


def shape(seen: Sequence[tuple[Observed, tuple[int, ...]]], literals: Literals) -> list[str] | None:
    """Return an expression for each size of tensors that are equal under each config.

    An expression is "" if it is unknown. Returns None if the tensors differ in their number of
    sizes.
    """
    if len({len(sizes) for _, sizes in seen}) != 1:
        return None
    axes = range(len(seen[0][1]))
    of_axes = ([replace(each, result=sizes[axis]) for each, sizes in seen] for axis in axes)
    return [fitted(of_axis, literals) for of_axis in of_axes]


def distinct(observed: Sequence[Observed], keys: Iterable[str]) -> list[Observed]:
    """Return a single observation for each combination of these keys' values, layers and result."""
    names = sorted(keys)
    by_values = {
        json.dumps([each.layers, *map(each.sample.keys.get, names), sorted(each.result)]): each
        for each in observed
    }
    return [*by_values.values()]


def entry_of(model: Model) -> dict[str, Any]:
    """Return the entry of a class, without the parts that vLLM determines."""
    entry = Fitter(model=model).entry()
    for row in entry["rows"]:
        row["shape"] = row["shape"] and [
            without_hidden(side, model.hidden) for side in row["shape"]
        ]
    texts = [text for row in entry["rows"] for text in (row["condition"], *(row["shape"] or ()))]
    names = {
        name
        for text in (*texts, *entry["counts"].values())
        for name in KEY.findall(WORD.sub("", text))
    }
    keys = {path for sample in model.samples for path in sample.keys} | {*model.hidden}
    return {**entry, **meanings(model, sorted(names & keys))}


def without_hidden(side: str, hidden: Sequence[str]) -> str:
    """Make a size unknown if it depends on a key without a default in the class.

    vLLM may ignore such a key.
    """
    for key in hidden:
        alike = rf"(\2 if not {key} or \1 == \2 else '')"
        side = re.sub(rf"^\((.*) if {re.escape(key)} else (.*)\)$", alike, side)
        side = re.sub(rf"^\(({re.escape(key)}) or (.*)\)$", alike, side)
    return side


def meanings(model: Model, used: Iterable[str]) -> dict[str, Any]:
    """Return `defaults`, `nulls`, `lists` and `aliases` of the used keys.

    Keys in the expressions of defaults are included.
    """
    found: dict[str, dict[str, Any]] = {"defaults": {}, "nulls": {}, "lists": {}, "aliases": {}}
    waiting, known = [*used], set[str]()
    while waiting:
        path = waiting.pop()
        if path in known:
            continue
        known.add(path)
        holder, _, key = path.rpartition(".")
        for name in ("defaults", "nulls"):
            value = value_without(model, path, absent=name == "defaults")
            if is_number(value) and not is_constant(model, path, value, absent=name == "defaults"):
                continue
            if value == []:
                found[name][path] = "[]"
            elif isinstance(value, list) and name == "defaults":
                if rules := listed(model, path):
                    found["lists"][path] = rules
            elif isinstance(value, int | str):
                text = getattr(value, "text", None) or repr(value)
                found[name][path] = text
                waiting += KEY.findall(text) if hasattr(value, "text") else ()
        config = model.config.from_dict(with_traces(model.raw))
        for name in holder.split(".") if holder else ():
            config = getattr(config, name)
        names = [name for name, target in (config.attribute_map or {}).items() if target == key]
        found["aliases"] |= {path: names} if names else {}
    return found


def is_constant(model: Model, path: str, default: int, *, absent: bool) -> bool:
    """Return True if a default stays the same under every changed config.

    Numbers and expressions are compared. Some defaults are computed from other keys in a way that
    leaves no trace (a rounded quotient). Configs that transformers refuses without the key are left
    out.
    """
    text = getattr(default, "text", None)
    for change in model.changes:
        if change.before is not model.samples[0] or change.path == path:
            continue
        try:
            value = read_without(model, path, absent=absent, raw=change.after.raw)
        except Exception:
            continue
        if getattr(value, "text", None) != text or text is None and value != default:
            return False
    return True


def value_without(model: Model, path: str, *, absent: bool, raw: Values | None = None) -> Any:
    """Return the value that transformers uses for a missing key or a null key.

    Returns None if transformers leaves the key unset or refuses the config.
    """
    try:
        return read_without(model, path, absent=absent, raw=raw or model.raw)
    except Exception:
        return None


def read_without(model: Model, path: str, *, absent: bool, raw: Values) -> Any:
    """Return the same as `value_without`, but raise transformers' errors."""
    raw = json.loads(json.dumps(raw))
    key = path.rpartition(".")[2]
    part = part_of(raw, path)
    part.pop(key, None)
    part |= {} if absent else {key: None}
    config = model.config.from_dict(with_traces(raw))
    for name in path.split("."):
        config = getattr(config, name)
    return config


def listed(model: Model, path: str) -> dict[str, str] | None:
    """Describe the list that transformers computes for a missing key.

    Returns its length (under ""), and a condition for each word.
    """
    holder = path.rpartition(".")[0]
    base = changed(model.raw, f"{holder}.num_hidden_layers".lstrip("."), MANY_SCALES) or model.raw
    part_of(base, path).pop(path.rpartition(".")[2], None)
    named = {**dict.fromkeys(model.hidden), **dict(leaves(base))}
    keys = [key for key, value in named.items() if value is None or is_number(value)]
    keys = [key for key in keys if key.rpartition(".")[0] == holder]
    changes = [(key, value) for key in keys for value in (PATTERNS if "pattern" in key else (2, 3))]
    seen, keys = [], []
    for key, raw in [("", base), *((key, changed(base, key, value)) for key, value in changes)]:
        words = value_without(model, path, absent=True, raw=raw)
        if raw and isinstance(words, list) and all(isinstance(word, str) for word in words):
            seen.append(
                Observed(sample=Sample(raw=raw, config=raw, tensors={}, made={}), result=words)
            )
            keys += [key] if words != seen[0].result and key not in keys else []
    for few in (seen, *([each for each in seen if each.sample.keys.get(key)] for key in keys)):
        lengths = (f"len({key})" if "pattern" in key else key for key in keys)
        length = next(
            (key for key in lengths if all(each.read(key) == len(each.result) for each in few)), ""
        )
        rules = {"": length}
        for word in dict.fromkeys(word for each in few for word in each.result):
            layers = [
                Observed(
                    sample=each.sample,
                    result={i for i, other in enumerate(each.result) if other == word},
                    layers=len(each.result),
                )
                for each in few
            ]
            rules[word] = fitted_condition(distinct(layers, keys), keys)
        if len(few) > 1 and all(rules.values()):
            return rules
    return None
