"""The paper's settings and this project's studies: what is wanted, the runs, the tables.

    reproduce.py --list                                 the studies
    reproduce.py 'form*' --dry-run                      what is missing, and how long it takes
    reproduce.py 'form*' --workers 2                    play it; Ctrl-C, then the same, goes on
    reproduce.py form --table                           from results/ alone, beside the paper's numbers
    reproduce.py form --table --minus 'fedssg stable'   with the differences to another row than feddc
    reproduce.py runs/* --table --target 97             the same of run folders of your own
    reproduce.py --harvest runs --version 4300aab       take run folders into results/

A run is known by its settings: one that serves two studies is played once. Let one process at a time play.
"""

import argparse
import contextlib
import csv
import datetime
import fnmatch
import functools
import hashlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, pstdev, stdev

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

# ---- what is wanted: flags of run.py -----------------------------------------------------------------------

STABLE, RELEASED, MAIN, APPENDIX = (
    f"--algo fedssg --form {form}" for form in ("stable", "released", "main", "appendix"))
SSG = {"fedssg stable": STABLE, "fedssg released": RELEASED}
DC, SCAFFOLD, DYN, AVG = ({x: f"--algo {x}"} for x in ("feddc", "scaffold", "feddyn", "fedavg"))
EIGHT = SSG | DC | SCAFFOLD | DYN | {x: f"--algo {x}" for x in ("fedvra", "feddisco", "fedprox")} | AVG
OFF = " --gate-ratio off --beta 0"
TUNED = " --alpha 0.05 --gate-shape clip"       # the paper's alpha for this setting, Section 2's option
DECAYS = {"fedprox": "--algo fedprox"} | AVG | {"fedavg, decay 1e-5": "--algo fedavg --weight-decay 1e-05"}
NO_GATE = {"fedssg stable, phi = 1": STABLE + OFF}
FIVE = SSG | NO_GATE | DC | SCAFFOLD
READINGS = {"fedssg main": MAIN, "fedssg main, alpha 0.05, clip": MAIN + TUNED,
            "fedssg main, Eq. (6)'s alpha 0.05": MAIN + " --gate-scale 0.05", "fedssg appendix": APPENDIX,
            "fedssg appendix, clip": APPENDIX + TUNED, "feddyn, alpha 0.05": "--algo feddyn --alpha 0.05"}
PHI = {"": "", ", phi = 1": OFF, ", phi = 2": " --gate-ratio off --beta 1",
       ", running clip": " --gate-ratio running --gate-shape clip --beta 0"}
GATES = {name + phi: flags + how for name, flags in SSG.items() for phi, how in PHI.items()} | {
    f"fedssg{phi}, no correction": f"{RELEASED}{how} --correction none" for phi, how in PHI.items()}
CONSTANT = {x: GATES[x] for x in ("fedssg stable, phi = 1", "fedssg stable, phi = 2",
                                  "fedssg, phi = 2, no correction")}
WITHOUT = {"": "", ", no alignment": " --alignment none", ", no memory (phi = 0)": " --gate-scale 0 --beta 0",
           ", no gate (phi = 1)": OFF}
PARTS = {name + part: flags + how for name, flags in SSG.items() for part, how in WITHOUT.items()} | {
    "fedssg, no correction": GATES["fedssg, no correction"]}    # in which alone stable and released differ
SWEEP = {**dict.fromkeys(SSG, (0.01, 0.03, 0.05, 0.1, 0.3, 1)), "feddc": (0.003, 0.01, 0.03, 0.1, 0.3),
         "feddyn": (0.003, 0.01, 0.03, 0.1)}
FEW_SWEEP = {"fedssg stable": (0.01, 0.2, 0.4, 0.7), "feddc": (0.02, 0.2, 0.7)}      # beside 0.05 and 0.1
ALPHAS, FEW_ALPHAS = (
    {f"{name}, alpha {a:g}": f"{EIGHT[name]} --alpha {a}" for name, each in sweep.items() for a in each}
    for sweep in (SWEEP, FEW_SWEEP))
CIFAR = {"fedssg stable": STABLE} | DC | SCAFFOLD | DYN | AVG | SSG        # the default form first
MNIST, MANY = "--dataset mnist", "--dataset mnist --num-clients 500 --participation 0.02 --rounds 600"
SPLITS = {"IID": "--partition iid", "DiD1": "--dir-alpha 0.3", "DiD2": "--dir-alpha 0.6",
          "IID-Dir1": "--dir-alpha 1"}          # what the paper's appendix calls IID


