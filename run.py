"""Run FedSSG and the methods it is compared with.

    python run.py --algo fedssg --dataset mnist                     the paper's setting
    python run.py --algo fedavg feddc fedssg --dataset synthetic    three methods, one table, no download
    torchrun --nproc-per-node 2 run.py --algo fedssg                clients spread over processes

To read this file, follow main -> plan_runs -> play -> simulate -> play_round -> plan_round. `args` is the
command line, with every preset filled in. `settings` is the part of it that changes a run's numbers. A hash
of the settings ends the name of the run's folder, so the same command finds its run again and goes on.

A run is one dict, and checkpoint.pt is that dict: dict(settings={...}, log=[row, ...], state={"omega": ...},
commits=[...]). The other files of its folder are printouts: written, never read.

Columns of log.csv, a row a round:
    round, seconds          counted from 1; what the round took, with its evaluation
    test_acc, test_loss     of omega on the test set: percent, mean loss; empty where it was not evaluated
    train_loss              mean loss of the cohort's mini-batches
    gate, h_norm, gain      means over the cohort: phi_i; ||h_i||; phi_i eta_t K_i alpha_i. With the memory on
                            the server ||h||; p phi_i kappa

Exit codes: 0 done; 1 a file or the network fails; 2 bad input; 3 a run diverged, and the others were played;
129, 130, 143 ended by SIGHUP, Ctrl-C, SIGTERM after a checkpoint; 141 nobody reads the output any more.
torchrun makes 1 of them all. It kills its processes 30 seconds after Ctrl-C: where a round takes longer, set
--shutdown-timeout, if your torchrun has it. Else what was played since the last checkpoint is played again.
"""

import argparse
import contextlib
import copy
import ctypes
import functools
import hashlib
import inspect
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Literal, get_args, get_origin

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import data
import models
from baselines import ALGORITHMS
from fedssg import FORMS, Round, as_function, check_strength, flatten, local_sgd, parts, total, trainable

# What the paper sets by data set; others take MNIST's settings. A table by number of clients is read at the
# nearest number. alpha is one value, or one each for IID, Dirichlet 0.3 and Dirichlet 0.6.
MNIST = dict(model="fcn", hidden=[200, 200], participation=0.15, rounds={100: 300}, target_acc=97.0,
             augment=False)
CIFAR = dict(MNIST, model="cnn", participation=0.1, rounds={100: 1000, 500: 1500}, augment=True)
PRESETS = dict(
    mnist=MNIST, cifar10=dict(CIFAR, target_acc=80.0), cifar100=dict(CIFAR, target_acc=42.0),
    emnist=dict(MNIST, hidden=[100], rounds={100: 300, 500: 600}, target_acc=93.0))
ALPHA = {
    "fedssg": dict(mnist={100: (0.03, 0.05, 0.04)}, emnist={100: (0.05, 0.06, 0.06), 500: (0.7, 0.6, 0.6)},
                   cifar10={100: 0.05, 500: 0.2}, cifar100={100: 0.02, 500: 0.2}),
    "feddc": dict(mnist={100: 0.1}, emnist={100: 0.1, 500: 0.2},
                  cifar10={100: 0.01, 500: 0.05}, cifar100={100: 0.01, 500: 0.05})}
WEIGHT_DECAY = {"fedprox": 1e-5}        # every other method 1e-3
# Settings change a run's numbers, and its folder with them. So do the methods' hyper-parameters. Every other
# flag changes at most a run's rounding, where it ends, where it is kept, or how often the program asks.
SETTINGS = {"form", "dataset", "letters", "augment", "model", "hidden", "num_clients", "participation",
            "sampling", "partition", "dir_alpha", "unbalanced_sigma", "min_samples", "shards", "rounds",
            "local_epochs", "batch_size", "lr", "lr_decay", "weight_decay", "clip", "eval_every", "precision"}
COLUMNS = ("round", "test_acc", "test_loss", "train_loss", "gate", "h_norm", "gain", "seconds")
# Flags that count only if another has one of these values.
NEEDS = dict(
    letters=("dataset", ["emnist"]), hidden=("model", ["fcn"]), shards=("partition", ["shards"]),
    dir_alpha=("partition", ["dirichlet", "dirichlet-class"]),
    unbalanced_sigma=("partition", ["iid", "dirichlet"]))


@dataclass(frozen=True)
class Federation:
    """What does not change during a run."""
    X: Tensor               # (n, ...) training samples
    Y: Tensor               # (n,) their labels
    X_test: Tensor          # the test set, likewise
    Y_test: Tensor
    shares: list            # of N arrays: each client's samples, as indices of X
    counts: np.ndarray      # (N, classes) each client's label counts
    model: nn.Module        # its weights are a scratch pad; its shapes count
    omega: Tensor           # (d,) the first parameters
    device: torch.device    # this process's
    rank: int               # this process, from 0
    W: int                  # how many processes there are


