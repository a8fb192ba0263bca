"""Run FedSSG and the methods it is compared with.

    python run.py --algo fedssg --dataset mnist                     the paper's setting
    python run.py --algo fedavg feddc fedssg --dataset synthetic    three methods, one table, no download
    torchrun --nproc-per-node 2 run.py --algo fedssg                clients spread over processes
"""

import argparse
import ctypes
import dataclasses
import datetime
import fcntl
import hashlib
import inspect
import json
import math
import os
import platform
import re
import signal
import sys
import time
from pathlib import Path
from typing import Literal, get_args, get_origin

import numpy as np
import torch
import torch.distributed as dist

import data
import models
from baselines import ALGORITHMS
from fedssg import FORMS, Round, flatten, local_sgd, total

# What the paper sets by data set. alpha: method -> {clients: value, or values for (IID, Dirichlet 0.3, Dirichlet 0.6)}.
# Other data take MNIST's settings; a number of clients that is not listed takes the nearest one that is.
PRESETS = {
    "mnist": dict(model="fcn", hidden=[200, 200], participation=0.15, rounds={100: 300}, target_acc=97.0,
                  alpha={"fedssg": {100: (0.03, 0.05, 0.04)}, "feddc": {100: 0.1}}),
    "emnist": dict(model="fcn", hidden=[100], participation=0.15, rounds={100: 300, 500: 600}, target_acc=93.0,
                   alpha={"fedssg": {100: (0.05, 0.06, 0.06), 500: (0.7, 0.6, 0.6)}, "feddc": {100: 0.1, 500: 0.2}}),
    "cifar10": dict(model="cnn", hidden=[200, 200], participation=0.1, rounds={100: 1000, 500: 1500}, target_acc=80.0,
                    alpha={"fedssg": {100: 0.05, 500: 0.2}, "feddc": {100: 0.01, 500: 0.05}}),
    "cifar100": dict(model="cnn", hidden=[200, 200], participation=0.1, rounds={100: 1000, 500: 1500}, target_acc=42.0,
                     alpha={"fedssg": {100: 0.02, 500: 0.2}, "feddc": {100: 0.01, 500: 0.05}}),
}
WEIGHT_DECAY = {"fedprox": 1e-5}        # the paper's; every other method 1e-3
# Vectors of d numbers: (kept for each client, sent down to it, sent up by it) in a round; fedssg by its correction.
# They are only announced; a method that is not listed counts as FedAvg.
VECTORS = {"fedavg": (0, 1, 1), "fedprox": (0, 1, 1), "scaffold": (1, 2, 2), "feddyn": (1, 1, 1), "feddc": (2, 2, 2),
           "fedvra": (1, 1, 1), "feddisco": (1, 1, 1), "state": (2, 2, 2), "last": (2, 2, 1), "none": (1, 1, 1)}
# Flags that change at most the rounding of a run, where it ends, or where it is kept: they do not make it another run.
NOT_SETTINGS = {"algo", "given", "seed", "seeds", "data_dir", "device", "state_device", "mode", "chunk", "no_compile", "out",
                "resume", "stop_after", "stop_at_target", "target_acc", "checkpoint_every", "show_split"}
COLUMNS = ("round", "test_acc", "test_loss", "train_loss", "gate", "h_norm", "seconds")     # of log.csv
LOCKS, INTERRUPTED = [], []             # lock files held open; signals that have come in


# ---- flags ----------------------------------------------------------------------------------------------------

def number(kind, low, high=10 ** 9, low_open=False):
    """An argparse type: int or float in [low, high], or (low, high]."""
    accepted = f"{'(' if low_open else '['}{low}, {high:g}]"

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (low < value if low_open else low <= value) or value > high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {'an integer' if kind is int else 'a number'} in {accepted}")
        return value
    return parse


def number_or_auto(text):
    return text if text == "auto" else number(float, 0)(text)


def hyper_parameters(algo):
    """The method's keyword parameters, by inspection: {name: inspect.Parameter}."""
    return {name: p for name, p in inspect.signature(ALGORITHMS[algo]).parameters.items() if p.kind is p.KEYWORD_ONLY}


def add_hyper_flags(parser):
    group = parser.add_argument_group("hyper-parameters of the methods", "Each goes to those of the named methods that have it; their "
                                      "docstrings say what it does. --form sets some of fedssg's; a flag beats it.")
    flags = {}
    for algo in ALGORITHMS:
        for name, p in hyper_parameters(algo).items():
            flags.setdefault(name, []).append((algo, p))
    for name, users in flags.items():
        annotation = users[0][1].annotation
        default = ", ".join(f"{algo} {p.default}" for algo, p in users)
        options = dict(choices=get_args(annotation)) if get_origin(annotation) is Literal else {}
        if not options:
            options = dict(type=number_or_auto if users[0][1].default == "auto" else number(float, 0), metavar=name.upper())
        preset = "; fedssg and feddc by data set, split and clients" if name == "alpha" else ""
        group.add_argument(flag(name), help=f"default: {default}{preset}", **options)


