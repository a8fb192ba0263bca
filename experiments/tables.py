"""The tables, as lines of markdown, from results/ alone."""

import math
from statistics import mean, stdev

from records import (
    chosen, curve_of, ending, measured, missing, pairs, paper, paper_key, reached, row_of, rows_for, untuned,
    variants_of)
from studies import KAPPA_SETTINGS, KAPPAS, ROWS, STUDIES

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)     # n - 1 from 1


def spread(values, digits):
    std = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{std}" if values else ""


def against(ours, theirs, digits):
    """Mean paired difference, and its 95 % t-interval; of {seed: value} each."""
    d = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if len(d) < 2:
        return ["-", "-"]
    half = T95[min(len(d) - 1, len(T95)) - 1] * stdev(d) / math.sqrt(len(d))
    return [f"{mean(d):+.{digits}f}", f"{mean(d) - half:+.{digits}f} to {mean(d) + half:+.{digits}f}"]


def rounds_cells(rows, base, key, target):
    """Rounds to the target, the paper's, the difference to base. rows, base: {seed: row}."""
    met, theirs = ({seed: reached(row, target) for seed, row in some.items()} for some in (rows, base))
    short = [int(rows[seed]["played"]) for seed in met if not met[seed]]
    text = [spread([t for t in met.values() if t], 1)]
    part = f"{len(short)} of {len(rows)} " * (len(rows) > 1)
    text += [f"{part}not in {min(short)}"] if short else []
    goal, its = paper("rounds").get(key, ["", "-"])
    both = all(met[seed] and theirs[seed] for seed in met if seed in theirs)    # a part of them would flatter
    return ["; ".join(filter(None, text)) or "not measured", its if goal == f"{target:g}" else "-",
            *(against(met, theirs, 1) if both else "--")]


def accuracy_cells(rows, base, key):
    """Last 50 (the last, if there are fewer), difference to base, std within the last 50, the paper's."""
    whole = {seed: row for seed, row in rows.items() if row["last50_mean"]}
    name, few = ("last50_mean", "") if whole else ("last", " (last)")
    ours, theirs = ({seed: float(row[name]) for seed, row in some.items() if row[name] and row["end"] == "T"}
                    for some in (rows, base))
    part = f" ({len(whole)} of {len(rows)})" if 0 < len(whole) < len(rows) else ""
    within = [float(row["last50_std"]) for row in whole.values()]
    return [spread(list(ours.values()), 2) + few + part if ours else "-" if rows else "not measured",
            *against(ours, theirs, 2), f"{mean(within):.2f}" if within else "-",
            " ± ".join(paper("accuracy").get(key, "-")) if whole or not rows else "-"]


def vectors(flags):
    """Vectors of the model's size: sent a client and round, as published and as needed; kept by a client.
    A server that knows K_i and eta_t can work out c_i' - c_i itself, so that one need not go up."""
    its = pairs(flags)
    variates = its["algo"] in ("scaffold", "feddc")
    memory = its["algo"] in ("feddyn", "feddc", "fedvra", "feddisco")
    last = False                    # whether the last step of omega goes down with it
    if its["algo"] == "fedssg":
        forms = dict(main="none", light="none", stateless="none", appendix="last")
        correction = its.get("correction", forms.get(its["form"], "plain"))
        alignment = its.get("alignment", "server" if its["form"] == "stateless" else "on the client")
        variates, last = correction in ("plain", "state"), correction == "last"
        memory = alignment not in ("server", "none")
    return 2 + 2 * variates + last, 2 + variates + last, memory + variates + last


def traffic_cells(flags, rows, target):
    met, (published, needed, kept) = [reached(row, target) for row in rows.values()], vectors(flags)
    sent = [f"{mean(met) * x:.0f}" if met and all(met) else "-" for x in (published, needed)]
    return [*sent, str(kept)]