# ---- a run -------------------------------------------------------------------------------------------------

def federate(settings, dataset, device):
    """Deal the data out to the clients and build the model."""
    X, Y, X_test, Y_test, classes = dataset
    if settings["augment"] and X.dim() != 4:
        raise ValueError("--augment: flips and shifts need images; use --augment none")
    labels, seed = Y.cpu().numpy(), settings["seed"]
    options = {name: settings[name] for name in ("dir_alpha", "unbalanced_sigma", "min_samples", "shards")}
    shares = data.partition(labels, settings["num_clients"], settings["partition"], seed, **options)
    counts = np.stack([np.bincount(labels[share], minlength=classes) for share in shares])
    model = models.build(settings["model"], X.shape[1:], classes, settings.get("hidden", ()),
                         int(data.rng(seed, "model").integers(2 ** 63))).to(device)
    models.check(model, X)
    rank, W = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return Federation(X, Y, X_test, Y_test, shares, counts, model, flatten(model), device, rank, W)


def simulate(run, fed, args, signals):
    """Play what is left of a run; returns its summary. The rest lies in the run's folder."""
    settings, log, folder = run["settings"], run["log"], folder_of(run["settings"], args)
    # Copied, so that nothing of the loaded file stays mapped. Of rows a process keeps its own clients'.
    state = run["state"] = {
        name: (x[fed.rank::fed.W] if name.endswith("_i") else x).to(fed.device, copy=True)
        for name, x in run["state"].items()}
    saved, warned = time.perf_counter(), set()
    if fed.rank == 0:
        announce(folder, run, fed, args, warned)
    while not done(log, args):
        row, largest = play_round(settings, fed, state, len(log) + 1, args)
        log.append(row)
        # the signal to end by (0: none), and whether a save is due
        word = [max(signals, default=0), time.perf_counter() - saved >= args.checkpoint_every]
        if fed.W > 1:
            dist.broadcast_object_list(word)        # rank 0's counts
        signum, due = word
        if signum or due or done(log, args):        # before anything is printed: the terminal may have gone
            save(folder, run, fed, args, warned)
            saved = time.perf_counter()
        if fed.rank == 0:
            progress(settings, log, args)
            warn(settings, log, largest, fed, warned)
        if signum:
            command = "the same command" + " without --overwrite" * args.overwrite
            stop(128 + signum, f"interrupted after round {len(log)}; {command} goes on")
    return summarise(log, args.target_acc)


def play_round(settings, fed, s, t, args):
    """Round t: plan, train, let the method update s, evaluate.
    Returns the row of the log, and of what the method returns the largest among the cohort: {name: value}."""
    began, losses, method = time.perf_counter(), [], ALGORITHMS[settings["algo"]]
    r, batches = plan_round(settings, fed, t, s["omega"].dtype)

    def train(rho, b):
        theta_i, loss_i = local_sgd(
            fed.model, s["omega"], rho, b, fed.X, fed.Y, lr=r.lr, weight_decay=settings["weight_decay"],
            clip=settings["clip"], mode=args.mode, chunk=args.chunk, compiled=args.compile,
            precision=settings["precision"], **batches)
        losses.append(loss_i)
        return theta_i
    values = method(s, r, train, **settings["hyper"])                           # {name: (m,)}

    *sums, loss, steps = total(*values.values(), losses[0], r.K_i)
    numbers = {name: x / r.m for name, x in zip(values, sums)} | {"train_loss": loss / steps}
    if t % settings["eval_every"] == 0 or t == r.T:
        X, Y = (x[fed.rank::fed.W] for x in (fed.X_test, fed.Y_test))
        tests = evaluate(fed.model, s["omega"], X, Y, precision=settings["precision"])
        numbers["test_acc"], numbers["test_loss"] = tests
    largest = maxima(values)
    floats = torch.stack([*numbers.values(), *largest.values()]).tolist()       # the host waits here alone
    row = dict.fromkeys(COLUMNS) | dict(zip(numbers, floats), round=t, seconds=time.perf_counter() - began)
    return row, dict(zip(largest, floats[len(numbers):]))


