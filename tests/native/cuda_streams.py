"""Runs csrc/torch/stream.c and pool.c on stand-ins for torch.cuda and the driver.

Called by test_cuda_streams.py, in a process of its own: nothing here is torch.
"""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

COMPUTE, PRE_UNSHARD, UNSHARD = 0, 1, 2


class Cuda(ModuleType):
    """A torch.cuda of several devices. What is asked of it is written down."""

    def __init__(self, library: Any, driver: Any, backend: str = "native") -> None:
        super().__init__("torch.cuda")
        self.library, self.driver, self.backend = library, driver, backend
        self.said: list[Any] = []
        self.streams = 0
        self.priorities: list[int] = []
        self.now = 0
        self.current = SimpleNamespace(cuda_stream=0, device_index=0)

    def Stream(self, device: Any, priority: int = 0) -> Any:
        self.streams += 1
        self.priorities.append(priority)
        return SimpleNamespace(cuda_stream=100 * (device.index + 1) + self.streams, device_index=device.index)

    def current_stream(self, device: Any) -> Any:
        return self.current

    def set_stream(self, stream: Any) -> None:
        self.said.append(("set_stream", stream.cuda_stream))
        self.set_device(stream.device_index)
        self.make_current(stream)

    def make_current(self, stream: Any) -> None:
        vars(stream).setdefault("stream_id", 1)
        self.current = stream
        self.library.make_current(ctypes.c_void_p(stream.cuda_stream))

    def current_device(self) -> int:
        return self.now

    def set_device(self, index: int) -> None:
        self.now = index
        self.driver.set_context(ctypes.c_size_t(index + 1))

    def get_allocator_backend(self) -> str:
        return self.backend

    def device(self, device: Any) -> Any:
        return Entered(self, "device", device.index)

    def empty_cache(self) -> None:
        self.said.append("empty_cache")

    def MemPool(self) -> SimpleNamespace:
        self.said.append(("MemPool", self.now))
        return SimpleNamespace(id=(0, 7))

    def functions(self, index: int) -> dict[str, Any]:
        """Of torch._C, about the pool of a device."""

        def heard(what: str) -> Any:
            return lambda *of: self.said.append((what, "pool") if of == (index, (0, 7)) else of)

        names = {
            "enter": "beginAllocateCurrentThreadToPool",
            "leave": "endAllocateToPool",
            "release": "releasePool",
        }
        return {f"_cuda_{name}": heard(what) for what, name in names.items()}


class Entered:
    """A context of torch.cuda."""

    def __init__(self, cuda: Cuda, what: str, index: int) -> None:
        self.cuda, self.what, self.index = cuda, what, index

    def __enter__(self) -> None:
        self.cuda.said.append(("enter", self.what))
        self.before = self.cuda.now
        self.cuda.now = self.index if self.what == "device" else self.cuda.now

    def __exit__(self, *_: Any) -> None:
        self.cuda.said.append(("leave", self.what))
        self.cuda.now = self.before


def calls(driver: Any) -> list[str]:
    return driver.take_calls().decode().splitlines()


def started(folder: str, index: int, current_device: int, **options: Any) -> tuple[Any, Any, Cuda]:
    """Streams of a device, while the thread's own is another or the same."""
    driver = ctypes.CDLL(f"{folder}/libcuda.so.1", ctypes.RTLD_GLOBAL)  # found again by its soname
    driver.take_calls.restype = ctypes.c_char_p
    library = ctypes.PyDLL(f"{folder}/streams.so")
    library.start.argtypes = [ctypes.py_object]
    for name in ("pool_has", "pool_cuts"):
        getattr(library, name).argtypes, getattr(library, name).restype = [ctypes.c_int64], ctypes.c_bool
    for name in ("grow_pool", "nbytes_of_piece", "piece_nbytes"):
        getattr(library, name).argtypes = [ctypes.c_int64]
        getattr(library, name).restype = ctypes.c_int64 if name != "grow_pool" else ctypes.c_int
    cuda = Cuda(library, driver, **options)
    cuda.set_device(current_device)
    sys.modules["torch"], sys.modules["torch.cuda"] = ModuleType("torch"), cuda
    sys.modules["torch"].get_device_module = lambda device: cuda  # type: ignore[attr-defined]
    sys.modules["torch._C"] = SimpleNamespace(**cuda.functions(index))
    cuda.make_current(SimpleNamespace(cuda_stream=0, device_index=index))
    library.start(SimpleNamespace(type="cuda", index=index))
    return library, driver, cuda


