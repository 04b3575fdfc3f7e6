"""FSDP1's attributes and methods of a handle, for code written for torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_c import _C
from fsdp_c.compat.mixed_use import refuse_torchs_functions
from fsdp_c.compat.upstream import HandleShardingStrategy, HandleTrainingState, _ShardParamInfo
from fsdp_c.sharding import flattening
from fsdp_c.sharding.configuration import UnitConfig

NOT_IN_SHARD = _ShardParamInfo(False, None, None, None, None)


class FlatParamShardMetadata(NamedTuple):
    """Metadata of this rank's shard. ``param_offsets``: inclusive (start, end) offsets in each parameter."""

    param_names: tuple[str, ...]
    param_shapes: tuple[torch.Size, ...]
    param_strides: tuple[tuple[int, ...], ...]
    param_contiguities: tuple[bool, ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]


class HandleNames(_C.Handle):
    """Base of FlatParamHandle with names that fsdp_c itself hardly uses."""

    flat_param: Any
    device: torch.device
    world_size: int
    uses_sharded_strategy: bool
    _config: UnitConfig
    _fully_sharded_module: nn.Module
    _orig_param_dtype: torch.dtype
    _fwd_bwd_param_dtype: torch.dtype
    _reduce_dtype: torch.dtype
    _wrap_views: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] | None

    # ---- settings

    @property
    def _sharding_strategy(self) -> HandleShardingStrategy:
        return HandleShardingStrategy(self._config.strategy.value)

    _use_orig_params = property(attrgetter("_config.use_orig_params"))
    _offload_params = property(attrgetter("_config.offload_params"))
    _keep_low_precision_grads = property(attrgetter("_config.keep_low_precision_grads"))
    _skip_writeback_check = property(attrgetter("_config.skip_writeback_check"))
    _use_full_prec_in_eval = property(attrgetter("_config.full_precision_in_eval"))

    @property
    def _debug_level(self) -> dist.DebugLevel:
        return dist.get_debug_level()

    @property
    def _device_handle(self) -> ModuleType:
        module: ModuleType = torch.get_device_module(self.device)
        return module

    @property
    def _aligned_numel(self) -> int:
        is_aligned = self._config.use_orig_params
        return flattening.ALIGNMENT_NBYTES // self._fwd_bwd_param_dtype.itemsize if is_aligned else 0

    @property
    def _low_prec_param_dtype_specified(self) -> bool:
        return self._config.param_dtype is not None

    @property
    def _low_prec_reduce_dtype_specified(self) -> bool:
        return self._config.reduce_dtype is not None

    @property
    def _uses_param_mixed_precision(self) -> bool:
        return self._fwd_bwd_param_dtype != self._orig_param_dtype

    @property
    def _uses_reduce_mixed_precision(self) -> bool:
        return self._reduce_dtype != self._orig_param_dtype

    # ---- state

    @property
    def _training_state(self) -> HandleTrainingState:
        return list(HandleTrainingState)[self.training_state]

    @_training_state.setter
    def _training_state(self, state: HandleTrainingState) -> None:
        refuse_torchs_functions(self.name)

    @property
    def _skipped_use_sharded_views(self) -> bool:
        """True between forward and backward if the strategy keeps unsharded views registered."""
        is_sharded = self.uses_sharded_strategy and self._config.use_orig_params
        if not is_sharded or self.training_state != _C.USE_IDLE:
            return False
        info = self.flat_param._param_infos[0]
        shown = info.module._parameters.get(info.param_name)
        return shown is not None and not isinstance(shown, nn.Parameter)

    @property
    def _force_full_precision(self) -> bool:
        """True if mixed precision is disabled at the moment.

        Applies inside summon_full_params, and in eval mode under FSDP_USE_FULL_PREC_IN_EVAL.
        """
        if not self._uses_param_mixed_precision and not self._uses_reduce_mixed_precision:
            return False
        in_eval = self._config.full_precision_in_eval and not self._fully_sharded_module.training
        return in_eval or self.training_state == _C.USE_SUMMON_FULL_PARAMS

    @property
    def _has_optim_in_backward(self) -> bool:
        """True if _apply_optimizer_in_backward attached an optimizer to an original parameter."""
        return any(hasattr(param, "_in_backward_optimizers") for param in self.flat_param._params or ())

    @_has_optim_in_backward.setter
    def _has_optim_in_backward(self, value: bool) -> None:
        refuse_torchs_functions(self.name)

    def _reset_flat_param_grad_info_if_needed(self) -> None:
        """No-op, called by torch's ``optim_state_dict``. Each step updates the gradient info."""

    def _get_padded_unsharded_flat_param(self) -> Tensor | None:
        return self.padded_unsharded_flat_param

    # ---- flattening

    def flatten_tensors(self, tensors: Sequence[Tensor], aligned_numel: int) -> Tensor:
        """Return ``tensors`` (one dtype) flattened into a padded 1-D tensor, in memory order.

        ``aligned_numel`` is the alignment in elements, 0 for none. Raises ValueError for tensors that cannot
        be flattened together.
        """
        if not tensors:
            raise ValueError("Expects non-empty `tensors`")
        if aligned_numel < 0:
            raise ValueError(f"Expects non-negative `aligned_numel` but got {aligned_numel}")
        names = [f"tensor {index}" for index in range(len(tensors))]
        flattening.check_uniform(tensors, names, use_orig_params=True)
        numels = [tensor.numel() for tensor in tensors]
        layout = _C.FlatLayout(numels, aligned_numel, self.world_size, self.layout.rank, False)
        return flattening.own_shard(tensors, layout)

    def flatten_tensors_into_flat_param(
        self, tensors: Sequence[Tensor], aligned_numel: int, requires_grad: bool
    ) -> nn.Parameter:
        """Return ``flatten_tensors`` as a new flat parameter without metadata."""
        flat_param = nn.Parameter(self.flatten_tensors(tensors, aligned_numel), requires_grad)
        flat_param._is_flat_param = True  # type: ignore[attr-defined]  # checked by isinstance(x, FlatParameter)
        return flat_param

    @staticmethod
    def _get_unpadded_shard(tensor: Tensor, rank: int, world_size: int) -> tuple[Tensor, int]:
        """Return rank's shard as a 1-D view of ``tensor``, and the number of padding elements."""
        flat = flattening.flat_view(flattening.without_gaps(tensor))
        step = -(-flat.numel() // world_size)
        start = min(rank * step, flat.numel())
        part = flat.narrow(0, start, min(step, flat.numel() - start))
        return part, step - part.numel()

    @staticmethod
    def _get_shard(tensor: Tensor, rank: int, world_size: int) -> tuple[Tensor, int]:
        """Return a copy of rank's shard, padded with zeros, and the number of zeros."""
        part, padding = HandleNames._get_unpadded_shard(tensor, rank, world_size)
        return torch.cat([part, part.new_zeros(padding)]), padding

    @staticmethod
    def _get_sharded_size(tensor: Tensor, rank: int, world_size: int) -> torch.Size:
        """Return the padded size of a shard of ``tensor``. Raises AssertionError unless ``tensor`` is 1-D."""
        if tensor.dim() != 1:
            raise AssertionError(f"expected a 1-D tensor, got one of shape {tuple(tensor.shape)}")
        return torch.Size((-(-tensor.numel() // world_size),))

    # ---- layout

    @property
    def _fqns_in_shard(self) -> list[str]:
        infos = zip(self.flat_param._fqns, self.flat_param._shard_param_infos, strict=True)
        return [fqn for fqn, info in infos if info.in_shard]

    def _get_modules(self) -> set[nn.Module]:
        return set(self.flat_param._modules)

    def _get_flat_param_offsets(self) -> list[tuple[int, int]]:
        """Return inclusive (start, end) offsets of parameters and padding in the unsharded flat parameter."""
        numels = self.layout.numels_with_padding
        ends = itertools.accumulate(numels)
        return [(end - numel, end - 1) for end, numel in zip(ends, numels, strict=True)]

    def _get_shard_metadata(
        self, unsharded_start_idx: int, unsharded_end_idx: int
    ) -> tuple[_ShardParamInfo, ...]:
        """Return the part of each parameter in this inclusive range of the unsharded flat parameter."""
        found = []
        for offset, numel in zip(self.layout.param_offsets, self.layout.param_numels, strict=True):
            start, end = max(offset, unsharded_start_idx), min(offset + numel - 1, unsharded_end_idx)
            held = (start - unsharded_start_idx, end - start + 1, start - offset, end - offset)
            found.append(_ShardParamInfo(True, *held) if start <= end else NOT_IN_SHARD)
        return tuple(found)

    def _get_unflat_views_aligned(self, tensor: Tensor | None = None) -> list[Tensor]:
        """Return the parameters as views of ``tensor``, an unsharded flat parameter (default: the own one)."""
        whole = self.flat_param if tensor is None else tensor
        layout, flat_param = self.layout, self.flat_param
        places = zip(
            layout.param_offsets, layout.param_numels, flat_param._shapes, flat_param._strides, strict=True
        )
        views = tuple(
            whole.narrow(0, offset, numel).as_strided(shape, strides)
            for offset, numel, shape, strides in places
        )
        return list(views if self._wrap_views is None else self._wrap_views(views))

    def _get_unflat_views_unaligned(self, tensor: Tensor | None = None) -> Iterator[Tensor]:
        return iter(self._get_unflat_views_aligned(tensor))

    @property
    def _get_unflat_views(self) -> Callable[[Tensor | None], Iterable[Tensor]]:
        aligned, unaligned = self._get_unflat_views_aligned, self._get_unflat_views_unaligned
        return aligned if self._config.use_orig_params else unaligned

    def shard_metadata(self) -> FlatParamShardMetadata:
        """Return the metadata of the parameters with elements in this rank's shard."""
        flat, infos = self.flat_param, self.flat_param._shard_param_infos
        bounds = [(info.intra_param_start_idx, info.intra_param_end_idx) for info in infos]
        columns = (flat._fqns, flat._shapes, flat._strides, flat._contiguities, flat._numels, bounds)
        held: list[tuple[Any, ...]] = [
            tuple(one for one, info in zip(column, infos, strict=True) if info.in_shard) for column in columns
        ]
        return FlatParamShardMetadata(*held)

    def param_module_names(self) -> Iterator[tuple[str, str]]:
        """Return (parameter name, module name) of all occurrences, shared ones last."""
        infos = [*self.flat_param._param_infos, *self.flat_param._shared_param_infos]
        return ((info.param_name, info.module_name) for info in infos)

    def shared_param_module_names(self) -> Iterator[tuple[str, str]]:
        """Return (parameter name, module name) of the further occurrences of shared parameters."""
        return ((info.param_name, info.module_name) for info in self.flat_param._shared_param_infos)