def plan_round(settings, fed, t, dtype):
    """Round t for this process: its Round, and the mini-batches as local_sgd takes them."""
    seed, N, p = settings["seed"], settings["num_clients"], settings["participation"]
    cohort = data.sample_clients(N, p, settings["sampling"], seed, t)
    mine = cohort[cohort % fed.W == fed.rank]       # client i and its rows live on rank i mod W
    idx, w, K_i = data.schedule(fed.shares, mine, seed, t, settings["local_epochs"], settings["batch_size"])

    def tensor(x, dtype=dtype):
        return torch.as_tensor(np.asarray(x), device=fed.device).to(dtype)
    batches = dict(idx=tensor(idx, torch.int64), w=tensor(w))
    if settings["augment"]:
        draws = data.augment_draws(mine, K_i, w, seed, t)
        batches.update(augment=data.augment, draws=tensor(draws, torch.int64))
    n = fed.counts.sum(axis=1)
    return Round(
        t=t, T=settings["rounds"], N=N, m=len(cohort), p=data.rate_in_force(N, p, settings["sampling"]),
        lr=settings["lr"] * settings["lr_decay"] ** (t - 1), lr0=settings["lr"],
        num_rows=len(range(fed.rank, N, fed.W)), i=tensor(mine // fed.W, torch.int64), K_i=tensor(K_i),
        n_i=tensor(n[mine]), size_i=tensor(n[mine] / n.mean()), labels_i=tensor(fed.counts[mine])), batches


def maxima(values):
    """The largest of each (m,) tensor among the clients of all processes; 0 if nobody has any."""
    largest = {name: x.max() if len(x) else x.new_zeros(()) for name, x in values.items()}
    if largest and dist.is_initialized():
        flat = torch.stack([*largest.values()])
        dist.all_reduce(flat, dist.ReduceOp.MAX)
        largest = dict(zip(largest, flat))
    return largest


@torch.no_grad()
def evaluate(model, theta, X, Y, batch=None, precision="float32"):
    """Accuracy (%, float64) and mean loss of the model theta (d,), in eval mode, on all processes' (X, Y)."""
    batch = batch or (2000 if X.is_cuda else 250)       # on a CPU the CNN is faster so
    predict = as_function(copy.deepcopy(model).eval(), precision)       # the caller's stays in its mode
    out = torch.cat([predict(theta, x) for x in X.split(batch)])                        # (n, classes)
    loss_i = torch.nn.functional.cross_entropy(out, Y, reduction="none")
    right_i = (out.argmax(dim=1) == Y).double()         # a float32 has no 82.2
    loss, right, n = total(loss_i, right_i, torch.ones_like(right_i))
    return 100 * right / n, (loss / n).to(loss.dtype)


def diverged(log):
    return bool(log) and not all(math.isfinite(x) for x in log[-1].values() if x is not None)


def done(log, args):
    """Whether a run with this log has nothing left to do: it is at its end, at its target, or diverged."""
    at_target = args.stop_at_target and summarise(log, args.target_acc)["rounds_to_target"]
    return len(log) >= min(args.rounds, args.stop_after) or at_target or diverged(log)


def summarise(log, target):
    """What summary.json says of the log: accuracies in percent, over the evaluated rounds."""
    tests = {row["round"]: row["test_acc"] for row in log if row["test_acc"] is not None}
    accs, seconds = list(tests.values()), [row["seconds"] for row in log]
    return dict(
        round=len(log), diverged=len(log) if diverged(log) else None, evaluations=len(accs),
        last=accs[-1] if accs else None, best=max(accs, default=None),
        last50_mean=float(np.mean(accs[-50:])) if accs else None,
        last50_std=float(np.std(accs[-50:])) if accs else None, target_acc=target,
        rounds_to_target=next((t for t, acc in tests.items() if acc >= target), None),
        seconds_per_round=float(np.mean(seconds)) if log else None)


# ---- its folder --------------------------------------------------------------------------------------------

def folder_of(settings, args):
    """The run's folder; its name ends in a hash of the settings."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    form = settings.get("form", "stable")
    form = "" if form == "stable" else f"-{form}"       # its folders are older than the other forms'
    name = f"{Path(settings['dataset']).stem}-{settings['algo']}{form}-seed{settings['seed']}-{digest}"
    return Path(args.out) / name


def load(folder, settings, fed, args):
    """The run in checkpoint.pt, its tensors mapped from the file; a new run if there is none."""
    path = folder / "checkpoint.pt"
    if args.overwrite or not path.exists():
        return dict(settings=settings, log=[], state={"omega": fed.omega}, commits=[])
    try:
        with zipfile.ZipFile(path) as file:     # torch.load looks at no checksum
            if file.testzip():
                raise ValueError("a checksum is wrong")
        run = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        its = run["settings"]
        for name in settings | its:
            if its.get(name) != settings.get(name):
                raise ValueError(f"its run has {name} {its.get(name)}, not {settings.get(name)}")
        run["state"]["omega"], summarise(run["log"], 0)         # all there?
    except Exception as error:      # torch raises many kinds for what it cannot load
        why = shorten(f"{type(error).__name__}: {error}", 120)
        stop(1, f"{path}: cannot go on from this file ({why}); use another --out")
    return {"commits": [None]} | run        # older runs do not say


def save(folder, run, fed, args, warned):
    """checkpoint.pt, then the printouts, by rank 0. Of a run with no round left, omega alone is kept."""
    state, log = run["state"], run["log"]
    if len(log) == args.rounds or diverged(log):
        state = {"omega": state["omega"]}
    elif fed.W > 1:
        mine = {name: x.cpu() for name, x in state.items() if name.endswith("_i")}
        everyones = [None] * fed.W if fed.rank == 0 else None
        dist.gather_object(mine, everyones)
        order = torch.cat([torch.arange(rank, len(fed.counts), fed.W) for rank in range(fed.W)]).argsort()
        if fed.rank == 0:
            state = state | {name: torch.cat([rows[name] for rows in everyones])[order] for name in mine}
    if fed.rank == 0:
        write(folder / "checkpoint.pt", run | {"state": state})
        print_out(folder, run, fed, args, warned)


def print_out(folder, run, fed, args, warned):
    """Write config.json, summary.json, log.csv and model.pt anew. A run goes on without them."""
    config = dict(settings=run["settings"], commits=run["commits"], device=str(fed.device), processes=fed.W,
                  torch=torch.__version__, numpy=np.__version__, python=sys.version.split()[0])
    lines = [",".join("" if row[name] is None else str(row[name]) for name in COLUMNS) for row in run["log"]]
    params = trainable(fed.model)
    for p, part in zip(params, parts(params, run["state"]["omega"])):
        p.data.copy_(part)
    printouts = {
        "config.json": json.dumps(config, indent=1),
        "summary.json": json.dumps(summarise(run["log"], args.target_acc), indent=1),
        "log.csv": "\n".join([",".join(COLUMNS), *lines]),
        "model.pt": {name: x.cpu() for name, x in fed.model.state_dict().items()}}
    for name, content in printouts.items():
        try:
            write(folder / name, content)
        except (OSError, RuntimeError) as error:        # a full disk, for torch.save, is a RuntimeError
            warn_once(warned, "printouts", f"{folder / name}: {error}; the run goes on without it")


def write(path, content):
    """Write text, or anything else by torch.save, whole or not at all: to a temporary name, then renamed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            if isinstance(content, str):
                file.write(f"{content}\n".encode())
            else:
                torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):      # of a disk that cannot be written to
            temporary.unlink(missing_ok=True)


