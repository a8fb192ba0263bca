"""The figures, one command each. They need matplotlib.

    figures.py curves runs/mnist-* --out curves.png     run folders, a study, or results/curves/NAME.csv
    figures.py targets fastest --out targets.png        a study of reproduce.py, or run folders
    figures.py alpha --out alpha.png                    the study alpha
    figures.py gate --out gate.png                      flags of run.py may follow: --rounds 100
    figures.py split --dataset mnist --out split.png    likewise
    figures.py scatter --out scatter.png                likewise; plays three runs of 100 rounds

scatter is the paper's Fig. 2, of "local/global loss deltas"; it says no more. Read here as, from round t-1
to t, the change of one client's loss on its own training samples, f_i(omega_t) - f_i(omega_t-1), against the
change of the loss on all training samples. omega is the server's model. The nearer its points are to the
origin, the more consistent the paper calls a method. The first rounds move every loss most, and all methods
alike; they would decide both numbers, so the figure starts at --first-round.
"""

import argparse
import math
import sys
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import reproduce    # noqa: E402

# Okabe and Ito's, which stay apart for the colour-blind; by method, longer names first. FedProx lies on
# FedAvg: the same grey, dashed. Of a method's variants the second and later ones are dashed, too.
COLOURS = {"fedssg released": "black", "fedssg": "#D55E00", "feddc": "#0072B2", "scaffold": "#56B4E9",
           "feddyn": "#009E73", "fedvra": "#CC79A7", "feddisco": "#E69F00", "fedprox": "#767676",
           "fedavg": "#767676"}
DASHES = ("-", "--", ":", "-.")


def canvas(width, height, **options):
    """A figure 880 pixels wide, and its axes as a list."""
    import matplotlib       # here, so that --help works without it
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.25, "axes.spines.top": False,
                         "axes.spines.right": False, "axes.titlesize": 9})
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained", squeeze=False, **options)
    return figure, list(axes.flat)


def plain_ticks(axis):
    """Numbers on a logarithmic axis, without powers of ten."""
    least, most = axis.get_view_interval()
    ticks = [a * 10 ** b for b in range(4) for a in (1, 1.5, 2, 2.5, 3, 4, 5, 7)]
    axis.set_ticks([tick for tick in ticks if least <= tick <= most])
    axis.set_major_formatter("{x:g}")
    axis.set_ticks([], minor=True)


def styles(labels):
    """{label: (colour, dash)}"""
    found, count = {}, {"fedprox": 1}
    for label in labels:
        method = next((name for name in COLOURS if label.startswith(name)), None)      # None: a user's own
        found[label] = COLOURS.get(method, "0.4"), DASHES[count.get(method, 0) % len(DASHES)]
        count[method] = count.get(method, 0) + 1
    return found


def told_apart(names):
    """{name: its parts, between dashes, that not all names have}"""
    parts = {name: name.split("-") for name in names}
    return {name: " ".join(x for x in its if not all(x in other for other in parts.values()))
            for name, its in parts.items()}


# ---- from results and run folders --------------------------------------------------------------------------

def curves_of(name, results):
    """{label: {seed: {round: accuracy}}} of a study, and its title."""
    lines = {}
    for label, _, rows, _ in reproduce.entries_of(name, results):
        for seed, row in rows.items():
            column = f"{row['method']} {row['variant']}".strip() + f" seed {seed}"
            table = reproduce.read_csv(results / "curves" / f"{row['setting']}.csv", ("round",))
            if curve := {int(line["round"]): float(line[column]) for line in table if line.get(column)}:
                lines.setdefault(label, {})[seed] = curve
    return lines, reproduce.STUDIES[name]["title"]


def read_curves(paths):
    """{label: {seed: {round: accuracy}}}; where settings differ, the label says how. And a title."""
    found = {}
    for path in (path for path in paths if path.suffix == ".csv"):
        for line in reproduce.read_csv(path, ("round",)):
            for name, acc in line.items():
                label, _, seed = name.partition(" seed ")
                if seed and acc:
                    its = found.setdefault((path.stem, label), {}).setdefault(seed, {})
                    its[int(line["round"])] = float(acc)
    for folder in reproduce.run_folders(path for path in paths if path.suffix != ".csv"):
        row, curve, *_ = reproduce.row_of(folder)
        if curve:
            label = f"{row['method']} {row['variant']}".strip()
            its = found.setdefault((row["setting"], label), {})
            its[row["seed"]] = max(curve, its.get(row["seed"], {}), key=len)
    apart = told_apart({setting for setting, _ in found})
    lines = {f"{label} {apart[setting]}".strip(): curves for (setting, label), curves in found.items()}
    return lines, " / ".join(sorted(apart)) if len(apart) == 1 else ""


