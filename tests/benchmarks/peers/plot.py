"""Draws what `bench_peers` wrote: how many times as long each peer took, by workload, with the rounds' spread.

python plot.py build/bench_peers_L15.json docs/benchmarks/peers-L15.svg    # in an environment that has matplotlib
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter

COLORS = ["#2e8b62", "#4a6fa5", "#c98a2b", "#8a5a9e", "#7a7a7a", "#b5524a"]


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    report = json.loads(source.read_text("utf-8"))
    results = report["results"]
    workloads = list(dict.fromkeys(one["workload"] for one in results))
    peers = list(dict.fromkeys(one["b"] for one in results))
    height = 0.8 / len(peers)
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + len(workloads) * (0.25 + 0.16 * len(peers))), layout="constrained")
    for number, (peer, color) in enumerate(zip(peers, COLORS, strict=False)):
        own = [one for one in results if one["b"] == peer]
        places = [workloads.index(one["workload"]) + (number - (len(peers) - 1) / 2) * height for one in own]
        ratios = [one["ratio"] for one in own]
        spread = [[one["ratio"] - one["low"] for one in own], [one["high"] - one["ratio"] for one in own]]
        bars = axes.barh(places, [ratio - 1 for ratio in ratios], height, 1.0, xerr=spread, label=peer, color=color)
        axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=6, fontsize=7)
    shapes = {one["workload"]: one["shape"] for one in results}
    axes.set_yticks(range(len(workloads)), [f"{name}\n{shapes[name]}" for name in workloads], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.set_xlim(right=1.5 * max(one["high"] for one in results))  # room for the longest bar's figure
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.axvline(1.0, color="black", linewidth=0.8)
    machine = report["machine"]
    axes.set_xlabel("their seconds over niwaki's, median of the rounds: right of 1 niwaki is faster")
    axes.set_title(f"{machine['model']}, bfloat16, {machine['threads']} threads", fontsize=10)
    axes.legend(fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams["svg.hashsalt"] = "niwaki"  # the same figures make the same file
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
