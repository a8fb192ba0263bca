"""The figures, one command each. They need matplotlib.

These draw the pictures of the pages, from results/ alone:

    figures.py mnist --out mnist.png                    learning curves beside rounds to 97 %, eight methods
    figures.py gates --out gates.png                    rounds to 97 % with other gates
    figures.py alpha --out alpha.png                    rounds to 97 % over alpha
    figures.py scatter --out scatter.png                how consistent FedAvg, FedDC and FedSSG are
    figures.py curves form-constant --out constant.png
    figures.py curves cifar10 --out cifar10.png
    figures.py curves cifar10-500 --out cifar10-500.png

These take a study of `reproduce.py --list`, or run folders:

    figures.py curves runs/my-* --out curves.png                    accuracy over rounds
    figures.py targets runs/my-* --target 90 --out targets.png      rounds to an accuracy, a point a seed
    figures.py both runs/my-* --target 90 --out both.png            the last two side by side
    figures.py alpha few-alpha --out alpha-500.png                  another study with several alphas
    figures.py tuned tuned-500 --out tuned-500.png                  rounds against what is sent until then

`tuned` shows each method at the strength that the tuning seeds chose. It needs those studies to be played.

`scatter` is our reading of the paper's Fig. 2, "local/global loss deltas": from round t-1 to t, the change of
one client's loss on its own samples against the change of the loss on all training samples. Both are of the
server's model. The paper calls a method consistent if its points lie near the origin. The first rounds move
every loss most, and all methods alike, so they are left out. If the folder --results has no scatter.csv, it
plays three runs of 100 rounds by the flags of run.py that follow, and keeps their points there.
"""

import argparse
import itertools
import math
import sys
from pathlib import Path
from statistics import correlation, mean

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from records import (  # noqa: E402
    curve_of, measured, pairs, read_csv, row_of, rows_for, run_folders, untuned, variants_of, write_csv)
from studies import STUDIES  # noqa: E402
from tables import vectors  # noqa: E402

# Okabe and Ito's colours, which stay apart for the colour-blind; by the beginning of a label. FedProx lies on
# FedAvg: the same grey, dashed. Of a method's lines the second and later ones are dashed or wider, too.
COLOURS = {"fedssg released": "black", "fedssg": "#D55E00", "feddc": "#0072B2", "scaffold": "#56B4E9",
           "feddyn": "#009E73", "fedvra": "#CC79A7", "feddisco": "#E69F00", "fedprox": "#767676",
           "fedavg": "#767676"}
DASHES = ("-", "--", ":", "-.")
POINTS = ("client", "method", "round", "change_of_global_loss", "change_of_client_loss")


# ---- reading -----------------------------------------------------------------------------------------------

# What is drawn is {label: {seed: run}}. A run is its row of runs.csv, with its curve {round: accuracy}.

def runs_of_study(name, results):
    """What is measured of a study. What is not is named."""
    rows, found, notes = measured(results), {}, []
    for label, flags in variants_of(name, rows).items():
        wanted, its = rows_for(name, label, flags, rows)
        if its:
            found[label] = {seed: row | {"curve": curve_of(row, results)} for seed, row in its.items()}
        if len(its) < len(wanted):
            notes.append(f"{label}: {len(its)} of {len(wanted)} seeds measured" + ", left out" * (not its))
    notes += [f"{method}: left out, not tuned yet" for method in untuned(name, rows)]
    if not found:
        stop(f"{name}: nothing is measured; `reproduce.py {name}` plays it")
    for note in notes:
        warn(note)
    return found


def runs_of_folders(folders):
    """A label is the method, and the flags of run.py that differ among the runs. A flag that is run.py's
    default is left out."""
    groups = {}
    for folder in folders:
        row, curve, _, _ = row_of(folder)
        if not curve:
            warn(f"{folder}: left out, it has no evaluation")
            continue
        seeds = groups.setdefault((row["flags"], row["contents"]), {})
        run = row | {"curve": curve}
        if row["seed"] in seeds:
            warn(f"{folder}: the same run twice; drawn is what went further")
            run = max(run, seeds[row["seed"]], key=lambda x: len(x["curve"]))
        seeds[row["seed"]] = run
    return dict(zip(labels_of(groups), groups.values())) or stop("nothing to draw")


def labels_of(keys):
    """The labels of (flags, contents), no two alike."""
    parts = [pairs(flags) | {"contents": contents} for flags, contents in keys]
    names = {name: None for its in parts for name in its if name not in ("algo", "form")}
    apart = [name for name in names if len({its.get(name) for its in parts}) > 1]
    found = {}
    for its in parts:
        method = its["algo"] + (f" {its.get('form', 'scaled')}" if its["algo"] == "fedssg" else "")
        label = ", ".join([method, *(f"{name} {its[name]}" for name in apart if its.get(name))])
        if label in found:
            stop(f"two rows have the label {label!r}")
        found[label] = None
    return list(found)


