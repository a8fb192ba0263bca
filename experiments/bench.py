"""How fast a round's training is on this machine, and what it is measured against.

    python experiments/bench.py --data-dir data     two or three minutes on two quiet cores
    python experiments/bench.py --quick             a smoke test, whose numbers mean little
    python experiments/bench.py --device cuda       the same on a GPU, in each precision, eager and compiled

It prints two tables in Markdown. The rivals of a table take turns, A B C A B C, so that a disturbance hits
them all, after one turn that is not measured. Wall seconds mean nothing on a busy machine. Its load stands in
the first line. Processor seconds, user and system of all threads, mean more.
"""

import argparse
import copy
import os
import platform
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data                                 # noqa: E402
import models                               # noqa: E402
from fedssg import flatten, local_sgd       # noqa: E402
from run import evaluate                    # noqa: E402

LR, DECAY, CLIP, E, B = 0.1, 1e-3, 10.0, 5, 50      # the paper's; the clip is its program's


def seconds(f):
    """(wall, processor) seconds of f(), with what it left in the GPU's queue."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    began, used = time.perf_counter(), time.process_time()
    f()
    wait()
    return time.perf_counter() - began, time.process_time() - used


def take_turns(rivals, turns):
    """{name: f} -> {name: median (wall, processor) seconds}."""
    for f in rivals.values():
        f()
    times = [{name: seconds(f) for name, f in rivals.items()} for _ in range(turns)]
    return {name: tuple(map(median, zip(*(its[name] for its in times)))) for name in rivals}


def show(title, columns, lines):
    print(f"\n### {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for line in lines:
        print(f"| {' | '.join(f'{x:.3g}' if isinstance(x, float) else x for x in line)} |", flush=True)


# ---- the paper's round of MNIST ----------------------------------------------------------------------------

def products(model, x):
    """{name: f}: the matrix products of a round's steps, and nothing else. x (m, K, B, features) is gathered
    beforehand. Each client has its own weights. On a GPU clients are batched, else spread over threads."""
    m, K, B, _ = x.shape
    weights = [p.detach().repeat(m, 1, 1) for p in model.parameters() if p.dim() == 2]      # (m, out, in)
    outputs = [x.new_empty(m, B, W.shape[1]) for W in weights]
    dW, dx = [torch.empty_like(W) for W in weights], [x.new_empty(m, B, W.shape[2]) for W in weights]
    G = torch.randn_like(outputs[-1])           # in place of the loss's gradient by the last output

    def steps(i):       # of client i, or of all by slice(None)
        for k in range(K):
            inputs, g = [x[i, k], *(y[i] for y in outputs[:-1])], G[i]
            for x_in, W, y in zip(inputs, weights, outputs):
                torch.matmul(x_in, W[i].mT, out=y[i])
            for layer in reversed(range(len(weights))):
                torch.matmul(g.mT, inputs[layer], out=dW[layer][i])
                if layer:
                    g = torch.matmul(g, weights[layer][i], out=dx[layer][i])
    if x.is_cuda:
        return {"bare products, batched over the clients": lambda: steps(slice(None))}
    return {"bare products, clients spread over the threads": lambda: spread(steps, m)}


def spread(client, m):
    """client(i) for m clients, on as many threads as torch has."""
    n = torch.get_num_threads()
    with ThreadPoolExecutor(n, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(client, range(m)))


def plain(model, shares, device):
    """How it is mostly written: FedAvg, with a module, a DataLoader and an optimizer for each client."""
    for share in shares:
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=LR, weight_decay=DECAY)
        for _ in range(E):
            for x, y in DataLoader(share, batch_size=B, shuffle=True):
                optimizer.zero_grad()
                cross_entropy(own(x.to(device)), y.to(device)).backward()
                torch.nn.utils.clip_grad_norm_(own.parameters(), CLIP)
                optimizer.step()


def ours(model, X, Y, parts, cohort, precisions):
    """{how: f}: the batches of a round drawn, then local_sgd with a term b, as FedSSG has one."""
    omega = flatten(model)
    rho, b = omega.new_zeros(len(cohort)), 1e-4 * torch.randn(len(cohort), len(omega), device=X.device)

    def train(precision, **how):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        idx, w, _ = (torch.as_tensor(x, device=X.device) for x in data.schedule(parts, cohort, 0, 1, E, B))
        w = w.to(omega.dtype)
        local_sgd(model, omega, rho, b, X, Y, idx, w, LR, DECAY, CLIP, precision=precision, **how)
    ways = {"loop": dict(mode="loop"), "vmap": dict(mode="vmap")}
    if X.is_cuda:
        ways = {"vmap": dict(mode="vmap"), "vmap, compiled": dict(mode="vmap", compiled=True)}
    return {f"{name}, {precision}": lambda precision=precision, how=how: train(precision, **how)
            for name, how in ways.items() for precision in precisions}


def round_of_mnist(args, device):
    name = "mnist" if (Path(args.data_dir) / "MNIST").is_dir() else "synthetic"
    X, Y, X_test, Y_test, _ = data.load(name, args.data_dir, device)
    if name == "synthetic":         # of MNIST's size
        X, Y, X_test, Y_test = X.repeat(6, 1, 1, 1), Y.repeat(6), X_test.repeat(5, 1, 1, 1), Y_test.repeat(5)
    parts, cohort = data.partition(Y.cpu().numpy(), 100, "dirichlet", 0), np.arange(15)
    model = models.build("fcn", X.shape[1:], 10, [200, 200], 0).to(device)
    idx = torch.as_tensor(data.schedule(parts, cohort, 0, 1, E, B)[0], device=device)
    shares = [TensorDataset(X[parts[i]].cpu(), Y[parts[i]].cpu()) for i in cohort]
    rivals = products(model, X[idx].flatten(3).transpose(0, 1).contiguous())
    rivals |= ours(model, X, Y, parts, cohort, ("float32", "tf32", "bf16") if X.is_cuda else ("float32",))
    way = "the plain way: a Module, a DataLoader, an SGD for each client"
    rivals[way] = lambda: plain(model, shares, device)
    rivals["evaluation of the test images"] = lambda: evaluate(model, flatten(model), X_test, Y_test)
    times = take_turns(rivals, 1 if args.quick else 7)
    (wall, used), *_ = times.values()
    show(f"A round of the FCN 784-200-200-10 on {name}: {len(cohort)} clients of {len(parts[0])} samples, "
         f"{len(idx) * len(cohort)} steps of {B}",
         ("", "wall s", "processor s", "of bare, wall", "of bare, processor"),
         [(rival, *t, t[0] / wall, t[1] / used) for rival, t in times.items()])
    print("\nMedians. Bare products and evaluation draw no batches; loop and vmap have a term b.")
    if name != "mnist":
        print(f"There is no MNIST in {args.data_dir} (--data-dir): `synthetic`, repeated to its size.")


# ---- the paper's CNN ---------------------------------------------------------------------------------------

def steps_of_cnn(args, device):
    clients, steps = (10, 50) if device.type == "cuda" else (2, 5)
    n = clients * steps * B // E
    X, Y = torch.randn(n, 3, 32, 32, device=device), torch.arange(n, device=device) % 10
    model = models.build("cnn", X.shape[1:], 10, [], 0).to(device)
    precisions = ("float32", "tf32", "bf16") if X.is_cuda else ("float32", "bf16")
    rivals = ours(model, X, Y, np.arange(n).reshape(clients, -1), np.arange(clients), precisions)
    show(f"The CNN on random 3x32x32 images: {clients} clients, {steps} steps of {B} each",
         ("", "wall ms a client's step", "processor ms a client's step"),
         [(how, *(1e3 * t / (clients * steps) for t in times))
          for how, times in take_turns(rivals, 1 if args.quick else 5).items()])


# ---- start -------------------------------------------------------------------------------------------------

def machine(device):
    info = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    names = [line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")]
    units = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in info]
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU used"
    return (f"{(names or [platform.processor() or platform.machine()])[0]} ({', '.join(units)}), "
            f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}, {gpu}; "
            f"load {os.getloadavg()[0]:.1f}")


def main():
    parser = argparse.ArgumentParser(description="How fast a round's training is.", allow_abbrev=False)
    add = parser.add_argument
    add("--data-dir", default="data", help="folder of MNIST, as torchvision has it (default: data)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--threads", type=int, default=torch.get_num_threads(), help="on the CPU (default: %(default)s)")
    add("--quick", action="store_true", help="one turn: a smoke test")
    args = parser.parse_args()
    if args.threads < 1:
        parser.error(f"--threads {args.threads}: use 1 or more")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device; use cpu or auto")
    device = torch.device("cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu")
    torch.set_num_threads(args.threads)
    torch.backends.cudnn.allow_tf32 = False     # as run.py; matrix products have it off
    warnings.filterwarnings("ignore", message="There is a performance drop")    # of the loss under vmap
    print(machine(device))
    round_of_mnist(args, device)
    steps_of_cnn(args, device)


if __name__ == "__main__":
    main()
