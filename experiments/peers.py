"""The same round of FedAvg in other simulators of federated learning, beside ours.

Every peer lives in an environment of its own, in a folder such as peers/, and is used by its own interface:

    for x in fedjax pfl flwr; do python -m venv peers/$x; done
    peers/fedjax/bin/pip install fedjax==0.0.17
    peers/pfl/bin/pip install pfl==0.6.0 torch==2.13.0
    peers/flwr/bin/pip install 'flwr[simulation]==1.42.0' torch==2.13.0
    python experiments/peers.py peers               a peer that has no environment there is left out

A round has 15 clients of 600 random images each, 5 epochs in batches of 50, and the FCN 784-200-200-10. These
are 900 steps. All stay started and play in turn, so that a busy machine disturbs all alike. One unmeasured
round comes first.

Seconds on a busy machine mean little. What holds is the last column: the processor seconds of a peer's round,
of all its processes, over those of our round just before it; the median over the turns. Ours clips gradients,
decays weights and adds the term b of the methods. The others do none of this. For Linux.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
CLIENTS, SAMPLES, EPOCHS, BATCH, LR = 15, 600, 5, 50, 0.1


@functools.cache            # Flower's workers ask for it in every round
def random_data():
    """Images (9000, 784) and labels of all clients; client i has the i-th 600 of them."""
    import numpy as np
    g = np.random.default_rng(0)
    n = CLIENTS * SAMPLES
    return g.normal(size=(n, 784)).astype("float32"), g.integers(10, size=n)


def torch_model():
    from torch import nn
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


# ---- one round a turn, in a process of its own -------------------------------------------------------------

def ours(turns):
    sys.path.insert(0, str(HERE.parent))
    import numpy as np
    import torch
    import data
    import models
    from baselines import fedavg
    from fedssg import Round, flatten, local_sgd
    X, Y = map(torch.from_numpy, random_data())
    model, i = models.build("fcn", (784,), 10, [200, 200], 0), np.arange(CLIENTS)
    shares, s = np.arange(len(X)).reshape(CLIENTS, SAMPLES), {"omega": flatten(model)}
    for t, _ in enumerate(turns, 1):
        idx, w, K_i = map(torch.as_tensor, data.schedule(shares, i, 0, t, EPOCHS, BATCH))
        r = Round(t=t, T=100, N=CLIENTS, lr=LR, lr0=LR, i=torch.as_tensor(i), K_i=K_i.float(),
                  n_i=torch.full((CLIENTS,), float(SAMPLES)))
        batches = dict(X=X, Y=Y, idx=idx, w=w.float(), lr=LR, weight_decay=1e-3, clip=10.0)
        fedavg(s, r, lambda rho, b: local_sgd(model, s["omega"], rho, b, **batches)[0])


def fedjax(turns):
    import jax
    jax.tree_map = jax.tree.map         # which FedJAX uses, and JAX no longer has
    import fedjax
    import haiku as hk
    X, Y = random_data()
    network = hk.transform(lambda batch: hk.nets.MLP([200, 200, 10])(batch["x"]))
    model = fedjax.create_model_from_haiku(
        network, {"x": X[:BATCH], "y": Y[:BATCH]}, eval_metrics={},
        train_loss=lambda batch, output: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], output))
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model), fedjax.optimizers.sgd(LR), fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=EPOCHS))
    state = algorithm.init(model.init(jax.random.PRNGKey(0)))
    shares = [slice(i * SAMPLES, (i + 1) * SAMPLES) for i in range(CLIENTS)]
    sets = [fedjax.ClientDataset({"x": X[share], "y": Y[share]}) for share in shares]
    for t, _ in enumerate(turns):
        keys = jax.random.split(jax.random.PRNGKey(t), CLIENTS)
        state, _ = algorithm.apply(state, [(str(i), sets[i], keys[i]) for i in range(CLIENTS)])
        jax.block_until_ready(state.params)


def pfl(turns):
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    X, Y = (x.split(SAMPLES) for x in map(torch.from_numpy, random_data()))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = torch_model()

        def loss(self, x, y, **_):
            return torch.nn.functional.cross_entropy(self.network(x), y)

        def metrics(self, x, y, **_):
            return {}

    class EndOfTurn(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            return next(turns, "end") == "end", Metrics()

    everyone = iter(list(range(CLIENTS)) * 10 ** 5)
    users = FederatedDataset(lambda i: Dataset([X[i], Y[i]], user_id=str(i)), lambda: next(everyone))
    network = Model()
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0))
    next(turns)
    FederatedAveraging().run(
        NNAlgorithmParams(central_num_iterations=10 ** 5, evaluation_frequency=10 ** 5,
                          train_cohort_size=CLIENTS, val_cohort_size=0),
        SimulatedBackend(training_data=users, val_data=users), model,
        NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=EPOCHS, local_learning_rate=LR),
        NNEvalHyperParams(local_batch_size=None), callbacks=[EndOfTurn()])


def flower_client(message, context):
    """What a client of Flower does with the model that it is sent."""
    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from torch.utils.data import DataLoader, TensorDataset
    model, i = torch_model(), int(context.node_config["partition-id"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    own = [torch.from_numpy(x[i * SAMPLES:(i + 1) * SAMPLES]) for x in random_data()]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(EPOCHS):
        for x, y in DataLoader(TensorDataset(*own), batch_size=BATCH, shuffle=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": SAMPLES})}
    return Message(content=RecordDict(content), reply_to=message)


def flower(turns):
    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation
    server, client = ServerApp(), ClientApp()
    client.train()(flower_client)

    @server.main()
    def main(grid, context):
        arrays, strategy = ArrayRecord(torch_model().state_dict()), FedAvg(fraction_evaluate=0.0)
        for _ in turns:
            arrays = strategy.start(grid, arrays, num_rounds=1).arrays

    cores = {"num_cpus": int(os.environ["OMP_NUM_THREADS"])}
    run_simulation(server, client, CLIENTS, backend_config={
        "init_args": cores, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}})


def play(name, threads):
    """In a process of its own: say the version, then play a round for each line that comes, and answer it."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                       # what the peer prints goes to its errors
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    print(importlib.metadata.version("torch" if name == "ours" else PEERS[name][0]), file=replies, flush=True)

    def turns():
        for line in sys.stdin:
            yield
            print("played", file=replies, flush=True)
    dict(PEERS, ours=("", ours))[name][1](turns())


