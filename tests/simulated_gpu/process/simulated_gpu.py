"""Install the simulated device under torch.cuda, whose own Python code then runs on it.

``wait_for_torch`` is called before torch is imported, and acts just before the import of three modules:
torch._C, which caches the CUDA hooks, so the library must be loaded first; torch.cuda, which uses the
functions of torch._C; and distributed_c10d, which looks for ProcessGroupNCCL.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(os.environ.get("SIMULATED_GPU", ""))
LIBRARY = FOLDER / "libtorch_cuda.so"
FUNCTIONS = (
    "getDeviceCount getDevice setDevice exchangeDevice maybeExchangeDevice getCurrentStream getDefaultStream "
    "getCurrentRawStream setStream synchronize set_sync_debug_mode get_sync_debug_mode sleep memoryStats "
    "resetPeakMemoryStats resetAccumulatedMemoryStats emptyCache setMemoryFraction beginAllocateToPool "
    "endAllocateToPool releasePool"
).split()


# ---- for tests in a process of the device


def reports() -> list[str]:
    """Return the race detector's reports since the last call."""
    return library().take_reports()


def driver_calls() -> dict[str, int]:
    """Return the numbers of event calls, launches and allocations since the start."""
    import torch

    native = library()
    launched = sum(count for _, count in native.launch_counts())
    allocated = torch.cuda.memory_stats()["num_allocs"]
    return native.driver_calls() | {"launches": launched, "allocations": allocated}


def log_order(on: bool) -> None:
    """Start an empty log for ``ordered``, or stop it. Call it after a synchronisation of the device."""
    library().log_order(on)


def ordered() -> list[tuple[str, int, dict[int, int]]]:
    """Return each logged launch and allocation, its agent, and the launches of each agent that come before.

    An agent is the host (0) or a stream. Launches are counted since the log began, with the launch itself.
    """
    return library().order_so_far()


def drop_wait(nth: int) -> None:
    """Drop the nth wait for an event through the driver from now on, of a stream or the host; -1: none."""
    library().drop_wait(nth)


def waits() -> int:
    """Return the number of waits for events through the driver so far."""
    return library().waits_so_far()


# ---- the start


def wait_for_torch() -> None:
    sys.meta_path.insert(0, _Watcher())


