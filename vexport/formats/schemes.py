"""The quantization schemes: compressed-tensors' presets, and the same with other groups of columns."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from pydantic import TypeAdapter

from vexport.errors import InputError, nearest
from vexport.formats import written_format
from vexport.formats.arguments import SchemeArgs, Strategy
from vexport.formats.base import Format
from vexport.formats.partition import Split, partition_of, uneven
from vexport.types import LinearPlan, TensorSpec

KEEP = "keep"
# `W4A16_G64` and `W4A16_CHANNEL` are W4A16 with groups of 64 columns, and with a scale a row.
OTHER_GROUPS = re.compile(r"(?P<preset>.+?)[-_ ]?(?:G(?P<size>[1-9]\d*)|CHANNEL)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetFile:
    """The generated presets and the version of compressed-tensors that they come from."""

    compressed_tensors: str
    presets: Mapping[str, SchemeArgs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A named scheme: its arguments, and the format in which its weights are stored."""

    name: str
    args: SchemeArgs
    format: Format

    def layout(self, linear: LinearPlan, source_dtype: str) -> tuple[TensorSpec, ...]:
        """The tensors that replace the layer's weight, in the order in which they are written."""
        parameters = self.format.parameters(self.args, (linear.out_features, linear.in_features))
        return tuple(
            TensorSpec(
                name=f"{linear.name}.{name}",
                dtype=source_dtype if parameter.in_model_dtype else parameter.dtype,
                shape=parameter.shape,
            )
            for name, parameter in parameters.items()
        )

    def unsupported_shape(
        self, members: Sequence[LinearPlan], *, ranks: int = 1, split: Split = "none"
    ) -> str | None:
        """Why vLLM could not run these layers as one on so many ranks, or None where it can.

        `split` is what tensor parallelism cuts of them. Key and value layers whose heads are fewer than the
        ranks are repeated by vLLM: pass them with as many out_features as all ranks hold together.
        """
        if ranks == 1 or split == "none":
            return self.format.unsupported_shape(self.args, partition_of(members, 1, "none"))
        refused = uneven(members, ranks, split)
        if refused:
            return refused
        reason = self.format.unsupported_shape(self.args, partition_of(members, ranks, split))
        return reason and f"{reason} on each of {ranks} ranks"


@cache
def presets() -> PresetFile:
    """The presets as generated, in the order in which tables list them."""
    text = files("vexport.formats").joinpath("presets.json").read_text(encoding="utf-8")
    return TypeAdapter(PresetFile).validate_json(text)


def scheme_names() -> tuple[str, ...]:
    """The names of all presets."""
    return tuple(presets().presets)


def fold_name(name: str) -> str:
    """A name without case and separators: `fp8-dynamic` and `FP8_DYNAMIC` are one."""
    return re.sub(r"[-_ ]", "", name).casefold()


def scheme_name(text: str) -> str:
    """The scheme that `text` names, whatever its case and separators; the text itself where it is none."""
    names = {fold_name(name): name for name in scheme_names()}
    other = OTHER_GROUPS.fullmatch(text)
    if fold_name(text) not in names and other is not None and fold_name(other["preset"]) in names:
        return regrouped_name(
            names[fold_name(other["preset"])], int(other["size"]) if other["size"] else None
        )
    return names.get(fold_name(text), text)


def is_scheme(name: str) -> bool:
    """Whether there is a scheme of exactly that name."""
    try:
        return get_scheme(name).name == name
    except InputError:
        return False


@cache
def get_scheme(name: str) -> Scheme:
    """The scheme of that name: a preset, or one with other groups. InputError lists the presets."""
    known = presets().presets
    if name in known:
        return _scheme(name, known[name])
    other = OTHER_GROUPS.fullmatch(name)
    if other is not None and other["preset"] in known:
        return regrouped(get_scheme(other["preset"]), int(other["size"]) if other["size"] else None)
    raise InputError(
        f"scheme {name!r}",
        got="an unknown name",
        need=f"one of {', '.join(known)}",
        fix=f"see `vexport list schemes`{nearest(name, list(known))}",
    )


def regrouped(scheme: Scheme, group_size: int | None) -> Scheme:
    """A scheme of integers with groups of so many columns, or with a scale a row where that is None.

    Raises InputError for floats, whose groups have one size, and where vLLM has no scheme for it.
    """
    if scheme.args.weights.is_float:
        raise _no_such_groups(scheme.name)
    strategy: Strategy = "channel" if group_size is None else "group"
    weights = replace(scheme.args.weights, group_size=group_size, strategy=strategy)
    return _scheme(regrouped_name(scheme.name, group_size), replace(scheme.args, weights=weights))


def regrouped_name(preset: str, group_size: int | None) -> str:
    """What a preset is called with other groups."""
    return f"{preset}_{'CHANNEL' if group_size is None else f'G{group_size}'}"


def all_schemes() -> tuple[Scheme, ...]:
    """Every preset."""
    return tuple(get_scheme(name) for name in scheme_names())


def _scheme(name: str, args: SchemeArgs) -> Scheme:
    found = written_format(args)
    if found is None:
        raise _no_such_groups(name)
    return Scheme(name=name, args=args, format=found)


def _no_such_groups(name: str) -> InputError:
    return InputError(
        f"scheme {name!r}",
        got="other groups than the preset's",
        need="a scheme of integer weights whose groups may have any size, such as W4A16",
        fix="use the preset as it is (see `vexport list schemes`)",
    )
