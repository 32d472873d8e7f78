"""Weights of a layer rounded by the moments of what enters them, and the memory that this takes."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from vexport.calibration.gradients import weights_of
from vexport.calibration.inputs import Entered, GroupInputs, Noted, Site
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.tensors import TORCH_DTYPES, read_weight
from vexport.errors import InputError
from vexport.formats.packing.base import Array, RoundedWeight, Scales
from vexport.formats.plan import FusionGroup
from vexport.numerics.ranks import gather, rank_and_size
from vexport.quantize.gptq import (
    GPTQ,
    Factor,
    Grid,
    Moments,
    Strength,
    factorize,
    grid_of,
    refit,
    round_columns,
    round_nearest,
    stack,
    strength_of,
)
from vexport.quantize.quantized_model import QuantizedModel
from vexport.quantize.scale_search import fused_scales, observe_weight
from vexport.quantize.stream import Stored, quantized_group
from vexport.records.calibration import GroupRounding

# All tokens of the text together weigh as much as this many routed tokens per column.
SHARED_TOKENS_PER_COLUMN = 1.0
# The rounded weights of a group by layer name.
GroupWeights = Mapping[str, RoundedWeight]
# Rows of a group used for its reported errors: measuring all would take as long as rounding.
MEASURED_ROWS = 64
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
WAITING_BYTES = 2
NUMBER = re.compile(r"\d+")


def round_group(
    group: FusionGroup,
    weights: Sequence[torch.Tensor],
    moments: Moments,
    strength: Strength,
    index: SourceIndex,
    *,
    factor: Factor | None,
) -> tuple[Mapping[str, RoundedWeight], GroupRounding]:
    """Round the weights (out, in) of a group's layers, which share one input: by layer name, and
    how.

    `factor` is that of the moments' H with the strength's ridge; None where H is not positive
    definite. Raises InputError where a weight is not finite.
    """
    source = torch.cat([weight.to(moments.hessian.device).to(torch.float32) for weight in weights])
    wanted = source
    if factor and strength.strength:
        wanted = refit(source, moments, strength=strength.strength, ridge=factor.damping)
    sizes = [len(weight) for weight in weights]
    scales, grid = _scales_and_grid(group, torch.split(wanted, sizes), moments, index)
    rounded = round_columns(wanted, factor, grid) if factor else round_nearest(wanted, grid)
    nearest_error, error = _errors(source, wanted, rounded, grid, moments.hessian)
    weights_of_layer = {
        member.name: RoundedWeight(values=part.cpu().numpy(), scales=scales_of_member)
        for member, part, scales_of_member in zip(
            group.members, torch.split(rounded, sizes), scales, strict=True
        )
    }
    return weights_of_layer, GroupRounding(
        name=group.name,
        rounding="nearest" if factor is None else _name(group, strength),
        strength=strength.strength if factor else 0.0,
        weighs_tokens=strength.weighs_tokens,
        columns=source.shape[1],
        fallback=None if factor else "H is not positive definite",
        damping=factor.damping if factor else 0.0,
        tokens=moments.tokens,
        nearest_error=nearest_error,
        error=error,
    )


def _name(group: FusionGroup, strength: Strength) -> str:
    """The name of the rounding: a refit of no strength is GPTQ."""
    return "gptq" if group.rounding == "refit" and not strength.strength else group.rounding


def _scales_and_grid(
    group: FusionGroup, weights: Sequence[torch.Tensor], moments: Moments, index: SourceIndex
) -> tuple[list[Scales], Grid]:
    """The scales of each weight, sharing what the group shares, and the numbers that they leave."""
    scheme = group.scheme
    dtypes = [TORCH_DTYPES[index.tensors[member.weight].dtype] for member in group.members]
    importance = moments.hessian.diagonal() / max(1, moments.tokens)
    observers = [
        observe_weight(member, weight.cpu(), group, importance, stored=dtype)  # searches run there
        for member, weight, dtype in zip(group.members, weights, dtypes, strict=True)
    ]
    scales, grids = fused_scales(observers), []
    for member, scales_of_member, dtype in zip(group.members, scales, dtypes, strict=True):
        shape = (member.out_features, member.in_features)
        in_model_dtype = scheme.format.parameters(scheme.args, shape)["weight_scale"].in_model_dtype
        stored = dtype if in_model_dtype else torch.float32
        grids.append(grid_of(scheme.args.weights, scales_of_member, shape, stored))
    return scales, stack(grids, moments.hessian.device)


def _errors(
    source: torch.Tensor,
    wanted: torch.Tensor,
    rounded: torch.Tensor,
    grid: Grid,
    hessian: torch.Tensor,
) -> tuple[float, float]:
    """|X~ (Q - W)^T|^2 / |X~ W^T|^2 to nearest and as rounded, of rows evenly spread over the
    group's.
    """
    rows = torch.linspace(0, len(source) - 1, min(len(source), MEASURED_ROWS)).to(
        source.device, torch.int64
    )
    exact = source[rows]
    signal = float((exact @ hessian * exact).sum())
    changes = (round_nearest(wanted[rows], grid.rows(rows)) - exact, rounded[rows] - exact)
    before, after = (float((change @ hessian * change).sum()) for change in changes)
    return (before / signal, after / signal) if signal else (0.0, 0.0)


class SiteSums:
    """The moments of what enters some sites; each rank takes in its own rows.

    With `plain` all groups are rounded by GPTQ, as where nothing in front of them is quantized: a
    refit has no errors of earlier layers to correct. `text` is how many tokens all rows have.
    """

    def __init__(
        self,
        model: QuantizedModel,
        inputs: GroupInputs,
        *,
        text: int,
        plain: bool = False,
    ) -> None:
        self._model, self._inputs, self._text, self._plain = model, inputs, text, plain
        self._sites = [site for site in inputs.sites if site.rounded]
        self._moments = {
            site.name: Moments.zeros(
                site.columns,
                drift=any(self._strength(group, site).strength > 0 for group in site.rounded),
                device=model.device,
            )
            for site in self._sites
        }

    def _strength(self, group: FusionGroup, site: Site) -> Strength:
        """Plain GPTQ for groups that get other tokens in either stream."""
        return strength_of(group) if site.is_aligned and not self._plain else GPTQ

    def add(self, quantized: Noted, source: Noted) -> None:
        """Add the inputs of one row in the quantized stream and in the source's.

        The model's weights must be the source's. What does not reach a site's module changes
        nothing.
        """
        for site in self._sites:
            here, exact = quantized.get(site.module), source.get(site.module)
            if here is None:
                continue
            tokens, wanted = (
                one.tokens if isinstance(one, Entered) else one for one in (here, exact)
            )
            assert tokens is not None
            weights = self._weights(site, tokens)
            if isinstance(here, Entered) and site.expert is not None:
                self._add_down(site, here, wanted, weights)
            else:
                rounded = self._model.rounded_input(site.groups[0], tokens)
                self._moments[site.name].add(rounded, wanted, weights=weights)

    def _weights(self, site: Site, tokens: torch.Tensor) -> torch.Tensor | None:
        """The weights of a row's tokens; None where they are not known."""
        if not all(self._strength(group, site).weighs_tokens for group in site.rounded):
            return None
        number = tokens.numel() // tokens.shape[-1]
        token_weights = weights_of(
            self._model.calibration.token_weights, self._inputs.names_of(site), number
        )
        return None if token_weights is None else token_weights.to(tokens.device)

    def _add_down(
        self, site: Site, here: Entered, exact: torch.Tensor | None, weights: torch.Tensor | None
    ) -> None:
        """An expert's own tokens, and all of the text, together as `SHARED_TOKENS_PER_COLUMN` a
        column.

        So an expert that few tokens are routed to is rounded by what it makes of all.
        """
        moments, first = self._moments[site.name], self._inputs.first_of(site)
        tokens = here.tokens if first is None else self._model.rounded_input(first, here.tokens)
        between = self._model.rounded_input(site.groups[0], self._inputs.between(site, tokens))
        wanted = None
        if moments.drift is not None:
            assert exact is not None
            wanted = self._inputs.between(site, exact)
        assert site.expert is not None
        route = here.routes[site.expert]
        moments.add(
            between[route],
            None if wanted is None else wanted[route],
            weights=None if weights is None else weights[route],
        )
        share = min(1.0, SHARED_TOKENS_PER_COLUMN * site.columns / max(1, self._text))
        moments.add(between, wanted, weights=weights, share=share)

    def rounded(
        self, owned: Sequence[Site]
    ) -> tuple[dict[str, GroupWeights], dict[str, GroupRounding]]:
        """The rounded weights of the groups of these sites, and how each was rounded, by the
        group's name.

        Groups whose input was not seen have no weights: they are rounded to nearest, and it is said
        why. Raises InputError where a weight is not finite.
        """
        model, weights_of_group, how = (
            self._model,
            dict[str, GroupWeights](),
            dict[str, GroupRounding](),
        )
        for site in owned:
            moments, factors = self._moments[site.name].complete(), dict[float, Factor | None]()
            for group in site.rounded:
                if not moments.tokens:
                    reason = "no token of the calibration text reaches it"
                    how[group.name] = GroupRounding(name=group.name, fallback=reason)
                    continue
                strength = self._with_ridge(group, site, moments.tokens)
                if strength.ridge not in factors:
                    factors[strength.ridge] = factorize(moments.hessian, strength.ridge)
                tensors = [model.index.tensors[member.weight] for member in group.members]
                weights = [
                    read_weight(model.reader, tensor, member.part)
                    for tensor, member in zip(tensors, group.members, strict=True)
                ]
                weights_of_group[group.name], how[group.name] = round_group(
                    group, weights, moments, strength, model.index, factor=factors[strength.ridge]
                )
                model.reader.release(tensors)
        return weights_of_group, how

    def _with_ridge(self, group: FusionGroup, site: Site, tokens: int) -> Strength:
        """A refit's ridge grows where fewer tokens than columns show its inputs."""
        strength = self._strength(group, site)
        if group.rounding != "refit" or self._plain:
            return strength
        return replace(strength, ridge=strength.ridge * max(1.0, site.columns / tokens))

    def round(self, groups: Sequence[FusionGroup]) -> tuple[Stored, Mapping[str, GroupRounding]]:
        """The bytes that replace the weights of groups, and how those of sites were rounded. All
        ranks call.

        Sites are dealt to the ranks in their order, and groups that no site has. Raises InputError
        where a weight is not finite.
        """
        for moments in self._moments.values():
            moments.all_reduce()
        (rank, size), model = rank_and_size(), self._model
        owners = {
            one.name: place % size for place, site in enumerate(self._sites) for one in site.rounded
        }
        made, how = self.rounded(self._sites[rank::size])
        stored = dict[str, Array]()
        for number, group in enumerate(groups):
            if owners.get(group.name, number % size) == rank:
                rounded = made.pop(group.name, {})
                stored |= quantized_group(
                    group, model.index, model.calibration, model.reader, rounded
                )
        for others, more in gather((stored, how)):
            stored |= others
            how |= more
        return stored, how


