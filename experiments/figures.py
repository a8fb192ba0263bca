"""Draw test accuracy against rounds from run folders:  python experiments/figures.py runs/mnist-* --out curve.png"""

import argparse
import csv
import json
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders with config.json and log.csv")
    parser.add_argument("--out", default="curve.png", help="the picture")
    parser.add_argument("--from-acc", type=float, default=90.0, help="lower end of the accuracy axis, percent")
    args = parser.parse_args()
    import matplotlib           # here, so that --help works without it
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for folder in args.folders:
        settings = json.loads((folder / "config.json").read_text())["settings"]
        with open(folder / "log.csv", newline="") as file:
            points = [(int(row["round"]), float(row["test_acc"])) for row in csv.DictReader(file) if row["test_acc"]]
        if not points:
            continue
        bold = settings["algo"] == "fedssg"
        form = f" {settings['form']}" if settings.get("form", "released") != "released" else ""
        axes.plot(*zip(*points), color="black" if bold else None, label=f"{settings['algo']}{form}, seed {settings['seed']}", linewidth=1.8 if bold else 1, zorder=3 if bold else 2)
    axes.set(xlabel="round", ylabel="test accuracy (%)", ylim=(args.from_acc, None))
    axes.set_title(f"{settings['dataset']}, {settings['num_clients']} clients, {settings['participation']:.0%} a round, "
                   f"{settings['partition']} {settings['dir_alpha']}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(ncols=2, fontsize=9)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
