"""Which run is which, and what results/ keeps of a run: a row of runs.csv, and its accuracy over the rounds.

A run is known by its flags of run.py, in alphabetical order and without those that are run.py's defaults, by
the contents of a data file of one's own, and by its seed. Nothing here imports torch but `resolve`.
"""

import contextlib
import csv
import datetime
import functools
import io
import json
import math
import os
import re
import shlex
import sys
from pathlib import Path
from statistics import mean, pstdev

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from studies import ALPHA_CLIP, CLIP, CONTENTS, ROWS, STUDIES, TARGETS  # noqa: E402

# ---- which run is which ------------------------------------------------------------------------------------

COLUMNS = (
    "flags", "contents", "seed",                # by these a run is known
    "setting", "method", "variant", "hyper",    # its curve: the file, the column "method variant seed 0"
    "to_targets", "last50_mean", "last50_std", "best", "last", "played", "end",
    "seconds_per_round", "version", "torch", "device", "date")


def pairs(flags):
    """{name: value} of flags of run.py that each have a value."""
    return dict(part.strip().split(" ", 1) for part in f" {flags}".split(" --")[1:])


def in_order(flags):
    return " ".join(f"--{name} {value}" for name, value in sorted(pairs(flags).items()))


def key_of(flags):
    """By what a run of a study is known, but for its seed: flags in alphabetical order, and contents."""
    return in_order(flags), CONTENTS.get(pairs(flags)["dataset"], "")


@functools.cache
def resolve(flags):
    """The settings that run.py makes of flags, without data; None if it does not accept them."""
    import run          # here, for it imports torch, which takes seconds
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        args = run.parse(shlex.split(flags))
        return run.settings_for(args.algo[0], args.seeds[0], args)


def flags_of(settings):
    """The fewest flags of run.py that make the settings, in alphabetical order; raises ValueError. FedSSG is
    `stable`, or with a kappa `scaled`, with changes; another form if that has fewer: with a kappa one that is
    met but for the kappa's value, else the run's own with changes."""
    import run
    dataset, algo, form = settings["dataset"], settings["algo"], settings.get("form")
    start = f"--dataset {shlex.quote(dataset)} --algo {algo}"
    start += f" --num-clients {settings['num_clients']}" * (settings["num_clients"] != 100)
    likes = [f" --like {x}" for x in run.PRESETS] if dataset.endswith(".npz") else []
    hyper, forms = settings["hyper"], ["stable", form]
    if "kappa" in hyper:
        any_kappa = {"kappa": None}
        forms = ["scaled", *(x for x, parts in run.FORMS.items()
                             if hyper | parts | any_kappa == hyper | any_kappa)]
    forms = [f" --form {x}" for x in dict.fromkeys(forms)] if form else [""]
    own, found = {x: y for x, y in settings.items() if x not in ("seed", "split", "contents", "form")}, []
    for flags in (start + like + name for like in ["", *likes] for name in forms):
        flags += differing(own, resolve(flags))
        flags += differing(own["hyper"], (resolve(flags) or own)["hyper"])
        made = resolve(flags)                   # None if run.py refuses them
        if made and {x: y for x, y in made.items() if x not in ("seed", "form")} == own:
            found.append(flags)
    if not found:
        raise ValueError("this run.py has no flags for its settings")
    return in_order(min(found, key=lambda flags: flags.count("--")))


def differing(own, usual):
    """Flags for the settings that are not as usual."""
    found = ""
    for name in own.keys() - {"hyper"}:
        value = own[name]
        if value == usual.get(name):
            continue
        if isinstance(value, list):
            value = " ".join(map(str, value))
        elif isinstance(value, float) and float(f"{value:g}") == value:
            value = f"{value:g}"
        found += f" --{name.replace('_', '-')} {'none' if value is False else value}"
    return found


@functools.cache
def paper(name):
    """{dataset,clients,percent,split,method: [mean, std]} of accuracy.csv; [target, rounds] of rounds.csv."""
    with open(HERE / "paper" / f"{name}.csv", newline="", encoding="utf-8") as file:
        return {",".join(row[:5]): row[5:] for row in csv.reader(file)}


def paper_key(flags, dataset=None):
    """The row of the paper's tables that a run repeats in all its settings; else empty. A data set that is
    given stands for the run's own. Then its precision and the rounds between evaluations do not count."""
    its = {"dir-alpha": "0.3", "partition": "dirichlet", "num-clients": "100"} | pairs(flags)
    name = dataset or its["dataset"]
    known = dict(mnist="MNIST", emnist="EMNIST-L", cifar10="CIFAR-10", cifar100="CIFAR-100").get(name)
    share = its.get("participation", "0.1" if name.startswith("cifar") else "0.15")
    split = {("dirichlet", "0.3"): "DiD1", ("dirichlet", "0.6"): "DiD2", ("dirichlet", "1"): "IID",
             ("iid", "0.3"): "IID"}.get((its["partition"], its["dir-alpha"]))
    key = f"{known},{its['num-clients']},{100 * float(share):g},{split},{its['algo']}"
    named = {"dataset", "num-clients", "participation", "partition", "dir-alpha", "algo", "form"}
    named |= {"like", "precision", "eval-every"} if dataset else set()
    left = " ".join(f"--{x} {its[x]}" for x in sorted(its.keys() - named))
    options = [""]
    if its["algo"] == "fedssg":         # the clip of Section 2, and the alpha that is tuned for this split
        options += [CLIP, *[ALPHA_CLIP] * (key == "MNIST,100,15,DiD1,fedssg")]
    same = left in options and its.get("form") not in ("scaled", "light", "stateless")
    return key if same and key in paper("accuracy") else ""