def study(title, setting, variants, seeds, *targets, to=None, limit=None, like=None, more={}):
    """Runs of every variant and seed (`more`: other counts): whole, `to` an accuracy, to `limit`. The table
    has the rounds to the targets; `like`: beside the paper's numbers for that data set."""
    return dict(title=title + (f", to {to} %" if to else ""), setting=setting, variants=variants, seeds=seeds,
                to=to, targets=targets or (to,), limit=limit, like=like, more=more)


STUDIES = {
    "form": study("Which form? MNIST 15 %, Dir 0.3", MNIST, SSG | DC, 5, 97),
    "form-readings": study("The two printed forms: MNIST 15 %, Dir 0.3", MNIST, READINGS | SSG | DC, 3, 97),
    "form-500": study("Which form? MNIST, 500 clients, 2 %, Dir 0.3", MANY, FIVE, 5, 95, 97),
    "form-constant": study("Which form? MNIST 15 %, Dir 0.3, constant rate, T 100",
                           f"{MNIST} --rounds 100 --lr-decay 1", FIVE, 5, 97),
    "form-short": study("Which form? MNIST 15 %, Dir 0.3, T 40", f"{MNIST} --rounds 40", FIVE, 5, 97),
    "form-unequal": study("Which form? MNIST 15 %, unequal clients (Dir 0.3 over each class), T 100",
                          f"{MNIST} --rounds 100 --partition dirichlet-class", FIVE, 5, 97),
    "fastest": study("Fastest? MNIST 15 %, Dir 0.3", MNIST, EIGHT, 10, to=97),
    "fastest-fashion": study("Fastest? FashionMNIST 15 %", "--dataset fashionmnist", EIGHT, 5, 80, 85, to=85),
    "end": study("Best at the end? MNIST 15 %", MNIST, EIGHT, 3, 97, more=dict.fromkeys(SSG | DC, 5)),
    "gate": study("Does the gate matter? MNIST 15 %, Dir 0.3", MNIST, GATES | DC, 10, to=97),
    "gate-end": study("Does the gate matter at the end? MNIST 15 %", MNIST, SSG | CONSTANT | DC, 3, 97),
    "gate-500": study("Does the gate matter? MNIST, 500 clients, 2 %, Dir 0.3", MANY, GATES | DC, 10, to=97),
    "parts": study("What do the parts give? MNIST 15 %, Dir 0.3", MNIST, PARTS | DC, 10, to=97),
    "decay": study("Does FedProx lead by its weight decay? MNIST 15 %, Dir 0.3", MNIST, DECAYS, 3, to=97),
    **{f"epochs-{E}": study(f"Larger E? MNIST 15 %, Dir 0.3, E {E}", f"{MNIST} --local-epochs {E}",
                            SSG | DC | SCAFFOLD | AVG, 5, to=97) for E in (1, 5, 10)},
    "few": study("Few of many? MNIST, 500 clients, 2 %, Dir 0.3", MANY, EIGHT, 3, 95, 97),
    "few-alpha": study("Few of many, with other alphas? MNIST, 500 clients, 2 %, Dir 0.3", MANY,
                       {"fedssg stable": STABLE} | DC | FEW_ALPHAS, 3, 95, 97),
    **{f"split-{split}-{p}": study(f"MNIST {p} %, {split}", f"{MNIST} --participation {p / 100} {flags}",
                                   EIGHT, 3, to=97) for p in (15, 10) for split, flags in SPLITS.items()},
    "alpha": study("Is the order an effect of tuning? MNIST 15 %, Dir 0.3", MNIST, ALPHAS | SSG | DC, 3,
                   to=97, limit=120, more=dict.fromkeys((*SSG, "feddc", "feddc, alpha 0.003"), 6)),
    # 150 rounds are an hour and a half of a CPU's core; the paper's numbers to 80 % want more
    **{f"cifar10{name}": study(f"CIFAR-10 10 %, Dir 0.3{kind}, on images that went through JPEG once",
                               f"--dataset cifar10_jpeg.npz --like cifar10{flag}", CIFAR, 1, 60, 70, 75, 80,
                               to=80, limit=limit, like="cifar10")
       for name, kind, flag, limit in (("", "", "", 150), ("-280", ", 280 rounds", "", 280),
                                       ("-bf16", ", bf16", " --precision bf16", 100))},
    "smoke": study("Ten seconds: does it run?", "--dataset synthetic --num-clients 8 --hidden 8 --rounds 3",
                   SSG | DC, 2, 20)}