def markdown(head, lines):
    """A table's lines, without columns that hold `-` alone."""
    head, *lines = zip(*(column for column in zip(head, *lines) if set(column[1:]) != {"-"}))
    head, *lines = (f"| {' | '.join(line)} |" for line in (head, *lines))
    return [head, f"|{'---|' * (head.count(' | ') + 1)}", *lines, ""]


def table(title, entries, targets, whole, minus, more=()):
    """Lines of markdown. entries: (label, key in the paper's tables, {seed: row}, seeds wanted).
    more: (heading, {label: cell}) of further columns."""
    theirs = [(label, rows) for label, _, rows, _ in entries if label.startswith(minus)]
    minus, base = min(theirs, key=lambda x: len(x[0]), default=(minus, {}))     # of several the plain one
    head = ["method", "seeds"] + [x for target in targets for x in (
        f"rounds to {target:g} % (± std over seeds)", "paper", f"minus {minus}", "95 %")]
    head += ["last 50, % (± std over seeds)", f"minus {minus}", "95 %", "std within the last 50",
             "paper (± std within the last 50)"] * whole + [heading for heading, _ in more]
    lines = []
    for label, key, rows, n in entries:
        other = {} if rows is base else base
        lines.append([label, f"{len(rows)}" + f" of {n}" * (len(rows) < n)])
        for target in targets:
            lines[-1] += rounds_cells(rows, other, key, target)
        lines[-1] += accuracy_cells(rows, other, key) if whole else []
        lines[-1] += [cells[label] for _, cells in more]
    return [f"**{title}**", "", *(markdown(head, lines) if lines else [])]


def entries_of(name, results, seeds=math.inf, rows=None):
    """What `table` takes, for a study and its first seeds, from the results alone."""
    s, rows, entries = STUDIES[name], rows or measured(results), []
    for label, flags in variants_of(name, rows).items():
        wanted, its = rows_for(name, label, flags, rows, seeds)
        entries.append((label, paper_key(f"{s['setting']} {flags}", s["paper"]), its, len(wanted)))
    return entries


def entries_of_folders(folders, targets=()):
    """{(setting, its runs' own target): {flags: what `table` takes}}"""
    groups = {}
    for folder in folders:
        row, _, _, goal = row_of(folder, targets)
        entry = f"{row['method']} {row['variant']}".strip(), paper_key(row["flags"]), {}, 0
        rows = groups.setdefault((row["setting"], goal), {}).setdefault(row["flags"], entry)[2]
        rows[row["seed"]] = max(row, rows.get(row["seed"], row), key=lambda row: int(row["played"]))
    return groups


def study_table(name, args, rows):
    """A study's table, and what it wants beside rounds and accuracy."""
    s, entries, more = STUDIES[name], entries_of(name, args.results, args.seeds, rows), []
    if s["last10"]:
        lasts = {label: last_ten(its.values(), s["limit"], args.results) for label, _, its, _ in entries}
        more.append((f"mean of the last ten evaluations to round {s['limit']}, %", lasts))
    if s["traffic"]:
        cells = {label: traffic_cells(ROWS[label], its, s["targets"][-1]) for label, _, its, _ in entries}
        heads = [f"sent until {s['targets'][-1]} %, as published", "as needed", "kept by a client"]
        more += [(head, {label: its[k] for label, its in cells.items()}) for k, head in enumerate(heads)]
    whole = not s["to"] and not s["limit"]
    lines = table(s["title"], entries, args.target or s["targets"], whole, args.minus or s["minus"], more)
    waiting = untuned(name, rows)
    lines += [f"Not tuned yet: {'; '.join(waiting)}.", ""] if waiting else []
    return lines + not_measured(name, [name], rows, args.seeds)


def not_measured(what, names, rows, seeds):
    """A line that says how many runs the studies still want, if any."""
    left = sum(1 for _ in missing(names, rows, seeds))
    return [f"`reproduce.py {what}` plays {left} runs that are not measured.", ""] if left else []


