"""The figures, one command each. They need matplotlib.

    figures.py mnist --out mnist.png                learning curves beside rounds to 97 %, eight methods
    figures.py gates --out gates.png                rounds to 97 % with other gates
    figures.py alpha --out alpha.png                rounds to 97 % over alpha
    figures.py tuned --out tuned.png                tuned methods: rounds against traffic, both until 97 %
    figures.py scatter --out scatter.png            how consistent FedAvg, FedDC and FedSSG are
    figures.py curves runs/my-* --out curves.png    accuracy over rounds
    figures.py targets runs/my-* --target 90 --out targets.png      rounds to an accuracy, a point a seed
    figures.py both runs/my-* --target 90 --out both.png            the last two side by side
    figures.py gate --dataset mnist --out gate.png                  the gate, client by client

The first five are drawn from results/ alone. `curves`, `targets` and `both` take run folders, or a setting of
results/ (the name of a file in results/curves) with the rows that --only names. `gate` takes flags of run.py.

`scatter` is our reading of the paper's Fig. 2, "local/global loss deltas": from round t-1 to t, the change of
one client's loss on its own samples against the change of the loss on all training samples. Both are of the
server's model. The paper calls a method consistent if its points lie near the origin. The first rounds move
every loss most, and all methods alike, so they are left out. If the folder --results has no scatter.csv, it
plays three runs of 100 rounds by the flags of run.py that follow, and keeps their points there.
"""

import argparse
import csv
import json
import math
import re
import sys
from pathlib import Path
from statistics import correlation, mean
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

# Okabe and Ito's colours, which stay apart for the colour-blind; by the beginning of a label. FedProx lies on
# FedAvg: the same grey, dashed. Of a method's lines the second and later ones are dashed or wider, too.
COLOURS = {"fedssg released": "black", "fedssg": "#D55E00", "feddc": "#0072B2", "scaffold": "#56B4E9",
           "feddyn": "#009E73", "fedvra": "#CC79A7", "feddisco": "#E69F00", "fedprox": "#767676",
           "fedavg": "#767676"}
DASHES, MARKERS = ("-", "--", ":", "-."), "osD^vPX*"

# What the pages show of results/: {label: row}. A row is a method, and its settings that are not the default.
MNIST, MANY = "mnist-100-15-dirichlet0.3-T300", "mnist-500-2-dirichlet0.3-T600"
EIGHT = ("fedssg stable", "fedssg released", "feddc", "scaffold", "feddyn", "fedvra", "feddisco", "fedprox",
         "fedavg")
PHI = {"": "", ", phi = 1": " gate_ratio=off beta=0.0", ", phi = 2": " gate_ratio=off",
       ", running clip": " gate_ratio=running gate_shape=clip beta=0.0"}
ROWS = dict(mnist={row: row for row in EIGHT}, gates={"feddc": "feddc"})
for phi, how in PHI.items():
    ROWS["gates"] |= {f"fedssg {form}{phi}": f"fedssg {form}{how}" for form in ("stable", "released")}
    ROWS["gates"][f"fedssg without correction{phi}"] = f"fedssg stable{how} correction=none"

# The strengths that are tuned, and their values. Smaller seeds than the first tuning seed are for the test.
GRIDS = dict(kappa=(0.05, 0.1, 0.18, 0.25, 0.35), alpha=(0.01, 0.03, 0.1, 0.3, 0.7),
             gamma=(0.01, 0.03, 0.1, 0.3, 0.7), mu=(0.0001, 0.001, 0.01, 0.1, 1), eta_g=(0.5, 0.7, 1, 1.5, 2))
TUNING_SEED = 100
POINTS = ("client", "method", "round", "change_of_global_loss", "change_of_client_loss")


# ---- reading -----------------------------------------------------------------------------------------------

def read_csv(path, *columns):
    """The rows of a CSV file in UTF-8 that has these columns."""
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        names, rows = list(reader.fieldnames or []), list(reader)
    if lacking := [name for name in columns if name not in names]:
        stop(f"{path}: has no column {lacking[0]}")
    if twice := [name for name in names if names.count(name) > 1]:
        stop(f"{path}: has two columns {twice[0]!r}")
    if any(None in row or None in row.values() for row in rows):
        stop(f"{path}: a row is too short or too long")
    return rows


def lines_of_setting(path):
    """{label: {seed: {round: accuracy}}} of a file in results/curves."""
    lines = {}
    for row in read_csv(path, "round"):
        for name, acc in row.items():
            label, _, seed = name.rpartition(" seed ")
            if label and acc:
                lines.setdefault(label, {}).setdefault(seed, {})[int(row["round"])] = float(acc)
    return lines