@functools.cache        # of the start: the files may change while it runs
def commit():
    """The commit of this program, with + if files differ from it; None where git cannot tell."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty=+", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, UnicodeError):
        return subprocess.run(command, cwd=Path(__file__).resolve().parent, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, check=True, timeout=5).stdout.strip()


# ---- what the user sees ------------------------------------------------------------------------------------

def announce(folder, run, fed, args, warned):
    """Say what is about to be played, or that nothing is left; write the printouts anew."""
    settings, log, n = run["settings"], run["log"], fed.counts.sum(axis=1)
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("*.tmp"):       # by a kill, unless another process is just writing it
        if time.time() - left.stat().st_mtime > 60:
            left.unlink(missing_ok=True)
    if done(log, args):
        print(f"{folder}: {'diverged' if diverged(log) else 'finished'} at round {len(log)}, nothing to do")
    else:
        run["commits"] = list(dict.fromkeys([*run["commits"], commit()]))
        if log:
            print(f"{folder}: goes on at round {len(log) + 1}")
    hyper = ", ".join(f"{name} {value}" for name, value in settings["hyper"].items()) or "no hyper-parameters"
    form = f" {settings['form']}" if "form" in settings else ""
    print(f"{settings['algo']}{form} seed {settings['seed']}: {hyper}; {len(n)} clients of {n.min()} to "
          f"{n.max()} samples; {len(fed.omega)} parameters on {fed.device}; results in {folder}", flush=True)
    print_out(folder, run, fed, args, warned)


def progress(settings, log, args):
    """One line a round; on a terminal it overwrites the last, and fits the width."""
    row, until = log[-1], min(args.rounds, args.stop_after)
    names = dict(test="test_acc", loss="test_loss", train="train_loss", gate="gate", h="h_norm")
    values = "  ".join(f"{name} {row[key]:.4g}" for name, key in names.items() if row[key] is not None)
    minutes = (until - len(log)) * np.mean([row["seconds"] for row in log[-20:]]) / 60
    line = (f"{settings['algo']} seed {settings['seed']}  round {len(log)}/{until}  {values}  "
            f"{row['seconds']:.2f} s/round  {minutes:.0f} min left")
    if sys.stdout is None or not sys.stdout.isatty():
        print(line, flush=True)
    else:
        width = shutil.get_terminal_size().columns
        print(f"{line[:width - 1]}\033[K", end="\n" if done(log, args) else "\r", flush=True)


def warn(settings, log, largest, fed, warned):
    """Say once what grows without bound (see fedssg's docstring), that nothing is learnt, or divergence."""
    hyper, where = settings["hyper"], f"{settings['algo']} seed {settings['seed']} round {len(log)}"
    gain = largest.get("gain", 0)
    limit = 1 if (hyper.get("alignment"), hyper.get("correction")) == ("inner", "plain") else 2
    if gain > limit:
        what, cure = ("phi kappa", "--kappa") if "kappa" in hyper else ("phi eta K alpha", "--alpha or --lr")
        what = f"p {what}" if hyper["alignment"] == "server" else what
        warn_once(warned, "gain", f"{where}: the gain {what} is {gain:.3g}, above {limit}; lower {cure}")
    growth = gain + largest.get("gate", 0) * settings["lr_decay"] ** (len(log) - 1)
    if hyper.get("correction") == "state" and growth > 2:
        warn_once(warned, "growth", f"{where}: phi (eta_t K alpha + eta_t / eta_0) is {growth:.3g}, above 2; "
                  "use --correction plain, as --form stable does")
    guess = math.log(max(fed.counts.shape[1], 2))
    if len(log) >= 10 and min(row["train_loss"] for row in log[-10:]) > 2 * guess:
        cure = "use --correction plain" if hyper.get("correction") == "last" else "lower --lr"
        warn_once(warned, "loss", f"{where}: nothing is learnt: the train loss of ten rounds is above twice "
                  f"ln(classes), {2 * guess:.3g}; {cure}")
    if diverged(log):
        warn_once(warned, "end", f"{where}: diverged; lower --lr, or what a warning above names")


def warn_once(warned, what, message):
    """Print a warning, if this is the first about `what` that the set `warned` knows of."""
    if what not in warned:
        print(f"warning: {message}", file=sys.stderr)
    warned.add(what)


def table(results, args):
    """A line for each method. Rounds are a mean over the seeds that got there. The speed-up is over the first
    method, if every seed of both got there: a part of them would flatter."""
    to_target = f"rounds to {args.target_acc:g} %"
    print(f"\n{'method':10}{'last 50 (%)':>16}{to_target:>20}{'speed-up':>10}{'s/round':>9}")
    first = [run["rounds_to_target"] for run in next(iter(results.values()))]
    for algo, runs in results.items():
        met = [run["rounds_to_target"] for run in runs if run["rounds_to_target"]]
        rounds = f"{np.mean(met):.4g}" if met else "-"
        if 0 < len(met) < len(runs):
            rounds += f" ({len(met)} of {len(runs)})"
        speed_up = f"{np.mean(first) / np.mean(met):.2f}x" if all(first) and len(met) == len(runs) else "-"
        seconds = np.mean([run["seconds_per_round"] for run in runs])
        print(f"{algo:10}{accuracy(runs):>16}{rounds:>20}{speed_up:>10}{seconds:9.2f}", flush=True)


def accuracy(runs):
    """Mean ± sample std over the seeds, or of one seed ± std over its last 50 evaluations."""
    if any(run["diverged"] for run in runs):
        return "diverged"
    if not all(run["evaluations"] for run in runs):
        return "-"
    if any(run["evaluations"] < 50 for run in runs):
        return f"{np.mean([run['last'] for run in runs]):.2f} (last)"
    means = [run["last50_mean"] for run in runs]
    spread = np.std(means, ddof=1) if len(runs) > 1 else runs[0]["last50_std"]
    return f"{np.mean(means):.2f} ± {spread:.2f}"


# ---- flags -------------------------------------------------------------------------------------------------

def number(kind, low, high=10 ** 9):
    """An argparse type: int or float in [low, high]."""
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            what = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text.strip()!r} is not {what} from {low:g} to {high:g}")
        return value
    return parse


