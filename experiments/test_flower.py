"""Tests of flower_app.py: it computes what run.py does, sends what it says, goes on when clients drop out.

Most of them carry the messages from the server to the clients and back in this process, on a small data set.
The last two start Flower, in its simulation and as processes of their own, on `synthetic`.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from flwr.app import Context, RecordDict                                    # noqa: E402
from flwr.common.serde import message_to_proto                              # noqa: E402
from flwr.supercore.task_identity import TaskIdentity                       # noqa: E402

import data                                                                 # noqa: E402
import flower_app                                                           # noqa: E402
from fedssg import FORMS, Round, fedssg, flatten, local_sgd                 # noqa: E402

N, ROUNDS = 10, 10
FLAGS = {"stable": ["--form", "stable"], "scaled": [], "fedavg": ["--algo", "fedavg"],
         "stateless": ["--form", "stateless"]}


class Wire:
    """Flower's grid, as far as the app uses it. Client i is on node 100 + i; restarted, on 200 + i."""

    def __init__(self, folder, **config):
        defaults = {"method": "stable", "dataset": small(folder), "data-dir": "data", "num-clients": N,
                    "participation": 0.5, "rounds": ROUNDS, "seed": 0, "timeout": 1.0,
                    "out": str(folder / "model.pt")}
        self.config, self.contexts, self.sent, self.answers = defaults | config, {}, [], []
        self.unasked, self.unheard, self.restarted = [], [], []     # (round, client)
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1   # else there are no messages
        for i in range(self.config["num-clients"]):
            self.start(i, 100 + i)

    def start(self, i, node):
        own = {"partition-id": i}
        self.contexts[node] = Context(
            run_id=1, node_id=node, node_config=own, state=RecordDict(), run_config=self.config)

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout):
        assert timeout == self.config["timeout"]
        for message in messages:
            node = message.metadata.dst_node_id
            assert message.metadata.ttl == timeout or message.metadata.message_type == "query"
            t, i = int(message.metadata.group_id or 0), self.contexts[node].node_config["partition-id"]
            if (t, i) in self.restarted:        # before the message is there
                self.start(i, node + 100)
                del self.contexts[node]
            elif (t, i) not in self.unasked:
                message.metadata.__dict__["_message_id"] = f"{t} to {i}"
                answer = flower_app.client_app(message, self.contexts[node])
                if t:
                    self.sent.append((t, i, message))
                    self.answers.append((t, i, answer))
                if (t, i) not in self.unheard:
                    yield answer

    def play(self):
        """The model that is left after the last round, as one vector."""
        flower_app.main(self, Context(1, 0, {}, RecordDict(), self.config))
        return load(self.config["out"])

    def memory(self, i, t):
        """What client i keeps of round t."""
        context, = (x for x in self.contexts.values() if x.node_config["partition-id"] == i)
        return context.state[f"rows of round {t}"].to_torch_state_dict()


def load(path):
    return torch.cat([x.flatten() for x in torch.load(path).values()])


def small(folder):
    """The path of a data set of 600 vectors in three classes, which is written into the folder."""
    x = np.random.default_rng(0).normal(size=(700, 8)).astype(np.float32)
    y = x[:, :3].argmax(axis=1)
    np.savez(folder / "small.npz", x_train=x[100:], y_train=y[100:], x_test=x[:100], y_test=y[:100])
    return str(folder / "small.npz")


def run_py(folder, dataset, *flags):
    """The model of a run of run.py, as one vector."""
    command = [sys.executable, "run.py", "--dataset", dataset, *flags, "--out", str(folder / "runs")]
    subprocess.run(command, cwd=HERE.parent, check=True, capture_output=True)
    path, = (folder / "runs").glob("*/model.pt")
    return load(path)


def straight(folder, absent):
    """The state after all rounds of `stable` by `fedssg`, with all rows in one place.

    absent: the (round, client) of the cohorts that take no part.
    """
    (X, Y, _, _), shares, model = flower_app.federate(small(folder), "data", N, 0)
    s = {"omega": flatten(model)}
    for t in range(1, ROUNDS + 1):
        cohort = [i for i in data.sample_clients(N, 0.5, "fixed", 0, t) if (t, i) not in absent]
        idx, w, K_i = (torch.from_numpy(x) for x in data.schedule(shares, cohort, 0, t, 5, 50))
        ones = torch.ones(len(cohort))
        r = Round(t=t, T=ROUNDS, N=N, m=len(cohort), p=0.5, lr=0.1 * 0.998 ** (t - 1), lr0=0.1, num_rows=N,
                  i=torch.tensor(cohort), K_i=K_i.float(), n_i=60 * ones, size_i=ones, labels_i=None)
        fedssg(s, r, lambda rho, b: local_sgd(model, s["omega"], rho, b, X, Y, idx, w, r.lr, 1e-3, 10.0)[0],
               **FORMS["stable"])
    return s


def of(t):
    """The clients of the cohort of round t."""
    return [int(i) for i in data.sample_clients(N, 0.5, "fixed", 0, t)]


# ---- the numbers are run.py's ------------------------------------------------------------------------------