class _Watcher:
    """Import hook that finds no module itself, and runs a function before certain imports."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        action = _ACTIONS.get(name)
        if action is not None:
            action()


def _load_library() -> None:
    ctypes.CDLL(str(LIBRARY))


def library() -> Any:
    """Return the device's library as a Python module."""
    found = sys.modules.get("_C_of_simulated_gpu")
    if found is None:
        spec = importlib.util.spec_from_file_location("_C", LIBRARY)
        assert spec is not None and spec.loader is not None
        found = sys.modules["_C_of_simulated_gpu"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return found


# ---- torch.cuda


def _before_torch_cuda() -> None:
    torch, native = sys.modules["torch"], library()
    torch_c = torch._C
    for name in FUNCTIONS:
        setattr(torch_c, f"_cuda_{name}", getattr(native, name))
    torch_c._cuda_beginAllocateCurrentThreadToPool = native.beginAllocateToPool
    torch_c._cuda_init = lambda: _at_first_use(torch, native)
    torch_c._cuda_isInBadFork = lambda: False
    torch_c._cuda_getArchFlags = lambda: "sm_90"
    torch_c._cuda_canDeviceAccessPeer = lambda *_: True
    torch_c._cuda_getAllocatorBackend = lambda: "native"
    torch_c._cuda_isCurrentStreamCapturing = native.is_capturing
    torch_c._cuda_ipc_collect = torch_c._cuda_clearCublasWorkspaces = torch_c._host_emptyCache = lambda: None
    torch_c._set_cached_tensors_enabled = lambda enabled: None
    torch_c._CUDAGraph, torch_c._graph_pool_handle = native.CUDAGraph, native.new_pool
    for absent in ("_cuda_CUDAAllocator", "_cuda_CUDAAllocator_AllocatorState"):
        setattr(torch_c, absent, type(absent, (), {}))
    torch_c._CudaStreamBase, torch_c._CudaEventBase = (
        _stream_class(torch, native),
        _event_class(torch, native),
    )
    torch_c._CudaDeviceProperties, torch_c._MemPool = native.DeviceProperties, native.MemPool
    torch_c._cudart = SimpleNamespace(
        cudaMemGetInfo=lambda device: _free_and_total(native, device),
        cudaGetErrorString=str,
        cudaError=SimpleNamespace(success=0),
        cudaStreamSynchronize=lambda stream: 0,
    )
    torch_c._nccl_version, torch_c._nccl_version_suffix = lambda: (2 << 32) | (27 << 16), lambda: b""
    torch_c._has_cuda = True
    _replace_storage_functions(torch, native)


def _at_first_use(torch: Any, native: Any) -> None:
    count = native.getDeviceCount()
    torch.cuda.default_generators = tuple(native.default_generator(index) for index in range(count))
    torch.cuda._get_device_properties = lambda device: native.DeviceProperties()
    torch._C._cuda_getDeviceProperties = torch.cuda._get_device_properties
    torch.cuda._device_count = lambda: count


def _free_and_total(native: Any, device: int) -> tuple[int, int]:
    total = native.DeviceProperties().total_memory
    return total - native.memoryStats(device)["reserved_bytes"]["all"]["current"], total


def _stream_class(torch: Any, native: Any) -> type:
    class CudaStreamBase(torch._C.Stream):
        def __new__(
            cls,
            priority: int = 0,
            stream_id: int = 0,
            device_index: int = 0,
            device_type: int = 0,
            stream_ptr: int = 0,
        ) -> Any:
            if stream_ptr:
                stream_id, device_index, device_type = (
                    stream_ptr,
                    native.getDevice(),
                    int(torch._C._autograd.DeviceType.CUDA),
                )
            if device_type:
                return super().__new__(
                    cls, stream_id=stream_id, device_index=device_index, device_type=device_type
                )
            return super().__new__(cls, device=torch.device("cuda", native.getDevice()), priority=priority)

        def __init__(self, *arguments: Any, **options: Any) -> None:
            pass

        @property
        def cuda_stream(self) -> int:
            return native.stream_handle(self.stream_id, self.device_index)

        @property
        def priority(self) -> int:
            return native.stream_priority(self.stream_id, self.device_index)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -1

    return CudaStreamBase


def _event_class(torch: Any, native: Any) -> type:
    class CudaEventBase(torch._C.Event):
        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> Any:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

        def __init__(self, *arguments: Any, **options: Any) -> None:
            pass

        @property
        def cuda_event(self) -> int:
            return self.event_id

        def elapsed_time(self, end_event: Any) -> float:
            return native.host_ms_between(self.event_id, end_event.event_id)

    return CudaEventBase


def _replace_storage_functions(torch: Any, native: Any) -> None:
    """Replace the two storage functions whose CUDA part a torch for the CPU lacks."""
    base = torch._C.StorageBase
    from torch.storage import UntypedStorage

    def new(cls: type, *arguments: Any, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return base.__new__(cls, *arguments, **({} if device is None else {"device": device}), **options)
        nbytes = arguments[0] if arguments else options.get("size", 0)
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    UntypedStorage.__new__ = new
    native.replace_storage_resize(UntypedStorage)


# ---- torch.distributed


def _before_distributed() -> None:
    c10d = sys.modules["torch._C._distributed_c10d"]
    library().bind_nccl(c10d)
    c10d.ProcessGroupNCCL.Options = c10d.NCCLOptions
    register = c10d.ProcessGroup._register_backend

    def _register_backend(group: Any, device: Any, kind: Any, backend: Any = None) -> None:
        """Wrap gloo, which in a torch for the CPU ends the process on a tensor of a GPU."""
        if device.type == "cuda" and isinstance(backend, c10d.ProcessGroupGloo):
            backend = c10d.ProcessGroupNCCL.of_gloo(backend)
            kind = c10d.ProcessGroup.BackendType.CUSTOM  # a group has one backend of each type
        register(group, device, kind, backend)

    c10d.ProcessGroup._register_backend = _register_backend


_ACTIONS: dict[str, Callable[[], None]] = {
    "torch._C": _load_library,
    "torch.cuda": _before_torch_cuda,
    "torch.distributed.distributed_c10d": _before_distributed,
}