def read_run(folder):
    """A run folder as: method, settings, hyper-parameters, seed, {round: accuracy}."""
    try:
        settings = json.loads((folder / "config.json").read_text("utf-8"))["settings"]
        algo, hyper, seed = (settings.pop(name) for name in ("algo", "hyper", "seed"))
        log = read_csv(folder / "log.csv", "round", "test_acc")
        curve = {int(row["round"]): float(row["test_acc"]) for row in log if row["test_acc"]}
    except (OSError, KeyError, ValueError, TypeError) as error:
        stop(f"{folder}: not a run folder ({type(error).__name__}: {error})")
    settings.pop("split", None)         # follows from the others
    if settings.get("weight_decay") == (1e-5 if algo == "fedprox" else 1e-3):
        del settings["weight_decay"]    # each method's own default
    return f"{algo} {settings.pop('form', '')}".strip(), settings, hyper, str(seed), curve


def lines_of_runs(folders):
    """{label: {seed: {round: accuracy}}}. A label names the method, the settings that differ among the runs,
    and the hyper-parameters that differ among those of the method."""
    groups, lines = {}, {}
    for folder in folders:
        method, settings, hyper, seed, curve = read_run(folder)
        if not curve:
            print(f"figures.py: {folder}: left out, it has no evaluation", file=sys.stderr)
            continue
        key = json.dumps([method, settings, hyper], sort_keys=True)
        seeds = groups.setdefault(key, (method, settings, hyper, {}))[-1]
        if seed in seeds:
            print(f"figures.py: {folder}: the same run twice; drawn is what went further", file=sys.stderr)
        seeds[seed] = max(curve, seeds.get(seed, {}), key=len)
    apart = differing(settings for _, settings, *_ in groups.values())
    for method, settings, hyper, seeds in groups.values():
        own = differing(its for name, _, its, _ in groups.values() if name == method)
        values = [f"{name}={value}" for name, value in (settings | hyper).items() if name in apart + own]
        add(lines, " ".join([method, *values]), seeds)
    return lines


def differing(dicts):
    """The names that do not have one value in all of them."""
    dicts = list(dicts)
    names = dict.fromkeys(name for its in dicts for name in its)
    return [name for name in names if len({json.dumps(its.get(name)) for its in dicts}) > 1]


def add(found, label, value):
    if label in found:
        stop(f"two rows have the label {label!r}")
    found[label] = value


def lines_of(args):
    """The lines to draw, {label: {seed: {round: accuracy}}}, and a title."""
    path = args.results / "curves" / f"{args.what[0]}.csv"
    if len(args.what) == 1 and path.is_file():
        lines, title = lines_of_setting(path), describe(path.stem)
    else:
        lines, title = lines_of_runs(folder for x in args.what for folder in run_folders(Path(x))), ""
    rows = args.rows or {row: row for row in args.only or sorted(lines)}
    if lacking := [row for row in rows.values() if row not in lines]:
        stop(f"no row {lacking[0]!r}; there are: {'; '.join(sorted(lines))}")
    return {label: lines[row] for label, row in rows.items()} or stop("nothing to draw"), title


def describe(setting):
    """mnist-100-15-dirichlet0.3-T300 in words."""
    words = re.fullmatch(r"(.+?)-(\d+)-([\d.]+)-(\D.*)", setting)
    return "{}, {} clients, {} % a round, {}".format(*words.groups()) if words else setting


def run_folders(path):
    """The path, if it is a run folder, or the run folders in it."""
    inside = sorted(x.parent for x in path.glob("*/config.json"))
    found = [path] if (path / "config.json").exists() else inside
    return found or stop(f"{path}: neither a run folder nor a setting of results/")


# ---- drawing -----------------------------------------------------------------------------------------------

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


def furthest(seeds):
    """The curves that went furthest, and what to call them."""
    last = max(max(curve) for curve in seeds.values())
    whole = [curve for curve in seeds.values() if max(curve) == last]
    some = f"{len(whole)} of " * (len(whole) < len(seeds))
    return whole, f"{some}{len(seeds)} seeds" if len(seeds) > 1 else f"seed {next(iter(seeds))}"


