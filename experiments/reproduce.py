"""The paper's settings and this project's studies: which runs they want, how to play them, their tables.

    reproduce.py --list                             the studies
    reproduce.py form --dry-run                     the runs that a study still wants, and how long they take
    reproduce.py form --workers 2                   plays them; after Ctrl-C the same command goes on
    reproduce.py form --table                       a table from results/ alone, beside the paper's numbers
    reproduce.py form --table --minus scaffold      with the differences to another row
    reproduce.py runs/* --table --target 97         a table of run folders of your own
    reproduce.py --harvest runs --version 4300aab   takes run folders into results/
    reproduce.py --tables                           writes results/tables.md: every table

NAME is a study, a pattern ('form*'), all, or the beginning of several names (kappa for kappa-100, kappa-500,
...). studies.py has the studies, records.py says by what a run is known, tables.py makes the tables.
A run that serves two studies is played once. Let one process at a time play.
"""

import argparse
import contextlib
import ctypes
import fnmatch
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from records import (  # noqa: E402, F401     figures.py takes the rest
    keep, measured, missing, pairs, paper, reached, read_csv, resolve, row_of, run_folders, stop, untuned,
    write, write_csv)
from studies import ALL, STUDIES  # noqa: E402
from tables import INTRO, entries_of, entries_of_folders, provenance, sections, table  # noqa: E402

# ---- runs --------------------------------------------------------------------------------------------------

def dry_run(names, args):
    """Say what is missing, and how long it takes."""
    rows, paces, planned, total = measured(args.results), {}, {}, 0

    def like(flags):
        its = pairs(flags)
        return tuple(its.get(x) for x in ("dataset", "num-clients", "participation", "local-epochs"))
    for (flags, _), its in rows.items():
        seconds = [float(row["seconds_per_round"]) for row in its.values() if row["seconds_per_round"]]
        paces[like(flags)] = paces.get(like(flags), []) + seconds
    for name, label, flags, *key in missing(names, rows, args.seeds):
        rounds, pace = rounds_to_play(STUDIES[name], flags, rows.get(key[0], {})), paces.get(like(flags))
        before = planned.get(tuple(key), 0)         # what a study above has played by then
        hours = max(0, rounds - before) * (mean(pace) if pace else guess(resolve(flags))) / 3600
        planned[tuple(key)], total = max(rounds, before), total + hours
        print(f"{name:18} {label:60} seed {key[1]:3} {hours:5.2f} h" + " (see above)" * (before >= rounds))
    for name in names:
        if waiting := untuned(name, rows):
            print(f"{name:18} waits for {STUDIES[name]['tuning']}: {'; '.join(waiting)}")
    print(f"{len(planned)} runs, {total:.1f} h of one core, {total / args.workers:.1f} h with --workers "
          f"{args.workers}. Assumed where unmeasured: 1.5 s a round of MNIST at 15 %, 60 rounds to a target")


def rounds_to_play(s, flags, its):
    """Of a run of a study; to a target those of the row's other seeds, if there are any."""
    if s["limit"] or not s["to"]:
        return s["limit"] or int(pairs(flags).get("rounds") or resolve(flags)["rounds"])
    met = [reached(row, s["to"]) for row in its.values()]
    return mean([t for t in met if t] or [60])


def guess(settings):
    """Seconds a round."""
    scale = 11 if settings["model"] == "cnn" else 1
    return 10 * settings["participation"] * settings["local_epochs"] / 5 * scale


def command(task, args):
    """The call of run.py that plays the task."""
    s, flags = STUDIES[task[0]], task[2]
    flags += f" --stop-at-target --target-acc {s['to']}" if s["to"] else ""
    flags += f" --stop-after {s['limit']}" if s["limit"] else ""
    words = [f"{args.data_dir}/{x}" if x.endswith(".npz") else x for x in flags.split()]
    return [sys.executable, str(HERE.parent / "run.py"), *words, "--seed", str(task[4]),
            "--out", str(args.out), "--data-dir", str(args.data_dir)]