@pytest.mark.parametrize("method", flower_app.METHODS)
def test_ten_rounds_give_the_weights_of_run_py(method, tmp_path):
    flags = f"--num-clients {N} --participation 0.5 --rounds {ROUNDS}".split() + FLAGS[method]
    assert torch.equal(Wire(tmp_path, method=method).play(), run_py(tmp_path, small(tmp_path), *flags))


# ---- what is sent ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("method, down, up", [
    ("stable", 2, 2), ("scaled", 2, 2), ("stateless", 1, 1), ("fedavg", 1, 1)])
def test_a_message_has_the_vectors_that_the_table_names_and_little_else(method, down, up, tmp_path):
    wire = Wire(tmp_path, method=method, rounds=2)
    d = len(wire.play())
    for messages, vectors in ((wire.sent, down), (wire.answers, up)):
        assert len(messages) == 2 * 5
        for _, _, message in messages:
            record, proto = message.content["vectors"], message_to_proto(message)
            assert sum(x.numpy().nbytes for x in record.values()) == vectors * 4 * d
            assert proto.ByteSize() - vectors * 4 * d < 1000    # numbers, names, numpy's headers


def test_the_memory_stays_with_the_client(tmp_path):
    wire = Wire(tmp_path, rounds=3)
    wire.play()
    for _, i, message in wire.answers:
        assert message.content["vectors"].keys() == {"D_i", "dc_i"}
        assert message.content["numbers"].keys() == {"client", "n_i", "phi_i", "lost"}
    for i in of(3):
        assert wire.memory(i, 3).keys() == {"h_i", "c_i", "count_i"}


@pytest.mark.parametrize("method", ["stateless", "fedavg"])
def test_without_a_client_s_memory_nothing_is_kept(method, tmp_path):
    wire = Wire(tmp_path, method=method, rounds=3)
    wire.play()
    assert not any(context.state for context in wire.contexts.values())


# ---- clients that drop out ---------------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["unasked", "unheard"])
def test_a_client_without_an_answer_counts_as_absent(how, tmp_path):
    """Whether it did not get the message, or its answer got lost: then it must forget that it trained."""
    wire, i = Wire(tmp_path), of(4)[0]
    absent = [(t, i) for t in (4, 5, 6) if i in of(t)]
    setattr(wire, how, absent)
    assert any(i in of(t) for t in range(1, 4)) and any(i in of(t) for t in range(7, ROUNDS + 1))
    assert torch.equal(wire.play(), straight(tmp_path, absent)["omega"])


def test_rows_are_those_of_all_in_one_place(tmp_path):
    wire, absent = Wire(tmp_path), [(4, of(4)[0]), (ROUNDS, of(ROUNDS)[0])]
    wire.unheard = absent
    wire.play()
    s = straight(tmp_path, absent)
    for i in range(N):
        counted = max([t for t in range(1, ROUNDS + 1) if i in of(t) and (t, i) not in absent], default=None)
        if counted:
            for name, row in wire.memory(i, counted).items():
                assert torch.equal(row[0], s[name][i])


def test_a_round_without_any_answer_changes_nothing(tmp_path, capsys):
    wire = Wire(tmp_path)
    wire.unheard = [(4, i) for i in of(4)]
    wire.play()
    lines = capsys.readouterr().out.splitlines()
    assert f"no answer from {of(4)}" in lines[3]
    assert lines[3].split("%")[0].split()[-1] == lines[2].split("%")[0].split()[-1]


def test_a_restarted_node_is_the_same_client_without_its_memory(tmp_path, capsys):
    wire, i = Wire(tmp_path), of(4)[0]
    later = [t for t in range(5, ROUNDS + 1) if i in of(t)]
    wire.restarted = [(4, i)]
    wire.play()
    lines = capsys.readouterr().out.splitlines()
    assert f"no answer from [{i}]" in lines[3]
    assert [t + 1 for t, line in enumerate(lines) if f"without its memory [{i}]" in line] == later[:1]
    assert wire.memory(i, later[-1])["count_i"] == len(later)
    j = next(j for j in of(ROUNDS) if j != i)
    assert wire.memory(j, ROUNDS)["count_i"] == sum(j in of(t) for t in range(1, ROUNDS + 1))


def test_an_unknown_method_is_refused(tmp_path):
    with pytest.raises(ValueError, match="scaled, stable, stateless, fedavg"):
        Wire(tmp_path, method="feddc").play()


# ---- Flower itself -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, clients, participation, rounds", [
    ("simulation", 10, 0.5, 6), ("deployment", 3, 1.0, 2)])
def test_flower_gives_the_weights_of_run_py(kind, clients, participation, rounds, tmp_path):
    config = f'participation={participation} rounds={rounds} out="{tmp_path}/model.pt"'
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    subprocess.run([HERE / "flower_deploy.sh", kind, str(clients), config], check=True, timeout=300,
                   env=os.environ | {"PATH": path})
    flags = f"--num-clients {clients} --participation {participation} --rounds {rounds}".split()
    assert torch.equal(load(tmp_path / "model.pt"), run_py(tmp_path, "synthetic", *flags))
