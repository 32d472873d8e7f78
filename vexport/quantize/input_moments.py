"""Collect the moments of all inputs of a layer while rows of text reach its modules."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from vexport.calibration.gradients import token_weights_of
from vexport.calibration.inputs import (
    Counted,
    GroupInputs,
    RecordedInputs,
    RoutedTokens,
    Site,
    Value,
    counted_rows,
)
from vexport.formats.plan import FusionGroup
from vexport.quantize.gptq import GPTQ, Strength, strength_of
from vexport.quantize.moments import Moments
from vexport.quantize.quantized_model import QuantizedModel

# An expert's down projection is rounded for its routed tokens. All tokens of the text are added
# with a small weight: together they count as this many routed tokens per column.
SHARED_TOKENS_PER_COLUMN = 1.0


class InputMoments:
    """Collects the moments of the sites of `inputs` that have groups to round with GPTQ or a refit.

    Each rank adds its rows. `total_tokens` is the number of counted tokens on all ranks. If
    `no_refit` is set, GPTQ replaces refits. Use it if no earlier layer is quantized, because a
    refit then has no errors to correct.
    """

    def __init__(
        self,
        model: QuantizedModel,
        inputs: GroupInputs,
        *,
        total_tokens: int,
        no_refit: bool = False,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._total_tokens = total_tokens
        self._no_refit = no_refit
        self.sites: Sequence[Site] = [site for site in inputs.sites if site.groups_rounded_by_text]
        self._moments = {site.name: self._zeros(site) for site in self.sites}
        # Weights of tokens by the site and the number of tokens in a row.
        self._weights = dict[tuple[str, int], torch.Tensor | None]()

    def _zeros(self, site: Site) -> Moments:
        has_drift = any(
            self._strength(group, site).strength > 0 for group in site.groups_rounded_by_text
        )
        return Moments.zeros(
            site.columns,
            drift=has_drift and not site.few_outputs,
            outputs=site.few_outputs if has_drift else 0,
            device=self._model.device,
        )

    def add(
        self,
        quantized: RecordedInputs,
        source: RecordedInputs,
        counted: Counted = None,
        *,
        rows: int = 1,
    ) -> None:
        """Add the inputs of a row in the quantized stream, and `GroupInputs.recorded_source` of the
        row in the source's stream.

        If `counted` is given, only these tokens of the row are added. `rows` is the number of rows
        of equal length that ran together.

        Modules of experts must still have the source's weights, because the inputs of their down
        projections are computed here. A site's moments do not change if the row does not reach the
        site's module.
        """
        for site in self.sites:
            here = quantized.get(site.module)
            if here is None:
                continue
            exact = source.get(site.module)
            wanted = None if exact is None else _tokens_of(exact)
            site.require_order(counted)
            tokens = _tokens_of(here)
            weights = self._token_weights(site, tokens, rows)
            if isinstance(here, RoutedTokens) and site.expert is not None:
                self._add_down(site, here, wanted, weights, counted)
            else:
                rounded = self._model.rounded_input(site.groups[0], tokens)
                self._moments[site.name].add(
                    counted_rows(rounded, counted, site.name),
                    None if wanted is None else counted_rows(wanted, counted, site.name),
                    weights=_only(weights, counted),
                )

    def all_reduce(self) -> None:
        """Sum the moments over all ranks. Every rank must call this."""
        for moments in self._moments.values():
            moments.all_reduce()

    def of(self, site: Site) -> Moments:
        """Complete and return the moments of a site. No tokens can be added afterwards."""
        return self._moments[site.name].complete()

    def strength(self, group: FusionGroup, site: Site, tokens: int) -> Strength:
        """Return the rounding strength of a group at a site that `tokens` tokens have reached.

        The ridge of a refit grows if a site has fewer tokens than columns.
        """
        strength = self._strength(group, site)
        if group.rounding != "refit" or self._no_refit:
            return strength
        return replace(strength, ridge=strength.ridge * max(1.0, site.columns / tokens))

    def _strength(self, group: FusionGroup, site: Site) -> Strength:
        """Return a group's strength.

        Returns the strength of GPTQ if `no_refit` was set, or if the two streams may have different
        tokens at the group's site.
        """
        return strength_of(group) if site.is_aligned and not self._no_refit else GPTQ

    def _token_weights(self, site: Site, tokens: torch.Tensor, rows: int) -> torch.Tensor | None:
        number = tokens.numel() // tokens.shape[-1] // rows
        if (site.name, number) not in self._weights:
            weights = self._weights_of(site, number)
            self._weights[site.name, number] = (
                None if weights is None else weights.to(tokens.device, non_blocking=True)
            )
        of_row = self._weights[site.name, number]
        return None if of_row is None else of_row.repeat(rows)

    def _weights_of(self, site: Site, tokens: int) -> torch.Tensor | None:
        if not all(
            self._strength(group, site).weighs_tokens for group in site.groups_rounded_by_text
        ):
            return None
        known = self._model.calibration.token_weights
        return token_weights_of(known, self._inputs.modules_of(site), tokens)

    def _add_down(
        self,
        site: Site,
        here: RoutedTokens,
        exact: torch.Tensor | None,
        weights: torch.Tensor | None,
        counted: Counted,
    ) -> None:
        """Add the tokens of an expert's down projection, and all tokens with a small weight.

        The counted tokens of the whole text count as `SHARED_TOKENS_PER_COLUMN` routed tokens per
        column. They determine the rounding if few tokens are routed to the expert.
        """
        moments = self._moments[site.name]
        first = self._inputs.gate_up_group(site)
        tokens = here.tokens if first is None else self._model.rounded_input(first, here.tokens)
        between = self._model.rounded_input(site.groups[0], self._inputs.down_input(site, tokens))
        wanted = None
        if moments.drift is not None:
            assert exact is not None
            wanted = self._inputs.down_input(site, exact)
        assert site.expert is not None
        route = here.routes[site.expert]
        if counted is not None:
            route = route[counted.mask[route]]
        moments.add(
            between[route],
            None if wanted is None else wanted[route],
            weights=None if weights is None else weights[route],
        )
        share = min(1.0, SHARED_TOKENS_PER_COLUMN * site.columns / max(1, self._total_tokens))
        moments.add(
            counted_rows(between, counted, site.name),
            None if wanted is None else counted_rows(wanted, counted, site.name),
            weights=_only(weights, counted),
            share=share,
        )


def _only(weights: torch.Tensor | None, counted: Counted) -> torch.Tensor | None:
    return weights if weights is None or counted is None else weights[counted.places]


def _tokens_of(value: Value) -> torch.Tensor:
    return value.tokens if isinstance(value, RoutedTokens) else value