def hyper_parameters():
    """The methods' keyword parameters, by inspection: {name: {method: inspect.Parameter}}."""
    found = {}
    for algo, method in ALGORITHMS.items():
        for name, p in inspect.signature(method).parameters.items():
            if p.kind is p.KEYWORD_ONLY:
                found.setdefault(name, {})[algo] = p
    return found


def flag_parser():
    parser = argparse.ArgumentParser(
        prog="run.py", allow_abbrev=False, description="Run FedSSG and the methods it is compared with.",
        epilog="Columns of log.csv and exit codes: see the head of run.py.",
        argument_default=argparse.SUPPRESS, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: stop(2, message)
    positive, count, share = number(float, 1e-9), number(int, 1), number(float, 1e-9, 1)
    add, yes = parser.add_argument, dict(action="store_true", default=False)
    add("--algo", nargs="+", choices=[*ALGORITHMS, "all"], default=["fedssg"], metavar="METHOD",
        help=f"one or more of {', '.join(ALGORITHMS)}, all")
    add("--form", choices=FORMS, help="which FedSSG, see the README (default: scaled; with --alpha stable)")
    add("--dataset", default="mnist", help=f"{', '.join(data.DATASETS)}, or a file of your own (.npz)")
    add("--like", choices=PRESETS, help="take the settings of this data set (default: its own, or mnist's)")
    add("--letters", type=number(int, 1, 26), default=10, help="emnist: the first so many letters")
    add("--data-dir", default="data", help="folder of the data sets, in torchvision's layout")
    add("--augment", choices=("auto", "none"), default="auto", help="auto: flips and shifts for CIFAR")
    add("--model", choices=models.MODELS, help="default: by data set")
    add("--hidden", type=number(int, 1, 10 ** 5), nargs="+",
        help="fcn: sizes of the hidden layers (default: by data set)")
    add("--num-clients", type=count, default=100, help="N")
    add("--participation", type=share, help="p (default: by data set)")
    add("--sampling", choices=data.SAMPLINGS, default="fixed",
        help="p N clients a round, or each with probability p")
    add("--partition", choices=data.PARTITIONS, default="dirichlet", help="how data is split, see data.py")
    add("--dir-alpha", type=positive, default=0.3, help="concentration of the Dirichlet partitions")
    add("--unbalanced-sigma", type=number(float, 0), default=0.0, help="iid, dirichlet: log-normal sizes")
    add("--min-samples", type=count, default=1, help="least samples of a client")
    add("--shards", type=count, default=2, help="shards: how many a client gets")
    add("--rounds", type=count, help="T; the gate's horizon depends on it (default: by data set and clients)")
    add("--local-epochs", type=number(int, 1, 10_000), default=5, help="E")
    add("--batch-size", type=count, default=50, help="B")
    add("--lr", type=positive, default=0.1, help="eta")
    add("--lr-decay", type=share, default=0.998, help="a round")
    add("--weight-decay", type=number(float, 0), help="(default: 0.001; fedprox 1e-05)")
    add("--clip", type=positive, default=10.0, help="norm at which a client's gradient is clipped")
    add("--seed", "--seeds", dest="seeds", type=number(int, 0, 2 ** 32 - 1), nargs="+", default=[0],
        help="one or several; a method has a run for each")
    add("--eval-every", type=count, default=1, help="rounds between evaluations on the test set")
    add("--target-acc", type=number(float, 0, 100), help="percent (default: the paper's, by data set)")
    add("--stop-at-target", **yes, help="end a run at the first round that reaches --target-acc")
    add("--stop-after", type=count, help="end after so many rounds; T stays")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="which GPU: CUDA_VISIBLE_DEVICES")
    add("--mode", choices=("auto", "loop", "vmap"), default="auto", help="clients one by one, or at once")
    add("--chunk", type=number(int, 0), default=0, help="vmap: at most so many clients at once; 0: all")
    add("--compile", **yes, help="vmap: compile the step, once a size of cohort; needs a C++ compiler")
    add("--precision", choices=("float32", "tf32", "bf16"), default="float32",
        help="of the model; tf32: CUDA only; bf16: by autocast, fast on GPUs and on CPUs that have it")
    add("--out", default="runs", help="folder of the results; the same command goes on where a run stopped")
    add("--overwrite", **yes, help="begin the runs anew, as after a change of a method's code")
    add("--checkpoint-every", type=number(float, 0), default=60.0, help="seconds; 0: each round")
    group = parser.add_argument_group(
        "hyper-parameters", "Each goes to those of the named methods that have it. --form sets some of "
        "fedssg's, the data set sets alpha of fedssg and feddc; a flag beats both.")
    for name, users in hyper_parameters().items():
        p, options = next(iter(users.values())), dict(type=number(float, 0), metavar="X")
        if get_origin(p.annotation) is Literal:
            options = dict(choices=get_args(p.annotation))
        elif p.default == "auto":
            options["type"] = lambda text: text if text == "auto" else number(float, 0)(text)
        defaults = ", ".join(f"{algo} {'by form and data set' if p.default is None else p.default}"
                             for algo, p in users.items())
        group.add_argument(flag(name), help=f"default: {defaults}", **options)
    return parser