# ---- taking turns ------------------------------------------------------------------------------------------

# name: its distribution, which is its environment's name, too; and what plays it
PEERS = {"FedJAX": ("fedjax", fedjax), "pfl-research": ("pfl", pfl), "Flower": ("flwr", flower)}


def start(name, python, threads, log):
    """The process that plays for this name; and its version."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0"}
    env = os.environ | quiet | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE)}
    # as a module, so that Flower's workers find what they play
    command = [python, "-c", f"import peers; peers.play({name!r}, {threads})"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, env=env, text=True)
    return process, process.stdout.readline().strip()


def processor_seconds(pid):
    """Of the process, of those that it started, of theirs, and so on."""
    parent, used = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:                 # it has just ended
            continue
        parent[int(stat.parent.name)] = int(fields[1])
        used[int(stat.parent.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def belongs(one):
        return one == pid or one in parent and belongs(parent[one])
    return sum(seconds for one, seconds in used.items() if belongs(one))


def turn(process):
    """Wall and processor seconds of a round."""
    began, used = time.perf_counter(), processor_seconds(process.pid)
    process.stdin.write("\n")
    process.stdin.flush()
    if not process.stdout.readline():
        sys.exit(f"peers.py: a peer has ended; see what it printed: {process.args[-1]}")
    return time.perf_counter() - began, processor_seconds(process.pid) - used


def main():
    parser = argparse.ArgumentParser(description="A round of FedAvg in other simulators, beside ours.")
    parser.add_argument("folder", type=Path, help="of the peers' environments, and of what they print")
    parser.add_argument("--turns", type=int, default=7, help="measured rounds of each (%(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(%(default)s)")
    args = parser.parse_args()
    folder = args.folder.absolute()
    pythons = {"ours": sys.executable} | {
        name: folder / its / "bin" / "python" for name, (its, _) in PEERS.items()
        if (folder / its / "bin" / "python").exists()}
    print("| | version | threads | wall s | processor s | processor s, of ours |\n|---|---|---|---|---|---|")
    for threads in args.threads:
        with contextlib.ExitStack() as logs:
            players = {}
            for name, python in pythons.items():
                log = logs.enter_context(open(folder / f"{name}.log", "w"))
                players[name] = start(name, python, threads, log)
            times = [{name: turn(process) for name, (process, _) in players.items()}
                     for _ in range(args.turns + 1)]
            for process, _ in players.values():
                process.stdin.close()
                process.wait()
        for name in pythons:
            wall, used = (median(column) for column in zip(*(its[name] for its in times[1:])))
            ratio = median(its[name][1] / its["ours"][1] for its in times[1:])
            version = players[name][1]
            print(f"| {name} | {version} | {threads} | {wall:.2f} | {used:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
