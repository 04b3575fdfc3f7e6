"""Optimizers over shards: in one pass of native code, or any that needs whole parameters; and averages of
parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from fsdp_c.operator_kernels import decoded, encoded, joined_masters, num_blocks
from fsdp_c.sharding import tensor_parallel
from fsdp_c.sharding.sharded_module import handle_of, units_of
from fsdp_c.sharding.wrap import unit_name
from fsdp_c.state.optim_params import OptimParam, OptimParams
from fsdp_c.state.parameter_average import ParameterAverage
from fsdp_c.state.whole_parameters import WholeParameters
from fsdp_c.training.backward_steps import BackwardSteps

__all__ = ["FlatAdamW", "ParameterAverage", "WholeParameters", "param_groups", "step_in_backward"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MASTER_LOW = ("master_low",)
# how things are kept, whatever a loaded state dict says
_OWN_OPTIONS = {"state_dtype": None, "master_dtype": None, "rounding": "nearest", "seed": 0}


class FlatAdamW(torch.optim.Optimizer):
    """AdamW in one native call per group, on the CPU and CUDA, for flat, sharded, offloaded or ordinary
    parameters.

    The arguments and the state ("step", "exp_avg", "exp_avg_sq", with amsgrad "max_exp_avg_sq") are those of
    ``torch.optim.AdamW``, and state dicts are exchanged with it and through ``FSDP.optim_state_dict``.
    Results are bitwise those of its fused implementation on a CPU with AVX2, but for a tensor's last elements
    that fill no vector (numel modulo 16, for 16-bit dtypes 32), which differ in their last bits; without
    AVX2, torch itself differs so far everywhere. Ours are the same on every CPU and with any number of
    threads, and on CUDA but for the last bit of the powers of ``betas`` in float64; there torch's fused
    implementation, which rounds in another order, differs from them in the last bits of each step. On CUDA
    "step" lies on the parameter's device, the host waits for nothing, and a step may be captured in a CUDA
    graph, with ``lr`` as a tensor on the device to change it between replays.

    Args:
        params: parameters of dtype float32, float64, bfloat16 or float16, as dicts of groups or as an
            iterable. What is float64 is computed in float64, all else in float32 with one rounding at the
            end.
        lr: learning rate, a float or a tensor of one element.
        betas: coefficients of the running averages of the gradient and its square.
        eps: added to the denominator.
        weight_decay: decoupled, times ``lr``.
        amsgrad: divide by the largest running average of the square so far.
        maximize: step along the gradient instead of against it.
        state_dtype: dtype of the state, by default each parameter's. ``torch.float32`` keeps exact averages
            for parameters in 16 bits; loading a state dict keeps them exact as well. ``torch.uint8`` keeps
            averages in 8 bits, by blocks of 256 elements: codes of bitsandbytes' dynamic map, and for each
            block a float32 scale, state "exp_avg_scale" and so on, 1 + 1/64 bytes together. In "exp_avg" an
            element is off by at most 0.71 % of the block's largest, in the others by half as much, and one a
            tenth as large, or a hundredth, by a fifth of that each; below 1e-7 of the largest one "exp_avg"
            is 0, the others are never less than 3e-7 of it unless they are 0. They are computed in float32
            and rounded after the step, to nearest also with ``rounding="stochastic"``. A state dict has them
            in float32, as torch's; what is loaded is rounded, to the same bits where it was in 8 bits before.
            Blocks are counted by the index in the whole parameter, as draws below are, and a shard's boundary
            divides a block in two: results are otherwise the same on any number of ranks. Not for float64.
        master_dtype: ``torch.float32`` trains float32 masters of bfloat16 parameters, for 2 bytes an element:
            masters step with the bits of AdamW on float32 parameters, and a parameter is its master rounded
            to nearest, of two equally near the one further from zero. State is float32 by default. What the
            parameter's bits lack of the master's is state "master_low", int16: ``master()`` puts both
            together, and they are saved with the parameters and the state. Without it a state dict, as
            torch's, has masters equal the parameters.
        rounding: "stochastic" rounds parameters and state in bfloat16 up or down by chance, so that a sum of
            steps that are each too small is right on average. What is drawn follows from the seed, the step,
            the parameter's position in the optimizer and the element's index in the whole parameter: results
            are those of the unsharded model with ``use_orig_params``, and without it, where the whole is the
            flat parameter, the same on any number of ranks; of a parameter with tensor parallelism inside the
            whole is what lies on this rank's place of that mesh. For bfloat16 parameters, and for float32 ones
            with ``state_dtype=torch.bfloat16``; not together with ``master_dtype``.
        seed: of stochastic rounding, the same on all ranks: from 0 to 2**31 - 1.

    Raises ValueError for numbers out of their domain, TypeError for parameters of other dtypes.
    """

    kept_options = frozenset(_OWN_OPTIONS)  # those of groups that no checkpoint changes

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        master_dtype: torch.dtype | None = None,
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "state_dtype": state_dtype,
            "master_dtype": master_dtype,
            "rounding": rounding,
            "seed": seed,
        }
        _check_options(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group whose options default to the constructor's. Raises as the constructor does."""
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for index, param in enumerate(self.param_groups[-1]["params"]):
            if why := _why_not(param.dtype, self.param_groups[-1]):
                group = len(self.param_groups) - 1
                del self.param_groups[-1]
                raise TypeError(f"{why}, but parameter {index} of group {group} is {param.dtype}")
        positions: dict[Tensor, int] = self.__dict__.setdefault("_positions", {})
        for param in self.param_groups[-1]["params"]:
            positions[param] = len(positions)

    def _note_positions(self) -> None:
        every = chain.from_iterable(group["params"] for group in self.param_groups)
        self._positions = {param: index for index, param in enumerate(every)}

    def sharded_state(self) -> dict[Tensor, dict[str, Any]]:
        """The state as it is saved: averages in 8 bits in float32. Not collective."""
        return {param: self.saved_state(param) for param in self.state}

    def saved_state(self, param: Tensor) -> dict[str, Any]:
        """That of one parameter that has some."""
        return _decoded_state(param, self.state[param])

    def state_dict(self) -> dict[str, Any]:
        """With the values of ``sharded_state``. Not collective."""

        def save(_: torch.optim.Optimizer, found: dict[str, Any]) -> None:
            every = chain.from_iterable(group["params"] for group in self.param_groups)
            found["state"].update({n: self.saved_state(p) for n, p in enumerate(every) if p in self.state})

        hook = self.register_state_dict_post_hook(save, prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient. Returns what ``closure``, called with gradients
        enabled, returns.

        Raises RuntimeError for a sparse gradient and NotImplementedError for a parameter on a device that has
        no kernels, or with its gradient on another one, before any parameter is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = [_gradients(index, group["params"]) for index, group in enumerate(self.param_groups)]
        for group, found in zip(self.param_groups, grads, strict=True):
            for device in dict.fromkeys(param.device for param, _ in found):
                there = (pair for pair in found if pair[0].device == device)
                self._step_on_device(group, device, *map(list, zip(*there, strict=True)))
        return loss

    def _step_on_device(
        self, group: dict[str, Any], device: torch.device, params: list[Tensor], grads: list[Tensor]
    ) -> None:
        lr = group["lr"]
        waits = not (isinstance(lr, Tensor) and lr.device == device and device.type == "cuda")
        states = [self._state_of(param, group) for param in params]
        averages = _averages(group["amsgrad"])
        names = averages + _MASTER_LOW * (group["master_dtype"] is not None)
        columns = [[state[name] for state in states] for name in names]
        given = [[tensor_parallel.local(tensor) for tensor in column] for column in (params, *columns)]
        used = [[tensor.contiguous() for tensor in column] for column in given]
        torch.ops.fsdp_c.adamw_(
            used[0],
            [tensor_parallel.local(grad).contiguous() for grad in grads],
            used[1],
            used[2],
            used[3] if group["amsgrad"] else [],
            used[-1] if group["master_dtype"] else [],
            [state[_scale_of(name)] for name in averages for state in states] if _is_coded(group) else [],
            [state["step"] for state in states],
            [] if waits else [lr],
            float(lr) if waits else 0.0,
            *map(float, group["betas"]),
            float(group["eps"]),
            float(group["weight_decay"]),
            group["maximize"],
            *self._drawn(group, params),
        )
        for tensor, contiguous in zip(chain(*given), chain(*used), strict=True):
            if tensor is not contiguous:
                tensor.copy_(contiguous)
        torch.autograd.graph.increment_version(params)

    def _drawn(self, group: dict[str, Any], params: list[Tensor]) -> tuple[list[int], list[int]]:
        """For each parameter the stream of what is drawn, and its first element's index in the whole."""
        if group["rounding"] == "nearest":
            return [], [_first_index(param) for param in params] if _is_coded(group) else []
        if not self._positions.keys() >= set(params):  # others were put into the groups
            self._note_positions()
        streams = [(group["seed"] << 32) + self._positions[param] for param in params]
        return streams, [_first_index(param) for param in params]

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        if state["step"].device != param.device:  # the module was moved, or the user set the state
            state["step"] = state["step"].to(param.device)
        if _is_coded(group):
            _encode_loaded(param, state)
        for name in _averages(group["amsgrad"]):
            if name not in state:
                state[name] = torch.zeros_like(param, dtype=_state_dtype(param, group))
                if _is_coded(group):
                    blocks = num_blocks(_first_index(param), tensor_parallel.local(param).numel())
                    state[_scale_of(name)] = torch.zeros(blocks, device=param.device)
        if group["master_dtype"] and "master_low" not in state:
            state["master_low"] = torch.zeros_like(param, dtype=torch.int16)
        return state

    def master(self, param: Tensor) -> Tensor:
        """A copy of the float32 master of ``param``, a bfloat16 parameter of a group with ``master_dtype``;
        what the parameter is itself before the first step."""
        low = self.state.get(param, {}).get("master_low", 0)
        return joined_masters(param.detach(), low)

    # ---- loading

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of this class or of torch's AdamW gave; ``state_dtype``,
        ``master_dtype``, ``rounding`` and ``seed`` stay this optimizer's.

        Raises ValueError where the groups do not fit.
        """
        own = [{option: group[option] for option in _OWN_OPTIONS} for group in self.param_groups]
        loaded: list[dict[str, Any]] = []  # state_dict as other hooks have left it
        hooks = (
            self.register_load_state_dict_pre_hook(lambda _, found: loaded.append(found)),
            self.register_load_state_dict_post_hook(lambda _: self._restore(own, loaded[0]), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _restore(self, own: list[dict[str, Any]], loaded: dict[str, Any]) -> None:
        """Take the state again, as it was before the base class rounded it to the parameters' dtypes."""
        for group, options, saved in zip(self.param_groups, own, loaded["param_groups"], strict=True):
            group.update(options)
            for param, key in zip(group["params"], saved["params"], strict=True):
                dtype = torch.float32 if _is_coded(group) else _state_dtype(param, group)
                dtypes = dict.fromkeys(_averages(True), dtype)
                dtypes |= dict.fromkeys(_MASTER_LOW, torch.int16)
                for name, value in loaded["state"].get(key, {}).items():
                    if dtypes.get(name, param.dtype) != param.dtype:
                        self.state[param][name] = value.to(dtype=dtypes[name], device=param.device)
                if not group["master_dtype"] and param in self.state:
                    self.state[param].pop("master_low", None)
        self.keep_loaded()

    @staticmethod
    def encodes(group: dict[str, Any], name: str) -> bool:
        """Whether a group keeps state of this name in 8 bits, which is loaded in float32."""
        return _is_coded(group) and name in _averages(True)

    def keep_loaded(self) -> None:
        """Averages that were loaded take 8 bits where their group keeps them so. Not collective."""
        for group in filter(_is_coded, self.param_groups):
            for param in group["params"]:
                _encode_loaded(param, self.state.get(param, {}))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take state of torch's AdamW as well: steps in another dtype, on another device, or as plain
        numbers."""
        super().__setstate__(state)
        self._note_positions()
        for group in self.param_groups:
            for option, value in (
                ("amsgrad", False),
                ("maximize", False),
                *_OWN_OPTIONS.items(),
            ):
                group.setdefault(option, value)
        for param, param_state in self.state.items():
            if isinstance(param_state, dict) and "step" in param_state:
                param_state["step"] = torch.as_tensor(
                    param_state["step"], dtype=torch.float32, device=param.device
                )


def _state_dtype(param: Tensor, group: dict[str, Any]) -> torch.dtype:
    dtype: torch.dtype = group["state_dtype"] or group["master_dtype"] or param.dtype
    return dtype


def _is_coded(group: dict[str, Any]) -> bool:
    """Whether averages are in 8 bits."""
    return bool(group["state_dtype"] == torch.uint8)


def _first_index(param: Tensor) -> int:
    return int(getattr(param, "_first_index", 0))


def _scale_of(name: str) -> str:
    return f"{name}_scale"


def _encode_loaded(param: Tensor, state: dict[str, Any]) -> None:
    for name in _averages(True):
        if name not in state or state[name].dtype == torch.uint8:
            continue
        values = tensor_parallel.local(state[name]).to(dtype=torch.float32, device=param.device).reshape(-1)
        codes, state[_scale_of(name)] = encoded(values, _first_index(param), name == "exp_avg")
        state[name] = torch.zeros_like(param, dtype=torch.uint8)
        local = tensor_parallel.local(state[name])
        local.copy_(codes.view_as(local))


def _decoded_state(param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    found = dict(state)
    for name in (name for name in _averages(True) if _scale_of(name) in state):
        codes, scale = tensor_parallel.local(state[name]).reshape(-1), found.pop(_scale_of(name))
        found[name] = torch.zeros_like(param, dtype=torch.float32)
        local = tensor_parallel.local(found[name])
        local.copy_(decoded(codes, scale, _first_index(param), name == "exp_avg").view_as(local))
    return found


def _why_not(dtype: torch.dtype, group: dict[str, Any]) -> str | None:
    if dtype not in _DTYPES:
        return (
            "FlatAdamW steps over float32, float64, bfloat16 and float16 (give others to another optimizer)"
        )
    if group["master_dtype"] and dtype != torch.bfloat16:
        return "master_dtype keeps masters of bfloat16 (put others in a group with master_dtype=None)"
    if _is_coded(group) and dtype == torch.float64:
        return (
            "state_dtype=torch.uint8 is for parameters that are stepped in float32 (put others in a group "
            "with state_dtype=None)"
        )
    in_bfloat16 = dtype == torch.bfloat16 or (dtype, group["state_dtype"]) == (torch.float32, torch.bfloat16)
    if group["rounding"] == "stochastic" and not in_bfloat16:
        return (
            'rounding="stochastic" is for bfloat16, and for float32 with state_dtype=torch.bfloat16 (put '
            'others in a group with rounding="nearest")'
        )
    return None


def _averages(amsgrad: bool) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if amsgrad else 2]


def _check_options(options: dict[str, Any]) -> None:
    if isinstance(options["lr"], Tensor) and options["lr"].numel() != 1:
        raise ValueError(f"lr must be a number or a tensor of one element, not of {options['lr'].numel()}")
    for name in ("lr", "eps", "weight_decay"):
        if not 0.0 <= float(options[name]) < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite, not {float(options[name])}")
    if len(options["betas"]) != 2 or not all(0.0 <= float(beta) < 1.0 for beta in options["betas"]):
        raise ValueError(f"betas must be two numbers in [0, 1), not {options['betas']}")
    if options["state_dtype"] not in (None, torch.uint8, *_DTYPES):
        raise ValueError(
            "state_dtype must be None, float32, float64, bfloat16, float16 or uint8, not "
            f"{options['state_dtype']}"
        )
    if options["master_dtype"] not in (None, torch.float32):
        raise ValueError(f"master_dtype must be None or torch.float32, not {options['master_dtype']}")
    if options["rounding"] not in ("nearest", "stochastic"):
        raise ValueError(f'rounding must be "nearest" or "stochastic", not {options["rounding"]!r}')
    if options["rounding"] == "stochastic" and options["master_dtype"]:
        raise ValueError(
            "master_dtype keeps what rounding takes from a parameter, so there is no chance in it: give "
            'master_dtype or rounding="stochastic", not both'
        )
    if not 0 <= options["seed"] < 1 << 31:
        raise ValueError(f"seed must be from 0 to 2**31 - 1, not {options['seed']}")


def _gradients(group: int, params: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The parameters with gradients, and the gradients. Raises for a parameter that cannot be updated."""
    found = [(param, grad) for param in params if (grad := param.grad) is not None]
    for index, (param, grad) in enumerate(found):
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"FlatAdamW takes no sparse gradients, but gradient {index} of group {group} is one: use "
                "torch.optim.SparseAdam for its parameter"
            )
        if param.device != grad.device:
            raise NotImplementedError(
                f"FlatAdamW steps where both are, but parameter {index} (of those with a gradient) of group "
                f"{group} is on {param.device}, its gradient on {grad.device}: move the gradient there"
            )
        if param.device.type == "meta":
            raise NotImplementedError(
                f"FlatAdamW cannot step over parameter {index} (of those with a gradient) of group {group} "
                f"on {param.device}: it has no values; materialize it first"
            )
    return found


