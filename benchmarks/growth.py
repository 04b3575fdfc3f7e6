"""How the cost of each operation grows with parameters per unit, units, depth, buffers, ties, optional units
and ranks.

python -m benchmarks.growth
python -m benchmarks.growth --only units depth --against torch.fsdp1 --markdown table.md --plot plot.png
python -m benchmarks.growth --long  # also memory growth: 20,000 steps, 300 saves, loads and summons
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import common

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
import torch.distributed.checkpoint as dcp  # isort: skip
from torch import Tensor, nn  # isort: skip
from torch.distributed.checkpoint import state_dict as dcp_state  # isort: skip
from torch.distributed.fsdp import StateDictType, fully_shard  # isort: skip
from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # isort: skip
from torch.nn.utils import clip_grad_norm_  # isort: skip
from torch.testing._internal.distributed.fake_pg import FakeStore  # isort: skip

from benchmarks.state_dict import FSDP2_OPTIONS, status

COUNTED = """\
CPU milliseconds of one process at the largest size: the least of {repeats} calls, or a single call for operations that
happen once, which includes first-time costs of the process. The garbage collector has its default settings. The process
is rank 0 of 2 of torch's fake process group (`save` and `load`: of one rank). The exponent behind a time is the slope
of its logarithm over that of the size: 1 if twice the size takes twice the time. It is omitted below {floor} ms.
`destroy` includes a full garbage collection. `bytes each` is resident memory after a step, by size. FSDP2's state dicts
are those of torch.distributed.checkpoint.state_dict; its sharded ones cost nothing. Empty cells do not apply.
"""
FLOOR_MS = 2.0
WIDTH = 2


# ----------------------------------------------------------------- models


class Leaf(nn.Module):
    """Parameters of the given sizes, and buffers."""

    def __init__(self, *numels: int, buffers: int = 0) -> None:
        super().__init__()
        for index, numel in enumerate(numels):
            self.register_parameter(f"weight{index}", nn.Parameter(torch.empty(numel)))
        for index in range(buffers):
            self.register_buffer(f"buffer{index}", torch.empty(WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for tensor in (*self.parameters(recurse=False), *self.buffers(recurse=False)):
            nn.init.zeros_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self._parameters.values():
            x = x + weight[:WIDTH]
        return x


class Unit(nn.Module):
    """A unit: Leaves with ``params`` parameters in all, ``ties`` leaves that share them, ``buffers``, and
    ``inner`` modules.

    The shard of rank 0 ends inside the unit's last parameter, so that it contains part of each one.
    """

    def __init__(
        self, params: int, *, ties: int = 0, buffers: int = 0, inner: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.leaves = nn.ModuleList(Leaf(2 * WIDTH, WIDTH) for _ in range(params // 2))
        for leaf in self.leaves[:ties]:
            self.leaves.append(Leaf())
            self.leaves[-1]._parameters.update(leaf._parameters)
        self.leaves.extend(Leaf(buffers=1) for _ in range(buffers))
        self.inner = nn.Identity() if inner is None else inner
        self.tail = Leaf(4 * dist.get_world_size() * (params + 2))

    def forward(self, x: Tensor) -> Tensor:
        for leaf in self.leaves:
            x = leaf(x)
        return self.tail(self.inner(x))


def stack(units: int) -> nn.Module:
    return nn.Sequential(*[Unit(4) for _ in range(units)])


def nested(depth: int) -> nn.Module:
    return Unit(2, inner=nested(depth - 1) if depth > 1 else None)


def optional_stack(units: int) -> nn.Module:
    from fsdp_c import optional

    return Unit(4, inner=nn.Sequential(*[optional(Unit(4)) for _ in range(units)]))


class Dimension(NamedTuple):
    """A dimension of growth: the sizes, and the function that builds the model of one size."""

    build: Callable[[int], nn.Module]
    sizes: tuple[int, ...]


DIMENSIONS = {
    "parameters per unit": Dimension(Unit, (150, 450, 1350)),
    "units": Dimension(stack, (15, 45, 135)),
    "depth": Dimension(nested, (6, 12, 24)),
    "buffers": Dimension(lambda size: Unit(8, buffers=size), (150, 450, 1350)),
    "ties": Dimension(lambda size: Unit(2 * size, ties=size), (75, 225, 675)),
    "optional units": Dimension(optional_stack, (15, 45, 135)),
    "ranks": Dimension(lambda size: stack(4), (8, 64, 512)),
}


def wrap(implementation: str, model: nn.Module, **kwargs: Any) -> Any:
    """Shard ``model``, one unit per Unit."""
    if implementation != "torch.fsdp2":
        policy, cpu = ModuleWrapPolicy({Unit}), torch.device("cpu")
        return common.fsdp_class(implementation)(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu, **kwargs
        )
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in reversed(list(model.modules())):
        if isinstance(module, Unit) and module is not model:
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@contextlib.contextmanager
def group_of(world_size: int) -> Iterator[None]:
    """Use torch's fake process group as the default group in the body."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# ----------------------------------------------------------------- operations