ALL = [name for name in STUDIES if name != "smoke"]
# percent, noted of every run
TARGETS = dict(mnist=(90, 95, 97, 98), fashionmnist=(75, 80, 85), emnist=(85, 90, 93, 94), cifar100=(30, 42),
               cifar10=(60, 70, 75, 80), synthetic=(20, 50, 60, 70, 80, 90))

# ---- which run is which ------------------------------------------------------------------------------------

# These move a run's numbers by rounding at most, or (form) repeat its hyper-parameters.
OMITTED = ("split", "contents", "form", "fills", "compile", "mode", "chunk")
# Left out at these values: then a run of a version that has no such flag is the same run.
NEUTRAL = dict(
    letters=10, augment=False, sampling="fixed", unbalanced_sigma=0, min_samples=1, shards=2, batch_size=50,
    lr=0.1, lr_decay=0.998, clip=10, local_epochs=5, eval_every=1, precision="float32", model="fcn",
    hidden=[200, 200], weight_decay=1e-3)
SPLIT = ("dataset", "num_clients", "participation", "partition", "dir_alpha")
NAMED = (*SPLIT, "rounds", "local_epochs", "lr_decay", "precision")
COLUMNS = ("id", "setting", *NAMED, "method", "variant", "hyper", "seed", "to_targets", "last50_mean",
           "last50_std", "best", "last", "played", "end", "seconds_per_round", "threads", "version", "torch",
           "device", "date")


def canonical(settings):
    """The settings that make a run this run, by today's names, whichever version wrote them."""
    s = {name: value for name, value in settings.items() if name not in OMITTED}
    s["dataset"], how = Path(s["dataset"]).name, s["partition"]
    s["precision"] = "tf32" if s.pop("tf32", False) else s.get("precision", "float32")
    cifar = dict(model="cnn", augment=True) if s["dataset"].startswith("cifar") else {}
    neutral = NEUTRAL | cifar | (dict(hidden=[100]) if s["dataset"] == "emnist" else {})
    neutral |= dict(weight_decay=1e-5) if s["algo"] == "fedprox" else {}
    neutral |= {} if how.startswith("dirichlet") else dict(dir_alpha=s["dir_alpha"])
    return {name: s[name] for name in sorted(s) if s[name] != neutral.get(name)}


