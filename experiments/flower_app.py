"""FedSSG between real clients: an app for Flower (https://flower.ai). flower.md says how to run it.

A client calls `fedssg` with its own row of the memory. The server adds up what the clients return.

    method            server sends   client returns     stays with the client
    scaled, stable    omega, c       D_i, c_i' - c_i    h_i, c_i, count_i
    stateless         omega          D_i                nothing: the server has the memory h
    fedavg            omega          D_i                nothing

Beside these vectors a few numbers are sent, among them the gate phi_i. Symbols are those of fedssg.py.
"""

import copy
import functools
import time

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor
from torch.nn.utils import vector_to_parameters

import data
import models
from fedssg import FORMS, Round, fedssg, flatten, local_sgd, total

WITH_MEMORY = {name: FORMS[name] for name in ("scaled", "stable")}      # on the client
# what `fedssg` is called with
METHODS = WITH_MEMORY | {"stateless": FORMS["stateless"], "fedavg": None}
# As run.py has them for MNIST.
LR, LR_DECAY, WEIGHT_DECAY, CLIP, LOCAL_EPOCHS, BATCH_SIZE, HIDDEN = 0.1, 0.998, 1e-3, 10.0, 5, 50, [200, 200]

client_app = ClientApp()
server_app = ServerApp()


@functools.cache
def federate(dataset: str, data_dir: str, num_clients: int, seed: int) -> tuple:
    """(data set, shares, model) as run.py makes them. A real client has its own share of the data alone."""
    X, Y, X_test, Y_test, classes = data.load(dataset, data_dir)
    shares = data.partition(Y, num_clients, "dirichlet", seed)
    model = models.build("fcn", X.shape[1:], classes, HIDDEN, int(data.rng(seed, "model").integers(2 ** 63)))
    return (X, Y, X_test, Y_test), shares, model


def federation(context: Context) -> tuple:
    return federate(*(context.run_config[name] for name in ("dataset", "data-dir", "num-clients", "seed")))


# ---- client ------------------------------------------------------------------------------------------------