def start(words):
    """A process, on one thread, that ends when this one does, and the file of its output."""
    parent, linux = os.getpid(), sys.platform == "linux"
    library = ctypes.CDLL(None) if linux else None

    def end_with_parent():          # after a kill, too; elsewhere after the signals alone that are passed on
        library.prctl(1, signal.SIGTERM)            # PR_SET_PDEATHSIG
        if os.getppid() != parent:                  # it died before that
            os._exit(1)
    output, env = tempfile.TemporaryFile("w+", errors="replace"), os.environ | {"OMP_NUM_THREADS": "1"}
    # in a session of its own: a terminal's Ctrl-C reaches it once, through us
    process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True, env=env,
                               preexec_fn=end_with_parent if linux else None)
    return process, output


def finish(process, output, task, args):
    """Keep the result of a task's process and say it; 1 if there is none."""
    where = f"{task[0]}: {task[1]} seed {task[4]}"
    if process.returncode not in (0, 3):        # 3: diverged, which is a result
        output.seek(0)
        last = (output.read().strip().splitlines() or ["no output"])[-1]
        ours = process.returncode in (128 + signal.SIGTERM, -signal.SIGTERM)
        print(f"{where}: {'stopped' if ours else f'exit code {process.returncode}: {last}'}", file=sys.stderr)
        return int(not ours)
    wanted, found = resolve(task[2]) | {"seed": task[4]}, []
    for config in args.out.glob(f"*-seed{task[4]}-*/config.json"):
        with contextlib.suppress(OSError, ValueError, LookupError):         # another run's folder
            settings = json.loads(config.read_text("utf-8"))["settings"]
            if all(settings[name] == value for name, value in wanted.items()):
                found.append(row_of(config.parent, STUDIES[task[0]]["targets"])[:2])
    if not found:
        print(f"{where}: no folder in {args.out} has its settings", file=sys.stderr)
        return 1
    row, curve = max(found, key=lambda pair: int(pair[0]["played"]))
    keep(args.results, row, curve)
    other = row["contents"] != task[3][1]
    print(f"{where}: {row['played']} rounds, last {row['last']} %, to {row['to_targets']}"
          + "; not the study's data: its contents differ" * other, flush=True)
    return int(other)


def play(names, args):
    """Play what is missing, args.workers runs at once. A signal ends them after a round, a second one at
    once. Whatever ends this process ends them."""
    running, tried, signals, failed = {}, set(), [], 0

    def forward(signum, frame):
        signals.append(signum)
        for process in running:
            process.terminate()
    for signum in (getattr(signal, x, None) for x in ("SIGINT", "SIGTERM", "SIGHUP")):
        if signum and signal.getsignal(signum) is not signal.SIG_IGN:       # nohup ignores SIGHUP
            signal.signal(signum, forward)
    try:
        while True:
            if not signals and len(running) < args.workers:
                busy = {task[3:] for _, task in running.values()}
                left = missing(names, measured(args.results), args.seeds)
                if task := next((x for x in left if x not in tried and x[3:] not in busy), None):
                    tried.add(task)
                    process, output = start(command(task, args))
                    running[process] = output, task
                    if signals:             # since the process began
                        process.terminate()
                    continue
            if not running:
                return 128 + signals[0] if signals else failed
            time.sleep(0.2)
            for process in [process for process in running if process.poll() is not None]:
                failed |= finish(process, *running.pop(process), args)
    finally:
        for process in running:
            process.terminate()
            process.wait()


# ---- start -------------------------------------------------------------------------------------------------

def print_tables(names, folders, args):
    of_folders = entries_of_folders(folders, args.target)
    if args.minus:
        labels = {label for name in names for label, *_ in entries_of(name, args.results)} | {
            label for entries in of_folders.values() for label, *_ in entries.values()}
        if not any(label.startswith(args.minus) for label in labels):
            stop(f"--minus {args.minus}: no such row; use one of {', '.join(sorted(labels))}")
    lines, rows = [], []
    for (setting, goal), entries in of_folders.items():
        lines += table(setting, list(entries.values()), args.target or [goal], True, args.minus or "feddc")
        rows += [row for _, _, its, _ in entries.values() for row in its.values()]
    lines += provenance(rows) if rows else []
    print("\n".join(lines + (sections(names, args) if names else [])))