def the_default_stream_is_left_and_come_back_to(folder: str) -> None:
    """Its handle is NULL, which must not be taken for none."""
    library, driver, cuda = started(folder, 0, 0)
    cuda.said.clear()
    for role in (PRE_UNSHARD, UNSHARD):
        library.enter(role)
        library.leave()
    assert cuda.said == [("set_stream", 101), ("set_stream", 0), ("set_stream", 102), ("set_stream", 0)], (
        cuda.said
    )
    library.record(COMPUTE, 0)
    library.wait_for(PRE_UNSHARD, 0)
    library.record(COMPUTE, 0)
    library.synchronize(0)
    assert calls(driver) == [
        "create event 1 stream 0 context 1",
        "record event 1 stream 0 context 1",
        "wait event 1 stream 101 context 1",
        "record event 1 stream 0 context 1",
        "synchronize event 1 stream 0 context 1",
    ]
    library.finish()


def only_the_all_reduce_does_not_go_before_computation(folder: str) -> None:
    """Its stream is the last."""
    library, _, cuda = started(folder, 0, 0)
    assert cuda.priorities == [-1, -1, -1, 0]
    library.finish()


def another_current_device_stays_and_is_not_used(folder: str) -> None:
    library, driver, cuda = started(folder, 1, 0)
    library.enter(PRE_UNSHARD)
    assert cuda.now == 1
    library.leave()
    assert cuda.now == 0
    library.record(COMPUTE, 0)
    library.wait_for(PRE_UNSHARD, 0)
    library.synchronize(0)
    assert {call.rpartition(" ")[2] for call in calls(driver)} == {"2"}  # of device 1
    assert driver.pushed_contexts() == 0
    assert ("MemPool", 1) in cuda.said
    library.finish()


def a_thread_without_context_gets_none_of_another_device(folder: str) -> None:
    library, driver, cuda = started(folder, 1, 1)
    cuda.now = 0
    driver.set_context(ctypes.c_size_t(0))
    library.record(COMPUTE, 0)
    assert calls(driver)[-1].endswith("context 2")
    driver.set_context(ctypes.c_size_t(0))
    library.enter(PRE_UNSHARD)
    library.leave()
    assert cuda.now == 1
    library.finish()


def a_step_under_another_stream_comes_after_the_one_before(folder: str) -> None:
    library, driver, cuda = started(folder, 0, 0)
    library.follow()
    assert calls(driver) == []
    cuda.make_current(SimpleNamespace(cuda_stream=150, device_index=0))
    library.follow()
    library.follow()
    first, *rest = calls(driver)
    assert first.startswith("create")
    assert [call.split(" context")[0] for call in rest] == [
        "record event 1 stream 0",
        "wait event 1 stream 150",
    ], rest
    library.enter(PRE_UNSHARD)
    library.leave()
    assert cuda.current.cuda_stream == 150
    library.finish()