def flag(name):
    return "--" + name.replace("_", "-")


def parse(argv):
    """The flags, with every preset filled in; one line and exit code 2 for what is not accepted."""
    parser = flag_parser()
    # argparse takes -1e-3 for a flag, but no word that begins with a space
    args = parser.parse_args([re.sub(r"^(?=-(\d|\.|inf|nan))", " ", word) for word in argv])
    args.algo = list(ALGORITHMS) if "all" in args.algo else list(dict.fromkeys(args.algo))
    args.seeds, args.out = list(dict.fromkeys(args.seeds)), os.path.expanduser(args.out)
    owners, algos = hyper_parameters(), ", ".join(args.algo)
    args.given = {name: vars(args).pop(name) for name in owners if name in args}
    for name in args.given:
        if not owners[name].keys() & set(args.algo):
            stop(2, f"{flag(name)}: none of {algos} has it; it belongs to {', '.join(owners[name])}")
    if "form" in args and "fedssg" not in args.algo:
        stop(2, f"--form: belongs to fedssg, not to {algos}")
    vars(args).setdefault("form", "stable" if "alpha" in args.given else "scaled")
    asked = [x for x in NEEDS if x in args and vars(args)[x] != parser.get_default(x)]
    fill_in(args)
    for name in asked:
        other, values = NEEDS[name]
        if vars(args)[other] not in values:
            stop(2, f"{flag(name)}: needs --{other} {' or '.join(values)}")
    if "fedssg" in args.algo:
        hyper = settings_for("fedssg", 0, args)["hyper"]
        try:
            check_strength(*(hyper.get(name) for name in ("alpha", "kappa", "alignment", "correction")))
        except ValueError as error:
            stop(2, f"--alpha, --kappa, --alignment, --form: {error}")
        if hyper["alignment"] == "none":
            for name in args.given.keys() & {"alpha", "kappa"}:
                stop(2, f"{flag(name)}: without alignment fedssg has no use for it; run fedssg without it")
    if args.sampling == "bernoulli" and args.participation * args.num_clients < 1e-3:
        stop(2, "--participation: too few for --sampling bernoulli; use 1e-3 / N or more")
    if args.lr * args.lr_decay ** (args.rounds - 1) < 1e-30:
        stop(2, f"--lr-decay {args.lr_decay}: nothing is left of the rate in round {args.rounds}")
    return args


