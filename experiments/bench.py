"""How fast the local solver and a whole round are on this machine, and what they are measured against.

    python experiments/bench.py                 a few minutes on 2 quiet cores
    python experiments/bench.py --quick         a smoke test: its numbers mean little
    python experiments/bench.py --device cuda   the same on a GPU, in each precision, eager and compiled

Prints markdown tables. The rivals of a table take turns, A B C A B C, so that a disturbance hits them all,
after one unmeasured turn. Wall seconds mean nothing on a busy machine (the load is in the first line).
Processor seconds, user and system of all threads, mean more.
"""

import argparse
import copy
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import data                                             # noqa: E402
import models                                           # noqa: E402
from fedssg import Round, fedssg, flatten, local_sgd    # noqa: E402
from run import evaluate                                # noqa: E402

LR, DECAY, CLIP, E, B = 0.1, 1e-3, 10.0, 5, 50          # the paper's; the clip is its program's


def seconds(f):
    """(wall, processor) seconds of f(), with what it left in the GPU's queue."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    began, used = time.perf_counter(), time.process_time()
    f()
    wait()
    return time.perf_counter() - began, time.process_time() - used


def take_turns(rivals, rounds):
    """{name: f} -> {name: [(wall, processor)] * rounds}."""
    for f in rivals.values():
        f()
    turns = [{name: seconds(f) for name, f in rivals.items()} for _ in range(rounds)]
    return {name: [turn[name] for turn in turns] for name in rivals}


def show(title, columns, lines):
    print(f"\n### {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for line in lines:
        cells = [f"{x:.3g}" if isinstance(x, float) else str(x) for x in line]
        print(f"| {' | '.join(cells)} |", flush=True)


def medians(times):
    """Median wall and processor seconds."""
    return [median(column) for column in zip(*times)]


# ---- 1. the paper's MNIST round, 2. a CNN ---------------------------------------------------------------

def mnist(data_dir, device):
    """The data set, and what to call it."""
    if (Path(data_dir) / "MNIST/raw/train-images-idx3-ubyte").is_file():
        return data.load("mnist", data_dir, device)[:4], "MNIST"
    X, Y, X_test, Y_test, _ = data.load("synthetic", device=device)
    return (X.repeat(6, 1, 1, 1), Y.repeat(6), X_test.repeat(5, 1, 1, 1), Y_test.repeat(5)), "synthetic"


def products(x, weights, G, outputs, dW, dx):
    """A step's matrix products of x (B, features), G (B, classes), into the last three; (m,) may lead."""
    inputs = [x, *outputs[:-1]]
    for x, W, y in zip(inputs, weights, outputs):
        torch.matmul(x, W.mT, out=y)                    # x W^T
    for k in reversed(range(len(weights))):
        torch.matmul(G.mT, inputs[k], out=dW[k])        # G^T x
        if k:
            G = torch.matmul(G, weights[k], out=dx[k])  # G W


def bare(model, X, idx):
    """{name: f}: a round's matrix products; each step has its own batch, each client its own weights."""
    K, m, B = idx.shape
    x = X[idx].flatten(3).transpose(0, 1).contiguous()  # (m, K, B, features), gathered beforehand
    weights = [p.detach().repeat(m, 1, 1) for p in model.parameters() if p.dim() == 2]
    places = [[x.new_empty(m, B, W.shape[1]) for W in weights], [torch.empty_like(W) for W in weights],
              [x.new_empty(m, B, W.shape[2]) for W in weights]]
    G = torch.randn_like(places[0][-1])

    def cohort():
        for k in range(K):
            products(x[:, k], weights, G, *places)

    def client(i):
        own, own_places = [W[i] for W in weights], [[place[i] for place in part] for part in places]
        for k in range(K):
            products(x[i, k], own, G[i], *own_places)

    return {"bare products, batched over the clients": cohort} if X.is_cuda else {
        "bare products, clients spread over the threads": lambda: spread(client, m)}


def spread(client, m):
    """client(i) for all clients, on as many threads as torch has."""
    n = torch.get_num_threads()
    with ThreadPoolExecutor(n, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(client, range(m)))


def autograd(model, X, Y, idx):
    """{name: f}: torch's forward and backward of each step, and nothing else: gradients are thrown away."""
    K, m, _ = idx.shape
    x, y = X[idx].transpose(0, 1).contiguous(), Y[idx].transpose(0, 1)

    def client(i):
        own = copy.deepcopy(model)
        for k in range(K):
            torch.autograd.grad(torch.nn.functional.cross_entropy(own(x[i, k]), y[i, k]), own.parameters())
    return {} if X.is_cuda else {"torch.autograd.grad alone": lambda: spread(client, m)}


def plain(model, shares, device):
    """How it is mostly written: FedAvg, with a module, a DataLoader and an optimizer for each client."""
    for share in shares:
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=LR, weight_decay=DECAY)
        for _ in range(E):
            for x, y in DataLoader(share, batch_size=B, shuffle=True):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(own(x.to(device)), y.to(device)).backward()
                torch.nn.utils.clip_grad_norm_(own.parameters(), CLIP)
                optimizer.step()


