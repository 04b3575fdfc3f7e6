"""Names, arguments, defaults and members of torch's FSDP1, compared with those of fsdp_c."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest

import fsdp_c
from fsdp_c import FullyShardedDataParallel
from fsdp_c.compat.standins.finder import FSDP, OURS

PUBLIC = ("api", "fully_sharded_data_parallel", "sharded_grad_scaler", "wrap")
STANDINS = "fsdp_c.compat.standins"
ABSENT = object()
OF_EVERY_OBJECT = {*vars(object), *vars(Enum), *vars(type("Plain", (), {}))} - {"__init__"}


def function_of(value: Any) -> Any:
    """Return the function of a static or class method."""
    return getattr(value, "__func__", value)


def arguments(value: Any) -> list[tuple[Any, ...]] | None:
    """Return name, kind and default of each argument; ``self`` is positional in C. None if there is no
    signature.
    """
    if not inspect.isroutine(function_of(value)):
        return None
    found = inspect.signature(function_of(value)).parameters.values()
    named = [(one.name, one.kind, one.default) for one in found]
    return named[1:] if named and named[0][0] in ("self", "cls") else named


def differences(module: str, replacement: str) -> Iterator[str]:
    """Yield names of a public module of torch that its replacement lacks, or that have other arguments, values
    or bases there.
    """
    theirs, ours = (importlib.import_module(name) for name in (f"{FSDP}.{module}", replacement))
    for name, value in vars(theirs).items():
        if getattr(value, "__module__", None) != theirs.__name__:
            continue
        found = getattr(ours, name, ABSENT)
        members = vars(value).items() if inspect.isclass(value) and found not in (ABSENT, value) else ()
        if members and replacement.startswith(STANDINS):
            if [one.__name__ for one in value.__mro__] != [one.__name__ for one in found.__mro__]:
                yield f"{module}.{name} has other bases"
        pairs = [(name, value, found)]
        pairs += [
            (f"{name}.{one}", member, inspect.getattr_static(found, one, ABSENT))
            for one, member in members
            if one not in OF_EVERY_OBJECT
        ]
        for path, known, own in pairs:
            if own in (ABSENT, object.__init__):
                if module in PUBLIC and not any(one.startswith("_") for one in path.split(".")):
                    yield f"{module}.{path} is missing"
            elif arguments(known) not in (None, arguments(own)):
                yield f"{module}.{path}{arguments(own)}, torch has {arguments(known)}"
            elif (
                isinstance(known, (Enum, bool, int, str))
                and not path.endswith("__")
                and repr(known) != repr(own)
            ):
                yield f"{module}.{path} = {own!r}, torch has {known!r}"


MODULES = [(name.removeprefix(f"{FSDP}."), ours) for name, ours in OURS.items() if name.startswith(FSDP)]
MODULES += [(name, f"{STANDINS}.{name}") for name in ("api", "wrap")]


@pytest.mark.parametrize(("module", "replacement"), MODULES)
def test_arguments_are_those_of_the_installed_torch(module: str, replacement: str) -> None:
    """Also of the modules that replace torch's where there are none."""
    assert list(differences(module, replacement)) == []


def test_a_missing_name_and_another_argument_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sync(self: FullyShardedDataParallel, recurse: bool = True) -> None: ...

    monkeypatch.setattr(FullyShardedDataParallel, "no_sync", no_sync)
    monkeypatch.delattr(FullyShardedDataParallel, "clip_grad_norm_")
    found = sorted(differences("fully_sharded_data_parallel", "fsdp_c.fully_sharded_data_parallel"))
    assert found[0] == "fully_sharded_data_parallel.FullyShardedDataParallel.clip_grad_norm_ is missing"
    assert found[1].startswith("fully_sharded_data_parallel.FullyShardedDataParallel.no_sync[('recurse', ")
    assert len(found) == 2


def test_package_has_its_version_and_lists_public_names_only() -> None:
    assert fsdp_c.__version__.split(".")[0].isdigit()
    listed = {name for name in dir(fsdp_c) if not name.startswith("_")}
    assert set(fsdp_c.__all__) | {"install", "uninstall", "summary", "wrap"} <= listed
    assert not {"_C", "torch", "construction", "materialization", "left_out"} & set(dir(fsdp_c))
    assert all(hasattr(fsdp_c, name) for name in dir(fsdp_c))