@client_app.query()
def introduce(message: Message, context: Context) -> Message:
    """Which client this node is, and how many samples it has. A node that is started again has a new id."""
    i = context.node_config["partition-id"]
    numbers = MetricRecord({"client": i, "n_i": len(federation(context)[1][i])})
    return Message(RecordDict({"numbers": numbers}), reply_to=message)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One client's part of round t.

    The reply may never arrive, so the new rows lie beside the old ones. The next message names by `counted`
    the last round of this client that is in the server's sums: the rows made in that round hold.
    """
    (X, Y, _, _), shares, model = federation(context)
    config, i, kept = context.run_config, context.node_config["partition-id"], context.state
    sent, numbers = message.content["vectors"].to_torch_state_dict(), dict(message.content["numbers"])
    method, omega, c = config["method"], sent["omega"], sent.get("c")
    counted, mean_n = numbers.pop("counted"), numbers.pop("mean_n")

    old = kept.get(f"rows of round {counted}")
    lost = method in WITH_MEMORY and counted > 0 and old is None    # the node was started again
    kept.clear()
    if old is not None:
        kept[f"rows of round {counted}"] = old
    s = {name: x.clone() for name, x in sent.items()} | (old.to_torch_state_dict() if old else {})

    idx, w, K_i = data.schedule(shares, [i], config["seed"], numbers["t"], LOCAL_EPOCHS, BATCH_SIZE)
    idx, w, K_i, n = torch.from_numpy(idx), torch.from_numpy(w), torch.tensor(K_i).float(), len(shares[i])
    r = Round(m=1, num_rows=1, i=torch.tensor([0]), K_i=K_i, n_i=torch.tensor([float(n)]),
              size_i=torch.tensor([n / mean_n]), labels_i=None, **numbers)
    theta_i = torch.empty(1, len(omega))

    def sgd(rho: Tensor, b: Tensor) -> Tensor:
        return theta_i.copy_(local_sgd(model, omega, rho, b, X, Y, idx, w, r.lr, WEIGHT_DECAY, CLIP)[0])

    if method == "fedavg":
        phi_i = torch.ones(1)
        sgd(torch.zeros(1), torch.zeros(1, len(omega)))
    else:   # of s the rows are the client's; what happens to omega, h and c there is thrown away
        phi_i = fedssg(s, r, sgd, **METHODS[method])["gate"]
    D_i = theta_i - omega                                                   # (1, d)
    answer = {"D_i": D_i[0]}
    if method in WITH_MEMORY:
        answer["dc_i"] = (-c - D_i / (r.K_i * r.lr)[:, None])[0]            # as in `fedssg`
        rows = {name: s[name] for name in ("h_i", "c_i", "count_i")}
        kept[f"rows of round {r.t}"] = ArrayRecord(rows)
    numbers = MetricRecord({"client": i, "n_i": n, "phi_i": phi_i.item(), "lost": int(lost)})
    return Message(RecordDict({"vectors": ArrayRecord(answer), "numbers": numbers}), reply_to=message)


# ---- server ------------------------------------------------------------------------------------------------

def step(method: str, s: dict, replies: list, N: int) -> None:
    """Change omega, h and c in s by the replies of a round, as the end of `fedssg` and `fedavg` do."""
    vectors = [reply["vectors"].to_torch_state_dict() for reply in replies]
    n_i, phi_i = (torch.tensor([float(reply["numbers"][x]) for reply in replies]) for x in ("n_i", "phi_i"))
    D_i = torch.stack([x["D_i"] for x in vectors])                          # (m, d)
    if method == "fedavg":
        sum_nD, sum_n = total(n_i[:, None] * D_i, n_i)
        s["omega"] += sum_nD / sum_n
        return
    if method == "stateless":
        D_i = D_i - METHODS[method]["kappa"] * s["h"]
    sum_D, sum_gated = total(D_i, phi_i[:, None] * D_i)
    s["h"] += sum_gated / N
    s["omega"] += sum_D / len(replies) + s["h"]
    if method in WITH_MEMORY:
        s["c"] += total(torch.stack([x["dc_i"] for x in vectors]))[0] / N


def meet(grid: Grid, client_of: dict, n_i: dict, timeout: float) -> dict:
    """{client: node} of the nodes that are there, the latest if a client has two. It asks new ones."""
    there = set(grid.get_node_ids())
    new = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in there - client_of.keys()]
    for reply in grid.send_and_receive(new, timeout=timeout) if new else []:
        if reply.has_error():
            print(f"a node cannot say which client it is: {reply.error.reason}", flush=True)
        else:
            numbers = reply.content["numbers"]
            client_of[reply.metadata.src_node_id], n_i[numbers["client"]] = numbers["client"], numbers["n_i"]
    return {client: node for node, client in client_of.items() if node in there}


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Wait until every client is there, then play T rounds with whoever answers in time."""
    (_, _, X_test, Y_test), _, model = federation(context)
    config, model = context.run_config, copy.deepcopy(model)
    method, N, T, timeout = (config[name] for name in ("method", "num-clients", "rounds", "timeout"))
    if method not in METHODS:
        raise ValueError(f"method {method!r}: use one of {', '.join(METHODS)}")
    omega = flatten(model)
    s = {"omega": omega, "h": torch.zeros_like(omega), "c": torch.zeros_like(omega)}
    vectors = {name: s[name] for name in (["omega", "c"] if method in WITH_MEMORY else ["omega"])}
    client_of, n_i, counted = {}, {}, dict.fromkeys(range(N), 0)
    while meet(grid, client_of, n_i, timeout).keys() != counted.keys():
        print(f"{len(n_i)} of {N} clients are there", flush=True)
        time.sleep(2)
    numbers = dict(T=T, N=N, p=data.rate_in_force(N, config["participation"], "fixed"), lr0=LR,
                   mean_n=sum(n_i.values()) / N)

    for t in range(1, T + 1):
        began, node_of = time.perf_counter(), meet(grid, client_of, n_i, timeout)
        cohort = [int(i) for i in data.sample_clients(N, config["participation"], "fixed", config["seed"], t)]
        messages = []
        for i in filter(node_of.get, cohort):
            own = ConfigRecord(numbers | dict(t=t, lr=LR * LR_DECAY ** (t - 1), counted=counted[i]))
            content = RecordDict({"vectors": ArrayRecord(vectors), "numbers": own})
            messages.append(Message(content, dst_node_id=node_of[i], message_type="train", group_id=str(t),
                                    ttl=timeout))       # or a slow client would work off old rounds
        answers = grid.send_and_receive(messages, timeout=timeout) if messages else []
        replies = {x.content["numbers"]["client"]: x.content for x in answers if not x.has_error()}
        replies = dict(sorted(replies.items()))
        if replies:
            step(method, s, list(replies.values()), N)
        counted.update(dict.fromkeys(replies, t))

        vector_to_parameters(omega, model.parameters())
        with torch.no_grad():
            accuracy = 100 * (model(X_test).argmax(dim=1) == Y_test).float().mean()
        line = f"round {t}/{T}  accuracy {accuracy:.2f} %  {time.perf_counter() - began:.1f} s"
        if silent := [i for i in cohort if i not in replies]:
            line += f"  no answer from {silent}"
        if lost := [i for i in replies if replies[i]["numbers"]["lost"]]:
            line += f"  without its memory {lost}"
        print(line, flush=True)
    if config["out"]:
        torch.save(model.state_dict(), config["out"])