def id_of(settings):
    """Eight hexadecimal digits for all settings but the seed."""
    text = json.dumps(canonical(settings) | {"seed": 0}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@functools.cache
def resolve(flags):
    """The settings that run.py makes of flags, without data; None if it does not accept them."""
    import run          # here: it imports torch, which takes seconds
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        args = run.parse(flags.split())
        return run.settings_for(args.algo[0], args.seeds[0], args)


@functools.cache
def paper(name):
    """{dataset,clients,percent,split,method: [mean, std]} of accuracy.csv; [target, rounds] of rounds.csv."""
    with open(HERE / "paper" / f"{name}.csv", newline="") as file:
        return {",".join(row[:5]): row[5:] for row in csv.reader(file)}


def paper_key(settings):
    """The run's key in the paper's tables, if its settings are the paper's in all; else empty."""
    names = dict(mnist="MNIST", emnist="EMNIST-L", cifar10="CIFAR-10", cifar100="CIFAR-100")
    N, p, algo = settings["num_clients"], settings["participation"], settings["algo"]
    for split, flags in SPLITS.items():
        flags += f" --dataset {settings['dataset']} --num-clients {N} --participation {p} --algo {algo}"
        key = f"{names.get(settings['dataset'])},{N},{100 * p:g},{split.partition('-')[0]},{algo}"
        own = [resolve(flags)] if key in paper("accuracy") else []
        if own and algo == "fedssg":
            # each form, with its alpha or the tuned one, clipped (an option of the paper) or not
            flags, tuned = flags + " --form ", f" --alpha {own[0]['hyper']['alpha']}"
            own = [resolve(flags + form + alpha + clip) for form in ("stable", "released", "main", "appendix")
                   for alpha in ("", tuned) for clip in ("", " --gate-shape clip")]
        if id_of(settings) in map(id_of, own):
            return key
    return ""


def wanted(results, fresh=True):
    """{flags: (id, paper's key)} of all studies; kept in ids.csv, so that a table does not wait for torch."""
    path, columns = results / "ids.csv", ("flags", "id", "paper")
    known = {row["flags"]: (row["id"], row["paper"]) for row in read_csv(path, columns)}
    like = {f"{s['setting']} {x}": s["like"] for s in STUDIES.values() for x in s["variants"].values()}
    if fresh or known.keys() != like.keys():
        for flags, dataset in like.items():
            s = resolve(flags)
            other = dict(dataset=dataset, precision="float32") if dataset else {}
            known[flags] = (id_of(s), paper_key(s | other)) if s else ("", "")      # no id: run.py refuses it
        write_csv(path, columns, [(flags, *known[flags]) for flags in like])
    return known


# ---- results -----------------------------------------------------------------------------------------------

def read_csv(path, columns):
    """The rows of a file of ours; none if there is no file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ())[:len(columns)] != tuple(columns):
            stop(f"{path}: its columns are not {','.join(columns)}; move it away")
        rows = list(reader)
    if any(None in row.values() for row in rows):
        stop(f"{path}: a row is too short; mend it, or move the file away")
    return rows


def write_csv(path, columns, rows):
    """Whole or not at all, under a temporary name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([columns, *rows])
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def row_of(folder, targets=(), **known):
    """A run folder as: a row of runs.csv, its curve {round: accuracy}, its settings, its own target."""
    import run
    try:
        config, summary = (json.loads((folder / f"{x}.json").read_text()) for x in ("config", "summary"))
        settings, goal, s = config["settings"], summary["target_acc"], canonical(config["settings"])
        with open(folder / "log.csv", newline="") as file:
            log = [row for row in csv.DictReader(file) if row["seconds"]]   # the last may be half written
        curve = {int(row["round"]): float(row["test_acc"]) for row in log if row["test_acc"]}
        finite = all(math.isfinite(float(x)) for row in log[-1:] for x in row.values() if x)
        pace = mean([float(row["seconds"]) for row in log] or [0])
        date = datetime.date.fromtimestamp((folder / "log.csv").stat().st_mtime)
        name, hyper, T, algo = s["dataset"], s["hyper"], s["rounds"], s["algo"]
        where = [str(s["num_clients"]), f"{100 * s['participation']:g}",
                 f"{s['partition']}{s.get('dir_alpha', '')}", f"T{T}"]
        made_with = {x: config[x] for x in ("device", "torch")}
    except (OSError, KeyError, ValueError, TypeError) as error:
        stop(f"{folder}: not a run folder ({type(error).__name__}: {error})")
    form = [settings["form"]] if "form" in settings else []
    own = {x: users[algo].default for x, users in run.hyper_parameters().items() if algo in users}
    own |= run.FORMS[form[0]] if form else {}
    variant = " ".join(form + [f"{x}={value}" for x, value in hyper.items() if own.get(x) != value])
    extra = [f"{x}={value}" for x, value in s.items() if x not in (*SPLIT, "rounds", "algo", "seed", "hyper")]
    name = Path(name).stem if Path(name).stem not in TARGETS else name      # mnist.npz is not MNIST
    setting = "-".join([name, *where, *extra])
    usual = TARGETS.get(re.match("cifar100?|[^_.]*", name)[0], TARGETS["synthetic"])
    at = {x: next((t for t, acc in curve.items() if acc >= x), f">{len(log)}") for x in
          sorted({*usual, goal, *targets})}
    accs, ended = list(curve.values()), len(log) == T
    row = {x: settings.get(x, "") for x in COLUMNS} | s | made_with | dict(
        id=id_of(settings), method=algo, variant=variant, played=len(log), date=date,
        setting=re.sub(r"[^\w.=+-]", "", setting.replace(", ", "+")),
        precision=s.get("precision", "float32"), hyper=" ".join(f"{x}={value}" for x, value in hyper.items()),
        to_targets=" ".join(f"{x:g}:{t}" for x, t in at.items()), seconds_per_round=f"{pace:.3f}",
        best=f"{max(accs):.2f}" if accs else "", last=f"{accs[-1]:.2f}" if accs else "",
        last50_mean=f"{mean(accs[-50:]):.3f}" if ended and len(accs) >= 50 else "",
        last50_std=f"{pstdev(accs[-50:]):.3f}" if ended and len(accs) >= 50 else "",
        end="diverged" if not finite else "T" if ended else "target" if at[goal] == len(log) else "stopped")
    return {x: str((row | known)[x]) for x in COLUMNS}, curve, settings, goal


def measured(results):
    """{(id, seed): the row that played most rounds; of several, the latest}"""
    rows = sorted(read_csv(results / "runs.csv", COLUMNS), key=lambda row: int(row["played"]))
    return {(row["id"], row["seed"]): row for row in rows}


def keep(results, row, curve):
    """Add a run to runs.csv and to the curves of its setting; False if as much of it is there already."""
    old = measured(results).get((row["id"], row["seed"]))
    if old and int(old["played"]) >= int(row["played"]):
        return False
    path, label = results / "curves" / f"{row['setting']}.csv", f"{row['method']} {row['variant']}".strip()
    lines = {int(line.pop("round")): line for line in read_csv(path, ("round",))}
    for t, acc in curve.items():
        lines.setdefault(t, {})[f"{label} seed {row['seed']}"] = f"{acc:.2f}"
    names = sorted({name for line in lines.values() for name in line})
    table = [(t, *(lines[t].get(name, "") for name in names)) for t in sorted(lines)]
    write_csv(path, ("round", *names), table)
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
    enough = int(row["played"]) >= min(int(row["rounds"]), s["limit"] or 10 ** 9)
    return enough or row["end"] == "diverged" or bool(s["to"] and reached(row, s["to"]))


# ---- runs --------------------------------------------------------------------------------------------------

def missing(names, ids, rows, seeds=math.inf):
    """What the studies still want, seed after seed, as (study, variant, flags, id, seed)."""
    for name in names:
        s = STUDIES[name]
        for seed in map(str, range(max(s["seeds"], *s["more"].values(), 0))):
            for label, flags in s["variants"].items():
                flags = f"{s['setting']} {flags}"
                run_id, n = ids[flags][0], min(s["more"].get(label, s["seeds"]), seeds)
                row = rows.get((run_id, seed))
                if run_id and int(seed) < n and not (row and serves(row, s)):
                    yield name, label, flags, run_id, seed


def dry_run(names, ids, args):
    """Say what is missing, and how long it takes."""
    rows, paces, planned, total = measured(args.results), {}, {}, 0
    for row in rows.values():
        like = row["dataset"], row["num_clients"], row["local_epochs"]
        if row["seconds_per_round"]:
            paces.setdefault(like, []).append(float(row["seconds_per_round"]))
    for name, label, flags, *key in missing(names, ids, rows, args.seeds):
        s, to, limit = resolve(flags), STUDIES[name]["to"], STUDIES[name]["limit"]
        met = [reached(row, to) for row in rows.values() if to and row["id"] == key[0]]
        rounds = limit or (mean([t for t in met if t] or [60]) if to else s["rounds"])
        guess = 10 * s["participation"] * s["local_epochs"] / 5 * (11 if s["model"] == "cnn" else 1)
        pace = mean(paces.get((s["dataset"], str(s["num_clients"]), str(s["local_epochs"])), [guess]))
        before = planned.get(tuple(key), 0)         # what a study above has played by then
        hours = max(0, rounds - before) * pace / 3600
        planned[tuple(key)], total = max(rounds, before), total + hours
        print(f"{name:16} {label:40} seed {key[1]:2} {hours:5.2f} h" + " (see above)" * (before >= rounds))
    print(f"{len(planned)} runs, {total:.1f} h of one core, {total / args.workers:.1f} h with --workers "
          f"{args.workers}. Assumed where unmeasured: 1.5 s a round of MNIST at 15 %, 60 rounds to a target")


def version():
    """The last commit that changed the program, with + if it was changed since."""
    code = ["--", *(f"{name}.py" for name in ("run", "fedssg", "baselines", "data", "models"))]
    with contextlib.suppress(FileNotFoundError):        # no git
        commit, changes = (
            subprocess.run(["git", *words, *code], cwd=HERE.parent, capture_output=True, text=True).stdout
            for words in (("log", "-1", "--format=%h"), ("status", "--porcelain")))
        return commit.strip() + "+" * bool(changes)
    return "unknown"


def start(task, args):
    """A process of run.py that plays the task, and the file of its output."""
    s, flags = STUDIES[task[0]], task[2]
    flags += f" --stop-at-target --target-acc {s['to']}" if s["to"] else ""
    flags += f" --stop-after {s['limit']}" if s["limit"] else ""
    words = [f"{args.data_dir}/{x}" if x.endswith(".npz") else x for x in flags.split()]
    command = [sys.executable, HERE.parent / "run.py", *words, "--seed", task[4],
               "--out", args.out, "--data-dir", args.data_dir]
    output, env = tempfile.TemporaryFile("w+"), os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    # in a session of its own: a terminal's Ctrl-C reaches it once, through us
    return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=env), output


