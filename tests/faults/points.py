"""Points of a step at which foreign code runs, in order. Any point can be made to raise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from tests.collectives import ALL_GATHER, REDUCE_SCATTER


class Trouble(Exception):
    """An exception in user code."""


class Points:
    """Counts the points that a step passes, and raises ``error`` at the armed one."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.armed = -1
        self.error: Callable[[str], BaseException] = Trouble

    def reach(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) - 1 == self.armed:
            raise self.error(f"at point {self.armed}, {name}")

    @contextmanager
    def raising_at(self, number: int, error: Callable[[str], BaseException] = Trouble) -> Iterator[None]:
        self.names, self.armed, self.error = [], number, error
        try:
            yield
        finally:
            self.armed = -1

    # ------------------------------------------------------------- where the user's code runs

    def watch_module(self, name: str, module: nn.Module) -> None:
        """Register all kinds of hooks on a module, and a hook on its output."""
        module.register_forward_pre_hook(lambda *_: self.reach(f"forward pre-hook of {name}"))
        module.register_forward_hook(lambda _, inputs, output: self.watch_output(name, output))
        module.register_full_backward_pre_hook(lambda *_: self.reach(f"backward pre-hook of {name}"))
        module.register_full_backward_hook(lambda *_: self.reach(f"backward hook of {name}"))

    def watch_output(self, name: str, output: Any) -> None:
        self.reach(f"forward hook of {name}")
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: self.reach(f"tensor hook on the output of {name}"))

    def comm_hook(self, state: Any, *gradients: Tensor) -> None:
        self.reach("before the comm hook's collective")
        if len(gradients) == 1:
            dist.all_reduce(gradients[0])
        else:
            getattr(dist, REDUCE_SCATTER)(gradients[1], gradients[0])
        self.reach("after the comm hook's collective")


class WatchedWork:
    """A collective's work handle. Its wait is a point too."""

    def __init__(self, points: Points, name: str, work: Any) -> None:
        self.points, self.name, self.work = points, name, work

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.points.reach(f"wait for {self.name}")


def watched_collective(points: Points, name: str) -> Callable[..., Any]:
    original = getattr(dist, name)

    def collective(*arguments: Any, **options: Any) -> Any:
        points.reach(f"before {name}")
        work = original(*arguments, **(options | {"async_op": True}))
        try:
            points.reach(f"after {name}")
        except BaseException:
            work.wait()  # keep the ranks' collectives paired
            raise
        watched = WatchedWork(points, name, work)
        return watched if options.get("async_op") else watched.wait()

    return collective


@contextmanager
def watched_collectives(points: Points) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in (ALL_GATHER, REDUCE_SCATTER, "all_reduce"):
            patch.setattr(dist, name, watched_collective(points, name))
        yield


@contextmanager
def every_call(points: Points) -> Iterator[None]:
    """Make each call and return of Python code, and each call from Python to C, a point: a signal handler can
    raise there.
    """

    def on_event(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_filename != __file__:
            points.reach(
                f"{event} in {frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code}"
            )

    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(None)