def plot_curves(ax, lines):
    """Mean over the seeds that went furthest, and the band from the least to the most."""
    look = styles(sorted(lines))
    for label, seeds in lines.items():
        whole, count = furthest(seeds)
        at = sorted(set.intersection(*map(set, whole)))
        middle, least, most = ([f(curve[t] for curve in whole) for t in at] for f in (mean, min, max))
        ax.plot(at, middle, marker="." * (len(at) == 1), label=f"{label}, {count}", **look[label])
        if len(whole) > 1:
            ax.fill_between(at, least, most, color=look[label]["color"], alpha=0.15, linewidth=0)
    ax.set(xlabel="communication round", ylabel="test accuracy (%)")


def curves(args):
    """Accuracy over the rounds."""
    lines, title = lines_of(args)
    last = {label: mean(curve[max(curve)] for curve in furthest(seeds)[0]) for label, seeds in lines.items()}
    columns = max(1, 110 // (max(map(len, lines)) + 22))        # of the legend: as many as fit
    figure, (ax,) = canvas(8, 3.4 + 0.2 * math.ceil(len(lines) / columns))
    plot_curves(ax, {label: lines[label] for label in sorted(lines, key=last.get, reverse=True)})
    figure.legend(loc="outside lower center", ncols=columns, frameon=False)
    ax.set_title(f"{title}\nline and band: mean and range of the seeds that went furthest".strip())
    return figure


def met_and_far(seeds, target):
    """The rounds in which the seeds met the target, and how far those went that did not."""
    met = [min(t for t, acc in curve.items() if acc >= target)
           for curve in seeds.values() if max(curve.values()) >= target]
    return met, [max(curve) for curve in seeds.values() if max(curve.values()) < target]


def plot_targets(ax, lines, target):
    """A point a seed, a bar for their mean, > for a seed that went so far and did not get there."""
    counts = {label: met_and_far(seeds, target) for label, seeds in lines.items()}
    if not any(met for met, _ in counts.values()):
        stop(f"nothing to draw: no run reached {target:g} %")
    order = sorted(lines, key=lambda label: mean(counts[label][0] or [math.inf]), reverse=True)
    for y, label in enumerate(order):
        (met, far), colour = counts[label], styles([label])[label]["color"]
        ax.plot(met, [y] * len(met), "o", color=colour, alpha=0.55, markersize=5)
        ax.plot(far, [y] * len(far), ">", color=colour, markersize=6)
        if met:
            ax.vlines(mean(met), y - 0.32, y + 0.32, color=colour, linewidth=2)
            ax.annotate(f"{mean(met):.1f}", (max(met + far), y), (8, 0), va="center",
                        textcoords="offset points")
    names = [f"{label}, {len(lines[label])} seed{'s'[:len(lines[label]) - 1]}" for label in order]
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(-0.6, len(names) - 0.4),
           xlabel=f"rounds to {target:g} % (logarithmic)",
           title="point: a seed; triangle: not by then\nbar, number: mean of those that got there")
    ax.margins(x=0.1)
    log_ticks(ax.xaxis)
    return order


def targets(args):
    """Rounds to the target."""
    lines, title = lines_of(args)
    figure, (ax,) = canvas(8, 1.2 + 0.32 * len(lines))
    plot_targets(ax, lines, args.target)
    figure.suptitle(title, fontsize=9)
    return figure