# ----------------------------------------------------------------- steps in the backward


def step_in_backward(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    clip_by_last_norm: bool = False,
) -> torch.optim.Optimizer:
    """From now on ``optimizer`` steps each unit of ``model`` amid the backward, as soon as the unit's
    gradients are reduced, and the gradients are freed.

    ``optimizer`` is one over the wrapped model's parameters, or what makes it of
    ``list(model.parameters())``; it is returned. Steps run beside the backward: on the CPU, and with
    ``CPUOffload``, in a thread, on a GPU on a stream. After ``loss.backward()`` all are over, with the bits
    of ``optimizer.step()`` there. A loop may go on to call ``step()`` and ``zero_grad()``: that steps what
    belongs to no unit, and nothing else. Schedulers, state dicts and checkpoints take the optimizer as
    before.

    Each backward that reduces gradients is a step: accumulate under ``no_sync``. ``clip_grad_norm_`` raises,
    as the total norm is not known in time; with ``clip_by_last_norm`` it returns the norm, and the factor by
    which it would clip scales the gradients of the next backward (of the first one nothing does). Scaled
    losses do not go with it, as gradients are stepped with before they are unscaled: ``ShardedGradScaler``
    raises.

    Not collective. Raises ValueError where no unit has parameters of the optimizer, a unit has another one,
    or the optimizer needs all parameters at once: a closure, ``WholeParameters``; in the backward where it
    keeps what it changes for a whole group. What it raises there is raised by the backward, with rank and
    unit.
    """
    made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(list(model.parameters()))
    closure = inspect.signature(made.step).parameters.get("closure")
    if isinstance(made, WholeParameters) or (closure is not None and closure.default is closure.empty):
        raise ValueError(
            f"{type(made).__name__} steps over all parameters at once: it cannot step unit by unit"
        )
    wanted = {param for group in made.param_groups for param in group["params"]}
    handles = [
        handle
        for unit in units_of(model)
        if (handle := unit._handle) is not None and not wanted.isdisjoint(handle.script_params)
    ]
    if not handles:
        raise ValueError(
            f"no unit has parameters of the {type(made).__name__}: make it of model.parameters() after wrapping"
        )
    for handle in handles:
        if handle._has_optim_in_backward:
            raise ValueError(
                f"unit {handle.name} on rank {handle.rank} has an optimizer that steps in the backward"
            )
    stepper = BackwardSteps(made, clip_by_last_norm)
    for handle in handles:
        handle.stepper = stepper
        handle.optimizer_in_backward = True
    return made


