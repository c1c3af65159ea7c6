"""Backends by name. Records only: a class is imported when somebody builds one."""

from __future__ import annotations

import importlib
import warnings

from anyattn.core.capabilities import CONTRACT_VERSION, BackendRecord
from anyattn.errors import BackendBuildError, ConfigError, UnknownNameError

__all__ = ["Registry", "load_target"]


class Registry:
    """Records in the order of registration, which is the last resort of ranking."""

    def __init__(self, records: tuple[BackendRecord, ...] = ()) -> None:
        self._records: dict[str, BackendRecord] = {}
        self._aliases: dict[str, str] = {}
        for record in records:
            self.register(record)

    def register(self, record: BackendRecord) -> None:
        """Add a record.

        Raises:
            ConfigError: a name or alias that is taken, or a contract version that isn't this package's.
        """
        if record.contract not in (None, CONTRACT_VERSION):
            raise ConfigError(
                f"backend {record.name} of {record.origin} was written for another contract",
                asked=record.contract,
                allowed=CONTRACT_VERSION,
                hint="install versions of anyattn and of the plugin that belong together",
            )
        for name in (record.name, *record.deprecated_aliases):
            if name in self._records or name in self._aliases:
                owner = self._records[self._aliases.get(name, name)]
                raise ConfigError(
                    f"backend name {name!r} is taken",
                    asked=f"{record.name} of {record.origin}",
                    allowed=f"a name other than {owner.name} of {owner.origin}",
                )
        self._records[record.name] = record
        self._aliases.update(dict.fromkeys(record.deprecated_aliases, record.name))

    def replace(self, record: BackendRecord) -> None:
        """Put `record` in the place of the one with its name, which keeps its rank and aliases.

        Raises:
            UnknownNameError: nobody registered that name.
        """
        if record.name not in self._records:
            raise UnknownNameError("backend", record.name, self._records)
        self._records[record.name] = record

    def get(self, name: str) -> BackendRecord:
        """The record of a name or alias; a deprecated alias warns.

        Raises:
            UnknownNameError: nobody registered it; the error names the nearest.
        """
        if name in self._aliases:
            canonical = self._aliases[name]
            warnings.warn(
                f"backend name {name!r} is deprecated, use {canonical!r}", DeprecationWarning, stacklevel=2
            )
            return self._records[canonical]
        if name not in self._records:
            raise UnknownNameError("backend", name, self._records)
        return self._records[name]

    def names(self) -> tuple[str, ...]:
        """Canonical names in registration order."""
        return tuple(self._records)

    def records(self) -> tuple[BackendRecord, ...]:
        """All records in registration order."""
        return tuple(self._records.values())


def _more(module: str) -> str:
    """The command that shows why: doctor tries libraries, not the modules of plugins."""
    ours = module.partition(".")[0] == __name__.partition(".")[0]
    return "`anyattn doctor --probe`" if ours else f"`python -c 'import {module}'`"


def load_target(target: str, backend: str = "a backend") -> type:
    """Import the class behind `module:Class`; `backend` is whose class it is, for the error.

    Raises:
        BackendBuildError: the module can't be imported or has no such class.
    """
    module, _, name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        # Vendor modules raise anything at import, or end the process; the cause is kept.
        raise BackendBuildError(
            f"the class of {backend} can't be loaded",
            asked=target,
            allowed="an importable module:Class",
            hint=f"{type(error).__name__}: {error}; {_more(module)} says more",
        ) from error
    if not isinstance(found, type):
        raise BackendBuildError(
            f"the target of {backend} isn't a class", asked=target, allowed="module:Class"
        )
    return found