def harvest(args):
    """Take finished run folders into the results, after a look at all of them."""
    limits = {}
    for name, _, _, key, _ in missing(ALL, {}):
        limits.setdefault(key, set()).add(STUDIES[name]["limit"] or math.inf)
    for folder, (row, curve, *_) in [(x, row_of(x, version=args.version)) for x in run_folders(args.harvest)]:
        what = f"{row['flags']} seed {row['seed']}, {row['played']} rounds"
        enough = min(limits.get((row["flags"], row["contents"]), {math.inf})) <= int(row["played"])
        if row["end"] == "stopped" and not enough:
            print(f"{folder.name}: left out, unfinished: {what}")
        else:
            told = "taken in" if keep(args.results, row, curve) else "there already"
            print(f"{folder.name}: {told}: {what}")


def find(name):
    """The studies of a name, a pattern, or the beginning of several names."""
    if name == "all":
        return ALL
    return fnmatch.filter(STUDIES, name) or [x for x in STUDIES if x.startswith(f"{name}-")]


def main(argv=None):
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")        # a terminal without ± shows ?
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error, add = stop, parser.add_argument
    add("names", nargs="*", metavar="NAME", help="studies; with --table also run folders")
    add("--list", action="store_true", help="the studies")
    add("--table", action="store_true", help="print the tables of what is measured")
    add("--tables", action="store_true", help="write all of them into tables.md, beside runs.csv")
    add("--dry-run", action="store_true", help="say what is missing")
    add("--harvest", nargs="+", default=[], metavar="FOLDER",
        help="take run folders, or folders of them, into the results")
    add("--target", type=float, nargs="+", default=[], help="--table: rounds to these accuracies, percent")
    add("--minus", help="--table: the row that others are compared with (by study; feddc)")
    add("--version", default="unknown", help="--harvest: of the code, where a folder does not say it")
    add("--seeds", type=int, default=math.inf, help="the first so many of a study's seeds (all)")
    add("--workers", type=int, default=1, help="runs at once, one thread each (1)")
    add("--data-dir", type=os.path.expanduser, default="data", help="folder of the data sets (data)")
    folder = lambda text: Path(text).expanduser()       # noqa: E731
    add("--out", type=folder, default=Path("runs"), help="folder of the runs (runs)")
    add("--results", type=folder, default=HERE / "results", help="folder of runs.csv and curves/")
    args = parser.parse_args(argv)
    if args.list:
        for name, s in STUDIES.items():
            print(f"{name:18} {len(s['variants']) or len(s['choices']):2} rows, {len(s['seeds']):2} seeds: "
                  f"{s['title']}")
        return 0
    if min(args.workers, args.seeds) < 1:
        stop("--workers and --seeds: 1 or more")
    if args.table + args.tables + args.dry_run + bool(args.harvest) > 1:
        stop("--table, --tables, --dry-run, --harvest: one at a time")
    match = {name: find(name) for name in args.names}
    names = list(dict.fromkeys(name for these in match.values() for name in these))
    unknown = [name for name, these in match.items() if not these]
    folders = list(run_folders(unknown)) if args.table else []
    for name in () if args.table else unknown:
        stop(f"{name}: no such study; --list names them")
    if not args.harvest and not args.tables and not names and not folders:
        stop("name a study, or all; --list names them")
    if (args.tables or args.table and names) and not (args.results / "runs.csv").is_file():
        stop(f"--results {args.results}: has no runs.csv")
    if args.tables:
        return write(args.results / "tables.md", "\n".join([INTRO, *sections(ALL, args)]))
    if args.table:
        return print_tables(names, folders, args)
    if args.harvest:
        return harvest(args)
    return dry_run(names, args) if args.dry_run else play(names, args)


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
