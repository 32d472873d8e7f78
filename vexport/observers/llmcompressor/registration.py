"""Register observers under names, and find them by name."""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import ClassVar, Self, TypeVar

from vexport.observers.llmcompressor import older
from vexport.observers.llmcompressor.bases import RegistryMixin
from vexport.records.observer_names import CLASS_SEPARATOR, folded

RegisteredT = TypeVar("RegisteredT", bound="RegisteredObserver")


class RegisteredObserver(RegistryMixin):
    """Class methods of `Observer` that register and find its subclasses.

    A subclass is registered if it defines `registry_name`, or by the decorator `register`, as in
    llm-compressor. The registry is the tree of subclasses, so a name exists as soon as the
    subclass is imported.
    """

    registry_name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def register(
        cls, name: str | None = None, alias: str | Sequence[str] | None = None
    ) -> Callable[[type[RegisteredT]], type[RegisteredT]]:
        """Return a decorator that registers a class under a name and aliases.

        The default name is the class name. Raises ValueError if another class has the same name or
        alias, or if the class overrides a method that is never called.
        """

        def decorate(kind: type[RegisteredT]) -> type[RegisteredT]:
            names = (name or kind.__name__, *([alias] if isinstance(alias, str) else alias or ()))
            known = cls.by_name()
            older.require_used_overrides(kind)
            for spelling in names:
                if known.get(folded(spelling), kind) is not kind:
                    raise ValueError(
                        f"observer {spelling!r}: got a second class of that name, need one; "
                        f"rename it"
                    )
            kind.registry_name, kind.aliases = names[0], tuple(names[1:])
            return kind

        return decorate

    @classmethod
    def register_value(
        cls,
        value: type[RegisteredT],
        name: str | None = None,
        alias: str | Sequence[str] | None = None,
    ) -> None:
        """Register a class under a name and aliases, as `register` does."""
        cls.register(name, alias)(value)

    @classmethod
    def registered_names(cls) -> list[str]:
        """Return the names of all observers, without aliases."""
        return list(dict.fromkeys(kind.registry_name for kind in cls.registered_classes()))

    @classmethod
    def registered_aliases(cls) -> list[str]:
        """Return the aliases of all observers."""
        return list(
            dict.fromkeys(alias for kind in cls.registered_classes() for alias in kind.aliases)
        )

    @classmethod
    def get_value_from_registry(cls, name: str) -> type[Self]:
        """Return the class for a registry name, an alias or package.module:Class.

        Raises ValueError if there is no such class.
        """
        if CLASS_SEPARATOR in name:
            return cls._imported(name)
        known = cls.by_name()
        if folded(name) not in known:
            names = ", ".join(sorted({kind.registry_name for kind in known.values()}))
            raise ValueError(
                f"observer {name!r}: got an unknown name, need one of {names}, or "
                f"package.module:Class"
            )
        return known[folded(name)]

    @classmethod
    def by_name(cls) -> "dict[str, type[Self]]":
        """Return all classes by their folded registry names and aliases."""
        return {
            folded(name): kind
            for kind in cls.registered_classes()
            for name in (kind.registry_name, *kind.aliases)
        }

    @classmethod
    def registered_classes(cls) -> "Iterator[type[Self]]":
        """Yield all subclasses that define `registry_name` themselves."""
        for kind in cls.__subclasses__():
            if "registry_name" in vars(kind):
                yield kind
            yield from kind.registered_classes()

    @classmethod
    def _imported(cls, name: str) -> "type[Self]":
        module, _, attribute = name.partition(CLASS_SEPARATOR)
        try:
            kind = getattr(import_module(module), attribute)
        except Exception as error:
            raise ValueError(
                f"observer {name!r}: got {type(error).__name__}: {error}, need a class that "
                f"can be imported; "
                "install its package, or add its folder to PYTHONPATH"
            ) from error
        if not isinstance(kind, type) or not issubclass(kind, cls):
            raise ValueError(
                f"observer {name!r}: got {kind!r}, need a subclass of vexport's Observer"
            )
        return kind