Measure = Callable[[str, Callable[[], Any]], Any]  # (name, call) -> result of the call


def run(implementation: str, build: Callable[[], nn.Module], once: Measure, several: Measure) -> None:
    """Run all operations that ``implementation`` supports, one after the other on one model."""
    held: dict[str, Any] = {"plain": build()}
    held["model"] = once("construct", lambda: wrap(implementation, held.pop("plain")))
    if implementation == "fsdp_c":  # FSDP1 needs a GPU here
        with torch.device("meta"):
            held["meta"] = build()
        once("construct from meta", lambda: wrap(implementation, held.pop("meta"), sync_module_states=True))
    trained(implementation, held["model"], once, several)
    once("destroy", lambda: (held.clear(), gc.collect()))


def trained(implementation: str, model: Any, once: Measure, several: Measure) -> None:
    x = torch.ones(1, WIDTH)
    once("first forward", lambda: model(x).sum()).backward()
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    optimizer.step()
    several("step", lambda: model(x).sum().backward())
    several(
        "clip",
        lambda: getattr(model, "clip_grad_norm_", partial(clip_grad_norm_, list(model.parameters())))(1.0),
    )
    several("zero_grad", model.zero_grad)
    several(".to()", lambda: model.to(torch.float32))
    for kind in ("FULL", "SHARDED", "LOCAL")[
        : {"fsdp_c": 3, "torch.fsdp1": 2, "torch.fsdp2": 1}[implementation]
    ]:
        state_dicts(implementation, kind, model, optimizer, several)
    if implementation != "torch.fsdp2":
        several("summon", lambda: summon(implementation, model))
    several("repr", lambda: repr(model))
    if implementation == "fsdp_c":
        import fsdp_c

        several("summary", lambda: str(fsdp_c.summary(model)))


def summon(implementation: str, model: nn.Module) -> None:
    with common.fsdp_class(implementation).summon_full_params(model):  # type: ignore[attr-defined]
        pass


def state_dicts(
    implementation: str, kind: str, model: Any, optimizer: torch.optim.Optimizer, several: Measure
) -> None:
    if implementation == "torch.fsdp2":
        options = FSDP2_OPTIONS[kind]
        several(f"{kind} get", lambda: dcp_state.get_model_state_dict(model, options=options))
        get = dcp_state.get_optimizer_state_dict
        several(f"{kind} optimizer get", lambda: get(model, optimizer, options=options))
        return
    fsdp: Any = common.fsdp_class(implementation)
    with fsdp.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
        state = several(f"{kind} get", model.state_dict)
        several(f"{kind} load", lambda: model.load_state_dict(state))
        if kind != "LOCAL":
            optim = several(f"{kind} optimizer get", lambda: fsdp.optim_state_dict(model, optimizer))
            several(
                f"{kind} optimizer to_load", lambda: fsdp.optim_state_dict_to_load(model, optimizer, optim)
            )


def checkpoints(implementation: str, build: Callable[[], nn.Module], several: Measure) -> None:
    """Save and load on one rank: all ranks participate in both."""
    model = wrap(implementation, build())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    optimizer.step()

    def state() -> Any:
        return dict(zip(("model", "optimizer"), dcp_state.get_state_dict(model, optimizer), strict=True))

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/saved"
        if implementation == "fsdp_c":
            from fsdp_c import checkpoint

            several("save", lambda: checkpoint.save(model, optimizer, path))
            several("load", lambda: checkpoint.load(model, optimizer, path))
        else:
            several("save", lambda: dcp.save(state(), checkpoint_id=path))
            several("load", lambda: dcp.load(state(), checkpoint_id=path))


class Timer:
    """Least CPU times in milliseconds. Operations that raise are omitted."""

    def __init__(self, repeats: int) -> None:
        self.repeats, self.found = repeats, dict[str, float]()

    def once(self, name: str, call: Callable[[], Any]) -> Any:
        return self.several(name, call, 1)

    def several(self, name: str, call: Callable[[], Any], repeats: int | None = None) -> Any:
        times, result = [], None
        try:
            for _ in range(repeats or self.repeats):
                result = None
                started = time.process_time()
                result = call()
                times.append(time.process_time() - started)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
            return None
        self.found[name] = min(times) * 1e3
        return result