def both(args):
    """Learning curves, until the last run has reached the target, beside rounds to the target."""
    lines, title = lines_of(args)
    figure, (left, right) = canvas(8, 2 + 0.28 * len(lines), ncols=2, width_ratios=(1, 1.1))
    order = plot_targets(right, lines, args.target)
    plot_curves(left, {label: lines[label] for label in reversed(order)})
    whole = [curve for seeds in lines.values() for curve in furthest(seeds)[0]]
    T = max(t for seeds in lines.values() for its in met_and_far(seeds, args.target) for t in its)
    seen = sorted(acc for curve in whole for t, acc in curve.items() if t <= T)
    low, high = seen[len(seen) // 20], seen[-1]         # the first rounds are far below
    left.set(xlim=(0, 1.05 * T), ylim=(low, high + 0.05 * (high - low) + 0.1),
             title="line and band: mean and range\nof the seeds that went furthest")
    left.axhline(args.target, color="0.4", linewidth=0.8, linestyle=":")
    left.legend(loc="lower right", fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=9)
    return figure


# ---- strengths ---------------------------------------------------------------------------------------------

def families(results, *settings):
    """{(family, strength): {its value: {seed: {round: accuracy}}}}. In a family only the strength differs."""
    found = {}
    hyper_of = {(row["setting"], f"{row['method']} {row['variant']}".strip()): row["hyper"]
                for row in read_csv(results / "runs.csv", "setting", "method", "variant", "hyper")}
    for path in [results / "curves" / f"{setting}.csv" for setting in settings]:
        for label, seeds in lines_of_setting(path).items() if path.is_file() else ():
            if (path.stem, label) not in hyper_of:
                stop(f"{results / 'runs.csv'}: has no {label!r} of {path.stem}")
            hyper = dict(pair.split("=") for pair in hyper_of[path.stem, label].split())
            name = next((x for x in GRIDS if x in hyper), "")
            family = " ".join(x for x in label.split() if x.partition("=")[0] != name)
            add(found.setdefault((family, name), {}), float(hyper.get(name, 0)), seeds)
    return found or stop(f"{results / 'curves'}: has no {settings[0]}.csv")


def alpha(args):
    """Rounds to the target by alpha, of what was played with several."""
    setting = (args.what or [MNIST])[0]
    found = {family: its for (family, name), its in families(args.results, setting).items()
             if name == "alpha" and len(its) > 1} or stop(f"nothing to draw: {setting} has no two alphas")
    figure, (ax,) = canvas(8, 3.6)
    for family, look in styles(found).items():
        counts = {a: met_and_far(seeds, args.target) for a, seeds in sorted(found[family].items())}
        means = [math.nan if far else mean(met) for met, far in counts.values()]
        ax.plot(list(counts), means, label=family, **look)
        for a, met_far in counts.items():
            for at, mark in zip(met_far, "o^"):
                ax.plot([a] * len(at), at, mark, color=look["color"], alpha=0.5, markersize=4)
    ax.set(xlabel="alpha", ylabel=f"rounds to {args.target:g} % test accuracy",
           title=f"{describe(setting)}\npoint: a seed; line: mean where all got there; triangle: not by then")
    log_ticks(ax.xaxis)
    log_ticks(ax.yaxis)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def chosen(its, name, target, T):
    """The value that is best on the tuning seeds: by the mean accuracy of the last 50 rounds, or within 0.03
    points by rounds to the target; by rounds alone where runs are not whole. None if fewer than three."""
    ends, rounds = {}, {}
    for value in sorted(its.keys() & set(GRIDS[name])):
        seeds = {seed: curve for seed, curve in its[value].items() if int(seed) >= TUNING_SEED}
        if seeds:
            met, far = met_and_far(seeds, target)
            rounds[value] = mean(met + [math.inf] * len(far))
            ends[value] = mean(acc if max(curve) == T else -math.inf for curve in seeds.values()
                               for t, acc in curve.items() if t > max(curve) - 50)
    near = [value for value in ends if not ends[value] < max(ends.values()) - 0.03]     # all, if -inf
    return min(near, key=rounds.get) if len(ends) > 2 else None


def sent(label):
    """Model sizes that a client and the server exchange in a round, as published: the model both ways, and
    the control variates of a method that has them."""
    without = "correction=none" in label or label.startswith("fedssg main")
    return 4 if label.startswith(("scaffold", "feddc", "fedssg")) and not without else 2


def tuned(args):
    """Rounds to the target against what a client and the server exchange until then: a point a method, with
    the value that was best on the tuning seeds, and a panel for each number of clients."""
    settings = args.what or [MNIST, MANY]
    figure, axes = canvas(8, 3.4 * len(settings), nrows=len(settings))
    for ax, setting in zip(axes, settings):
        points, T = {}, int(setting.split("-T")[1].split("-")[0])
        # FedProx has a weight decay of its own by default, and is tuned at the others'
        found = families(args.results, setting, f"{setting}-weight_decay=0.001")
        for (family, name), its in found.items():
            value = chosen(its, name, args.target, T) if name else 0.0      # FedAvg has none
            seeds = {seed: curve for seed, curve in its.get(value, {}).items() if int(seed) < TUNING_SEED}
            label = f"{family} {name}={value:g}" if name and value else family
            if seeds:
                add(points, label, seeds)
            elif value is not None:
                print(f"figures.py: {label}: left out, no run of the test seeds yet", file=sys.stderr)
        if not any(met_and_far(seeds, args.target)[0] for seeds in points.values()):
            stop(f"nothing to draw: no tuned run of {setting} reached {args.target:g} %")
        for n, (label, seeds) in enumerate(points.items()):
            met, far = met_and_far(seeds, args.target)
            rounds = mean(met or [math.nan])
            ax.plot(rounds * sent(label), rounds, MARKERS[n % len(MARKERS)], alpha=0.8,
                    color=styles([label])[label]["color"], fillstyle="none" if far else "full",
                    label=f"{label}, {len(met)} of {len(seeds)} seeds" if far else label)
        ax.set(xlabel=f"model sizes sent until {args.target:g} %",
               ylabel=f"rounds to {args.target:g} %", title=describe(setting))
        log_ticks(ax.xaxis)
        log_ticks(ax.yaxis)
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7, frameon=False)
    figure.suptitle("sent: by a client that takes part and to it; mean of the seeds that got there\n"
                    "hollow: not all seeds did", fontsize=9)
    return figure