# ---- results -----------------------------------------------------------------------------------------------

def read_csv(path, columns):
    """The rows of a file of ours; none if there is no file."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ())[:len(columns)] != tuple(columns):
            stop(f"{path}: its columns are not {','.join(columns)}; move it away")
        rows = list(reader)
    if any(None in row.values() for row in rows):
        stop(f"{path}: a row is too short; mend it, or move the file away")
    return rows


def write_csv(path, columns, rows):
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    write(path, text.getvalue())


def write(path, text):
    """Whole or not at all, under a temporary name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode("utf-8"))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def row_of(folder, targets=(), version="unknown"):
    """A run folder as: a row of runs.csv, its curve {round: accuracy}, its settings, its own target."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        goal = float(json.loads((folder / "summary.json").read_text("utf-8"))["target_acc"])
        s = config["settings"] | {"seed": int(config["settings"]["seed"])}
        with open(folder / "log.csv", newline="", encoding="utf-8") as file:
            log = [row for row in csv.DictReader(file) if row["seconds"]]   # the last may be half written
        curve = {int(row["round"]): float(row["test_acc"]) for row in log if row["test_acc"]}
        finite = all(math.isfinite(float(x)) for row in log[-1:] for x in row.values() if x)
        pace = mean([float(row["seconds"]) for row in log] or [0])
        date = datetime.date.fromtimestamp((folder / "log.csv").stat().st_mtime)
        # several, if it was stopped and went on
        commits = [x for x in config.get("commits") or [config.get("commit")] if x]
        made_with = {x: config[x] for x in ("device", "torch")} | {"version": " ".join(commits) or version}
        flags, hyper, T = flags_of(s), s["hyper"], s["rounds"]
        split = s["partition"] + f"{s['dir_alpha']}" * s["partition"].startswith("dirichlet")
        name, share = s["dataset"], f"{100 * s['participation']:g}"
        where = [s.get("contents", ""), str(s["num_clients"]), share, split, f"T{T}"]
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        stop(f"{folder}: not a run folder of this version ({type(error).__name__}: {error})")
    given = [x.replace("-", "_") for x in pairs(flags)]
    named = {"dataset", "like", "num_clients", "participation", "partition", "dir_alpha", "rounds", "algo",
             "form"}
    extra = [f"{x}={s[x]}" for x in given if x not in named | hyper.keys()]
    variant = [pairs(flags).get("form", "")] + [f"{x}={value}" for x, value in hyper.items() if x in given]
    name = Path(name).stem if Path(name).stem not in TARGETS else name      # mnist.npz is not MNIST
    setting = "-".join(filter(None, [name, *where, *extra]))
    usual = TARGETS.get(re.match("cifar100?|[^_.]*", name)[0], TARGETS["synthetic"])
    at = {x: next((t for t, acc in curve.items() if acc >= x), f">{len(log)}") for x in
          sorted({*usual, goal, *targets})}
    accs, ended = list(curve.values()), len(log) == T
    row = made_with | dict(
        flags=flags, contents=s.get("contents", ""), seed=s["seed"], method=s["algo"], date=date,
        played=len(log),
        setting=re.sub(r"[^\w.=+-]", "", setting.replace(", ", "+")), variant=" ".join(variant).strip(),
        hyper=" ".join(f"{x}={value}" for x, value in hyper.items()), seconds_per_round=f"{pace:.3f}",
        to_targets=" ".join(f"{x:g}:{t}" for x, t in at.items()),
        best=f"{max(accs):.2f}" if accs else "", last=f"{accs[-1]:.2f}" if accs else "",
        last50_mean=f"{mean(accs[-50:]):.3f}" if ended and len(accs) >= 50 else "",
        last50_std=f"{pstdev(accs[-50:]):.3f}" if ended and len(accs) >= 50 else "",
        end="diverged" if not finite else "T" if ended else "target" if at[goal] == len(log) else "stopped")
    return {x: str(row[x]) for x in COLUMNS}, curve, s, goal


def measured(results):
    """{(flags, contents): {seed: the row that played most rounds; of several, the latest}}"""
    found = {}
    for row in sorted(read_csv(results / "runs.csv", COLUMNS), key=lambda row: int(row["played"])):
        found.setdefault((row["flags"], row["contents"]), {})[int(row["seed"])] = row
    return found


def curve_of(row, results):
    """{round: accuracy} of a row of runs.csv."""
    column = f"{row['method']} {row['variant']}".strip() + f" seed {row['seed']}"
    table = read_csv(results / "curves" / f"{row['setting']}.csv", ("round",))
    return {int(line["round"]): float(line[column]) for line in table if line.get(column)}


def keep(results, row, curve):
    """Add a run to runs.csv and to the curves of its setting; False if as much of it is there already."""
    old = measured(results).get((row["flags"], row["contents"]), {}).get(int(row["seed"]))
    if old and int(old["played"]) >= int(row["played"]):
        return False
    path, label = results / "curves" / f"{row['setting']}.csv", f"{row['method']} {row['variant']}".strip()
    lines = {int(line.pop("round")): line for line in read_csv(path, ("round",))}
    for t, acc in curve.items():
        lines.setdefault(t, {})[f"{label} seed {row['seed']}"] = f"{acc:.2f}"
    names = sorted({name for line in lines.values() for name in line})
    write_csv(path, ("round", *names), [(t, *(lines[t].get(x, "") for x in names)) for t in sorted(lines)])
    rows = [x for x in read_csv(results / "runs.csv", COLUMNS) if x != old] + [row]     # old: the run went on
    write_csv(results / "runs.csv", COLUMNS, [list(row.values()) for row in rows])
    return True


def reached(row, target):
    """The round, or None."""
    noted = dict(pair.split(":") for pair in row["to_targets"].split())
    if f"{target:g}" not in noted:
        stop(f"target {target:g}: runs.csv has the rounds to {', '.join(noted)} % of these runs")
    return None if ">" in noted[f"{target:g}"] else int(noted[f"{target:g}"])


def serves(row, s):
    """Whether the row has all that the study wants of a run."""
    enough = row["end"] == "T" or int(row["played"]) >= (s["limit"] or math.inf)
    return enough or row["end"] == "diverged" or bool(s["to"] and reached(row, s["to"]))


def rows_for(name, label, flags, rows, seeds=math.inf):
    """The wanted seeds of a study's row, and {seed: row of runs.csv} of those that are measured."""
    s = STUDIES[name]
    wanted = [seed for k, seed in enumerate(s["more"].get(label, s["seeds"])) if k < seeds]
    its = rows.get(key_of(f"{s['setting']} {flags}"), {})
    return wanted, {seed: its[seed] for seed in wanted if seed in its and serves(its[seed], s)}


