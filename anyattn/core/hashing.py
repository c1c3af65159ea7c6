"""Keys of every layer call: records and enums whose hash costs nothing."""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["hashed_once"]

T = TypeVar("T", bound=type)


def hashed_once(cls: T) -> T:
    """A frozen dataclass that computes its hash when first asked: dictionaries ask in every layer call.

    The value is not pickled: hashes of strings differ between processes.
    """
    computed: Any = cls.__hash__

    def __hash__(self: Any) -> int:
        fields = self.__dict__
        value: int | None = fields.get("_hash")
        if value is None:
            value = fields["_hash"] = computed(self)
        return value

    def __getstate__(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    for method in (__hash__, __getstate__):
        setattr(cls, method.__name__, method)
    return cls