def a_hook_under_another_stream_is_that_streams(folder: str) -> None:
    """What it enqueues is enqueued there, so there it is recorded and waited for; not between enter and
    leave."""
    library, driver, cuda = started(folder, 0, 0)
    cuda.make_current(SimpleNamespace(cuda_stream=150, device_index=0))
    library.record(COMPUTE, 0)
    assert [call.split(" context")[0] for call in calls(driver)] == [
        "create event 1 stream 0",
        "record event 1 stream 0",
        "wait event 1 stream 150",
        "create event 2 stream 0",
        "record event 2 stream 150",
    ]
    library.enter(PRE_UNSHARD)
    library.record(COMPUTE, 0)
    library.leave()
    assert [call.split(" context")[0] for call in calls(driver)] == ["record event 2 stream 150"]
    cuda.make_current(SimpleNamespace(cuda_stream=0, device_index=0))
    library.wait_for(COMPUTE, 0)
    assert [call.split(" context")[0] for call in calls(driver)] == [
        "record event 1 stream 150",
        "wait event 1 stream 0",
        "wait event 2 stream 0",
    ]
    library.finish()


def a_stream_that_the_script_may_have_destroyed_is_asked_nothing(folder: str) -> None:
    """One whose number is its handle is none of torch's. Once a step under it has ended it may be gone."""
    library, driver, cuda = started(folder, 0, 0)
    cuda.make_current(SimpleNamespace(cuda_stream=150, stream_id=150, device_index=0))
    library.follow()
    library.note_end()
    assert calls(driver)[-1].startswith("record event 1 stream 150")
    cuda.make_current(SimpleNamespace(cuda_stream=160, device_index=0))
    library.follow()
    assert [call.split(" context")[0] for call in calls(driver)] == ["wait event 1 stream 160"]
    library.give_back()
    said = [call.split(" context")[0] for call in calls(driver)]
    assert said == ["record event 1 stream 160", "wait event 1 stream 0"], said
    library.end_backward()
    said = [call.split(" context")[0] for call in calls(driver)]
    assert said == ["record event 1 stream 160", "synchronize event 1 stream 0"], said
    library.end_backward()
    assert calls(driver) == []
    library.finish()


def streams_that_were_left_wait_for_the_one_that_used_their_memory(folder: str) -> None:
    """Each once, and not the one that is current again."""
    library, driver, cuda = started(folder, 0, 0)
    library.give_back()
    assert calls(driver) == []
    for stream in (150, 160, 150):
        cuda.make_current(SimpleNamespace(cuda_stream=stream, device_index=0))
        library.follow()
    calls(driver)
    library.give_back()
    said = [call.split(" context")[0] for call in calls(driver)]
    assert said == ["record event 1 stream 150", "wait event 1 stream 0", "wait event 1 stream 160"], said
    for stream in range(170, 200):
        cuda.make_current(SimpleNamespace(cuda_stream=stream, device_index=0))
        library.follow()
    calls(driver)
    library.give_back()
    said = [call.split(" context")[0].rpartition(" ")[2] for call in calls(driver)]
    assert said[0] == "199" and sorted(said[1:]) == ["195", "196", "197", "198"], said
    library.finish()


def the_pool_is_entered_and_left(folder: str) -> None:
    library, _, cuda = started(folder, 0, 0)
    cuda.said.clear()
    library.use_pool()
    library.stop_using_pool()
    library.stop_using_pool()
    assert cuda.said == [("enter", "pool"), ("leave", "pool"), ("release", "pool")]
    library.finish()
    library, _, cuda = started(folder, 0, 0, backend="cudaMallocAsync")
    library.use_pool()
    library.stop_using_pool()
    assert cuda.said == []
    library.finish()