# ---- worked out here ---------------------------------------------------------------------------------------

def gate(args):
    """phi of the sampled clients, and its expectation: E[count | sampled at t] = 1 + p (t - 1)."""
    import torch
    import data
    import run
    import fedssg
    given = run.parse(args.what)
    N, T = given.num_clients, given.rounds
    p = data.rate_in_force(N, given.participation, given.sampling)
    gates = {}
    for form, h in run.FORMS.items():
        gates.setdefault((h["gate_ratio"], h["gate_shape"], h["beta"]), []).append(form)
    figure, axes = canvas(8, 3.2, ncols=len(gates))
    for ax, ((ratio, shape, beta), forms) in zip(axes, gates.items()):
        count, rounds = torch.zeros(N), range(1, T + 1)
        for t in rounds:
            i = data.sample_clients(N, given.participation, given.sampling, given.seeds[0], t)
            count[i] += 1
            phi_i = fedssg.gate(count[i], SimpleNamespace(t=t, T=T, p=p), ratio=ratio, shape=shape, beta=beta)
            ax.plot([t] * len(i), phi_i, ".", color=COLOURS["feddc"], markersize=2, alpha=0.5)
        expected = [(1 + p * (t - 1)) / (p * (t if ratio == "running" else T)) + beta for t in rounds]
        ax.plot(rounds, expected, color=COLOURS["fedssg"], linewidth=2)
        ax.set(xlabel="communication round", ylim=(0, None), title=", ".join(forms))
    axes[0].set_ylabel("gate phi of the sampled clients")
    figure.suptitle(f"{N} clients, p = {p:g}, T = {T}; point: a client; line: their expectation", fontsize=9)
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
        for t in range(1, min(rounds, args.rounds) + 1):
            run.play_round(settings, fed, s, t, args)
            losses = [float(run.evaluate(fed.model, s["omega"], X, Y)[1])
                      for X, Y in ((fed.X, fed.Y), (fed.X[own], fed.Y[own]))]
            if not all(map(math.isfinite, losses)):
                stop(f"{algo}: diverged at round {t}; lower --lr")
            if before:
                label = f"{algo} {settings.get('form', '')}".strip()
                rows.append((client, label, t, *(after - old for old, after in zip(before, losses))))
            before = losses
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([POINTS, *rows])


def scatter(args, first_round=10):
    """See the head of this file."""
    path, points = args.results / "scatter.csv", {}
    if not path.exists():
        play_scatter(args.what, path)
    elif args.what:
        stop(f"{path}: is there and would be drawn; for other runs name another folder by --results")
    for row in read_csv(path, *POINTS):
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

DRAW = dict(mnist=both, gates=targets, alpha=alpha, tuned=tuned, curves=curves, targets=targets, both=both,
            gate=gate, scatter=scatter)


def stop(message):
    print(f"figures.py: {message}", file=sys.stderr)
    sys.exit(2)


def main(argv=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.error, add = stop, parser.add_argument
    add("figure", choices=DRAW)
    add("--out", type=Path, required=True, help="the picture, .png or .svg")
    add("--results", type=Path, default=HERE / "results", help="folder of runs.csv and curves/")
    add("--only", nargs="+", metavar="ROW", help="curves, targets, both: the rows to draw")
    add("--target", type=float, default=97.0, help="accuracy, percent (97)")
    args, args.what = parser.parse_known_args(argv)
    args.rows = ROWS.get(args.figure)
    if args.rows and (args.what or args.only):
        stop(f"{args.figure}: takes no more words")
    if args.rows:
        args.what = [MNIST]
    if args.out.suffix not in (".png", ".svg") or not args.out.parent.is_dir():
        stop(f"--out {args.out}: name a .png or .svg in a folder that there is")
    if args.figure in ("curves", "targets", "both") and (not args.what or args.what[0].startswith("-")):
        stop(f"{args.figure}: name run folders, or a setting of results/")
    try:
        DRAW[args.figure](args).savefig(args.out, dpi=110)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        stop(str(error))
    except KeyboardInterrupt:
        stop("interrupted")


if __name__ == "__main__":
    main()