def last_ten(rows, limit, results):
    means = []
    for row in rows:
        accs = [acc for t, acc in curve_of(row, results).items() if t <= limit]
        means += [mean(accs[-10:])] if accs else []
    return spread(means, 2) or "-"


def tuning_table(name, rows):
    """What each strength gave on the tuning seeds, and the choice."""
    s, lines = STUDIES[name], []
    goal, seeds = s["targets"][-1], "seeds 100 and 101" if len(s["seeds"]) > 1 else "seed 100"
    for method, labels in s["choices"].items():
        best, values = chosen(name, labels, rows), [label.split()[-1] for label in labels]
        results = [tuning_cell(*rows_for(name, label, ROWS[label], rows), s["to"], goal) for label in labels]
        if len(labels) == 1:                    # a method without a strength
            lines.append([method, "-", "-", *results, "-", "-", "-", "-"])
            continue
        choice = best.split()[-1] if best else "open"
        choice += ", the end of its grid" * (best in (labels[0], labels[-1]))
        cells = [f"{value}: {result}" for value, result in zip(values, results)]
        lines.append([method, labels[0].split()[-2], choice, *cells, *["-"] * (5 - len(cells))])
    head = ["method", "strength", "chosen", "least", "second", "third", "fourth", "fifth"]
    what = f"rounds to {goal} %" if s["to"] else f"last 50 in %, and rounds to {goal} %"
    about = f"Each strength, and what it gave: {what}, mean of {seeds}."
    return [f"**{s['title']}**", "", about, "", *markdown(head, lines)]


def tuning_cell(seeds, its, to, goal):
    if not its:
        return "not measured"
    met = [reached(row, goal) for row in its.values()]
    short = [int(row["played"]) for row in its.values() if not reached(row, goal)]
    rounds = f"not in {min(short)}" if short else f"{mean(met):.1f}"
    part = f" ({len(its)} of {len(seeds)})" * (len(its) < len(seeds))
    return (rounds if to else f"{mean(map(ending, its.values())):.2f}, {rounds}") + part


def kappa_tuning(rows):
    """Over settings, each kappa and what it falls short of the best of them, on the tuning seeds."""
    lines, worst = [], dict.fromkeys(KAPPAS, 0.0)
    for name, (title, _, to, tuning, _, _) in KAPPA_SETTINGS.items():
        if not tuning:
            continue
        found = {x: rows_for(f"kappa-{name}-tuning", x, ROWS[x], rows)[1] for x in KAPPAS}
        seeds = set.intersection(*map(set, found.values()))         # that every kappa has
        count = f"{len(seeds)}" + f" of {len(tuning)}" * (len(seeds) < len(tuning))
        if not seeds:
            lines.append([title, UNIT[to][0], count, *["not measured"] * len(KAPPAS)])
            continue
        cost = (lambda row: reached(row, to) or math.inf) if to else (lambda row: -ending(row))
        values = {x: mean(cost(its[seed]) for seed in seeds) for x, its in found.items()}
        best, digits = min(values.values()), 1 if to else 2
        short = {x: value - best if value > best else 0.0 for x, value in values.items()}
        lines.append([title, UNIT[to][0], count, *(
            f"{abs(values[x]):.{digits}f} ({short[x]:.{digits}f})" for x in KAPPAS)])
        worst = {x: max(worst[x], short[x] / UNIT[to][1]) for x in KAPPAS}
    done = sum(line[-1] != "not measured" for line in lines)
    lines.append([f"worst shortfall in {done} of {len(lines)} settings", "1.5 rounds or 0.15 points are one",
                  "-", *(f"{x:.1f}" for x in worst.values())])
    return ["**Which kappa? MNIST, tuning seeds**", "",
            "Mean over the seeds, and in brackets what it falls short of the best.", "",
            *markdown(["setting", "what", "seeds", *(x.split(", ")[-1] for x in KAPPAS)], lines)]


UNIT = {97: ("rounds to 97 %", 1.5), None: ("accuracy at the end, %", 0.15)}    # and what counts as much