def run_in(folder):
    """The id and the seed of the run in a folder; None if it has none that can be read."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        settings = json.loads((folder / "config.json").read_text())["settings"]
        return id_of(settings), str(settings["seed"])


def finish(process, output, task, args, **known):
    """Keep the result of a task's process and say it; 1 if there is none."""
    where = f"{task[0]}: {task[1]} seed {task[4]}"
    if process.returncode not in (0, 3):        # 3: diverged, which is a result
        output.seek(0)
        last = (output.read().strip().splitlines() or ["no output"])[-1]
        ours = process.returncode in (130, -signal.SIGINT)
        print(f"{where}: {'stopped' if ours else f'exit code {process.returncode}: {last}'}", file=sys.stderr)
        return int(not ours)
    found = [folder for folder in args.out.iterdir() if run_in(folder) == task[3:]]
    rows = [row_of(folder, STUDIES[task[0]]["targets"], **known)[:2] for folder in found]
    if not rows:
        print(f"{where}: no folder in {args.out} has its settings", file=sys.stderr)
        return 1
    row, curve = max(rows, key=lambda pair: int(pair[0]["played"]))
    keep(args.results, row, curve)
    print(f"{where}: {row['played']} rounds, last {row['last']} %, to {row['to_targets']}", flush=True)
    return 0