def read(what, results, target):
    """Of a study or of run folders: the runs, a title, and the accuracy to reach."""
    if len(what) == 1 and what[0] in STUDIES:
        study = STUDIES[what[0]]
        return runs_of_study(what[0], results), study["title"], target or study["targets"][-1]
    return runs_of_folders(run_folders(what)), "", target or 97.0


def met_and_far(seeds, target):
    """The rounds in which the seeds met the target, and how far those went that did not."""
    curves = [run["curve"] for run in seeds.values()]
    met = [min(t for t, acc in curve.items() if acc >= target)
           for curve in curves if max(curve.values()) >= target]
    return met, [max(curve) for curve in curves if max(curve.values()) < target]


def furthest(seeds):
    """The curves that went furthest, and what to call them."""
    curves = [run["curve"] for run in seeds.values()]
    whole = [curve for curve in curves if max(curve) == max(map(max, curves))]
    part = f"{len(whole)} of " * (len(whole) < len(curves))
    return whole, f"{part}{len(curves)} seeds" if len(curves) > 1 else f"seed {next(iter(seeds))}"


# ---- how it looks ------------------------------------------------------------------------------------------

def canvas(width, height, **options):
    """A figure 880 pixels wide, and its axes as a list."""
    import matplotlib       # here, so that --help works without it
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.25, "axes.spines.top": False,
                         "axes.spines.right": False, "axes.titlesize": 9, "text.parse_math": False})
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained", squeeze=False, **options)
    return figure, list(axes.flat)


