"""Run vLLM's choice of a class for linear layers, from the source text of a wheel.

vLLM is not imported, because its CUDA wheel needs 9 GB of packages. Each name that the code uses is
executed from the wheel's text when the code first uses it. Only the platform is made up.
"""

import __future__

import ast
import builtins
import importlib
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from vexport.formats.dequantize import ct_scheme
from vexport.formats.schemes import Scheme

FOLDER = "vllm/model_executor/layers/quantization/compressed_tensors"
CONFIG = "CompressedTensorsConfig"
# Compute capabilities for which the choice is recorded: more than any GPU has, on both sides.
CAPABILITIES = range(50, 140)


class Source(Protocol):
    """Python files of a vLLM version as text."""

    def tree(self, name: str) -> ast.Module: ...

    def file_of(self, module: str, importer: str) -> str: ...


class _Module(dict[str, Any]):
    """Global names of a file of the wheel. A name is executed when it is first used."""

    def __init__(self, wheel: Source, file: str, platform: object) -> None:
        super().__init__(__name__=__name__, current_platform=platform)
        self.wheel, self.file, self.platform = wheel, file, platform

    def __missing__(self, name: str) -> Any:
        for node in self.wheel.tree(self.file).body:
            if isinstance(node, ast.ImportFrom | ast.Import):
                found = next((each for each in node.names if name == (each.asname or each.name)), 0)
                if found:
                    self[name] = self._imported(node, found)  # type: ignore[arg-type]
                    return self[name]
            elif name in _defined(node):
                self._execute(node)
                return dict.__getitem__(self, name)
        raise KeyError(name)

    def _imported(self, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> Any:
        if isinstance(node, ast.Import):
            return importlib.import_module(alias.name)
        source = self.wheel.file_of("." * node.level + (node.module or ""), self.file)
        if not source:
            return getattr(importlib.import_module(node.module or ""), alias.name)
        return _Module(self.wheel, source, self.platform)[alias.name]

    def _execute(self, node: ast.stmt) -> None:
        if isinstance(node, ast.ClassDef) and node.name == CONFIG:
            node.bases = []  # only its own methods are needed
        for name in _used_at_once(node):
            if not hasattr(builtins, name):
                self[name]
        flags = __future__.annotations.compiler_flag
        exec(compile(ast.Module([node], []), self.file, "exec", flags, dont_inherit=True), self)


def _used_at_once(node: ast.stmt) -> set[str]:
    """Return the names that Python looks up when it executes a definition."""
    inside = set[str]()
    parts: list[ast.AST] = [node]
    if isinstance(node, ast.ClassDef):
        parts = [*node.bases, *node.decorator_list]
        inside = set[str]().union(*map(_used_at_once, node.body)) - set[str]().union(
            *map(_defined, node.body)
        )
    if isinstance(node, ast.FunctionDef):
        defaults = (*node.args.defaults, *filter(None, node.args.kw_defaults))
        parts = [*node.decorator_list, *defaults]
    if isinstance(node, ast.AnnAssign):
        parts = [node.value] if node.value else []
    walked = (each for part in parts for each in ast.walk(part))
    names = (each for each in walked if isinstance(each, ast.Name))
    return inside | {each.id for each in names if isinstance(each.ctx, ast.Load)}


def _defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement of a file defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def selected_classes(
    wheel: Source, schemes: Iterable[Scheme], least: Mapping[str, int]
) -> dict[str, dict[int, str]]:
    """Return the classes that vLLM selects, by the class that a scheme usually gets.

    Each class is listed with the first capability on which vLLM selects it. It is "" if vLLM
    refuses the scheme from there on. `least` maps each class to its minimum compute capability.
    Raises AssertionError if vLLM refuses only one of two schemes with the same usual class.
    """
    choice = _Choice(wheel, least)
    found: dict[str, dict[int, str]] = {}
    for scheme in schemes:
        usual, selected, last = scheme.format.vllm_scheme(scheme.args), dict[int, str](), ""
        for sm in CAPABILITIES:
            name = choice.of(scheme, sm)
            if name != last:
                selected[sm] = last = name
        runs = [sm for sm in CAPABILITIES if _at(selected, sm)]
        assert runs == [sm for sm in CAPABILITIES if _at(found.setdefault(usual, selected), sm)]
    return dict(sorted(found.items()))


def _at(selected: Mapping[int, str], sm: int) -> str:
    first = max((first for first in selected if first <= sm), default=None)
    return "" if first is None else selected[first]


class _Choice:
    """vLLM's choice of a class, with a made-up platform."""

    def __init__(self, wheel: Source, least: Mapping[str, int]) -> None:
        self.sm = 0
        capability = SimpleNamespace(to_int=lambda: self.sm)
        platform = SimpleNamespace(
            get_device_capability=lambda: capability,
            is_xpu=lambda: False,
            fp8_dtype=lambda: torch.float8_e4m3fn,
        )
        module = _Module(wheel, f"{FOLDER}/compressed_tensors.py", platform)
        for name, minimum in least.items():
            module[name] = type(name, (_Stub,), {"minimum": minimum})
        self.config = object.__new__(module[CONFIG])

    def of(self, scheme: Scheme, sm: int) -> str:
        """Return the name of the class for a scheme on a GPU, or "" if vLLM refuses it.

        As in vLLM's `get_scheme`, the minimum capability of the selected class decides.
        """
        self.sm = sm
        self.config.quant_format = scheme.format.name
        sides = ct_scheme(scheme.args)
        try:
            found = self.config._get_scheme_from_parts(
                weight_quant=sides.weights,
                input_quant=sides.input_activations,
                format=scheme.format.name,
                layer_name="layer",
            )
        except (NotImplementedError, ValueError):
            return ""
        return type(found).__name__ if sm >= found.minimum else ""


class _Stub:
    """Class of a linear layer, which only has a name and a minimum compute capability."""

    minimum: int

    def __init__(self, *_: object, **__: object) -> None:
        pass

    @classmethod
    def get_min_capability(cls) -> int:
        return cls.minimum