def a_piece_is_taken_inside_the_pool_and_free_at_once(folder: str) -> None:
    library, _, cuda = started(folder, 0, 0)
    cuda.said.clear()

    def empty(numel: int, device: Any) -> SimpleNamespace:
        """Without elements, which torch may fill: the storage grows behind its back."""
        assert numel == 0
        storage = SimpleNamespace(
            resize_=lambda nbytes: cuda.said.append((nbytes, device.index)), data_ptr=lambda: 2**40
        )
        return SimpleNamespace(untyped_storage=lambda: storage)

    sys.modules["torch"].empty = empty  # type: ignore[attr-defined]
    assert not library.pool_cuts(0)
    assert library.grow_pool(2**30) == 0
    assert [library.pool_cuts(offset) for offset in (-1, 0, 2**30 - 1, 2**30)] == [False, True, True, False]
    assert cuda.said == [("enter", "pool"), (2**30, 0), ("leave", "pool"), ("release", "pool")], cuda.said
    cuda.said.clear()
    assert library.grow_pool(0) == 0 and cuda.said == []
    room = 2**30 - 2**20 - 512
    assert [library.pool_has(nbytes) for nbytes in (0, 2**20, 2**20 + 1, room, room + 1)] == [
        False,
        False,
        True,
        True,
        False,
    ]
    library.finish()
    library, _, cuda = started(folder, 0, 0, backend="cudaMallocAsync")
    cuda.said.clear()
    assert library.grow_pool(512) == 0 and cuda.said == []
    library.finish()


def a_device_without_room_for_a_piece_is_no_error_and_another_one_is(folder: str) -> None:
    library, _, cuda = started(folder, 0, 0)
    cuda.said.clear()
    for error in (RuntimeError, KeyError):

        def refuse(numel: int, device: Any, error: type[Exception] = error) -> None:
            raise error

        sys.modules["torch"].empty = refuse  # type: ignore[attr-defined]
        try:
            assert library.grow_pool(2**30) == 0 and error is RuntimeError and not library.pool_has(2**21)
        except KeyError:
            assert error is KeyError
    tries = [("enter", "pool"), ("leave", "pool"), ("release", "pool")]
    assert cuda.said == [*tries, "empty_cache", *tries, *tries], cuda.said
    library.finish()


def a_piece_is_cut_into_large_blocks_of_512_bytes_and_a_rest(folder: str) -> None:
    library, *_ = started(folder, 0, 0)
    assert [library.nbytes_of_piece(n) for n in (0, 1, 2**20, 2**20 + 1, 2**21)] == [
        0,
        0,
        0,
        2**20 + 512,
        2**21,
    ]
    assert [library.piece_nbytes(n) for n in (0, 2**21)] == [0, 2**21 + 2**20 + 512]
    library.finish()


def an_error_on_a_side_stream_stays_and_the_stream_is_left(folder: str) -> None:
    library, _, cuda = started(folder, 1, 0)
    try:
        library.fail_on(PRE_UNSHARD)
    except TimeoutError:
        assert (cuda.current.cuda_stream, cuda.now) == (0, 0)
        library.finish()
        return
    raise AssertionError("the exception was lost")


def a_torch_that_refuses_is_told(folder: str) -> None:
    library, _, cuda = started(folder, 0, 0)
    cuda.set_stream = lambda stream: 1 / 0  # type: ignore[method-assign]
    library.finish()
    library.start(SimpleNamespace(type="cuda", index=0))
    try:
        library.enter(PRE_UNSHARD)
    except ZeroDivisionError:
        return
    raise AssertionError("an exception of torch was swallowed")


CASES = {
    case.__name__: case
    for case in (
        the_default_stream_is_left_and_come_back_to,
        only_the_all_reduce_does_not_go_before_computation,
        another_current_device_stays_and_is_not_used,
        a_thread_without_context_gets_none_of_another_device,
        a_step_under_another_stream_comes_after_the_one_before,
        a_hook_under_another_stream_is_that_streams,
        a_stream_that_the_script_may_have_destroyed_is_asked_nothing,
        streams_that_were_left_wait_for_the_one_that_used_their_memory,
        the_pool_is_entered_and_left,
        a_piece_is_taken_inside_the_pool_and_free_at_once,
        a_device_without_room_for_a_piece_is_no_error_and_another_one_is,
        a_piece_is_cut_into_large_blocks_of_512_bytes_and_a_rest,
        an_error_on_a_side_stream_stays_and_the_stream_is_left,
        a_torch_that_refuses_is_told,
    )
}

if __name__ == "__main__":
    CASES[sys.argv[2]](sys.argv[1])