def fill_in(args):
    """What the data set presets, for flags that are not given."""
    vars(args).setdefault("like", args.dataset if args.dataset in PRESETS else "mnist")
    preset = PRESETS[args.like]
    args.augment = args.augment == "auto" and preset["augment"]
    for name, value in preset.items():
        vars(args).setdefault(name, nearest(value, args.num_clients) if name == "rounds" else value)
    vars(args).setdefault("stop_after", args.rounds)


def nearest(by_clients, num_clients):
    """The entry of the listed number of clients that is nearest."""
    return by_clients[min(by_clients, key=lambda n: abs(n - num_clients))]


def settings_for(algo, seed, args):
    """All that makes this run this run. Of hyper-parameters the last counts: default, preset, form, flag."""
    hyper = {name: users[algo].default for name, users in hyper_parameters().items() if algo in users}
    if algo in ALPHA:
        alpha = nearest(ALPHA[algo][args.like], args.num_clients)
        if isinstance(alpha, tuple):
            dirichlet = 1 if args.dir_alpha < 0.45 else 2       # nearer to 0.3, or to 0.6
            alpha = alpha[0 if args.partition == "iid" or args.dir_alpha >= 1 else dirichlet]
        hyper["alpha"] = alpha
    given = {name: value for name, value in args.given.items() if name in hyper}
    hyper |= (FORMS[args.form] if algo == "fedssg" else {}) | given
    if hyper.get("kappa") is not None and "alpha" not in given:
        del hyper["alpha"]          # the preset's
    hyper = {name: value for name, value in hyper.items() if value is not None}
    settings = {"weight_decay": WEIGHT_DECAY.get(algo, 1e-3), "algo": algo, "seed": seed, "hyper": hyper}
    matters = {"form": algo == "fedssg", "hidden": args.model == "fcn", "letters": args.dataset == "emnist"}
    return settings | {name: value for name, value in vars(args).items()
                       if name in SETTINGS and matters.get(name, True)}