def play(names, ids, args):
    """Play what is missing, args.workers runs at once. Ctrl-C ends them after a round, again: at once."""
    running, tried, signals, failed = {}, set(), [], 0

    def forward(signum, frame):
        signals.append(signum)
        for process in running:
            process.send_signal(signal.SIGINT)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, forward)
    while True:
        if not signals and len(running) < args.workers:
            busy = {task[3:] for _, task, _ in running.values()}
            left = missing(names, ids, measured(args.results), args.seeds)
            todo = (task for task in left if task not in tried)
            if task := next((task for task in todo if task[3:] not in busy), None):
                tried.add(task)
                process, output = start(task, args)
                running[process] = output, task, version()
                continue
        if not running:
            return 128 + signals[0] if signals else failed
        time.sleep(0.2)
        for process in [process for process in running if process.poll() is not None]:
            output, task, code = running.pop(process)
            failed |= finish(process, output, task, args, threads=args.threads, version=code)


# ---- tables ------------------------------------------------------------------------------------------------

T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)   # n - 1 from 1


def spread(values, digits):
    std = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{std}" if values else ""


def against(ours, theirs, digits):
    """Mean paired difference and its 95 % t-interval; of {seed: value} each."""
    d = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if len(d) < 2:
        return "-"
    half = T95[min(len(d) - 1, len(T95)) - 1] * stdev(d) / math.sqrt(len(d))
    return f"{mean(d):+.{digits}f} [{mean(d) - half:+.{digits}f}, {mean(d) + half:+.{digits}f}]"


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
            against(met, theirs, 1) if both else "-"]


