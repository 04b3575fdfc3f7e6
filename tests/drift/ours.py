"""fsdp_c's names beside a table of torch's FSDP1: what is missing, and what takes other arguments."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from typing import Any

from fsdp_c.compat.standins.finder import FSDP, OURS
from tests.drift.tables import Table

PUBLIC = (
    "api",
    "fully_sharded_data_parallel",
    "sharded_grad_scaler",
    "wrap",
)  # the modules that users import from
LINE = re.compile(r"(\w+) (\w+)\.([\w.]+)(?:\((.*)\)| = (.*))?$")
ABSENT = object()


def differences(table: Table) -> list[str]:
    """One line per difference. Private names are compared as far as we have them; public ones we must
    have."""
    found = []
    for line in table:
        if line.startswith("export "):
            continue
        kind, module, path, parameters, value = LINE.match(line).groups()  # type: ignore[union-attr]
        if f"{FSDP}.{module}" not in OURS:
            continue
        ours = _get(importlib.import_module(OURS[f"{FSDP}.{module}"]), path)
        if ours is ABSENT:
            if module in PUBLIC and not any(one.startswith("_") for one in path.split(".")):
                found.append(f"{module}.{path} is missing")
        elif kind in ("def", "staticmethod", "classmethod"):
            found += _signature(f"{module}.{path}", kind, ours, parameters, module)
        elif kind == "value" and value is not None:
            found += _value(f"{module}.{path}", ours, value, module)
    return found


def _get(module: Any, path: str) -> Any:
    """The object at ``path``, ABSENT where there is none, or only what every object has. Of a field its
    default."""
    *classes, name = path.split(".")
    found = module
    for one in classes:
        found = getattr(found, one, ABSENT)
    if name in getattr(found, "__dataclass_fields__", {}):
        return found.__dataclass_fields__[name].default
    value = getattr(found, name, ABSENT)
    return ABSENT if found is ABSENT or value is getattr(object, name, None) else value


def _signature(name: str, kind: str, ours: Any, parameters: str, module: str) -> list[str]:
    try:
        given = list(inspect.signature(ours).parameters.values())
    except (TypeError, ValueError):
        return [f"{name}: our signature cannot be read"]
    wanted = list(_evaluated(parameters, module))
    if kind == "classmethod":
        wanted = wanted[1:]
    if [_key(one) for one in given] == [_key(one) for one in wanted]:
        return []
    return [f"{name}({_shown(given)}), torch has ({_shown(wanted)})"]


def _value(name: str, ours: Any, value: str, module: str) -> list[str]:
    if value == "auto()":
        return []  # the enums' members are compared by the tests of their values
    wanted = eval(value, _namespace(module))
    return [] if ours == wanted else [f"{name} = {ours!r}, torch has {wanted!r}"]


def _evaluated(parameters: str, module: str) -> list[inspect.Parameter]:
    return list(inspect.signature(eval(f"lambda {parameters}: None", _namespace(module))).parameters.values())


@functools.cache
def _namespace(module: str) -> dict[str, Any]:
    """Where the defaults of a module's functions have their names from."""
    import torch
    import torch.distributed as dist

    return {"torch": torch, "dist": dist, **vars(importlib.import_module(f"{FSDP}.{module}"))}


def _key(one: inspect.Parameter) -> tuple[Any, ...]:
    kind = one.POSITIONAL_OR_KEYWORD if one.name == "self" else one.kind  # C takes self by position alone
    return (one.name, kind, one.default)


def _shown(parameters: list[inspect.Parameter]) -> str:
    return str(inspect.Signature([one.replace(annotation=inspect.Parameter.empty) for one in parameters]))[
        1:-1
    ]