def kappa_test(heading, label, rows, fresh=False):
    """A kappa beside alpha, a line a setting, on the test seeds; `fresh`: but those of first trials."""
    lines = []
    for name, (title, _, to, _, _, tried) in KAPPA_SETTINGS.items():
        (wanted, ours), (_, theirs) = (rows_for(f"kappa-{name}", x, ROWS[x], rows)
                                       for x in (label, "fedssg stable"))
        wanted = [seed for seed in wanted if seed >= tried * fresh]
        both = ours.keys() & theirs.keys() & set(wanted)
        count = f"{len(both)}" + f" of {len(wanted)}" * (len(both) < len(wanted))
        if both:                    # means of different seeds would mislead
            ours, theirs = ({seed: its[seed] for seed in sorted(both)} for its in (ours, theirs))
        cells, (alone, *_) = (rounds_cells(its, base, "", to) if to else accuracy_cells(its, base, "")
                              for its, base in ((ours, theirs), (theirs, {})))
        difference = cells[2:4] if to else cells[1:3]
        lines.append([title, UNIT[to][0], count, cells[0], alone, *difference])
    head = ["setting", "what", "seeds of both", "kappa", "alpha", "kappa minus alpha", "95 %"]
    return [f"**{heading}**", "", *markdown(head, lines)]


def kappa_tests(rows):
    return (kappa_test("kappa 0.15, the tuning seeds' choice, or alpha (`stable`)? MNIST, test seeds",
                       "fedssg scaled, kappa 0.15", rows)
            + kappa_test("kappa 0.25 (`scaled`), of first trials, or alpha? MNIST, test seeds",
                         "fedssg scaled", rows)
            + kappa_test("The same on the seeds that had no part in the choice of 0.25",
                         "fedssg scaled", rows, fresh=True))


def sections(names, args):
    """The tables of the studies, a heading each, as lines, and who played them. All of kappa's make two."""
    rows, lines = measured(args.results), []
    kappa = [name for name in STUDIES if name.startswith("kappa-")]
    together = set(kappa) <= set(names)
    for name in names:
        if together and name == kappa[0]:
            lines += ["## kappa", "", *kappa_tuning(rows), *kappa_tests(rows)]
            lines += not_measured("kappa", kappa, rows, args.seeds)
        elif not together or name not in kappa:
            lines += [f"## {name}", ""]
            if STUDIES[name]["choices"] and not STUDIES[name]["tuning"]:
                lines += tuning_table(name, rows) + not_measured(name, [name], rows, args.seeds)
            else:
                lines += study_table(name, args, rows)
    used = [row for name in names for _, _, its, _ in entries_of(name, args.results, args.seeds, rows)
            for row in its.values()]
    return lines + provenance(used)


def provenance(rows):
    columns = ("version", "torch", "device", "date")
    used = {x: sorted({word for row in rows for word in row[x].split()}) for x in columns}
    return ["; ".join(f"{x} {', '.join(those)}" for x, those in used.items() if those), ""]


INTRO = """# Every table

`python experiments/reproduce.py --tables` writes this page from `results/runs.csv`. Each heading names a
study. `reproduce.py NAME` plays what it has not measured yet. "3 of 10" has three of the ten seeds that it
wants.

Rounds to a target are mean ± standard deviation over seeds. "Not in N" was not reached in N rounds. "Last 50"
is the mean of the last 50 evaluations, then mean ± standard deviation over seeds. "(last)" is the last round
of a run that is too short for it. The paper's ± is the scatter within the last 50 rounds, another thing.

Differences are paired by seed, because methods share cohorts and batches. The column after a difference has
its 95 % t-interval. Two seeds with the same difference give an interval of no width, which says nothing.

What is sent until a target is counted in models a client: rounds times the vectors of the model's size that
go down and up in a round. "As needed" leaves out what the server can work out by itself.

Each run had one thread. The last line of this page says which versions of the program played.
"""