def styles(labels):
    """{label: how its line looks}, no two alike."""
    found, count = {}, {"fedprox": 1}
    for label in labels:
        method = next((name for name in COLOURS if label.startswith(name)), None)      # None: a user's own
        n = count.get(method, 0)
        found[label] = dict(color=COLOURS.get(method, "0.4"), linestyle=DASHES[n % len(DASHES)],
                            linewidth=1.3 + n // len(DASHES))
        count[method] = n + 1
    return found


def log_ticks(axis):
    """A logarithmic axis with numbers in place of powers of ten: round ones if two are in view."""
    from matplotlib.ticker import MaxNLocator
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    decades = [10.0 ** k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    for digits in ((1, 1.5, 2, 2.5, 3, 4, 5, 7), (1, 2, 5), (1,)):
        ticks = [x for x in (a * decade for decade in decades for a in digits) if low <= x <= high]
        if len(ticks) <= 10:
            break
    if len(ticks) < 2:
        ticks = [x for x in MaxNLocator(5).tick_values(low, high) if low <= x <= high]
    axis.set_ticks(ticks, [f"{x:.10g}" for x in ticks])
    axis.set_ticks([], minor=True)


# ---- figures -----------------------------------------------------------------------------------------------

def plot_curves(ax, runs):
    """Mean over the seeds that went furthest, and the band from the least to the most."""
    look = styles(sorted(runs))
    for label, seeds in runs.items():
        whole, count = furthest(seeds)
        at = sorted(set.intersection(*map(set, whole)))
        middle, least, most = ([f(curve[t] for curve in whole) for t in at] for f in (mean, min, max))
        ax.plot(at, middle, marker="." * (len(at) == 1), label=f"{label}, {count}", **look[label])
        if len(whole) > 1:
            ax.fill_between(at, least, most, color=look[label]["color"], alpha=0.15, linewidth=0)
    ax.set(xlabel="communication round", ylabel="test accuracy (%)")


def curves(runs, title, target):
    """Accuracy over the rounds. It shows no target."""
    last = {label: mean(curve[max(curve)] for curve in furthest(seeds)[0]) for label, seeds in runs.items()}
    columns = max(1, 110 // (max(map(len, runs)) + 22))         # of the legend: as many as fit
    figure, (ax,) = canvas(8, 3.4 + 0.2 * math.ceil(len(runs) / columns))
    plot_curves(ax, {label: runs[label] for label in sorted(runs, key=last.get, reverse=True)})
    figure.legend(loc="outside lower center", ncols=columns, frameon=False)
    ax.set_title(f"{title}\nline and band: mean and range of the seeds that went furthest".strip())
    return figure


def plot_targets(ax, runs, target):
    """A point a seed, a bar for their mean, > for a seed that went so far and did not get there."""
    counts = {label: met_and_far(seeds, target) for label, seeds in runs.items()}
    if not any(met for met, _ in counts.values()):
        stop(f"nothing to draw: no run reached {target:g} %")
    order = sorted(runs, key=lambda label: mean(counts[label][0] or [math.inf]), reverse=True)
    for y, label in enumerate(order):
        (met, far), colour = counts[label], styles([label])[label]["color"]
        ax.plot(met, [y] * len(met), "o", color=colour, alpha=0.55, markersize=5)
        ax.plot(far, [y] * len(far), ">", color=colour, markersize=6)
        if met:
            ax.vlines(mean(met), y - 0.32, y + 0.32, color=colour, linewidth=2)
            ax.annotate(f"{mean(met):.1f}", (max(met + far), y), (8, 0), va="center",
                        textcoords="offset points")
    names = [f"{label}, {len(runs[label])} seed{'s'[:len(runs[label]) - 1]}" for label in order]
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(-0.6, len(names) - 0.4),
           xlabel=f"rounds to {target:g} % (logarithmic)",
           title="point: a seed; triangle: not by then\nbar, number: mean of those that got there")
    ax.margins(x=0.1)
    log_ticks(ax.xaxis)
    return order


def targets(runs, title, target):
    """Rounds to the target."""
    figure, (ax,) = canvas(8, 1.2 + 0.32 * len(runs))
    plot_targets(ax, runs, target)
    figure.suptitle(title, fontsize=9)
    return figure


def both(runs, title, target):
    """Learning curves, until the last run has reached the target, beside rounds to the target."""
    figure, (left, right) = canvas(8, 2 + 0.28 * len(runs), ncols=2, width_ratios=(1, 1.1))
    order = plot_targets(right, runs, target)
    plot_curves(left, {label: runs[label] for label in reversed(order)})
    T = max(t for seeds in runs.values() for its in met_and_far(seeds, target) for t in its)
    seen = sorted(acc for seeds in runs.values() for curve in furthest(seeds)[0]
                  for t, acc in curve.items() if t <= T)
    low, high = seen[len(seen) // 20], seen[-1]         # the first rounds are far below
    left.set(xlim=(0, 1.05 * T), ylim=(low, high + 0.05 * (high - low) + 0.1),
             title="line and band: mean and range\nof the seeds that went furthest")
    left.axhline(target, color="0.4", linewidth=0.8, linestyle=":")
    left.legend(loc="lower right", fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=9)
    return figure


def alpha(runs, title, target):
    """Rounds to the target by alpha, of the methods that were played with several."""
    found = {}
    for label, seeds in runs.items():
        family, _, rest = label.partition(", alpha ")
        hyper = dict(pair.split("=") for pair in next(iter(seeds.values()))["hyper"].split())
        if "alpha" in hyper and ", " not in rest:
            # the default alpha may have two rows, with and without its value: the same runs
            found.setdefault(family, {}).setdefault(float(hyper["alpha"]), {}).update(seeds)
    found = {family: its for family, its in found.items() if len(its) > 1}
    if not found:
        stop(f"nothing to draw: there are no two alphas of a method")
    figure, (ax,) = canvas(8, 3.6)
    for family, look in styles(found).items():
        counts = {a: met_and_far(seeds, target) for a, seeds in sorted(found[family].items())}
        means = [math.nan if far else mean(met) for met, far in counts.values()]
        ax.plot(list(counts), means, label=family, **look)
        for a, met_far in counts.items():
            for at, mark in zip(met_far, "o^"):
                ax.plot([a] * len(at), at, mark, color=look["color"], alpha=0.5, markersize=4)
    ax.set(xlabel="alpha", ylabel=f"rounds to {target:g} % test accuracy",
           title=f"{title}\npoint: a seed; line: mean where all got there; triangle: not by then")
    log_ticks(ax.xaxis)
    log_ticks(ax.yaxis)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def tuned(runs, title, target):
    """Rounds to the target against model sizes that a client and the server exchange until then, as
    published: a point a method."""
    figure, (ax,) = canvas(8, 3.6)
    for (label, seeds), marker in zip(runs.items(), itertools.cycle("osD^vPX*")):
        met, far = met_and_far(seeds, target)
        if not met:
            warn(f"{label}: left out, no seed reached {target:g} %")
            continue
        sent, _, _ = vectors(next(iter(seeds.values()))["flags"])
        ax.plot(mean(met) * sent, mean(met), marker, alpha=0.8, color=styles([label])[label]["color"],
                fillstyle="none" if far else "full",
                label=f"{label}, {len(met)} of {len(seeds)} seeds" if far else label)
    if not ax.lines:
        stop(f"nothing to draw: no run reached {target:g} %")
    ax.set(xlabel=f"model sizes sent until {target:g} %, by a client that takes part and to it",
           ylabel=f"rounds to {target:g} %",
           title=f"{title}\nmean of the seeds that got there; hollow: not all seeds did")
    log_ticks(ax.xaxis)
    log_ticks(ax.yaxis)
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    return figure


def play_scatter(flags, path, rounds=100, client=0):
    """Play FedAvg, FedDC and FedSSG, and keep how the two losses change."""
    import run
    rows = []
    for algo in ("fedavg", "feddc", "fedssg"):
        args = run.parse([*flags, "--algo", algo])
        device = run.open_device(args)
        settings = run.settings_for(algo, args.seeds[0], args) | {"eval_every": args.rounds}
        fed = run.federate(settings, run.load_data(args, device)[0], device)
        s, own, before = {"omega": fed.omega.clone()}, fed.shares[client], None
        label = f"{algo} {settings.get('form', '')}".strip()
        for t in range(1, min(rounds, args.rounds) + 1):
            run.play_round(settings, fed, s, t, args)
            losses = [float(run.evaluate(fed.model, s["omega"], X, Y)[1])
                      for X, Y in ((fed.X, fed.Y), (fed.X[own], fed.Y[own]))]
            if not all(map(math.isfinite, losses)):
                stop(f"{algo}: diverged at round {t}; lower --lr")
            if before:
                rows.append((client, label, t, *(after - old for old, after in zip(before, losses))))
            before = losses
    write_csv(path, POINTS, rows)


def scatter(flags, results, first_round=10):
    """See the head of this file."""
    path, points = results / "scatter.csv", {}
    if not path.exists():
        play_scatter(flags, path)
    elif flags:
        stop(f"{path}: is there and would be drawn; for other runs name another folder by --results")
    for row in read_csv(path, POINTS):
        if int(row["round"]) >= first_round:
            points.setdefault(row["method"], []).append([float(row[name]) for name in POINTS[2:]])
    if min(map(len, points.values()), default=0) < 2:
        stop(f"{path}: too few rounds from {first_round} on")
    figure, axes = canvas(8, 3.2, ncols=len(points), sharex=True, sharey=True)
    for ax, (label, its) in zip(axes, points.items()):
        t, x, y = zip(*its)
        dots = ax.scatter(x, y, c=t, cmap="viridis_r", s=12)
        away = mean(a * a + b * b for a, b in zip(x, y)) ** 0.5
        ax.set(xlabel="change of the global loss", title=f"{label}\ncorrelation {correlation(x, y):.2f}\n"
                                                         f"rms distance from 0: {away:.4f}")
        ax.axhline(0, color="grey", linewidth=0.6)
        ax.axvline(0, color="grey", linewidth=0.6)
    axes[0].set_ylabel(f"change of client {row['client']}'s loss")
    figure.colorbar(dots, ax=axes, label="round", pad=0.01)
    return figure


# ---- start -------------------------------------------------------------------------------------------------

# What draws a figure of runs, and the study that it shows if none is named.
DRAW = dict(mnist=(both, "fastest"), gates=(targets, "gate"), alpha=(alpha, "alpha"),
            tuned=(tuned, "tuned-100"), curves=(curves, None), targets=(targets, None), both=(both, None))


def warn(message):
    print(f"figures.py: {message}", file=sys.stderr)


def stop(message):
    warn(message)
    sys.exit(2)


def main(argv=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.error, add = stop, parser.add_argument
    add("figure", choices=[*DRAW, "scatter"])
    add("--out", type=Path, required=True, help="the picture, .png or .svg")
    add("--results", type=Path, default=HERE / "results", help="folder of runs.csv and curves/")
    add("--target", type=float, help="accuracy, percent (the study's last, or 97)")
    args, what = parser.parse_known_args(argv)
    draw, study = DRAW.get(args.figure, (None, None))
    what = what or [study] * bool(study)
    if args.figure in ("mnist", "gates") and what != [study]:
        stop(f"{args.figure}: takes no more words")
    if args.out.suffix not in (".png", ".svg") or not args.out.parent.is_dir():
        stop(f"--out {args.out}: name a .png or .svg in a folder that there is")
    if draw and (not what or what[0].startswith("-")):
        stop(f"{args.figure}: name run folders, or a study of `reproduce.py --list`")
    try:
        figure = draw(*read(what, args.results, args.target)) if draw else scatter(what, args.results)
        figure.savefig(args.out, dpi=110)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        stop(str(error))
    except KeyboardInterrupt:
        stop("interrupted")


if __name__ == "__main__":
    main()