def most_waiting(device: str = "cpu") -> int:
    """The most bytes for rows that wait in a layer: half of the GPU's memory, or of this
    process's.
    """
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory // 2
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such group, or one without a limit
        memory = min(memory, int(CGROUP_MEMORY.read_text(encoding="ascii")))
    return memory // 2


def waiting_bytes(groups: Iterable[FusionGroup], tokens: int) -> int:
    """The bytes of rows of so many tokens in all that wait in front of a layer's widest input,
    16-bit.

    A row has what enters the widest and that as it is rounded, of the others about as much as they
    take, and as much again is lost between; a refit keeps what enters the widest in the source's
    stream, too.
    """
    rounded = [group for group in groups if group.rounding != "nearest"]
    columns = {NUMBER.sub("*", group.name): group.members[0].in_features for group in rounded}
    refits = any(strength_of(group).strength > 0 for group in rounded)
    widest = max(columns.values(), default=0)
    return tokens * (sum(columns.values()) + (3 if refits else 2) * widest) * WAITING_BYTES


def require_room(groups: Iterable[FusionGroup], tokens: int, samples: int, device: str) -> None:
    """Raise InputError where the waiting rows of so many samples exceed the memory."""
    needed, most = waiting_bytes(groups, tokens), most_waiting(device)
    if needed > most:
        fitting = samples * most // needed
        raise InputError(
            "calibration",
            got=f"{samples} samples of {tokens:,} tokens, which take {needed / 1e9:.1f} GB "
            f"while rounding",
            need=f"at most {most / 1e9:.1f} GB, half of the memory",
            fix=f"use --samples {fitting}"
            if fitting
            else "use shorter samples (seq_len in a scenario)",
        )
