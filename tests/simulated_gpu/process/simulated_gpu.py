"""Puts the simulated device where torch's Python looks for CUDA: torch.cuda's own code runs on top of it.

``wait_for_torch`` is called before torch is imported, and acts just before three of torch's modules are:
torch._C asks for the hooks of CUDA as it is made and keeps the answer, so the library is loaded before;
torch.cuda takes what it finds in torch._C; distributed_c10d looks for ProcessGroupNCCL.
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
    """What the race detector has found since the last call."""
    return library().take_reports()


def driver_calls() -> dict[str, int]:
    """Calls of the driver since the start: events, launches, and blocks taken from the allocator."""
    import torch

    native = library()
    launched = sum(count for _, count in native.launch_counts())
    allocated = torch.cuda.memory_stats()["num_allocs"]
    return native.driver_calls() | {"launches": launched, "allocations": allocated}


def log_order(on: bool) -> None:
    """Keep what is ``ordered``, beginning with nothing: call it when the host knows the device to be
    through."""
    library().log_order(on)


def ordered() -> list[tuple[str, int, dict[int, int]]]:
    """What has been done since: each launch and allocation, its stream, and how much of each stream's work is
    before.

    Streams by their ids, the default ones' too; 0 is the host. Work is counted in launches since the log
    began, with the launch itself.
    """
    return library().order_so_far()


def drop_wait(nth: int) -> None:
    """Leave out the nth wait of a stream, or of the host, for an event from now on, of those asked of the
    driver.

    -1: none.
    """
    library().drop_wait(nth)


def waits() -> int:
    """How many such waits there were."""
    return library().waits_so_far()


# ---- the start


def wait_for_torch() -> None:
    sys.meta_path.insert(0, _Watcher())


class _Watcher:
    """Finds no module; acts before some are found by others."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        action = _ACTIONS.get(name)
        if action is not None:
            action()


def _load_library() -> None:
    ctypes.CDLL(str(LIBRARY))


def library() -> Any:
    """The library as a module of Python."""
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
    """The two functions of storages that a torch for the CPU is compiled without CUDA's part of."""
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
        """gloo of a torch for the CPU ends the process on a tensor of a GPU."""
        if device.type == "cuda" and isinstance(backend, c10d.ProcessGroupGloo):
            backend = c10d.ProcessGroupNCCL.of_gloo(backend)
            kind = c10d.ProcessGroup.BackendType.CUSTOM  # a group has one backend of a kind
        register(group, device, kind, backend)

    c10d.ProcessGroup._register_backend = _register_backend


_ACTIONS: dict[str, Callable[[], None]] = {
    "torch._C": _load_library,
    "torch.cuda": _before_torch_cuda,
    "torch.distributed.distributed_c10d": _before_distributed,
}
