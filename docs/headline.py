"""Draws docs/headline.png from the newest tables of benchmarks/results: python docs/headline.py"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (needs the backend above)
from matplotlib.axes import Axes  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
COLORS = {"FSDP1": "#9aa5b1", "FSDP2": "#5c7080", "fsdp_c": "#d9480f"}


def newest(name: str) -> str:
    return max((ROOT / "benchmarks" / "results").glob(f"{name}_[0-9]*.md")).read_text()


def row(text: str, first: str) -> list[float]:
    """The first number of each cell, in the first row that begins with ``first``."""
    (cells,) = re.findall(rf"^\| {re.escape(first)} \|(.*)\|$", text, re.MULTILINE)[:1]
    return [float(number[0]) for cell in cells.split("|") if (number := re.findall(r"-?\d[\d.]*", cell))]


def host_work() -> dict[str, list[float]]:
    """Thousand instructions per unit and step, with original parameters."""
    fsdp1, _, fsdp2, ours, _ = row(newest("host_overhead"), "12, 8")
    return {"FSDP1": [fsdp1], "FSDP2": [fsdp2], "fsdp_c": [ours]}


def state_dicts(rows: list[str]) -> dict[str, list[float]]:
    """CPU milliseconds of rank 0, from the table of 200 units."""
    text = newest("state_dict")
    return {name: [row(text, one)[column] for one in rows] for column, name in enumerate(COLORS)}


def steps(models: list[str]) -> dict[str, list[float]]:
    """Milliseconds of a step on one H100: ``models``, then 1.3B with CPU offload."""
    text = newest("h100")
    offload = text[text.index("## CPU offload") :]
    rows = {"FSDP1": "torch.fsdp1", "FSDP2": "torch.fsdp2", "fsdp_c": "fsdp_c"}
    return {
        name: [row(text, f"{model} | {of}")[0] for model in models] + [row(offload, of)[0]]
        for name, of in rows.items()
    }


def bars(axes: Axes, title: str, groups: list[str], values: dict[str, list[float]], shown: str) -> None:
    for place, (name, heights) in enumerate(values.items()):
        at = [group + 0.27 * (place - 1) for group in range(len(groups))]
        drawn = axes.bar(at, heights, 0.25, color=COLORS[name], label=name)
        axes.bar_label(drawn, [format(height, shown) for height in heights], fontsize=9, padding=1)
    axes.set_title(title, fontsize=11, pad=10)
    axes.set_xticks(range(len(groups)), [group.replace(" ", "\n", 1) for group in groups], fontsize=10)
    axes.set_yticks([])
    axes.spines[["top", "left", "right"]].set_visible(False)


def main() -> None:
    widths = [1.35, 2.4, 2]
    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(9.5, 3.4), width_ratios=widths, layout="constrained"
    )
    bars(left, "Host work per unit\n(1,000 instructions a step)", ["12 parameters"], host_work(), ".0f")
    forms = ["FULL get", "FULL load", "SHARDED get", "SHARDED load"]
    bars(middle, "State dicts, 200 units\n(CPU milliseconds)", forms, state_dicts(forms), ".0f")
    models = ["1.3B", "6.7B"]
    groups = [*models, "1.3B CPU offload"]
    bars(right, "A step on one H100, 2026-11-26\n(milliseconds)", groups, steps(models), ".0f")
    middle.legend(frameon=False, fontsize=10, loc="upper center")
    figure.savefig(ROOT / "docs" / "headline.png", dpi=150)


if __name__ == "__main__":
    main()
