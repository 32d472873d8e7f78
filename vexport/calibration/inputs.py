"""Find the modules of fusion groups in a model, and observe their inputs while the model runs.

A hook sees the input of a linear module. Experts that are stored in three-dimensional parameters
share a module. A hook on this module sees all tokens and their routes to experts. The inputs of the
experts' down projections are computed from them. A new kind of experts needs a class like
`ExpertRunner` and an entry in EXPERT_KINDS.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch

from vexport.architectures.fusion import moe_layer
from vexport.calibration.weights import Weights, last_part
from vexport.errors import InputError
from vexport.formats.plan import FusionGroup
from vexport.records import LinearPlan
from vexport.rules.calibration import ANSWERS_OF_EXPERTS

# The attributes that describe the layout of an experts module in transformers' interface.
LAYOUT = ("has_gate", "has_bias", "is_transposed", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedTokens:
    """Input of a module of experts: all tokens (tokens, hidden size) in the order of the text.

    `routes` has a tensor for each expert: the positions of the tokens that the router sends to it.
    `weights` has a tensor (routed tokens, 1) for each expert: the factors of its outputs.
    """

    tokens: torch.Tensor
    routes: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]


class ExpertRunner:
    """Run a module of experts one expert at a time, to observe the inputs inside each expert.

    This class runs experts with transformers' experts interface (integrations/moe.py).
    """

    def supports(self, module: torch.nn.Module) -> bool:
        """Return True for a module of this kind."""
        return all(hasattr(module, part) for part in LAYOUT)

    def route_tokens(
        self, module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> RoutedTokens:
        """Return the tokens in a call of the module's forward, and their routes to experts."""
        arguments = (
            inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments.values()
        )
        _, hidden, chosen, router_weights = arguments
        assert isinstance(hidden, torch.Tensor)
        assert isinstance(chosen, torch.Tensor)
        assert isinstance(router_weights, torch.Tensor)
        experts = len(module.get_parameter("down_proj"))
        # Positions in the flattened `chosen` (tokens, experts per token), sorted by expert. The
        # host waits for a GPU only to read the counts.
        places = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=experts).tolist()
        routes = places // chosen.shape[-1]
        weights = router_weights.flatten()[places].unsqueeze(-1)
        return RoutedTokens(
            tokens=hidden, routes=torch.split(routes, counts), weights=torch.split(weights, counts)
        )

    def down_input(
        self, module: torch.nn.Module, expert: int, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return the input (tokens, intermediate size) of an expert's down projection."""
        experts = cast(Experts, module)
        output = self._product(
            experts, "gate_up_proj" if experts.has_gate else "up_proj", expert, tokens
        )
        return experts._apply_gate(output) if experts.has_gate else experts.act_fn(output)

    def down_output(
        self, module: torch.nn.Module, expert: int, down_input: torch.Tensor
    ) -> torch.Tensor:
        """Return the output (tokens, hidden size) of an expert's down projection."""
        return self._product(cast(Experts, module), "down_proj", expert, down_input)

    def combine_outputs(
        self, routed: RoutedTokens, outputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the module's output from the outputs (routed, hidden size) of all experts.

        The outputs for a token are added up in the order of the experts, in float32.
        """
        total = torch.zeros_like(routed.tokens, dtype=torch.float32)
        for route, weight, output in zip(routed.routes, routed.weights, outputs, strict=True):
            total.index_add_(0, route, (output * weight).to(torch.float32))
        return total.to(routed.tokens.dtype)

    def _product(
        self, experts: "Experts", parameter: str, expert: int, tokens: torch.Tensor
    ) -> torch.Tensor:
        weight = experts.get_parameter(parameter)[expert]
        output = torch.nn.functional.linear(tokens, weight.T if experts.is_transposed else weight)
        if experts.has_bias:
            output += experts.get_parameter(f"{parameter}_bias")[expert]
        return output


class Experts(Protocol):
    """Methods and attributes of transformers' modules of experts that are used here."""

    has_gate: bool
    has_bias: bool
    is_transposed: bool

    def get_parameter(self, target: str) -> torch.nn.Parameter: ...
    def _apply_gate(self, gate_up_out: torch.Tensor) -> torch.Tensor: ...
    def act_fn(self, input: torch.Tensor) -> torch.Tensor: ...


class Llama4(ExpertRunner):
    """Llama 4's experts: the router's weight scales an expert's input, not its output.

    Source: Llama4TextMoe of transformers. vLLM does the same before it quantizes an expert's input
    (`apply_router_weight_on_input`, fused_moe/prepare_finalize/no_dp_ep.py). The module's input
    repeats all tokens for each expert. A token is multiplied by the router's weight for the expert,
    or by zero if it is not routed to the expert. The output has the same shape. In `RoutedTokens` a
    token is multiplied by the sum of its router weights.
    """

    def supports(self, module: torch.nn.Module) -> bool:
        return type(module).__name__ == "Llama4TextExperts"

    def route_tokens(
        self, module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> RoutedTokens:
        scaled = args[0] if args else kwargs["hidden_states"]
        assert isinstance(scaled, torch.Tensor)
        tokens = scaled.view(len(module.get_parameter("down_proj")), -1, scaled.shape[-1])
        is_routed = (tokens != 0).any(-1)
        routes = torch.split(is_routed.nonzero()[:, 1], is_routed.sum(-1).tolist())
        weights = tuple(torch.ones_like(tokens[0, route, :1]) for route in routes)
        return RoutedTokens(tokens=tokens.sum(0), routes=routes, weights=weights)

    def down_input(
        self, module: torch.nn.Module, expert: int, tokens: torch.Tensor
    ) -> torch.Tensor:
        gate, up = (tokens @ module.get_parameter("gate_up_proj")[expert]).chunk(2, dim=-1)
        hidden: torch.Tensor = up * module.get_submodule("act_fn")(gate)
        return hidden

    def down_output(
        self, module: torch.nn.Module, expert: int, down_input: torch.Tensor
    ) -> torch.Tensor:
        return down_input @ module.get_parameter("down_proj")[expert]

    def combine_outputs(
        self, routed: RoutedTokens, outputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        combined = routed.tokens.new_zeros(len(outputs), *routed.tokens.shape)
        for expert, (route, output) in enumerate(zip(routed.routes, outputs, strict=True)):
            combined[expert, route] = output
        return combined.flatten(0, 1)


EXPERT_KINDS: Sequence[ExpertRunner] = (ExpertRunner(), Llama4())


def expert_runner_of(module: torch.nn.Module) -> ExpertRunner | None:
    """Return the runner for a module with stacked weights, or None if its class is unsupported."""
    return next((kind for kind in EXPERT_KINDS if kind.supports(module)), None)


# The input or output of a linear module, or the tokens and routes of a module of experts.
Value = torch.Tensor | RoutedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedTokens:
    """The tokens of a row that statistics count: `mask` (tokens,) is True for them.

    `places` has their positions. To select them by position, the host does not wait for a GPU.
    Both are on the device. `on_host` is the mask in main memory.
    """

    mask: torch.Tensor
    places: torch.Tensor
    on_host: torch.Tensor

    @classmethod
    def of(cls, counted: Sequence[bool], device: str) -> "CountedTokens":
        """Return the counted tokens of a row."""
        places = [place for place, is_counted in enumerate(counted) if is_counted]
        return cls(
            mask=torch.tensor(counted, device=device),
            places=torch.tensor(places, dtype=torch.int64, device=device),
            on_host=torch.tensor(counted),
        )


# None if statistics count all tokens of a row.
Counted = CountedTokens | None


def counted_rows(value: torch.Tensor, counted: Counted, name: str) -> torch.Tensor:
    """Return the counted tokens (tokens, columns) of a value (..., columns), or the whole value.

    Raises InputError if the value of the module `name` does not have all tokens of the row.
    """
    if counted is None:
        return value
    rows = value.reshape(-1, value.shape[-1])
    if len(rows) != len(counted.mask):
        raise InputError.of(ANSWERS_OF_EXPERTS, name)
    return rows[counted.places]


def counted_value(value: Value, counted: CountedTokens, name: str) -> Value:
    """Return an input with only its counted tokens. Raises InputError like `counted_rows`."""
    if not isinstance(value, RoutedTokens):
        return counted_rows(value, counted, name)
    places = counted.mask.cumsum(0) - 1
    chosen = [counted.mask[route] for route in value.routes]
    pairs = list(zip(value.routes, value.weights, chosen, strict=True))
    return RoutedTokens(
        tokens=counted_rows(value.tokens, counted, name),
        routes=tuple(places[route[is_counted]] for route, _, is_counted in pairs),
        weights=tuple(weight[is_counted] for _, weight, is_counted in pairs),
    )


# Inputs by the module's name in the model. `recorded_source` has outputs for some modules.
RecordedInputs = Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPosition:
    """A position in a module of experts: an expert's down projection, or its gate and up
    projections.
    """

    expert: int
    is_down: bool


class Places:
    """Finds a plan's layers in a model. `layers_name` is the name of the list of decoder layers."""

    def __init__(
        self, model: torch.nn.Module, weights: Weights, layers_name: str, layers: int
    ) -> None:
        self._model = model
        self._weights = weights
        self._layers_prefix = f"{layers_name}."
        self._layers = layers
        # The names of all modules, in the model's order.
        self.modules = [name for name, _ in model.named_modules()]

    def parameter_of(self, member: LinearPlan) -> str:
        """Return the name of the parameter with a layer's weight, or "" if the model has
        no such parameter.
        """
        return next(iter(self._weights.parameters_of(member.weight)), "")

    def layer_of(self, group: FusionGroup) -> int:
        """Return the number of the decoder layer that has a group's weights.

        For a group outside the decoder layers, such as the output head, it is the number of layers.
        """
        parameter = self.parameter_of(group.members[0])
        if not parameter.startswith(self._layers_prefix):
            return self._layers
        return int(parameter.removeprefix(self._layers_prefix).partition(".")[0])

    def by_layer(self, groups: Iterable[FusionGroup]) -> Sequence[Sequence[FusionGroup]]:
        """Return the groups of each decoder layer, and last the groups outside the layers."""
        groups_of_layers: list[list[FusionGroup]] = [[] for _ in range(self._layers + 1)]
        for group in groups:
            groups_of_layers[self.layer_of(group)].append(group)
        return groups_of_layers

    def linear(self, member: LinearPlan) -> torch.nn.Module | None:
        """Return the linear module that holds the layer's weight.

        Returns None if the layer is an expert in a stacked parameter or an embedding, or if the
        model does not use its weight.
        """
        owner, parameter = self._owner(member)
        is_product = (
            parameter == "weight" and owner is not None and owner.get_parameter("weight").dim() == 2
        )
        return owner if is_product and not isinstance(owner, torch.nn.Embedding) else None

    def expert(self, member: LinearPlan) -> tuple[torch.nn.Module, ExpertPosition] | None:
        """Return the module of experts that holds a layer's weight, and the layer's position in it.

        Returns None if the layer is not in a module of experts.
        """
        owner, parameter = self._owner(member)
        if owner is None or owner.get_parameter(parameter).dim() != 3:
            return None
        stored = self._weights.stored_as(self.parameter_of(member))
        places = [names.index(member.weight) for names in stored if member.weight in names]
        number = member.part.expert if member.part else places[0]
        return owner, ExpertPosition(expert=number, is_down=parameter == "down_proj")

    def _owner(self, member: LinearPlan) -> tuple[torch.nn.Module | None, str]:
        """Return the module whose parameter holds a layer's weight, and the name of that
        parameter in it.
        """
        name = self.parameter_of(member)
        owner = self._model.get_submodule(name.rpartition(".")[0]) if name else None
        return owner, last_part(name)


class _AllInputsRecorded(Exception):
    """Ends a forward once all its inputs are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """An input (..., columns) of `module`, and the fusion groups that read it.

    `expert` is the number of an expert if this is the input of its down projection. It is None for
    a linear module and for the common input of all experts. `is_aligned` is True if the module sees
    the same tokens in the source and in the quantized model. It is False if a router chooses the
    module's tokens, because the router of the quantized model may choose other tokens.
    `few_outputs` is the number of outputs of the site's only layer, if it is a linear module
    without a bias and with fewer outputs than inputs. Otherwise it is 0.
    """

    name: str
    module: str
    columns: int
    groups: tuple[FusionGroup, ...]
    expert: int | None = None
    is_aligned: bool = True
    few_outputs: int = 0

    def require_order(self, counted: Counted) -> None:
        """Raise InputError if only some tokens count, and the module sees tokens in any order."""
        if counted is not None and not self.is_aligned:
            raise InputError.of(ANSWERS_OF_EXPERTS, self.name)

    @property
    def groups_rounded_by_text(self) -> tuple[FusionGroup, ...]:
        """Return the groups rounded by GPTQ or a refit, which need the input."""
        return tuple(group for group in self.groups if group.rounding != "nearest")


class GroupInputs:
    """Inputs of groups in a model, and the reason for each group whose input cannot be observed."""

    def __init__(self, places: Places, groups: Sequence[FusionGroup]) -> None:
        self._places = places
        # The modules that read an input, by the name of the first of them.
        self._modules: dict[str, list[torch.nn.Module]] = {}
        # The group of an expert's gate and up projections, by module and expert.
        self._gate_up_groups: dict[tuple[str, int], FusionGroup] = {}
        self.unreachable: dict[str, str] = {}
        sharing: dict[tuple[str, int | None, int], list[FusionGroup]] = {}
        for group in groups:
            place = self._place(group)
            if isinstance(place, str):
                self.unreachable[group.name] = place
            else:
                sharing.setdefault((*place, group.members[0].in_features), []).append(group)
        self.sites = tuple(
            Site(
                name=shared[0].name,
                module=module,
                columns=columns,
                groups=tuple(shared),
                expert=expert,
                is_aligned=expert_runner_of(self._modules[module][0]) is not None
                or moe_layer(shared[0].members[0].name) is None,
                few_outputs=self._few_outputs(module, shared),
            )
            for (module, expert, columns), shared in sharing.items()
        )

    def _few_outputs(self, module: str, groups: Sequence[FusionGroup]) -> int:
        """Return `few_outputs` of the site of a module and groups.

        A subclass of Linear may compute another output. A bias would have to be subtracted from an
        output in 16 bits, which could lose the product's digits.
        """
        members = [member for group in groups for member in group.members]
        reader, shape = self._modules[module][0], (members[0].out_features, members[0].in_features)
        is_plain = type(reader) is torch.nn.Linear and reader.bias is None
        is_alone = len(members) == 1 and is_plain and reader.get_parameter("weight").shape == shape
        return shape[0] if is_alone and shape[0] < shape[1] else 0

    def _place(self, group: FusionGroup) -> tuple[str, int | None] | str:
        """Return the module and expert of a group's input.

        If the input cannot be observed, return the reason.
        """
        member = group.members[0]
        name, expert = self._module_of(member), self._places.expert(member)
        linears = [
            linear for one in group.members if (linear := self._places.linear(one)) is not None
        ]
        if len(linears) == len(group.members):
            self._modules[name] = linears
            return name, None
        if expert is None:
            return "a weight that no linear module of the model uses"
        module, layer = expert
        if expert_runner_of(module) is None:
            return f"experts of the unsupported class {type(module).__name__}"
        self._modules[name] = [module]
        if not layer.is_down:
            self._gate_up_groups[name, layer.expert] = group
        return name, layer.expert if layer.is_down else None

    def _module_of(self, member: LinearPlan) -> str:
        """Return the name of the module that has a member's weight."""
        return self._places.parameter_of(member).rpartition(".")[0]

    @property
    def modules(self) -> list[str]:
        """Return the names of the modules with these inputs, in the model's order."""
        return [name for name in self._places.modules if name in self._modules]

    def modules_of(self, site: Site) -> list[str]:
        """Return the names of all modules that read a site's input."""
        return sorted(
            {self._module_of(member) for group in site.groups for member in group.members}
        )

    def gate_up_group(self, site: Site) -> FusionGroup | None:
        """Return the group of an expert's gate and up projections for the site of its down
        projection.

        Returns None for other sites, or if the plan does not quantize these projections.
        """
        return None if site.expert is None else self._gate_up_groups.get((site.module, site.expert))

    def down_input(self, site: Site, tokens: torch.Tensor) -> torch.Tensor:
        """Return the input (tokens, intermediate size) of an expert's down projection."""
        (module,) = self._modules[site.module]
        runner = expert_runner_of(module)
        assert runner is not None
        assert site.expert is not None
        return runner.down_input(module, site.expert, tokens)

    def of_module(self, module: str | None) -> "GroupInputs":
        """Return the inputs of a single module. If `module` is None, return no inputs and only the
        groups whose inputs cannot be observed.
        """
        part = copy(self)
        part.sites = tuple(site for site in self.sites if site.module == module)
        part.unreachable = {} if module else self.unreachable
        return part

    @contextmanager
    def hooked(
        self, observe: Callable[[str, Value], None], *, first_only: bool = False
    ) -> Iterator[None]:
        """Call `observe` with the name and input of each module that runs inside the block.

        The hooks run before hooks that round the input.

        If several modules read the same input, `observe` is called for each module. With
        `first_only` it is called only for the first module.
        """
        with ExitStack() as block:
            for name, modules in self._modules.items():
                for module in modules[:1] if first_only else modules:
                    hook = partial(_call_with_input, observe, name)
                    handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
                    block.callback(handle.remove)
            yield

    @contextmanager
    def recorded(self, *, only_inputs: bool = False) -> Iterator[dict[str, Value]]:
        """Record the inputs of a forward inside the block, before they are rounded.

        With `only_inputs` the forward ends as soon as all inputs are recorded.
        """
        recorded: dict[str, Value] = {}

        def record_input(name: str, value: Value) -> None:
            recorded[name] = value
            if only_inputs and len(recorded) == len(self._modules):
                raise _AllInputsRecorded

        with suppress(_AllInputsRecorded), self.hooked(record_input):
            yield recorded

    @contextmanager
    def recorded_source(self) -> Iterator[dict[str, Value]]:
        """Record the source's side of a refit in a forward inside the block, by module.

        For a site with few outputs it is the output (..., out), and otherwise the input (...,
        columns).
        """
        with ExitStack() as block:
            recorded = block.enter_context(self.recorded())
            for site in self.sites:
                if site.few_outputs:
                    (module,) = self._modules[site.module]
                    hook = partial(_record_output, recorded, site.module)
                    block.callback(module.register_forward_hook(hook).remove)
            yield recorded

    def values(
        self, site: Site, value: Value, *, all_experts: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names of a site's layers and their inputs.

        With `all_experts` an expert's input contains all tokens. Otherwise it contains only the
        tokens routed to the expert.
        """
        members = [member for group in site.groups for member in group.members]
        if not isinstance(value, RoutedTokens):
            yield from ((member.name, value) for member in members)
            return
        tokens = value.tokens
        if site.expert is not None:
            tokens = self.down_input(
                site, tokens if all_experts else tokens[value.routes[site.expert]]
            )
        for member in members:
            place = self._places.expert(member)
            assert place is not None
            is_routed = site.expert is None and not all_experts
            yield member.name, tokens[value.routes[place[1].expert]] if is_routed else tokens


def _record_output(
    recorded: dict[str, Value],
    name: str,
    module: torch.nn.Module,
    inputs: object,
    output: torch.Tensor,
) -> None:
    """Record a copy of the module's output, which the model may change. This is a forward hook."""
    recorded[name] = output.clone()


def _call_with_input(
    observe: Callable[[str, Value], None],
    name: str,
    module: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    kwargs: Mapping[str, object],
) -> None:
    """Call `observe` with the module's name and its input. This is a forward pre-hook."""
    runner = expert_runner_of(module)
    observe(name, args[0] if runner is None else runner.route_tokens(module, args, kwargs))
