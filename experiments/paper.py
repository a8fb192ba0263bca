"""The paper's numbers beside measured ones:  python experiments/paper.py runs/*

Prints a markdown table of run folders: accuracy over the last 50 evaluations and rounds to the target accuracy, each
beside what the paper's tables (experiments/paper/*.csv) say for that setting. Several seeds of one setting are averaged.
"""

import argparse
import csv
import json
from pathlib import Path
from statistics import mean, pstdev

PAPER = Path(__file__).resolve().parent / "paper"
NAMES = {"mnist": "MNIST", "emnist": "EMNIST-L", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}


def paper_key(settings):
    """(dataset, clients, participation, split, algorithm) as the paper's tables name them."""
    split = "IID" if settings["partition"] == "iid" else "-"
    if settings["partition"] == "dirichlet":
        split = {0.3: "DiD1", 0.6: "DiD2"}.get(settings["dir_alpha"], "-")
    return (NAMES.get(settings["dataset"], "-"), str(settings["num_clients"]), f"{100 * settings['participation']:g}", split, settings["algo"])


def table(name, columns):
    """{paper_key: the named columns} of one of the paper's tables."""
    with open(PAPER / f"{name}.csv", newline="") as file:
        return {(row["dataset"], row["clients"], row["participation_pct"], row["split"], row["algo"]): [row[c] for c in columns]
                for row in csv.DictReader(file)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders")
    args = parser.parse_args()
    accuracy, rounds = table("accuracy", ["mean", "std"]), table("rounds", ["rounds", "target_acc_pct"])
    runs = {}
    for folder in args.folders:
        if not (folder / "summary.json").exists():
            continue
        settings = json.loads((folder / "config.json").read_text())["settings"]
        same = json.dumps({name: value for name, value in settings.items() if name not in ("seed", "split")}, sort_keys=True)
        runs.setdefault(same, []).append((settings, json.loads((folder / "summary.json").read_text())))

    print("| setting | method | hyper-parameters | seeds | last 50 (%) | paper | rounds to target | paper |\n|---|---|---|---|---|---|---|---|")
    for group in runs.values():
        settings, key = group[0][0], paper_key(group[0][0])
        summaries = [summary for _, summary in group]
        target, met = summaries[0]["target_acc"], [s["rounds_to_target"] for s in summaries]
        whole = [s for s in summaries if s["round"] == settings["rounds"] and s["evaluations"] >= 50]
        spread = pstdev(s["last50_mean"] for s in whole) if len(whole) > 1 else sum(s["last50_std"] for s in whole)
        last = f"{mean(s['last50_mean'] for s in whole):.2f} ± {spread:.2f}" if whole else "-"
        if whole and len(whole) < len(summaries):       # the others were stopped at the target
            last += f", {len(whole)} of {len(summaries)}"
        reached = [count for count in met if count is not None]
        to_target = f"{mean(reached):.1f} ({min(reached)}-{max(reached)})" if len(reached) > 1 else f"{reached[0]}" if reached else "-"
        if len(reached) < len(met):
            best = max(s["best"] or 0 for s in summaries)
            to_target = f"not in {max(s['round'] for s in summaries)} (best {best:.2f} %)" if not reached else f"{to_target}, {len(reached)} of {len(met)}"
        paper_rounds = rounds.get(key, ["-", None])
        form = f" {settings['form']}" if settings.get("form", "released") != "released" else ""
        hyper = ", ".join(f"{name} {value}" for name, value in settings["hyper"].items())
        print(f"| {' '.join(key[:4])} | {settings['algo']}{form} | {hyper} | {len(group)} | {last} | {' ± '.join(accuracy.get(key, ['-']))} | {to_target} | "
              f"{paper_rounds[0] if paper_rounds[1] in (f'{target:g}',) else '-'} |")


if __name__ == "__main__":
    main()