# ----------------------------------------------------------------- groups of parameters


def param_groups(model: nn.Module, rule: Callable[[str, torch.Size], dict[str, Any]]) -> list[dict[str, Any]]:
    """The parameters of a wrapped ``model`` for any optimizer, grouped by the options that ``rule`` gives
    each.

    ``rule(name, shape)`` is asked with name and whole shape of each parameter as the model before wrapping
    had it (what a rank shows of one is 1-D): ``lambda name, shape: {"weight_decay": 0.0} if len(shape) < 2
    else {}``. Not collective; groups, and the names in them, are the same on all ranks.

    Where ``rule`` divides a unit without ``use_orig_params``, which has one flat parameter, the groups hold
    views of it: its range for each original parameter, whose ``grad`` is that range of the flat parameter's.
    ``FlatAdamW`` and optimizers that treat each element by itself take them; one optimizer has all of them,
    as its ``zero_grad`` clears the flat parameter's gradient. State dicts have the original names in any
    case. Raises ValueError where such a unit has tensor parallelism inside.
    """
    known = OptimParams(model)
    groups = _grouped(known, rule)
    if groups is None:
        parallel = [unit for unit in known.units if handle_of(unit).is_parallel]
        if parallel:
            raise ValueError(
                f"the rule divides the flat parameters of {unit_name(parallel[0].module)}, which has tensor "
                "parallelism inside: wrap the model with use_orig_params=True"
            )
        groups = _grouped(OptimParams.of_originals(model), rule)
        assert groups is not None
    return [{**options, "params": params} for options, params in groups]


def _grouped(
    known: OptimParams, rule: Callable[[str, torch.Size], dict[str, Any]]
) -> list[tuple[dict[str, Any], list[nn.Parameter]]] | None:
    """None where one parameter would be in several groups."""
    groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
    for param, one in known.by_param.items():
        chosen, *others = [rule(name, shape) for name, shape in _original_shapes(param, one)]
        if any(other != chosen for other in others):
            return None
        params = next((params for found, params in groups if found == chosen), None)
        if params is None:
            groups.append((chosen, [param]))
        else:
            params.append(param)
    return groups


def _original_shapes(param: nn.Parameter, known: OptimParam) -> list[tuple[str, torch.Size]]:
    if known.module is None or known.module._handle is None:
        return [(known.name, param.shape)]
    managed = known.module._handle.managed_params
    return [(fqn, managed[index].shape) for fqn, index in zip(known.fqns, known.indices, strict=True)]