def curves(args):
    """Mean over seeds, and the band from the least to the most; the second panel lacks the first third."""
    study = len(args.what) == 1 and str(args.what[0]) in reproduce.STUDIES
    lines, title = curves_of(str(args.what[0]), args.results) if study else read_curves(args.what)
    last = {label: mean(list(its.values())[-1] for its in seeds.values()) for label, seeds in lines.items()}
    order = sorted(lines, key=last.get, reverse=True) or stop("nothing to draw: no run has an evaluation")
    shared = {label: sorted(set.intersection(*map(set, lines[label].values()))) for label in order}
    look, T = styles(sorted(lines)), max(at[-1] for at in shared.values())      # rounds that all seeds have
    names = {label: f"{label}, {len(seeds)} seeds" if len(seeds) > 1 else f"{label}, seed {[*seeds][0]}"
             for label, seeds in lines.items()}
    columns = max(1, 120 // (max(map(len, names.values())) + 10))       # of the legend: as many as fit
    (figure, axes), late = canvas(8, 3.2 + 0.2 * math.ceil(len(names) / columns), ncols=2), []
    for label in order:
        seeds = list(lines[label].values())
        at = shared[label]
        middle, least, most = ([f(curve[t] for curve in seeds) for t in at] for f in (mean, min, max))
        for ax in axes:
            ax.plot(at, middle, color=look[label][0], linestyle=look[label][1], linewidth=1.3,
                    label=names[label])
            if len(seeds) > 1:
                ax.fill_between(at, least, most, color=look[label][0], alpha=0.15, linewidth=0)
        late += [acc for t, *both in zip(at, least, most) if t >= T / 3 for acc in both]
    space = 0.05 * (max(late) - min(late)) or 0.5
    axes[1].set(xlim=(T / 3, T), ylim=(min(late) - space, max(late) + space), title="zoomed")
    for ax in axes:
        ax.set(xlabel="communication round", ylabel="test accuracy (%)")
    figure.suptitle(title, fontsize=9)
    handles, _ = axes[0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def rows_of(args):
    """The entries of reproduce.table for studies and run folders; title, and target."""
    names = [str(name) for name in args.what]
    if len(names) == 1 and names[0] in reproduce.STUDIES:
        s = reproduce.STUDIES[names[0]]
        return reproduce.entries_of(names[0], args.results), s["title"], args.target or s["targets"][-1]
    goals = [args.target] if args.target else []
    groups = reproduce.entries_of_folders(reproduce.run_folders(args.what), goals) or stop("nothing to draw")
    apart = told_apart({setting for setting, _ in groups})
    goal, *more = sorted({goal for _, goal in groups})
    if more and not args.target:
        stop(f"the runs have the targets {goal:g} and {more[0]:g} %; name one with --target")
    entries = [(f"{label} {apart[setting]}".strip(), *rest) for (setting, _), its in groups.items()
               for label, *rest in its.values()]
    return entries, next(iter(groups))[0] if len(apart) == 1 else "", args.target or goal


def targets(args):
    """A point a seed, a bar for their mean, > for a seed that played so long and did not get there."""
    entries, title, target = rows_of(args)
    met = {label: [reproduce.reached(row, target) for row in rows.values()] for label, _, rows, _ in entries}
    far = {label: [int(row["played"]) for row in rows.values() if not reproduce.reached(row, target)]
           for label, _, rows, _ in entries}
    entries = [entry for entry in entries if met[entry[0]]]
    entries.sort(key=lambda entry: mean([t for t in met[entry[0]] if t] or [math.inf]))
    if not any(t for its in met.values() for t in its):
        stop(f"nothing to draw: no run reached {target:g} %")
    figure, (ax,) = canvas(8, 1.2 + 0.32 * len(entries))
    for y, (label, key, rows, _) in enumerate(reversed(entries)):
        at, colour = [t for t in met[label] if t], styles([label])[label][0]
        ax.plot(at, [y] * len(at), "o", color=colour, alpha=0.55, markersize=5)
        ax.plot(far[label], [y] * len(far[label]), ">", color=colour, markersize=6)
        middle = [mean(at)] if at else []
        ax.vlines(middle, y - 0.32, y + 0.32, color=colour, linewidth=2)
        goal, count = reproduce.paper("rounds").get(key, ("", ""))
        theirs = [int(count)] if goal == f"{target:g}" and count.isdigit() else []
        ax.plot(theirs, [y] * len(theirs), "D", color="black", fillstyle="none", markersize=7)
        end = max(at + far[label] + theirs), y
        ax.annotate("".join(f"{x:.1f}" for x in middle), end, (8, 0), textcoords="offset points", va="center")
    names = [f"{label}, {len(rows)} seed{'s'[:len(rows) - 1]}" for label, _, rows, _ in reversed(entries)]
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(-0.6, len(names) - 0.4), xscale="log",
           xlabel=f"rounds to {target:g} % test accuracy (logarithmic)")
    plain_ticks(ax.xaxis)
    figure.suptitle(f"{title}\npoint: a seed; bar, number: mean of those that got there; triangle: not by "
                    "then; diamond: the paper".strip(), fontsize=9)
    ax.margins(x=0.08)
    return figure


def alpha(args):
    """Rounds to the target by alpha: a point a seed, a line through the means, ^ for who played so long and
    did not get there."""
    study = reproduce.STUDIES["alpha"]
    target, found, far = args.target or study["targets"][-1], {}, {}
    for label, _, rows, _ in reproduce.entries_of("alpha", args.results):
        name, _, a = label.partition(", alpha ")
        for row in rows.values() if a else ():
            t = reproduce.reached(row, target)
            its = (found if t else far).setdefault(name, {})
            its.setdefault(float(a), []).append(t or int(row["played"]))
    if not found:
        stop(f"nothing to draw: no run of the study alpha reached {target:g} %")
    look = styles({**found, **far})
    figure, (ax,) = canvas(8, 3.6)
    for label, (colour, dash) in look.items():
        its = found.get(label, {})
        ax.plot(sorted(its), [mean(its[a]) for a in sorted(its)], dash, color=colour, label=label)
        for those, mark in (its, "o"), (far.get(label, {}), "^"):
            for a, at in those.items():
                ax.plot([a] * len(at), at, mark, color=colour, alpha=0.5, markersize=4)
    ticks = sorted({a for its in [*found.values(), *far.values()] for a in its})
    ax.set(xscale="log", yscale="log", xlabel="alpha", ylabel=f"rounds to {target:g} % test accuracy",
           title=f"{study['title'].rsplit(',', 1)[0]}, to {target:g} %; triangle: not by then")
    plain_ticks(ax.yaxis)
    ax.set_xticks(ticks, [f"{a:g}" for a in ticks])
    ax.set_xticks([], minor=True)
    figure.legend(loc="outside right upper", frameon=False)
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
        where = "1 + (1-p)/(p t)" if ratio == "running" else "(1 + p (t-1)) / (p T)" + " + 1" * (beta == 1)
        ax.set(xlabel="communication round", ylim=(0, None))
        ax.set_title(f"{', '.join(forms)}\nline: its mean, {where}")
    axes[0].set_ylabel("gate phi of the sampled clients")
    figure.suptitle(f"{N} clients, p = {p:g}, T = {T}; a point is a client", fontsize=9)
    return figure


def federation(flags, algo):
    """args, settings and Federation of run.py, without a run."""
    import run
    given = run.parse([*flags, "--algo", algo])
    device = run.open_device(given)
    dataset, _ = run.load_data(given, device)
    settings = run.settings_for(algo, given.seeds[0], given)
    return given, settings, run.federate(settings, dataset, device)


def split(args):
    """Label counts: a column a client, a row a class."""
    given, settings, fed = federation(args.what, "fedavg")
    figure, (ax,) = canvas(8, 2.6)
    shown = ax.imshow(fed.counts.T, aspect="auto", cmap="cividis", interpolation="nearest", origin="lower")
    figure.colorbar(shown, label="samples", pad=0.01)
    n = fed.counts.sum(axis=1)
    how = settings["partition"] + f" {settings['dir_alpha']}" * settings["partition"].startswith("dirichlet")
    ax.set(xlabel="client", ylabel="class", yticks=range(0, len(fed.counts[0]), 1 + len(fed.counts[0]) // 20))
    ax.set_title(f"{settings['dataset']}, {how}, seed {settings['seed']}: {len(n)} clients of {n.min()} to "
                 f"{n.max()} samples")
    ax.grid(False)
    return figure


def scatter(args):
    """See the head of this file. The points are kept beside the picture; --points draws them again."""
    import run
    points, kept = {}, args.points or args.out.with_suffix(".csv")
    columns = ("client", "method", "round", "change_of_global_loss", "change_of_client_loss")
    rows = reproduce.read_csv(kept, columns)            # stops at a file that is not of such points
    for name in () if args.points else ("fedavg", "feddc", "fedssg"):
        given, settings, fed = federation(args.what + ["--form", args.form] * (name == "fedssg"), name)
        if not 0 <= args.client < given.num_clients:
            stop(f"--client {args.client}: from 0 to {given.num_clients - 1}")
        last = min(args.rounds_shown, given.rounds)
        if args.first_round >= last:
            stop(f"--first-round {args.first_round}: less than {last}, the last round played")
        s, own, losses = {"omega": fed.omega.clone()}, fed.shares[args.client], []
        settings["eval_every"] = settings["rounds"]         # accuracies are not asked for
        for t in range(1, last + 1):
            run.play_round(settings, fed, s, t, given)
            parts = (fed.X, fed.Y), (fed.X[own], fed.Y[own])
            losses.append([float(run.evaluate(fed.model, s["omega"], *part)[1]) for part in parts])
            if not all(map(math.isfinite, losses[-1])):
                stop(f"{name}: diverged at round {t}; lower --lr")
        label = f"{name} {settings.get('form', '')}".strip()
        points[label] = [(t, *(after - before for before, after in zip(*pair)))
                         for t, pair in enumerate(zip(losses, losses[1:]), 2)]
    if points:
        rows = [(args.client, label, *its) for label in points for its in points[label]]
        reproduce.write_csv(kept, columns, rows)
    for row in rows if args.points else ():
        args.client = row["client"]
        points.setdefault(row["method"], []).append(tuple(float(row[name]) for name in columns[2:]))
    points = {label: [x for x in its if x[0] >= args.first_round] for label, its in points.items()}
    if min(map(len, points.values()), default=0) < 2:
        stop(f"nothing to draw from round {args.first_round} on")
    import numpy as np
    figure, axes = canvas(8, 3.2, ncols=len(points), sharex=True, sharey=True)
    for ax, (label, its) in zip(axes, points.items()):
        t, x, y = np.array(its).T
        dots = ax.scatter(x, y, c=t, cmap="viridis_r", s=12)
        ax.set(xlabel="change of the global loss")
        ax.set_title(f"{label}\ncorrelation {np.corrcoef(x, y)[0, 1]:.2f}\nrms distance from 0: "
                     f"{((x * x + y * y).mean()) ** 0.5:.4f}")
        ax.axhline(0, color="grey", linewidth=0.6)
        ax.axvline(0, color="grey", linewidth=0.6)
    axes[0].set_ylabel(f"change of client {args.client}'s loss")
    figure.colorbar(dots, ax=axes, label="round", pad=0.01)
    return figure


# ---- start -------------------------------------------------------------------------------------------------

def stop(message):
    print(f"figures.py: {message}", file=sys.stderr)
    sys.exit(2)


def main(argv=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    draw = dict(curves=curves, targets=targets, alpha=alpha, gate=gate, split=split, scatter=scatter)
    parser.error = stop
    parser.add_argument("figure", choices=draw)
    parser.add_argument("--out", type=Path, required=True, help="the picture, .png or .svg")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of runs.csv")
    parser.add_argument("--target", type=float, help="targets, alpha: accuracy, percent")
    parser.add_argument("--client", type=int, default=0, help="scatter: which client")
    parser.add_argument("--form", default="stable", help="scatter: which FedSSG")
    parser.add_argument("--rounds-shown", type=int, default=100, help="scatter: rounds to play (100)")
    parser.add_argument("--first-round", type=int, default=10, help="scatter: first round to draw (10)")
    parser.add_argument("--points", type=Path, help="scatter: draw these points again, play nothing")
    args, args.what = parser.parse_known_args(argv)
    if args.out.suffix not in (".png", ".svg") or not args.out.parent.is_dir():
        stop(f"--out {args.out}: name a .png or .svg in a folder that there is")
    if args.figure in ("curves", "targets"):
        args.what = [Path(x) for x in args.what] or stop(f"{args.figure}: name run folders, or see --help")
        missing = [x for x in args.what if not x.exists() and str(x) not in reproduce.STUDIES]
        if missing or any(str(x).startswith("-") for x in args.what):
            stop(f"{(missing or args.what)[0]}: no such file, folder or study")
        if len(args.what) > 1 and any(str(x) in reproduce.STUDIES for x in args.what):
            stop("name one study, or run folders")
    elif args.what and (args.figure == "alpha" or args.points):
        stop(f"{args.what[0]}: nothing to do with it here")
    elif args.points and not args.points.is_file():
        stop(f"--points {args.points}: no such file")
    of_results = args.figure == "alpha" or any(str(x) in reproduce.STUDIES for x in args.what)
    if of_results and not (args.results / "runs.csv").is_file():
        stop(f"--results {args.results}: has no runs.csv")
    try:
        draw[args.figure](args).savefig(args.out, dpi=110)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        stop(str(error))
    except KeyboardInterrupt:
        stop("interrupted")


if __name__ == "__main__":
    main()