def measure(implementation: str, name: str, repeats: int) -> list[dict[str, float]]:
    """Return the times of the operations for each size, and the memory of the model for the last."""
    build, sizes = DIMENSIONS[name]
    rows = []
    with group_of(2):
        for size in (
            sizes[0],
            sizes[0],
            sizes[-1],
        ):  # the first two include one-time costs
            before = status("VmRSS")
            model = wrap(implementation, build(size))
            model(torch.ones(1, WIDTH)).sum().backward()
            nbytes = status("VmRSS") - before
            del model
            gc.collect()
    for size in sizes:
        timer = Timer(repeats)
        with group_of(size if name == "ranks" else 2):
            run(implementation, partial(build, size), timer.once, timer.several)
        if name != "ranks":
            with group_of(1):
                checkpoints(implementation, partial(build, size), timer.several)
            timer.found["bytes each"] = nbytes / size
        gc.collect()
        rows.append(timer.found)
    return rows


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Return the slope of a least-squares line through the logarithms."""
    xs, ys = list(map(math.log, sizes)), [math.log(max(cost, 1e-9)) for cost in costs]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return rise / sum((x - mean_x) ** 2 for x in xs)


def slopes(steps: int, calls: int) -> dict[str, float]:
    """Return the growth of fsdp_c's resident memory in bytes per call, over the second half of many calls."""
    from fsdp_c import checkpoint

    found = {}
    with group_of(1), tempfile.TemporaryDirectory() as folder:
        model = wrap("fsdp_c", stack(4))
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)

        def step() -> None:
            model(torch.ones(1, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for name, call, count in (
            ("step", step, steps),
            ("save", lambda: checkpoint.save(model, optimizer, f"{folder}/saved"), calls),
            ("load", lambda: checkpoint.load(model, optimizer, f"{folder}/saved"), calls),
            ("summon", lambda: summon("fsdp_c", model), calls),
        ):
            for _ in range(2):
                gc.collect()
                before = status("VmRSS")
                for _ in range(count // 2):
                    call()
                gc.collect()
                found[name] = (status("VmRSS") - before) / (count // 2)
    return found


# ----------------------------------------------------------------- tables


def table(name: str, found: dict[str, list[dict[str, float]]]) -> str:
    sizes = DIMENSIONS[name].sizes
    lines = [f"### {name}: {', '.join(map(str, sizes))}", "", "| | " + " | ".join(found) + " |"]
    lines.append("|---" * (1 + len(found)) + "|")
    for operation in dict.fromkeys(key for rows in found.values() for row in rows for key in row):
        cells = []
        for rows in found.values():
            costs = [row[operation] for row in rows if operation in row]
            has_exponent = operation != "bytes each" and len(costs) == len(sizes) and costs[-1] >= FLOOR_MS
            exponents = [f", {exponent(sizes, costs):.2f}"] if has_exponent else []
            shown = [f"{cost:.3g}" if cost < 1000 else f"{cost:.0f}" for cost in costs[-1:]]
            cells.append("".join([*shown, *exponents]))
        lines.append(f"| {operation} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(found: dict[str, dict[str, list[dict[str, float]]]], path: Path) -> None:
    """Plot the time of every operation over the size, one panel per dimension."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(found), figsize=(3 * len(found), 4), sharey=True, squeeze=False)
    for panel, (name, by_implementation) in zip(panels[0], found.items(), strict=True):
        sizes = DIMENSIONS[name].sizes
        for implementation, rows in by_implementation.items():
            color = dict(zip(common.IMPLEMENTATIONS, ("C1", "C2", "C0"), strict=True))[implementation]
            for operation in rows[0].keys() - {"bytes each", "destroy"}:
                costs = [row.get(operation, math.nan) for row in rows]
                panel.loglog(sizes, costs, color=color, alpha=0.6, linewidth=1)
            panel.plot([], [], color=color, label=implementation)
        panel.loglog(sizes, [size / sizes[0] for size in sizes], "k--", linewidth=1, label="exponent 1")
        panel.set_title(name, fontsize=9)
        panel.minorticks_off()
        panel.set_xticks(sizes, list(map(str, sizes)))
    panels[0][0].legend(fontsize=7)
    panels[0][0].set_ylabel("CPU ms, a line for each operation")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(DIMENSIONS), default=list(DIMENSIONS))
    parser.add_argument(
        "--against", nargs="*", choices=common.IMPLEMENTATIONS[:2], default=common.IMPLEMENTATIONS[:2]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--long",
        action="store_true",
        help="also measure memory growth: 20,000 steps, 300 saves, loads and summons",
    )
    parser.add_argument("--markdown", type=Path, help="also write the tables here")
    parser.add_argument("--plot", type=Path)
    # arguments of a child process: implementation, dimension
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        warnings.simplefilter("ignore")
        sys.setrecursionlimit(10_000)
        print(json.dumps(measure(*args.work, args.repeats)))
        return
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    text = f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n\n"
    text += COUNTED.format(repeats=args.repeats, floor=FLOOR_MS)
    for name in args.only:
        found[name] = {}
        for implementation in (*args.against, "fsdp_c") if name != "optional units" else ("fsdp_c",):
            command = [sys.executable, "-m", "benchmarks.growth", f"--repeats={args.repeats}"]
            command += ["--work", implementation, name]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[name][implementation] = json.loads(output.splitlines()[-1])
        print(table(name, found[name]), flush=True)
        text += f"\n{table(name, found[name])}\n"
    if args.long:
        grown = ", ".join(f"{slope:.0f} in a {name}" for name, slope in slopes(20_000, 300).items())
        text += f"\nBytes by which fsdp_c's resident memory grows: {grown}.\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text)
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
