"""Averages of a model's parameters over steps, kept as sharded as the parameters are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_avg_fn

from fsdp_c.compat.aliases import StateDict
from fsdp_c.compat.errors import first_names
from fsdp_c.sharding import common, tensor_parallel
from fsdp_c.sharding.holders import group_of_model
from fsdp_c.sharding.sharded_module import ShardedModule, handle_of, units_of, units_with_paths
from fsdp_c.sharding.traversal import clean_name, is_flat_param_name, walk
from fsdp_c.state.optim_loading import LoadOptions, load_optim_state
from fsdp_c.state.optim_params import Key, OptimParams
from fsdp_c.state.optim_saving import SaveOptions, save_optim_state
from fsdp_c.state.sharded_values import from_memory_order
from fsdp_c.state.state_dict import settings_of
from fsdp_c.state.state_dict_saving import local_shard, split_shard
from fsdp_c.training.unshard_params import check_idle

_MODULE, _COUNT = "module.", "n_averaged"  # the keys of AveragedModel


class ParameterAverage:
    """The average of a wrapped model's parameters over steps, as ``torch.optim.swa_utils.AveragedModel`` has
    it of a plain one: its values, without a copy of the model.

    ``update()`` after ``optimizer.step()`` takes in the parameters as they are then, the first time by
    copying them: by ``average + (1 - decay) * (parameter - average)``, or with ``decay=None`` to the mean of
    all updates. Each rank averages its own shards, and nothing is sent. ``with average.shown():`` the model
    computes, and is saved, with the average.

    Args:
        model: has at least one FullyShardedDataParallel in it.
        decay: between 0 and 1, or None for equal weights.
        dtype: of the averages of floating-point parameters, by default each parameter's own. In 16 bits an
            average stops to move where ``1 - decay`` of the difference is less than it rounds off:
            ``torch.float32`` keeps it.
        device: where the averages lie, by default beside the shards; "cpu" leaves the device's memory to
            training.
        use_buffers: average buffers too; else the model's own are used.

    Memory: one shard of each unit, in ``dtype``. ``shown()`` takes one unit's more, or all of them where
    dtype or device differ. Raises ValueError for a decay out of its range and for a model without units.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float | None = 0.999,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        use_buffers: bool = False,
    ) -> None:
        if decay is not None and not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay must be between 0 and 1, or None for equal weights, not {decay}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be None or of floating point, not {dtype}")
        if not units_of(model):
            raise ValueError(
                f"{type(model).__name__} has no FullyShardedDataParallel in it: wrap it first, or use "
                "torch.optim.swa_utils.AveragedModel"
            )
        self.model, self.decay, self.use_buffers = model, decay, use_buffers
        self.n_averaged = 0
        self._dtype, self._device = dtype, None if device is None else torch.device(device)
        self._is_shown = False
        self._units = [module for module in units_of(model) if module._handle is not None]
        self._of_unit = {module: self._copy(local_shard(module)) for module in self._settled()}
        self._others = {name: self._copy(tensor) for name, tensor in self._named_others().items()}
        self._managed: dict[nn.Module, set[str]] = {}
        for param in (param for module in self._units for param in common.managed_params(module._handle)):
            self._managed.setdefault(param.module, set()).add(param.name)
        self._names: dict[tuple[nn.Module, str], str] = {}  # of the others, by where they are

    def _copy(self, tensor: Tensor) -> Tensor:
        dtype = self._dtype if tensor.is_floating_point() else None
        return tensor.detach().to(self._device, dtype, copy=True)

    def _settled(self) -> Iterator[ShardedModule]:
        """The units, each once its shard has what the user did to its parameters."""
        for module in self._units:
            check_idle(module, summoned=False)
            with common.bound_runtime(module):
                handle_of(module).writeback()
            yield module

    def _named_others(self) -> dict[str, Tensor]:
        """What no unit manages, by its first name: parameters, and buffers where they are averaged."""
        names: dict[Tensor, str] = {}
        for name, tensor in common.unmanaged_tensors(self.model, self.use_buffers):
            names.setdefault(tensor, name)
        return {name: tensor for tensor, name in names.items()}

    def _found_others(self) -> dict[tuple[nn.Module, str], Tensor]:
        """The same by where they are, without their names."""
        found: dict[Tensor, tuple[nn.Module, str]] = {}
        for _, module in walk(self.model, once=True):
            managed = self._managed.get(module, ())
            if module._parameters and module._parameters.keys() != managed:
                for name, param in module._parameters.items():
                    if param is not None and name not in managed and not is_flat_param_name(name):
                        found.setdefault(param, (module, name))
            if self.use_buffers:
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        found.setdefault(buffer, (module, name))
        return {place: tensor for tensor, place in found.items()}

    def _live_others(self) -> dict[str, Tensor]:
        """Those that are averaged, by name. RuntimeError where there are others than at first."""
        found = self._found_others()
        if found.keys() != self._names.keys():
            others = self._named_others()
            if others.keys() != self._others.keys():
                changed = sorted(others.keys() ^ self._others.keys())
                raise RuntimeError(
                    f"{first_names(changed)} came or went since the ParameterAverage was made: make it once the "
                    "model is complete"
                )
            names = {tensor: name for name, tensor in others.items()}
            self._names = {place: names[tensor] for place, tensor in found.items() if tensor in names}
        return {self._names[place]: tensor for place, tensor in found.items() if place in self._names}

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each average, and what it is the average of."""
        others = self._live_others()
        pairs = [(self._of_unit[module], local_shard(module)) for module in self._settled()]
        for name, average in self._others.items():
            pairs.append((tensor_parallel.local(average), tensor_parallel.local(others[name].detach())))
        return pairs

    def _refuse_shown(self, what: str) -> None:
        if self._is_shown:
            raise RuntimeError(f"{what} inside shown(), where the parameters are the average: leave it first")

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are now, between steps. Not collective; every rank calls it.

        Raises AssertionError amid a step or in ``summon_full_params``, RuntimeError inside ``shown()``.
        """
        self._refuse_shown("update()")
        alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for average, live in self._pairs():
            if self.n_averaged == 0:
                average.copy_(live)
            elif average.dtype == live.dtype and average.device == live.device:
                averages, lives = alike.setdefault((live.device, live.dtype), ([], []))
                averages.append(average)
                lives.append(live)
            else:
                self._move([average], [live.to(average.device, average.dtype)])
        for averages, lives in alike.values():
            self._move(averages, lives)
        self.n_averaged += 1

    def _move(self, averages: list[Tensor], lives: list[Tensor]) -> None:
        """The averages towards ``lives``, by torch's own rules, which AveragedModel chooses so too."""
        if self.decay is not None:
            get_ema_multi_avg_fn(self.decay)(averages, lives, self.n_averaged)
        elif averages[0].is_floating_point() and averages[0].device.type == "cuda":
            torch._foreach_lerp_(averages, lives, 1 / (self.n_averaged + 1))
        else:
            count = torch.tensor(self.n_averaged, device=averages[0].device)
            for average, live in zip(averages, lives, strict=True):
                average.copy_(get_swa_avg_fn()(average, live, count))

    # ---- in the model's place

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """The model's parameters are the average: to evaluate and save. At exit they are again what they were.

        Not collective, but every rank does it, as a forward inside gathers from all. Inside, parameters are
        read and not written to; state dicts share memory with them, as far as they do elsewhere: save inside,
        or copy. Raises AssertionError amid a step or in ``summon_full_params``, RuntimeError
        before the first ``update()``.
        """
        self._refuse_shown("shown()")
        if self.n_averaged == 0:
            raise RuntimeError("there is no average before the first update()")
        held = self._exchange([None] * len(self._pairs()))
        self._is_shown = True
        try:
            yield
        finally:
            self._exchange(held)
            self._is_shown = False

    @torch.no_grad()
    def _exchange(self, held: list[Tensor | None]) -> list[Tensor | None]:
        """Swap averages and parameters. ``held``: what parameters were that are no longer in an average, as
        it has another dtype or device; returns that."""
        result: list[Tensor | None] = []
        for device in {module.compute_device for module in self._units}:  # a save may be reading parameters
            common.synchronize(device)
        for (average, live), original in zip(self._pairs(), held, strict=True):
            before = live.clone()
            live.copy_(average if original is None else original)
            swaps = average.dtype == live.dtype and average.device == live.device
            if swaps:
                average.copy_(before)
            result.append(None if swaps or original is not None else before)
        for module in self._units:  # what is gathered is from before
            handle_of(module).reshard(True)
        return result

    # ---- state dicts

    def held(self) -> tuple[dict[ShardedModule, Tensor], dict[str, Tensor]]:
        """The averages themselves: of each unit's shard, and by name of what no unit manages. RuntimeError
        inside ``shown()``."""
        self._refuse_shown("the state of a ParameterAverage is asked for")
        return self._of_unit, self._others

    def state_dict(self) -> StateDict:
        """``{"n_averaged": ..., "module.layer.weight": ...}``, as AveragedModel's, with the average's dtype:
        whole tensors, where the model's state dict type is FULL_STATE_DICT, with its settings, else this
        rank's rows. Collective.

        Raises RuntimeError inside ``shown()``, and as ``FSDP.optim_state_dict`` does.
        """
        params = OptimParams(self.model)
        settings = settings_of(params.all_units)
        group = group_of_model(self.model)
        options = SaveOptions.of(settings, settings.state_dict_config, offloads=False, group=group)
        state = self._by_param(params)
        keys: dict[Key, nn.Parameter] = dict(enumerate(state))
        osd = {"state": {key: {"average": state[param]} for key, param in keys.items()}}
        saved = save_optim_state(params, keys, osd, options)
        if not options.returns_state:
            return {}
        values = {name: one["average"] for name, one in saved["state"].items()}
        values |= {name: values[first] for name, first in self._further_names() if first in values}
        return {
            _COUNT: torch.tensor(self.n_averaged, device="cpu"),
            **{_MODULE + name: value for name, value in values.items()},
            **{_MODULE + name: value for name, value in self._buffers()},
        }

    def _by_param(self, params: OptimParams) -> dict[nn.Parameter, Tensor]:
        """The averages as state of an optimizer."""
        parts: dict[tuple[ShardedModule, int], Tensor] = {}
        for module, average in self.held()[0].items():
            for index, (layout, part) in enumerate(split_shard(module, average)):
                if not handle_of(module).layout.sharded:
                    part = from_memory_order(part, layout.shape, layout.order)
                parts[module, index] = part
        found: dict[nn.Parameter, Tensor] = {}
        for param, known in params.by_param.items():
            if known.module is None:
                found[param] = self._others[known.name]
            elif params.use_orig_params:
                found[param] = parts[known.module, known.indices[0]]
            else:
                found[param] = self._of_unit[known.module]
        return found

    def _further_names(self) -> Iterator[tuple[str, str]]:
        """The names of shared parameters beyond the first, each with that."""
        for path, module in units_with_paths(self.model):
            prefix = clean_name(f"{path}.") if path else ""
            first: dict[int, str] = {}
            for param in common.managed_params(module._handle):
                name = first.setdefault(param.place, prefix + param.fqn)
                if name != prefix + param.fqn:
                    yield prefix + param.fqn, name
        names: dict[Tensor, str] = {}
        for name, tensor in common.unmanaged_tensors(self.model):
            if names.setdefault(tensor, name) != name:
                yield name, names[tensor]

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Those that a state dict has; the model's own, where they are not averaged."""
        for path, module in self.model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    full_name = clean_name(f"{path}.{name}" if path else name)
                    yield full_name, self._others.get(full_name, buffer).detach().clone()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what ``state_dict()`` gave, of any wrapping and number of ranks, or AveragedModel's: on every
        rank, whole or its own rows. Collective for rows.

        Raises KeyError for names that are missing, ValueError for other shapes; nothing is loaded then.
        """
        self._refuse_shown("load_state_dict()")
        params = OptimParams(self.model)
        names = {name: _MODULE + name for known in params.by_param.values() for name in known.fqns}
        wanted = [_COUNT, *names.values(), *(_MODULE + name for name in self._others)]
        if missing := [key for key in dict.fromkeys(wanted) if key not in state_dict]:
            raise KeyError(f"the state dict of an average lacks {first_names(missing)}")
        keys: dict[Key, nn.Parameter] = dict(enumerate(params.by_param))
        state = {name: {"average": state_dict[key]} for name, key in names.items()}
        loaded = load_optim_state(params, keys, {"state": state}, LoadOptions(False, None, None))["state"]
        own = self._by_param(params)
        values = [(own[param], loaded[key]["average"]) for key, param in keys.items() if key in loaded]
        values += [
            (self._others[name], state_dict[_MODULE + name]) for name in self._others.keys() - names.keys()
        ]
        if odd := [(tuple(new.shape), tuple(old.shape)) for old, new in values if new.shape != old.shape]:
            raise ValueError(f"a tensor of shape {odd[0][0]} does not fit an average of shape {odd[0][1]}")
        for average, value in values:
            average.copy_(value)
        self.n_averaged = int(state_dict[_COUNT])