def variants_of(name, rows):
    """{label: flags} of a study. Of `tuned` these are the strengths that the tuning seeds choose."""
    s, found = STUDIES[name], {}
    for method, labels in s["choices"].items() if s["tuning"] else ():
        if best := chosen(s["tuning"], labels, rows):
            found[best] = ROWS[best]
    return found or s["variants"]


def chosen(name, labels, rows):
    """The label with the fewest rounds to the target; of whole runs with the best last 50, where within 0.03
    points the rounds decide. None until all are measured."""
    s, found = STUDIES[name], {label: rows_for(name, label, ROWS[label], rows) for label in labels}
    if any(len(its) < len(wanted) for wanted, its in found.values()):
        return None
    rounds, accs = {}, {}
    for label, (_, its) in found.items():
        rounds[label] = mean(reached(row, s["targets"][-1]) or math.inf for row in its.values())
        accs[label] = 0 if s["to"] else mean(map(ending, its.values()))
    near = [label for label in labels if accs[label] >= max(accs.values()) - 0.03]
    return min(near, key=rounds.get)


def untuned(name, rows):
    """The methods of a study whose strength the tuning seeds have not chosen yet."""
    s = STUDIES[name]
    return [method for method, labels in s["choices"].items() if not chosen(s["tuning"], labels, rows)
            ] if s["tuning"] else []


def ending(row):
    """The mean of the last 50 evaluations in percent, or the last of a run too short for them."""
    return float(row["last50_mean"] or row["last"] or "nan")


def missing(names, rows, seeds=math.inf):
    """What the studies still want, seed after seed, as (study, label, flags, key, seed)."""
    for name in names:
        variants = variants_of(name, rows)
        wanted = {label: rows_for(name, label, flags, rows, seeds) for label, flags in variants.items()}
        for seed in sorted({seed for its, _ in wanted.values() for seed in its}):
            for label, flags in variants.items():
                if seed in wanted[label][0] and seed not in wanted[label][1]:
                    flags = f"{STUDIES[name]['setting']} {flags}"
                    yield name, label, flags, key_of(flags), seed


def run_folders(paths):
    """The run folders among the paths, and in folders of them."""
    paths = [Path(path) for path in paths]
    for path in paths:
        one = (path / "config.json").exists()
        inside = [path] if one else sorted(x.parent for x in path.glob("*/config.json"))
        if not inside and not (path.is_file() and len(paths) > 1):      # runs/* may name a file, too
            stop(f"{path}: neither a study nor a run folder")
        yield from inside


def stop(message):
    print(f"reproduce.py: {message}", file=sys.stderr)
    sys.exit(2)