def flag(name):
    return "--" + name.replace("_", "-")


def parse(argv):
    """Flags to settings, every preset filled in; one line and exit code 2 for what is not accepted."""
    parser = argparse.ArgumentParser(prog="run.py", allow_abbrev=False, description=__doc__.splitlines()[0],
                                     argument_default=argparse.SUPPRESS, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: stop(2, message)
    positive, count = number(float, 0, low_open=True), number(int, 1)
    add = parser.add_argument
    add("--algo", nargs="+", choices=[*ALGORITHMS, "all"], default=["fedssg"], metavar="METHOD",
        help=f"one or more of {', '.join(ALGORITHMS)}, all")
    add("--form", choices=FORMS, default="released", help="which of the paper's three FedSSG algorithms")
    add("--dataset", default="mnist", help=f"{', '.join(data.DATASETS)}, or a file of your own (.npz)")
    add("--letters", type=number(int, 1, 26), default=10, help="emnist: the first so many letters")
    add("--data-dir", default="data", help="folder of the data sets, in torchvision's layout")
    add("--augment", choices=("auto", "none"), default="auto", help="auto: flips and shifts for cifar10 and cifar100")
    add("--model", choices=models.MODELS, help="default: by data set")
    add("--hidden", type=count, nargs="+", help="fcn: sizes of the hidden layers (default: by data set)")
    add("--num-clients", type=count, default=100, help="N")
    add("--participation", type=number(float, 0, 1, True), help="p (default: by data set)")
    add("--sampling", choices=data.SAMPLINGS, default="fixed",
        help="fixed: max(1, round(p N)) clients a round; bernoulli: each with probability p")
    add("--partition", choices=data.PARTITIONS, default="dirichlet",
        help="iid: uniform; dirichlet: equal sizes, each client's labels by a Dirichlet; dirichlet-class: each class spread over "
             "clients by a Dirichlet, unequal sizes; shards: few classes a client")
    add("--dir-alpha", type=positive, default=0.3, help="concentration of the Dirichlet partitions")
    add("--unbalanced-sigma", type=number(float, 0), default=0.0, help="log-normal client sizes (iid, dirichlet)")
    add("--min-samples", type=count, default=1, help="least samples of a client")
    add("--shards", type=count, default=2, help="shards: how many a client gets")
    add("--rounds", type=count, help="T; the gate's horizon depends on it (default: by data set and clients)")
    add("--local-epochs", type=number(int, 1, 10_000), default=5, help="E")
    add("--batch-size", type=count, default=50, help="B")
    add("--lr", type=number(float, 1e-12), default=0.1, help="eta")
    add("--lr-decay", type=number(float, 0, 1, True), default=0.998, help="a round")
    add("--weight-decay", type=number(float, 0), help="(default: 0.001; fedprox 1e-05)")
    add("--clip", type=positive, default=10.0, help="norm at which a client's gradient is clipped")
    add("--seed", type=number(int, 0, 2 ** 32 - 1), help="of all randomness (default: 0)")
    add("--seeds", type=number(int, 0, 2 ** 32 - 1), nargs="+", help="several runs a method; mean and std at the end")
    add("--eval-every", type=count, default=1, help="rounds between evaluations on the test set")
    add("--target-acc", type=number(float, 0, 100), help="percent (default: the paper's, by data set)")
    add("--stop-at-target", action="store_true", default=False, help="end a run at the first round that reaches --target-acc")
    add("--stop-after", type=count, help="end after so many rounds; T stays")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:K")
    add("--mode", choices=("auto", "loop", "vmap"), default="auto",
        help="loop: client after client (CPU); vmap: all at once (CUDA)")
    add("--chunk", type=count, help="vmap: at most so many clients at once")
    add("--no-compile", action="store_true", default=False, help="CUDA: run the batched step as it is, without torch.compile")
    add("--tf32", action="store_true", default=False, help="CUDA: matrix products with 10 bits of mantissa")
    add("--state-device", choices=("auto", "cpu"), default="auto", help="cpu: keep the per-client rows in host memory")
    add("--out", default="runs", help="folder of the results")
    add("--resume", action="store_true", default=False, help="go on with runs that were interrupted")
    add("--checkpoint-every", type=count,
        help="rounds between checkpoints (default: 10, or more where they would take over 4 %% of the time)")
    add("--show-split", action="store_true", default=False, help="print each client's label counts")
    add_hyper_flags(parser)

    # `-` and `_` both work in the name of a flag
    argv = [token.replace("_", "-", token.split("=")[0].count("_")) if token.startswith("--") else token for token in argv]
    args = parser.parse_args(argv)
    args.algo = list(ALGORITHMS) if "all" in args.algo else list(dict.fromkeys(args.algo))
    if "seed" in vars(args) and "seeds" in vars(args):
        stop(2, "--seed: not beside --seeds; name them all in --seeds")
    args.seeds = list(dict.fromkeys(getattr(args, "seeds", [getattr(args, "seed", 0)])))
    if args.dataset not in data.DATASETS and not args.dataset.endswith(".npz"):
        stop(2, f"--dataset {args.dataset}: use one of {', '.join(data.DATASETS)}, or a file that ends in .npz")
    every_hyper = {name for algo in ALGORITHMS for name in hyper_parameters(algo)}
    args.given = {name: vars(args).pop(name) for name in every_hyper if name in vars(args)}
    for name in args.given:
        if not any(name in hyper_parameters(algo) for algo in args.algo):
            owners = ", ".join(algo for algo in ALGORITHMS if name in hyper_parameters(algo))
            stop(2, f"{flag(name)}: none of {', '.join(args.algo)} has it; it belongs to {owners}")
    if args.form != "released" and "fedssg" not in args.algo:
        stop(2, "--form: belongs to fedssg, which --algo does not name")
    if args.unbalanced_sigma and args.partition not in ("iid", "dirichlet"):
        stop(2, f"--unbalanced-sigma: not with --partition {args.partition}; use iid or dirichlet")
    preset = PRESETS.get(args.dataset, PRESETS["mnist"])
    if "hidden" in vars(args) and getattr(args, "model", preset["model"]) != "fcn":
        stop(2, f"--hidden: belongs to --model fcn, not to {getattr(args, 'model', preset['model'])}")
    defaults = dict(preset, rounds=nearest(preset["rounds"], args.num_clients), chunk=None, checkpoint_every=None)
    for name in defaults.keys() - {"alpha"}:
        vars(args).setdefault(name, defaults[name])
    vars(args).setdefault("stop_after", args.rounds)
    if not 1e-30 < args.lr * args.lr_decay ** (args.rounds - 1):
        stop(2, f"--lr-decay {args.lr_decay}: the learning rate of round {args.rounds} would vanish; use a larger one")
    args.out = os.path.expanduser(args.out)
    return args


def nearest(table, num_clients):
    """The entry of the listed number of clients that is nearest."""
    return table[min(table, key=lambda n: abs(n - num_clients))]


def hyper_for(algo, args):
    """The method's hyper-parameters: its defaults, then the presets, then the form, then explicit flags."""
    known = hyper_parameters(algo)
    hyper = {name: p.default for name, p in known.items()}
    alpha = PRESETS.get(args.dataset, PRESETS["mnist"])["alpha"].get(algo)
    if alpha is not None:
        alpha = nearest(alpha, args.num_clients)
        if isinstance(alpha, tuple):        # IID, or the nearer of the paper's two Dirichlet alphas
            iid = args.partition == "iid" or args.dir_alpha >= 1
            alpha = alpha[0 if iid else 1 if args.dir_alpha < 0.45 else 2]
        hyper["alpha"] = alpha
    if algo == "fedssg":
        hyper.update(FORMS[args.form])
    hyper.update({name: value for name, value in args.given.items() if name in known})
    return hyper


def settings_for(algo, seed, args):
    """All that makes this run this run: what decides its folder, and what a later call must agree with."""
    settings = {name: value for name, value in vars(args).items() if name not in NOT_SETTINGS}
    settings.update(algo=algo, seed=seed, hyper=hyper_for(algo, args))
    settings.setdefault("weight_decay", WEIGHT_DECAY.get(algo, 1e-3))
    if algo != "fedssg":
        settings.pop("form")
    if settings["model"] != "fcn":
        settings.pop("hidden")
    return settings


def stop(code, message):
    """End the program with one line."""
    if int(os.environ.get("RANK", 0)) == 0 or code == 1:
        print(f"run.py: {message}", file=sys.stderr)
    sys.exit(code)


# ---- one run --------------------------------------------------------------------------------------------------

def run_folder(settings, args):
    """The run's folder; its name ends in a hash of the settings, so runs of other settings never share one."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    form = f"-{settings['form']}" if settings.get("form", "released") != "released" else ""
    return Path(args.out) / f"{Path(args.dataset).stem}-{settings['algo']}{form}-seed{settings['seed']}-{digest}"


def cuda_or_cpu(args, local_rank):
    """The device of this process; ends the program if there is no such device."""
    name = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]?))?", name):
        stop(2, f"--device {args.device}: use auto, cpu, cuda or cuda:K")
    device = torch.device(name)
    if device.type == "cuda":
        if device.index is not None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            stop(2, f"--device {args.device}: each of several processes needs a device of its own; use cuda")
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0      # the count alone does not see an old driver
        last = max(device.index, int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1)    # so that the machine's processes end alike
        if last >= found:
            stop(2, f"--device {args.device}: cuda:{last} is needed, this machine has {found} CUDA devices; use cpu, or fewer processes")
    return device


@torch.no_grad()
def evaluate(logits, theta, X, Y, batch=2000):
    """Accuracy in percent and mean cross-entropy of the model theta (d,) on (X, Y), over all processes' shares."""
    out = torch.cat([logits(theta, x) for x in X.split(batch)])                 # (n, classes)
    loss_i = torch.nn.functional.cross_entropy(out, Y, reduction="none")
    loss, right, n = total(loss_i, (out.argmax(dim=1) == Y).to(out.dtype), torch.ones_like(loss_i))
    return 100 * right / n, loss / n


def simulate(settings, args, dataset, device):
    """One run: the rounds of one method under one seed, from where it stands to where it is to end.

    Returns its summary, which also lies in the run's folder beside config.json, log.csv, checkpoint.pt and model.pt.
    """
    X, Y, X_test, Y_test, classes = dataset
    rank, W = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    algo, seed, T = settings["algo"], settings["seed"], settings["rounds"]
    clients = split(Y, classes, settings)
    model = models.build(settings["model"], X.shape[1:], classes, settings.get("hidden", ()),
                         int(data.rng(seed, "model").integers(2 ** 63)))
    omega, loss = flatten(model)
    s = {"omega": omega.to(device)}
    settings = dict(settings, split=hashlib.sha256(np.concatenate([clients["n"], *clients["parts"]]).tobytes()).hexdigest()[:8])

    announce(algo, seed, settings, omega, clients["n"], args, device, rank, W)
    data.sample_clients(len(clients["n"]), settings["participation"], settings["sampling"], seed, 1)     # refuses before files are made

    folder = run_folder(settings, args)
    box = [open_run(folder, settings, args, device) if rank == 0 else None]
    if W > 1:
        dist.broadcast_object_list(box)
    log, finished = box[0]
    if rank == 0 and args.show_split:
        show_split(clients["labels"], folder)
    if finished:
        return finished
    rows_device = torch.device("cpu") if args.state_device == "cpu" else device
    if log:
        *_, state = load_checkpoint(folder / "checkpoint.pt")
        s = {name: x[rank::W].clone().to(rows_device) if name.endswith("_i") else x.to(device) for name, x in state.items()}
    compiled = 0 if device.type != "cuda" or args.no_compile else 1
    if W > 1 or settings["sampling"] == "bernoulli":    # the clients here change in number: let few sizes be compiled
        compiled *= 8
    warned, first, began, saving = set(), len(log) + 1, time.perf_counter(), 0.0

    while not done(log, args):
        t, round_began = len(log) + 1, time.perf_counter()
        r, batches = plan_round(settings, clients, t, rank, W, device, omega.dtype)
        seen = {}

        def train(rho, b):
            theta_i, seen["loss_i"] = local_sgd(
                loss, s["omega"], rho, b, X, Y, lr=r.lr, weight_decay=settings["weight_decay"], clip=settings["clip"],
                mode=args.mode, chunk=args.chunk, compiled=compiled, **batches)
            seen["steepest"] = largest(r.lr * rho)      # where the loss is flat, a step keeps 1 - this of the way from the anchor
            return theta_i

        if args.state_device == "cpu":
            out = with_rows_on_host(ALGORITHMS[algo], s, r, train, settings["hyper"], device)
        else:
            out = ALGORITHMS[algo](s, r, train, **settings["hyper"])

        due = t % (args.checkpoint_every or 10) == 0 and (args.checkpoint_every or saving <= 0.04 * (time.perf_counter() - began))
        signals = [max(INTERRUPTED, default=0), bool(due)]
        signals = [r.K_i.new_full((), x) for x in signals]      # made on the device: the host waits for no copy
        worst = torch.stack([seen["steepest"], largest(out.pop("gain", r.K_i[:0])), *signals])
        if W > 1:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        sum_loss, sum_K = total(seen["loss_i"], r.K_i)
        numbers = dict(out, train_loss=sum_loss / sum_K)
        if t % settings["eval_every"] == 0 or t == T:
            numbers["test_acc"], numbers["test_loss"] = evaluate(loss.logits, s["omega"], X_test[rank::W], Y_test[rank::W])
        # all that the host must see of this round, in one transfer
        *values, steepest, gain, interrupted, due = torch.stack([*numbers.values(), *worst]).tolist()
        row = dict.fromkeys(COLUMNS) | dict(zip(numbers, values), round=t, seconds=time.perf_counter() - round_began)
        log.append(row)

        if rank == 0:
            with open(folder / "log.csv", "a") as file:
                file.write(csv_line(row) + "\n")
            progress(algo, seed, row, min(T, args.stop_after), (time.perf_counter() - began) / (t - first + 1))
            warn(algo, t, steepest, gain, warned)
        if not all(map(math.isfinite, values)):
            summary = dict(summarise(log, args.target_acc), diverged=t)
            cause = (f"eta_t * max rho_i is {steepest:.3g}, above 1" if steepest > 1 else
                     f"try a smaller --lr than {settings['lr']}")
            if rank == 0:
                write_json(folder / "summary.json", summary)
                print()
                print(f"run.py: {algo} seed {seed}: diverged at round {t} ({cause}); log and last checkpoint are in {folder}",
                      file=sys.stderr)
            return summary
        if interrupted or due or done(log, args):
            save_began = time.perf_counter()
            save_rows(folder / "checkpoint.pt", s, settings, t, rank, W)
            saving += time.perf_counter() - save_began
        if interrupted:
            if rank == 0:
                print()
            stop(128 + int(interrupted), f"interrupted after round {t}; the same command with --resume goes on")

    summary = summarise(log, args.target_acc)
    if rank == 0:
        print()
        write(folder / "model.pt", lambda file: torch.save(named(model, s["omega"]), file))
        write_json(folder / "summary.json", summary)
        if len(log) == T:
            (folder / "checkpoint.pt").unlink()
    return summary


def split(labels, classes, settings):
    """Who has what: parts, a list of N index arrays; n (N,) their lengths; labels (N, classes) their label counts."""
    labels = labels.cpu().numpy()
    options = {name: settings[name] for name in ("dir_alpha", "unbalanced_sigma", "min_samples", "shards")}
    parts = data.partition(labels, settings["num_clients"], settings["partition"], settings["seed"], **options)
    return dict(parts=parts, n=np.array([len(part) for part in parts]),
                labels=np.stack([np.bincount(labels[part], minlength=classes) for part in parts]))


def plan_round(settings, clients, t, rank, W, device, dtype):
    """Round t for this process: its Round, and the mini-batches (idx, w, augmentation) as local_sgd takes them."""
    seed, N, n = settings["seed"], settings["num_clients"], clients["n"]
    cohort = data.sample_clients(N, settings["participation"], settings["sampling"], seed, t)
    mine = cohort[cohort % W == rank]               # client i and its rows live on rank i mod W
    idx, w, K_i = data.schedule(clients["parts"], mine, seed, t, settings["local_epochs"], settings["batch_size"])

    def tensor(x, dtype=dtype):
        return torch.as_tensor(np.asarray(x), device=device).to(dtype)
    batches = dict(idx=tensor(idx, torch.int64), w=tensor(w))
    if settings["augment"] == "auto" and settings["dataset"] in ("cifar10", "cifar100"):
        batches.update(augment=data.augment, draws=tensor(data.augment_draws(mine, K_i, w, seed, t), torch.int64))
    return Round(
        t=t, T=settings["rounds"], N=N, m=len(cohort),
        p=settings["participation"] if settings["sampling"] == "bernoulli" else len(cohort) / N,
        lr=settings["lr"] * settings["lr_decay"] ** (t - 1), lr0=settings["lr"],
        num_rows=len(range(rank, N, W)), i=tensor(mine // W, torch.int64), K_i=tensor(K_i), n_i=tensor(n[mine]),
        size_i=tensor(n[mine] / n.mean()), labels_i=tensor(clients["labels"][mine])), batches


def with_rows_on_host(method, s, r, train, hyper, device):
    """A round with s's rows in host memory: the method sees the cohort's, on the device, as if they were all."""
    i = r.i.cpu()
    there = {name: x[i].to(device) if name.endswith("_i") else x for name, x in s.items()}
    out = method(there, dataclasses.replace(r, num_rows=len(i), i=torch.arange(len(i), device=device)), train, **hyper)
    for name, x in there.items():
        if name.endswith("_i"):
            if name not in s:
                s[name] = torch.zeros(r.num_rows, *x.shape[1:], dtype=x.dtype)
            s[name][i] = x.cpu()
        else:
            s[name] = x
    return out


def largest(x):
    """The largest entry of x (m,), 0 if there is none."""
    return torch.cat([x, x.new_zeros(1)]).max()


def done(log, args):
    """Whether a run with this log has nothing left to do."""
    reached = args.stop_at_target and any(row["test_acc"] is not None and row["test_acc"] >= args.target_acc for row in log)
    return len(log) >= min(args.rounds, args.stop_after) or reached


def summarise(log, target):
    """What summary.json says of the log: accuracies in percent, over the evaluated rounds."""
    tests = [(row["round"], row["test_acc"]) for row in log if row["test_acc"] is not None]
    last50 = [acc for _, acc in tests[-50:]]
    return dict(
        round=log[-1]["round"],
        evaluations=len(tests),
        last50_mean=float(np.mean(last50)) if tests else None,
        last50_std=float(np.std(last50)) if tests else None,
        last=tests[-1][1] if tests else None,
        best=max(acc for _, acc in tests) if tests else None,       # chosen on the test set: optimistic
        target_acc=target,
        rounds_to_target=next((t for t, acc in tests if acc >= target), None),
        seconds_per_round=float(np.mean([row["seconds"] for row in log])))


# ---- the run's folder -----------------------------------------------------------------------------------------

def open_run(folder, settings, args, device):
    """Claim the folder of a run. Returns (log so far, summary or None if there is something left to do).

    Ends the program with one line where another process runs in it, or where an unfinished run is not to be resumed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock(folder)
    config = json.loads(json.dumps(dict(
        settings=settings, device=str(device), torch=torch.__version__, numpy=np.__version__, python=platform.python_version(),
        machine=platform.machine(), processes=dist.get_world_size() if dist.is_initialized() else 1)))
    if not (folder / "config.json").exists():
        left = [name for name in ("log.csv", "checkpoint.pt", "summary.json", "model.pt") if (folder / name).exists()]
        if left not in ([], ["log.csv"]) or (left and read_log(folder / "log.csv")):
            stop(1, f"{folder}: has {', '.join(left)} but no config.json; remove the folder to start that run again")
        write_log(folder / "log.csv", [])
        write_json(folder / "config.json", config)
        return [], None
    if read_json(folder / "config.json", "settings")["settings"] != config["settings"]:
        stop(2, f"{folder}: its config.json is of other settings; choose another --out, or remove the folder")
    log, summary = read_log(folder / "log.csv"), folder / "summary.json"
    if summary.exists():
        diverged = read_json(summary, "round").get("diverged")
        if diverged and log:
            print(f"run.py: {folder}: diverged at round {diverged} when it was run", file=sys.stderr)
            return log, dict(summarise(log, args.target_acc), diverged=diverged)
        if log and done(log, args):
            print(f"{folder}: finished at round {len(log)}, nothing to do")
            if len(log) == args.rounds:         # left by a kill between the last two steps of a run
                (folder / "checkpoint.pt").unlink(missing_ok=True)
            return log, summarise(log, args.target_acc)
    if not args.resume:
        stop(2, f"{folder}: holds an unfinished run of these settings (round {len(log)}); add --resume to go on, "
                "or choose another --out")
    checkpoint, t = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        its_settings, t, _ = load_checkpoint(checkpoint)
        if its_settings != config["settings"]:
            stop(2, f"{checkpoint}: is of other settings than its folder; remove its folder to start that run again")
    if len(log) < t:
        stop(1, f"{folder}: log.csv ends at round {len(log)}, before its checkpoint of round {t}; "
                "remove the folder to start that run again")
    if t == 0 and summary.exists():
        stop(1, f"{folder}: its checkpoint.pt is missing; remove the folder to start that run again")
    if t == 0 and log:
        print(f"{folder}: stopped before its first checkpoint, starts again at round 1")
    summary.unlink(missing_ok=True)         # so that one never stands beside rounds it does not know of
    write_log(folder / "log.csv", log[:t])
    return log[:t], None


def lock(folder):
    """Refuse a second run in the folder; the lock goes with the process."""
    LOCKS.append(open(folder / ".lock", "w"))
    try:
        fcntl.flock(LOCKS[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stop(2, f"{folder}: another process is running in it")


def write(path, save):
    """Write a file whole or not at all: under a temporary name, flushed, renamed."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, content):
    write(path, lambda file: file.write((json.dumps(content, indent=1) + "\n").encode()))


def read_json(path, key):
    """The object in the file, which must have the key."""
    try:
        content = json.loads(path.read_text())
        content[key]
        return content
    except (ValueError, KeyError, TypeError):
        stop(1, f"{path}: damaged; remove its folder to start that run again")


def write_log(path, log):
    lines = [",".join(COLUMNS)] + [csv_line(row) for row in log]
    write(path, lambda file: file.write(("\n".join(lines) + "\n").encode()))


def csv_line(row):
    return ",".join("" if row[name] is None else repr(row[name]) for name in COLUMNS)


def read_log(path):
    """The rows of log.csv up to the first that is not whole; an empty field is None."""
    log = []
    for line in path.read_text(errors="replace").splitlines()[1:]:
        try:
            row = dict(zip(COLUMNS, (None if text == "" else float(text) for text in line.split(",")), strict=True))
        except ValueError:
            break
        if row["round"] != len(log) + 1 or row["seconds"] is None:
            break
        log.append(row | {"round": len(log) + 1})
    return log


def save_rows(path, s, settings, t, rank, W):
    """Checkpoint: the whole state, rows gathered from all processes (client i lives on rank i mod W), by rank 0."""
    N, whole = settings["num_clients"], {}
    for name, x in s.items():
        if W == 1 or not name.endswith("_i"):
            whole[name] = x
        elif rank > 0:
            dist.send(x, 0)
        else:
            whole[name] = torch.empty(N, *x.shape[1:], dtype=x.dtype)       # in host memory: a GPU may not hold all rows
            whole[name][0::W] = x
            for source in range(1, W):
                part = x.new_empty(len(range(source, N, W)), *x.shape[1:])
                dist.recv(part, source)
                whole[name][source::W] = part
    if rank == 0:
        content = dict(settings=json.dumps(settings, sort_keys=True), round=t, state=whole)
        write(path, lambda file: torch.save(content, file))


def load_checkpoint(path):
    """(settings, round, state) of a checkpoint, read as tensors and plain values only, its tensors mapped from the file."""
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        state = {name: x for name, x in checkpoint["state"].items() if torch.is_tensor(x)}
        return json.loads(checkpoint["settings"]), int(checkpoint["round"]), {"omega": state["omega"], **state}
    except Exception as error:      # torch raises many kinds for a damaged file
        stop(1, f"{path}: not a whole checkpoint ({type(error).__name__}); remove its folder to start that run again")


def named(model, omega):
    """The flat vector as the state_dict of its torch module."""
    torch.nn.utils.vector_to_parameters(omega, model.parameters())
    return {name: x.detach().cpu() for name, x in model.state_dict().items()}


# ---- what the user sees ---------------------------------------------------------------------------------------

def announce(algo, seed, settings, omega, n, args, device, rank, W):
    """One line on what the run keeps and sends; ends the program if the rows cannot fit."""
    bytes_of_d = omega.numel() * omega.element_size()
    kept, down, up = VECTORS.get(settings["hyper"].get("correction", algo), (0, 1, 1))
    rows = kept * len(n) * bytes_of_d
    if device.type == "cuda" and args.state_device == "auto":
        room = W * torch.cuda.get_device_properties(device).total_memory     # each process has a device of its own
    else:
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if rows > room:
        advice = ", or --state-device cpu" if device.type == "cuda" else ""
        stop(2, f"--num-clients {len(n)}: {algo}'s rows take {rows / 1e9:.1f} GB, there are {room / 1e9:.1f} GB; "
                f"use fewer clients or a smaller --model{advice}")
    if rank == 0:
        down_mb, up_mb = down * bytes_of_d / 1e6, up * bytes_of_d / 1e6
        print(f"{algo} seed {seed}: {len(n)} clients of {n.min()} to {n.max()} samples on {device}; keeps {rows / 1e6:.0f} MB of rows; "
              f"a client gets {down_mb:.2f} MB ({down} x d) and sends {up_mb:.2f} MB ({up} x d) a round")


def progress(algo, seed, row, until, seconds):
    """One line a round; on a terminal it overwrites the last."""
    left = datetime.timedelta(seconds=round(seconds * (until - row["round"])))
    test = "" if row["test_acc"] is None else f"  test {row['test_acc']:.2f} %, loss {row['test_loss']:.4f}"
    gate = "" if row["gate"] is None else f"  gate {row['gate']:.3f}"
    memory = "" if row["h_norm"] is None else f"  |h_i| {row['h_norm']:.3f}"
    line = (f"{algo} seed {seed}  round {row['round']}/{until}{test}  train loss {row['train_loss']:.4f}{gate}{memory}"
            f"  {row['seconds']:.2f} s/round  {left} left")
    terminal = sys.stdout is not None and sys.stdout.isatty()
    print(f"\r{line}\033[K" if terminal else line, end="" if terminal else "\n", flush=True)


def warn(algo, t, steepest, gain, warned):
    """Say once that a step along a flat direction overshoots, or that the memory feeds back too strongly."""
    advice = ("--gate-shape clip or a smaller --alpha" if algo == "fedssg" else
              "a smaller --alpha, --mu, --gamma or --lr; small clients have the largest")
    for what, value, limit, who in (("eta_t * max rho_i", steepest, 1, "clients overshoot"),
                                    ("phi eta K alpha", gain, 2, "the memory h_i overshoots")):
        if value > limit and what not in warned:
            warned.add(what)
            print(f"warning: {algo} round {t}: {what} is {value:.2f}, above {limit}: {who}; try {advice}", file=sys.stderr)


def show_split(label_counts, folder):
    """Print the label counts of each client, and keep them as split.npz: counts (N, classes)."""
    write(folder / "split.npz", lambda file: np.savez(file, counts=label_counts))
    print("client  samples  of each class")
    for i, counts in enumerate(label_counts):
        print(f"{i:6d}  {counts.sum():7d}  " + " ".join(f"{count:5d}" for count in counts))


def table(results, args):
    """Print for each method: accuracy over the last 50 evaluations, rounds to the target, speed-up over the first method.

    ± is the standard deviation over the seeds; for one seed, over its 50 evaluations.
    """
    print(f"\n{'method':10}{'last 50 (%)':>16}{f'rounds to {args.target_acc:g} %':>20}{'speed-up':>10}{'s/round':>9}")
    first = None
    for algo, runs in results.items():
        met = [run["rounds_to_target"] for run in runs if run["rounds_to_target"] is not None]
        last50 = "diverged" if any("diverged" in run for run in runs) else "-"
        if last50 == "-" and all(run["evaluations"] >= 50 for run in runs):   # none was stopped early
            spread = np.std([run["last50_mean"] for run in runs]) if len(runs) > 1 else runs[0]["last50_std"]
            last50 = f"{np.mean([run['last50_mean'] for run in runs]):.2f} ± {spread:.2f}"
        rounds = f"{np.mean(met):.1f} ± {np.std(met):.1f}" if len(met) > 1 else f"{met[0]}" if met else "-"
        if len(met) < len(runs) > 1:
            rounds += f" ({len(met)} of {len(runs)})"
        first = first or (np.mean(met) if met else math.nan)
        speed_up = f"{first / np.mean(met):.2f}x" if met and first == first else "-"
        seconds = np.mean([run["seconds_per_round"] for run in runs])
        print(f"{algo:10}{last50:>16}{rounds:>20}{speed_up:>10}{seconds:9.2f}")


# ---- start ----------------------------------------------------------------------------------------------------

def main(argv=None):
    if hasattr(sys.stdout, "reconfigure"):      # a terminal without ± shows ?
        sys.stdout.reconfigure(errors="replace")
    args = parse(sys.argv[1:] if argv is None else argv)
    W, local_rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    device = cuda_or_cpu(args, local_rank)
    if W > args.num_clients:
        stop(2, f"--num-clients {args.num_clients}: fewer than the {W} processes")
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        if not os.access(args.out, os.W_OK):
            raise PermissionError("not writable")
    except OSError as error:
        stop(2, f"--out {args.out}: {error.strerror or error}; choose a folder that can be written")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = True       # else a resumed run is not the straight one, bit for bit
    if W > 1:
        try:        # with --state-device cpu, checkpoints gather rows from host memory
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        except (ValueError, RuntimeError) as error:
            stop(1, f"WORLD_SIZE is {W}, but the processes cannot meet ({str(error).splitlines()[0]}); start them by torchrun")
        if device.type == "cpu":
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", W))))
    results = {}
    try:
        try:
            if local_rank > 0:      # the first process of a machine may have to download
                dist.barrier()
            dataset = data.load(args.dataset, args.data_dir, device, letters=args.letters)
            if args.dataset.endswith(".npz"):       # other contents make another run
                args.contents = hashlib.sha256(Path(args.dataset).expanduser().read_bytes()).hexdigest()[:8]
            if local_rank == 0 and W > 1:
                dist.barrier()
        except (ValueError, OSError) as error:
            stop(1, f"--dataset {args.dataset}: {error}")
        keep_memory_flat()
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, interrupt)
        for algo in args.algo:
            results[algo] = []
            for seed in args.seeds:
                results[algo].append(simulate(settings_for(algo, seed, args), args, dataset, device))
                while LOCKS:        # that run is over: others may look at it
                    LOCKS.pop().close()
    except ValueError as error:
        stop(2, str(error))
    except OSError as error:
        stop(1, f"{error.filename or args.out}: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:    # torch says "not enough memory" by a RuntimeError
        if type(error).__module__.startswith("torch._"):    # torch._dynamo, torch._inductor: no compiler, say
            stop(1, f"torch.compile failed ({str(error).strip().splitlines()[0]}); --no-compile runs without it")
        if W > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error)):     # one that ended has said why
            stop(1, "lost another process") if dist.get_rank() == 0 else sys.exit(1)
        if not isinstance(error, MemoryError) and not re.search("to allocate|CUDA error: out of memory|ALLOC_FAILED", str(error)):
            raise
        stop(1, "out of memory; use fewer clients, a smaller --model or --hidden, fewer --local-epochs, or --chunk")
    if not dist.is_initialized() or dist.get_rank() == 0:
        table(results, args)
    if dist.is_initialized():
        dist.destroy_process_group()
    if any("diverged" in run for runs in results.values() for run in runs):
        sys.exit(3)


def keep_memory_flat():
    """Have glibc take blocks above 4 MB from the system and give them back: in its heap they find ever new places."""
    try:
        ctypes.CDLL(None).mallopt(-3, 4 * 2 ** 20)      # M_MMAP_THRESHOLD
    except AttributeError:      # another C library
        pass


def interrupt(signum, frame):
    """Ctrl-C or SIGTERM: end at the end of the round; a second one ends at once."""
    INTERRUPTED.append(signum)
    signal.signal(signum, signal.SIG_DFL)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:       # before the first round
        stop(130, "interrupted before the first round")