def accuracy_cells(rows, base, key):
    """Last 50 (the last, if there are fewer), difference to base, std within the last 50, the paper's."""
    whole = {seed: row for seed, row in rows.items() if row["last50_mean"]}
    name, few = ("last50_mean", "") if whole else ("last", " (last)")
    ours, theirs = ({seed: float(row[name]) for seed, row in some.items() if row[name] and row["end"] == "T"}
                    for some in (rows, base))
    part = f" ({len(whole)} of {len(rows)})" if 0 < len(whole) < len(rows) else ""
    within = [float(row["last50_std"]) for row in whole.values()]
    return [spread(list(ours.values()), 2) + few + part if ours else "-" if rows else "not measured",
            against(ours, theirs, 2), f"{mean(within):.2f}" if within else "-",
            " ± ".join(paper("accuracy").get(key, "-")) if whole or not rows else "-"]


def table(title, entries, targets, whole, minus, command=""):
    """Print markdown, without columns that hold `-` alone.
    entries: (label, key in the paper's tables, {seed: row}, seeds wanted)."""
    theirs = [(label, rows) for label, _, rows, _ in entries if label.startswith(minus)]
    minus, base = min(theirs, key=lambda x: len(x[0]), default=(minus, {}))     # of several the plain one
    head = ["method", "seeds"] + [x for target in targets for x in (
        f"rounds to {target:g} % (± std over seeds)", "paper", f"minus {minus} [95 %]")]
    head += ["last 50, % (± std over seeds)", f"minus {minus} [95 %]", "std within the last 50",
             "paper (± std within the last 50)"] * whole
    lines = []
    for label, key, rows, n in entries:
        lines.append([label, f"{len(rows)}" + f" of {n}" * (len(rows) < n)])
        other = {} if rows is base else base
        for target in targets:
            lines[-1] += rounds_cells(rows, other, key, target)
        lines[-1] += accuracy_cells(rows, other, key) if whole else []
    head, *lines = zip(*(column for column in zip(head, *lines) if set(column[1:]) != {"-"}))
    print(f"**{title}**\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for line in lines:
        print(f"| {' | '.join(line)} |")
    used = {x: sorted({row[x] for _, _, rows, _ in entries for row in rows.values()} - {""})
            for x in ("version", "torch", "threads", "device", "date")}
    print("\n" + command + "; ".join(f"{x} {', '.join(those)}" for x, those in used.items() if those) + "\n")


def entries_of(name, results, seeds=math.inf):
    """What `table` takes, for a study and its first seeds, from the results alone."""
    s, ids, rows, entries = STUDIES[name], wanted(results, fresh=False), measured(results), []
    for label, flags in s["variants"].items():
        (run_id, key), n = ids[f"{s['setting']} {flags}"], min(s["more"].get(label, s["seeds"]), seeds)
        own = {seed: rows[run_id, seed] for seed in map(str, range(n)) if (run_id, seed) in rows}
        entries.append((label, key, {seed: row for seed, row in own.items() if serves(row, s)}, n))
    return entries


def entries_of_folders(folders, targets=()):
    """{(setting, its runs' own target): {id: what `table` takes}}"""
    groups = {}
    for folder in folders:
        row, _, settings, goal = row_of(folder, targets)
        entry = f"{row['method']} {row['variant']}".strip(), paper_key(settings), {}, 0
        setting = "-".join(x for x in (row["setting"], settings.get("contents")) if x)     # of own data
        rows = groups.setdefault((setting, goal), {}).setdefault(row["id"], entry)[2]
        rows[row["seed"]] = max(row, rows.get(row["seed"], row), key=lambda row: int(row["played"]))
    return groups


def tables(names, folders, args):
    of_folders = entries_of_folders(folders, args.target)
    of_studies = {name: entries_of(name, args.results, args.seeds) for name in names}
    labels = {label for entries in of_studies.values() for label, *_ in entries} | {
        label for entries in of_folders.values() for label, *_ in entries.values()}
    if args.minus != "feddc" and not any(label.startswith(args.minus) for label in labels):
        stop(f"--minus {args.minus}: no such row; use one of {', '.join(sorted(labels))}")
    for (setting, goal), entries in of_folders.items():
        table(setting, list(entries.values()), args.target or [goal], True, args.minus)
    for name, entries in of_studies.items():
        s, left = STUDIES[name], sum(n - len(rows) for _, _, rows, n in entries)
        what = f"`python experiments/reproduce.py {name}`" + f" plays {left} runs not measured" * bool(left)
        table(s["title"], entries, args.target or s["targets"], not s["to"], args.minus, f"{what}. ")


# ---- start -------------------------------------------------------------------------------------------------

def run_folders(paths):
    """The run folders among the paths, and in folders of them."""
    paths = [Path(path) for path in paths]
    for path in paths:
        one = (path / "config.json").exists()
        inside = [path] if one else sorted(x.parent for x in path.glob("*/config.json"))
        if not inside and not (path.is_file() and len(paths) > 1):      # runs/* may name a file, too
            stop(f"{path}: neither a study nor a run folder")
        yield from inside


def harvest(ids, args):
    """Take finished run folders into the results, after a look at all of them."""
    known = dict(threads=args.threads, version=args.version)
    for folder, (row, curve, *_) in [(x, row_of(x, **known)) for x in run_folders(args.harvest)]:
        limits = [STUDIES[task[0]]["limit"] for task in missing(ALL, ids, {}) if task[3] == row["id"]]
        what = f"{row['method']} {row['variant']} seed {row['seed']}, {row['played']}/{row['rounds']} rounds"
        if row["end"] == "stopped" and not any(n and n <= int(row["played"]) for n in limits):
            print(f"{folder}: left out, unfinished: {what}")
        else:
            print(f"{folder}: {'taken in' if keep(args.results, row, curve) else 'there already'}: {what}")


def stop(message):
    print(f"reproduce.py: {message}", file=sys.stderr)
    sys.exit(2)


def main(argv=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.error, add = stop, parser.add_argument
    add("names", nargs="*", metavar="NAME", help="studies, 'form*', all; with --table also run folders")
    add("--list", action="store_true", help="the studies")
    add("--table", action="store_true", help="print the tables of what is measured")
    add("--dry-run", action="store_true", help="say what is missing")
    add("--harvest", nargs="+", default=[], metavar="FOLDER",
        help="take run folders, or folders of them, into the results")
    add("--target", type=float, nargs="+", default=[], help="--table: rounds to these accuracies, percent")
    add("--minus", default="feddc", help="--table: the row that others are compared with (feddc)")
    add("--version", default="unknown", help="--harvest: of the code that made the folders")
    add("--seeds", type=int, default=math.inf, help="the first so many of a study's seeds (all)")
    add("--workers", type=int, default=1, help="runs at once (1)")
    add("--threads", type=int, default=1, help="of each run (1); --harvest: that the folders were made with")
    add("--data-dir", type=os.path.expanduser, default="data", help="folder of the data sets (data)")
    folder = lambda text: Path(text).expanduser()       # noqa: E731
    add("--out", type=folder, default=Path("runs"), help="folder of the runs (runs)")
    add("--results", type=folder, default=HERE / "results", help="folder of runs.csv, ids.csv and curves/")
    args = parser.parse_args(argv)
    if args.list:
        for name, s in STUDIES.items():
            print(f"{name:16} {len(s['variants']):2} variants, {s['seeds']:2} seeds: {s['title']}")
        return 0
    if min(args.workers, args.threads, args.seeds) < 1:
        stop("--workers, --threads and --seeds: 1 or more")
    if args.table and args.harvest:
        stop("--harvest: not with --table; take the folders in first")
    if args.dry_run and args.harvest:
        stop("--harvest: not with --dry-run; it takes the folders in")
    match = {name: ALL if name == "all" else fnmatch.filter(STUDIES, name) for name in args.names}
    names = list(dict.fromkeys(name for these in match.values() for name in these))
    folders = list(run_folders(name for name, these in match.items() if not these)) if args.table else []
    for name in () if args.table else (name for name in match if not match[name]):
        stop(f"{name}: no such study; --list names them")
    if not args.harvest and not names and not folders:
        stop("name a study, or all; --list names them")
    if args.table and names and not (args.results / "runs.csv").is_file():
        stop(f"--results {args.results}: has no runs.csv")
    if args.table:
        return tables(names, folders, args)
    ids = wanted(args.results)
    harvest(ids, args)
    return dry_run(names, ids, args) if args.dry_run else play(names, ids, args) if names else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ModuleNotFoundError as error:        # numpy, torch; what results/ holds is shown without it
        stop(f"{error}; pip install -r requirements.txt")
    except BrokenPipeError:         # the reader of the output has gone: end quietly, as other tools do
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        stop(f"{error.filename}: {error.strerror}")
