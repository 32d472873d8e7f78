"""Observers by name: their own, an alias, or package.module:Class; as compressed-tensors' RegistryMixin."""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import ClassVar, Self, TypeVar

from vexport.observers.flatten import WEIGHT
from vexport.observers.qparams import ObserverArgs
from vexport.records.observer_names import CLASS_SEPARATOR, OptionValue, folded

NamedT = TypeVar("NamedT", bound="Named")


class Named:
    """A class that loads its subclasses by name."""

    registry_name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()

    def __init__(self, base_name: str, args: ObserverArgs, **observer_kwargs: OptionValue) -> None:
        super().__init__()

    @classmethod
    def load_from_registry(
        cls,
        name: str,
        *,
        base_name: str = WEIGHT,
        args: ObserverArgs | None = None,
        quantization_args: ObserverArgs | None = None,
        **observer_kwargs: OptionValue,
    ) -> Self:
        """A new observer by its name; `quantization_args` is what `args` were called before.

        ValueError lists the names.
        """
        arguments = args or quantization_args
        if arguments is None:
            raise ValueError(f"observer {name!r}: got no args, need the quantization arguments")
        return cls.of_name(name)(base_name, arguments, **observer_kwargs)

    @classmethod
    def register(
        cls, name: str | None = None, alias: str | Sequence[str] = ()
    ) -> Callable[[type[NamedT]], type[NamedT]]:
        """A decorator that gives a class a name, its own if none is given, and aliases.

        ValueError where another class has one of them.
        """

        def decorate(kind: type[NamedT]) -> type[NamedT]:
            names = (name or kind.__name__, *([alias] if isinstance(alias, str) else alias))
            known = cls.by_name()
            for spelling in names:
                if known.get(folded(spelling), kind) is not kind:
                    raise ValueError(
                        f"observer {spelling!r}: got a second class of that name, need one; rename it"
                    )
            kind.registry_name, kind.aliases = names[0], tuple(names[1:])
            return kind

        return decorate

    @classmethod
    def of_name(cls, name: str) -> type[Self]:
        """The class of a registry name, an alias or package.module:Class; ValueError for none."""
        if CLASS_SEPARATOR in name:
            return cls._imported(name)
        known = cls.by_name()
        if folded(name) not in known:
            names = ", ".join(sorted({kind.registry_name for kind in known.values()}))
            raise ValueError(
                f"observer {name!r}: got an unknown name, need one of {names}, or package.module:Class"
            )
        return known[folded(name)]

    @classmethod
    def by_name(cls) -> "dict[str, type[Self]]":
        """Every class by its folded registry name and aliases."""
        return {folded(name): kind for kind in cls.named() for name in (kind.registry_name, *kind.aliases)}

    @classmethod
    def named(cls) -> "Iterator[type[Self]]":
        """Every subclass that has its own registry name."""
        for kind in cls.__subclasses__():
            if "registry_name" in vars(kind):
                yield kind
            yield from kind.named()

    @classmethod
    def _imported(cls, name: str) -> "type[Self]":
        module, _, attribute = name.partition(CLASS_SEPARATOR)
        try:
            kind = getattr(import_module(module), attribute)
        except Exception as error:
            raise ValueError(
                f"observer {name!r}: got {type(error).__name__}: {error}, need a class that can be imported; "
                "install its package, or name its folder in PYTHONPATH"
            ) from error
        if not isinstance(kind, type) or not issubclass(kind, cls):
            raise ValueError(f"observer {name!r}: got {kind!r}, need a subclass of vexport's Observer")
        return kind