def stop(code, message):
    """End the program with one line; of several processes the first says what concerns all."""
    if code == 1 or os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):      # of a terminal that has gone
            print(f"run.py: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


# ---- start -------------------------------------------------------------------------------------------------

def open_device(args):
    """This process's device; under torchrun also its process group."""
    W, cuda = int(os.environ.get("WORLD_SIZE") or 1), args.device != "cpu" and torch.cuda.is_available()
    if args.device == "cuda" and not cuda:
        stop(2, "--device cuda: this machine has no CUDA device that torch can use; use cpu")
    if (args.chunk or args.compile) and (args.mode == "loop" or (args.mode == "auto" and not cuda)):
        stop(2, "--chunk and --compile: work with --mode vmap")
    if args.precision == "tf32" and not cuda:
        stop(2, "--precision tf32: works on CUDA only; use float32 or bf16")
    if W > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    if not cuda:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) if W > 1 else 0)
    torch.cuda.set_device(device)
    torch.backends.cudnn.deterministic = True       # else a resumed run is not the straight one, bit for bit
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.precision == "tf32"
    return device


def load_data(args, device):
    """The data set, and settings that it tells: the contents make an .npz what it is, whatever its path."""
    first = not dist.is_initialized() or os.environ.get("LOCAL_RANK", "0") == "0"
    with warnings.catch_warnings(record=True) as found:
        for turn in (True, False):      # the first process of a machine may have to download
            if turn == first:
                dataset = data.load(args.dataset, args.data_dir, device, letters=args.letters)
            if dist.is_initialized():
                dist.barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        for warning in found:
            print(f"warning: {warning.message}", file=sys.stderr)
    if not args.dataset.endswith(".npz"):
        return dataset, {}
    path = Path(args.dataset).expanduser()
    return dataset, dict(dataset=path.name, contents=hashlib.sha256(path.read_bytes()).hexdigest()[:8])


def plan_runs(args, device):
    """The runs of every method under every seed, [(run, fed), ...], as their folders hold them."""
    dataset, own = load_data(args, device)
    # the methods share a seed's split and first model
    feds = {seed: federate(settings_for(args.algo[0], seed, args), dataset, device) for seed in args.seeds}
    runs = []
    for algo in args.algo:
        for seed, fed in feds.items():
            # a version of numpy that draws otherwise makes another run
            split = hashlib.sha256(np.concatenate([fed.counts.sum(axis=1), *fed.shares]).tobytes())
            settings = settings_for(algo, seed, args) | own | {"split": split.hexdigest()[:8]}
            runs.append((load(folder_of(settings, args), settings, fed, args), fed))
    return runs


def play(runs, args):
    """Play them, and print the table, whatever ends them; returns the exit code."""
    results, rank = {}, runs[0][1].rank
    if args.overwrite and rank == 0:        # all are loaded, so nothing else can be wrong
        for run, _ in runs:
            (folder_of(run["settings"], args) / "checkpoint.pt").unlink(missing_ok=True)
    try:
        with signals_noted() as signals:
            while runs:
                run, fed = runs.pop(0)          # so that its state is given back when it ends
                summary = simulate(run, fed, args, signals)
                results.setdefault(run["settings"]["algo"], []).append(summary)
    finally:
        if results and rank == 0:
            table(results, args)
    return 3 if any(run["diverged"] for its_runs in results.values() for run in its_runs) else 0


@contextlib.contextmanager
def signals_noted():
    """A list of the signals to end by that have come in: a run ends at the end of the round. A second Ctrl-C
    ends at once. A signal that is ignored, as SIGHUP under nohup, stays so. Afterwards all is as before."""
    noted = []

    def note(signum, frame):
        noted.append(signum)
        signal.signal(signum, signal.SIG_DFL)
    kinds = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {kind: signal.signal(kind, note) for kind in kinds if signal.getsignal(kind) != signal.SIG_IGN}
    try:
        yield noted
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def main(argv=None):
    """Play what the command line says; what is not the program's fault ends it with one line."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")        # a terminal without ± shows ?
    with contextlib.suppress(AttributeError, OSError, TypeError):
        # glibc returns blocks above 32 MB, so memory stays flat; it keeps up to 128 MB of others for reuse
        for option, size in ((-3, 32), (-1, 128)):      # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, size * 2 ** 20)
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        code = play(plan_runs(args, open_device(args)), args)
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.exit(code)
    except KeyboardInterrupt:
        stop(130, "interrupted before the first round")
    except ValueError as error:
        stop(2, str(error))
    except BrokenPipeError:         # the reader of the output has gone: end quietly, as other tools do
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        stop(1, f"{error.filename}: {error.strerror}" if error.filename else str(error))


if __name__ == "__main__":
    main()