def ours(model, X, Y, parts, cohort, precisions=("float32",)):
    """{how: f}: the batches of a round drawn, then local_sgd, with a term b, as FedSSG has one."""
    omega = flatten(model)
    b = 1e-4 * torch.randn(len(cohort), len(omega), device=X.device)

    def train(precision, **how):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        idx, w, _ = (torch.as_tensor(x, device=X.device) for x in data.schedule(parts, cohort, 0, 1, E, B))
        local_sgd(model, omega, b.new_zeros(len(b)), b, X, Y, idx, w, LR, DECAY, CLIP, precision=precision,
                  **how)
    ways = {"loop": dict(mode="loop"), "vmap": dict(mode="vmap")}
    if X.is_cuda:
        ways = {"vmap": dict(mode="vmap"), "vmap, compiled": dict(mode="vmap", compiled=True)}
    return {f"{name}, {precision}": lambda precision=precision, how=how: train(precision, **how)
            for name, how in ways.items() for precision in precisions}


def precisions_of(device):
    return ("float32", "tf32", "bf16") if device.type == "cuda" else ("float32", "bf16")


def round_of_mnist(args, device):
    (X, Y, X_test, Y_test), name = mnist(args.data_dir, device)
    parts, cohort = data.partition(Y, 100, "dirichlet", 0), data.sample_clients(100, 0.15, "fixed", 0, 1)
    model = models.build("fcn", X.shape[1:], 10, [200, 200], 0).to(device)
    idx, _, K_i = data.schedule(parts, cohort, 0, 1, E, B)
    shares = [TensorDataset(X[parts[i]].cpu(), Y[parts[i]].cpu()) for i in cohort]
    idx = torch.as_tensor(idx, device=device)
    rivals = bare(model, X, idx) | autograd(model, X, Y, idx)
    rivals |= ours(model, X, Y, parts, cohort, precisions_of(device) if X.is_cuda else ("float32",))
    rivals["plain: Module, DataLoader, SGD for each client"] = lambda: plain(model, shares, device)
    rivals["evaluation of the test set"] = lambda: evaluate(model, flatten(model), X_test, Y_test)
    times = {rival: medians(t) for rival, t in take_turns(rivals, 1 if args.quick else 7).items()}
    least = next(iter(times.values()))
    show(f"1. A round of the FCN 784-200-200-10 on {name}: {len(cohort)} clients of {len(parts[0])} samples, "
         f"{int(K_i.sum())} steps of {B}",
         ("", "wall s", "processor s", "of bare, wall", "of bare, processor"),
         [(rival, *t, t[0] / least[0], t[1] / least[1]) for rival, t in times.items()])
    print("\nMedians. The first two and evaluation draw no batches; loop and vmap have a term b.")
    if name != "MNIST":
        print(f"There is no MNIST in {args.data_dir} (--data-dir): `synthetic`, repeated to its size.")


def round_of_cifar(args, device):
    clients, steps = (10, 50) if device.type == "cuda" else (2, 5)
    n = clients * steps * B // E
    X, Y = torch.randn(n, 3, 32, 32, device=device), torch.arange(n, device=device) % 10
    model = models.build("cnn", X.shape[1:], 10, [], 0).to(device)
    rivals = ours(model, X, Y, np.arange(n).reshape(clients, -1), range(clients), precisions_of(device))
    times = take_turns(rivals, 1 if args.quick else 5)
    show(f"2. The CNN on random 3x32x32 images: {clients} clients, {steps} steps of {B} each",
         ("", "wall s", "processor s", "processor ms a client's step"),
         [(how, *medians(t), 1e3 * medians(t)[1] / (clients * steps)) for how, t in times.items()])


# ---- 3. more clients, 5. many more ----------------------------------------------------------------------

