"""On which GPUs a kernel of vLLM says that it is supported: its own method, run from the wheel's source.

Nothing of vLLM is imported. Names that a method uses are looked up in the wheel, but for those in `_answers`,
which stand for a CUDA wheel with FlashInfer, without DeepGEMM, Humming, b12x, Conch, FBGEMM and Quark. A name
that is in neither ends the script.
"""

import ast
import builtins
import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import SimpleNamespace

from wheels import Wheel

# The capabilities of GPUs that vLLM 0.32 tells apart.
CAPABILITIES = (75, 80, 86, 89, 90, 100, 103, 120, 121)
# From the wheel's compiled part, by capability: as vexport/engine/dry/stubs.py has them.
ABSTRACT = ("ABC", "Generic")
_ABSENT = ("has_humming", "has_fbgemm_gpu", "has_deep_gemm", "is_deep_gemm_supported", "has_quark")


def supported(wheel: Wheel, file: str, name: str) -> list[int]:
    """The capabilities for which a class's `is_supported` says yes, or which its least one includes."""
    return [sm for sm in CAPABILITIES if _Class(wheel, file, name, _answers(sm)).supports(sm)]


def _answers(sm: int) -> Mapping[str, object]:
    """What a method is told of the device and of the packages."""
    capability = _Capability((sm // 10, sm % 10))
    platform = SimpleNamespace(
        **{
            f"is_{name}": _say(name in ("cuda", "cuda_alike"))
            for name in ("cuda", "cuda_alike", "rocm", "xpu", "cpu")
        },
        get_device_capability=lambda *_: capability,
        has_device_capability=lambda least, *_: sm >= _number(least),
        is_device_capability=lambda other, *_: sm == _number(other),
        is_device_capability_family=lambda other, *_: sm // 10 == _number(other) // 10,
        supports_fp8=_say(sm >= 89),
    )
    return {
        "current_platform": platform,
        "envs": _Off(),
        "find_spec": lambda name: None,
        "torch": SimpleNamespace(_scaled_mm=None, float4_e2m1fn_x2=None),
        "cutlass_fp8_supported": _say(sm >= 89),
        "CUTLASS_BLOCK_FP8_SUPPORTED": sm >= 90,
        "cutlass_fp4_supported": _say(100 <= sm < 130),
        **dict.fromkeys(_ABSENT, _say(False)),
    }


def _say(answer: bool) -> Callable[..., bool]:
    return lambda *_: answer


def _number(capability: object) -> int:
    return capability if isinstance(capability, int) else capability[0] * 10 + capability[1]  # type: ignore[index]


class _Capability(tuple[int, int]):
    """A DeviceCapability."""

    major, minor = property(lambda self: self[0]), property(lambda self: self[1])

    def to_int(self) -> int:
        return _number(self)


class _Off:
    """The environment: no variable is set."""

    def __getattr__(self, name: str) -> object:
        return [] if name == "VLLM_DISABLED_KERNELS" else False


class _Names(dict[str, object]):
    """The names of a file of the wheel, made when they are asked for."""

    def __init__(self, wheel: Wheel, file: str, answers: Mapping[str, object]) -> None:
        super().__init__(answers)
        self._wheel, self._file, self._answers = wheel, file, answers

    def __missing__(self, name: str) -> object:
        if name.startswith("has_flashinfer"):
            return _say(True)
        if name.startswith("_import_b12x"):
            return lambda: None
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in self._wheel.classes(self._file):
            return _Class(self._wheel, self._file, name, self._answers)
        for node in self._wheel.tree(self._file).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return _function(node, self)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return _value(node.value, self)
        place = self._wheel.imports(self._file).get(name)
        if place is None:
            raise SystemExit(f"{self._file}: {name} is not known here: add it to the answers")
        return _Names(self._wheel, place[0], self._answers)[place[1]]


class _Class:
    """A class of the wheel: its methods and attributes, and those of its bases."""

    def __init__(self, wheel: Wheel, file: str, name: str, answers: Mapping[str, object]) -> None:
        self._names, self._node = _Names(wheel, file, answers), wheel.classes(file)[name]

    def __getattr__(self, name: str) -> object:
        return self._found(name, self)

    def _found(self, name: str, asked: "_Class") -> object:
        """An attribute, bound to the class that was asked for it."""
        for node in self._node.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                made = _function(node, self._names)
                return lambda *given, **named: made(asked, *given, **named)
            value, targets = (
                getattr(node, "value", None),
                getattr(node, "targets", [getattr(node, "target", None)]),
            )
            if isinstance(value, ast.expr) and targets[0] is not None and ast.unparse(targets[0]) == name:
                return _value(value, self._names)
        for base in self._node.bases:
            if ast.unparse(base).startswith(ABSTRACT):
                continue
            parent = _value(base.value if isinstance(base, ast.Subscript) else base, self._names)
            with suppress(AttributeError):
                return parent._found(name, asked)  # type: ignore[attr-defined]
        raise AttributeError(name)

    def supports(self, sm: int) -> bool:
        """Kernels of packed integers have a least capability, others a method."""
        try:
            return sm >= int(self.get_min_capability())  # type: ignore[operator]
        except AttributeError:
            return bool(self.is_supported(sm)[0])  # type: ignore[operator]


def _function(node: ast.FunctionDef, names: _Names) -> Callable[..., object]:
    """A function of the wheel; what it imports itself is looked up like any other name."""
    bare = copy.deepcopy(node)
    bare.body = [line for line in node.body if not isinstance(line, ast.Import | ast.ImportFrom)]
    bare.decorator_list, bare.returns = [], None
    for each in (*bare.args.posonlyargs, *bare.args.args, *bare.args.kwonlyargs):
        each.annotation = None
    found: dict[str, Callable[..., object]] = {}
    exec(compile(ast.Module(body=[bare], type_ignores=[]), "wheel", "exec"), names, found)
    return found[node.name]


def _value(node: ast.expr, names: _Names) -> object:
    return eval(compile(ast.Expression(node), "wheel", "eval"), names)