def peak_memory(device):
    """The most bytes this process ever held: allocated on the GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    if os.path.exists("/proc/self/status"):     # Linux's ru_maxrss of a child starts at its parent's
        return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def rounds_of_fedssg(device, model, features, hidden, N, m, n_i, rounds):
    """Whole rounds on random data: cohort, schedule, local_sgd, fedssg. Returns a row of the table."""
    X, Y = torch.randn(10_000, features, device=device), torch.arange(10_000, device=device) % 10
    parts = np.random.default_rng(0).integers(len(X), size=(N, n_i))    # shared: a client costs its indices
    model = models.build(model, (features,), 10, hidden, 0).to(device)
    s, times = {"omega": flatten(model)}, []

    def one(t):
        cohort = data.sample_clients(N, m / N, "fixed", 0, t)
        idx, w, K_i = (torch.as_tensor(x, device=device) for x in data.schedule(parts, cohort, 0, t, E, B))
        r = Round(t=t, T=rounds, N=N, m=m, p=m / N, lr=LR, lr0=LR, num_rows=N, K_i=K_i.float(),
                  i=torch.as_tensor(cohort, device=device), n_i=w.new_full((m,), n_i), size_i=w.new_ones(m),
                  labels_i=w.new_zeros(m, 10))
        fedssg(s, r, lambda rho, b: local_sgd(model, s["omega"], rho, b, X, Y, idx, w, LR, DECAY, CLIP)[0])

    for t in range(1, rounds + 1):
        times.append(seconds(lambda: one(t)))
    (wall, processor), peak, d = medians(times[2:]), peak_memory(device), len(s["omega"])
    return N, m, d, E * -(-n_i // B) * m, wall, processor, 1e3 * processor / m, 2 * 4e-6 * d * N, 1e-6 * peak


def show_rounds(title, cases, device):
    """Each case in a process of its own: a process's peak never falls."""
    threads = str(torch.get_num_threads())
    command = [sys.executable, __file__, "--device", device.type, "--threads", threads, "--case"]
    show(title, ("N", "m", "d", "steps", "wall s/round", "processor s", "processor ms a client",
                 "rows h_i and c_i, MB", "peak, MB"),
         [json.loads(shell(*command, json.dumps(case))) for case in cases])


def more_clients(args, device):
    fcn = dict(model="fcn", features=784, hidden=[200, 200], n_i=100, N=200, rounds=4 if args.quick else 8)
    show_rounds("3a. Rounds of FedSSG by size of the cohort: FCN, 100 samples a client",
                [fcn | dict(m=m) for m in (5, 15, 50, 150)], device)
    linear = fcn | dict(model="linear", m=15)
    show_rounds("3b. Rounds of FedSSG by number of clients: linear model, 100 samples a client",
                [linear | dict(N=N) for N in (100, 1000, 10_000)], device)


def many_more(args, device):
    show_rounds("5. FedSSG with 100 000 clients of 10 samples: linear model on 20 features",
                [dict(model="linear", features=20, hidden=[], n_i=10, N=100_000, m=100,
                      rounds=4 if args.quick else 20)], device)


# ---- 4. processes ---------------------------------------------------------------------------------------

def processes(args):
    """run.py as it is started from a shell, on the CPU, timed by its own log.csv."""
    have = mnist(args.data_dir, "cpu")[1].lower()
    rounds, half, took = 4 if args.quick else 12, max(1, cores() // 2), {}
    for W, threads in ((1, half), (2, half), (1, 2 * half)):
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {W}".split() if W > 1 else []
        with tempfile.TemporaryDirectory() as out:
            flags = f"--dataset {have} --device cpu --stop-after {rounds}".split()
            shell(sys.executable, *torchrun, str(ROOT / "run.py"), *flags, "--data-dir", args.data_dir,
                  "--out", out, OMP_NUM_THREADS=str(threads))
            log, = Path(out).glob("*/log.csv")
            took[f"W = {W}, {threads} threads each"] = median(
                float(row["seconds"]) for row in list(csv.DictReader(log.open()))[2:])
    show(f"4. run.py in W processes on the CPU: FedSSG on {have}, evaluation included",
         ("", "wall s/round", "speed-up"),
         [(name, t, next(iter(took.values())) / t) for name, t in took.items()])
    cohorts = [data.sample_clients(100, 0.15, "fixed", 0, t) for t in range(3, rounds + 1)]
    most = mean(len(cohort) / np.bincount(cohort % 2).max() for cohort in cohorts)
    print(f"\nClient i lives on process i mod W: these cohorts allow two processes a speed-up of {most:.2f}.")


# ---- start ----------------------------------------------------------------------------------------------

def shell(*command, **environment):
    """The command's output; ends the program if it fails."""
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bench.py: {' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def machine(device):
    info = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    names = [line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")]
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU used"
    return (f"{(names or [platform.processor() or platform.machine()])[0]}, {cores()} cores, "
            f"{torch.get_num_threads()} threads, torch {torch.__version__}, {gpu}; "
            f"load {os.getloadavg()[0]:.1f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--data-dir", default="data", help="folder of MNIST, as torchvision has it (default: data)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--threads", type=int, default=torch.get_num_threads(), help="on the CPU (default: %(default)s)")
    add("--quick", action="store_true", help="few repeats: a smoke test")
    add("--big", action="store_true", help="also 100 000 clients")
    add("--case", type=json.loads, help=argparse.SUPPRESS)     # rounds_of_fedssg in a process of its own
    args = parser.parse_args()
    if args.threads < 1:
        parser.error(f"--threads {args.threads}: use 1 or more")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device; use cpu or auto")
    device = torch.device("cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu")
    torch.set_num_threads(args.threads)
    torch.backends.cudnn.allow_tf32 = False     # as run.py; matrix products have it off
    if args.case:
        return print(json.dumps(rounds_of_fedssg(device, **args.case)))
    print(machine(device))
    round_of_mnist(args, device)
    round_of_cifar(args, device)
    more_clients(args, device)
    processes(args)
    if args.big:
        many_more(args, device)


if __name__ == "__main__":
    main()
