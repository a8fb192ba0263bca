"""Checks of the gate, the methods, the solver, the data and the command line.     python -m pytest -q

Each method is compared with something independent of it: numbers worked by hand, autograd, torch.optim, closed forms,
another method at the setting at which both are the same. No network, no data files; about 90 s on two cores.
"""

import copy
import csv
import fcntl
import gzip
import hashlib
import inspect
import json
import math
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import baselines as baselines_module
import data
import fedssg as fedssg_module
import models
import run
from baselines import ALGORITHMS, disco_weights, fedavg, feddc, feddisco, feddyn, fedprox, fedvra, scaffold
from fedssg import fedssg, flatten, FORMS, gate, local_sgd, Round


F64 = torch.float64
METHODS = {**ALGORITHMS, **{f"fedssg {form}": partial(fedssg, **FORMS[form]) for form in FORMS}}
NO_GATE = partial(fedssg, gate_ratio="off", beta=0.0)


# ---- helpers: a round, two federated problems with four clients, and the loop over rounds ----

def make_round(i, n=(1, 1, 1, 1), labels=None, t=1, T=10, K=2, lr=0.1, lr0=None, dtype=F64):
    """The Round of the cohort i among len(n) clients of n[j] samples. K: steps, one number or one per member."""
    i, n = torch.as_tensor(i), torch.tensor(n, dtype=dtype)
    labels = torch.ones(len(n), 2) if labels is None else torch.as_tensor(labels)
    return Round(t=t, T=T, N=len(n), m=len(i), p=len(i) / len(n), lr=lr, lr0=lr if lr0 is None else lr0, num_rows=len(n),
                 i=i, K_i=torch.as_tensor(K, dtype=dtype).expand(len(i)), n_i=n[i], size_i=n[i] / n.mean(),
                 labels_i=labels[i].to(dtype))


def cohorts(m, rounds, N=4):
    """`rounds` random cohorts of m of N clients."""
    return [torch.from_numpy(np.sort(np.random.default_rng(t).choice(N, m, replace=False))) for t in range(rounds)]


# f_i(theta) = 1/2 (theta - A_i)^T diag(Q_i) (theta - A_i): the curvatures differ, so client drift has a bias
A = torch.tensor([[3., -1, 0], [-2, 4, 1], [0, 2, -5], [1, 1, 6]], dtype=F64)
Q = torch.tensor([[0.2, 1, 2], [2, 0.3, 0.5], [1, 3, 0.2], [0.4, 1, 1]], dtype=F64)
OPTIMUM = (Q * A).sum(0) / Q.sum(0)


def quadratic(K=5, lr=0.1, decay=1.0, T=10, N=4, labels=None):
    """K exact gradient steps on f_i plus the affine term. `seen` collects the mean gradient of f_i of each round."""
    def start(s, t, i):
        r = make_round(i, n=[1] * N, t=t, T=T, K=K, lr=lr * decay ** (t - 1), lr0=lr, labels=labels)

        def train(rho, b):
            theta, total_g = s["omega"].expand(len(i), -1), 0
            for _ in range(K):
                g = Q[i] * (theta - A[i])
                theta, total_g = theta - r.lr * (g + rho[:, None] * theta + b), total_g + g
            seen.append(total_g / K)
            return theta
        return r, train
    seen = []
    return SimpleNamespace(omega=torch.zeros(3, dtype=F64), start=start, seen=seen)


def classify(sizes=(1, 3, 6, 10), dtype=F64, epochs=2, batch=4, lr=0.5, decay=1.0, T=10, weight_decay=1e-2, clip=2.0,
             **how):
    """A small network on random data in three classes, trained by local_sgd; `how` goes to local_sgd."""
    g, n = torch.Generator().manual_seed(0), sum(sizes)
    X, Y = torch.randn(n, 4, generator=g, dtype=dtype), torch.randint(3, (n,), generator=g)
    parts = np.split(np.arange(n), np.cumsum(sizes)[:-1])
    labels = torch.stack([torch.bincount(Y[part], minlength=3) for part in parts])
    model = models.build("fcn", (4,), 3, [5], seed=1).to(dtype)
    omega, loss = flatten(model)

    def batches(i, t=1):
        idx, w, K_i = data.schedule(parts, [int(j) for j in i], 0, t, epochs, batch)
        return torch.from_numpy(idx), torch.from_numpy(w).to(dtype), torch.from_numpy(K_i)

    def start(s, t, i):
        idx, w, K_i = batches(i, t)
        r = make_round(i, sizes, labels, t, T, K_i, lr * decay ** (t - 1), lr, dtype)
        return r, lambda rho, b: local_sgd(loss, s["omega"], rho, b, X, Y, idx, w, r.lr, weight_decay, clip, **how)[0]
    return SimpleNamespace(omega=omega, start=start, model=model, loss=loss, X=X, Y=Y, batches=batches)


def play(method, problem, cohorts, **hyper):
    """The rounds of a method; yields, after each, copies of its state together with its clients' theta_i."""
    s = {"omega": problem.omega.clone()}
    for t, i in enumerate(cohorts, 1):
        r, train = problem.start(s, t, torch.as_tensor(i))
        returned = []
        method(s, r, lambda rho, b: returned.append(train(rho, b)) or returned[0], **hyper)
        yield {"theta_i": returned[0], **{name: x.clone() for name, x in s.items()}}


def assert_same(a, b, names=("omega", "theta_i"), tolerance=None):
    """Two plays agree in every round: bit for bit, or to the tolerance."""
    rounds = list(zip(a, b, strict=True))
    assert len(rounds) >= 2
    for x, y in rounds:
        for name in names:
            assert torch.equal(x[name], y[name]) if tolerance is None else close(x[name], y[name], tolerance), name


def close(a, b, tolerance=1e-10):
    return torch.allclose(torch.as_tensor(a, dtype=F64), torch.as_tensor(b, dtype=F64), rtol=tolerance, atol=tolerance)


# ---- the gate ----

@pytest.mark.parametrize("ratio, shape, expected", [
    ("running", "identity", (0.5, 1.5)), ("running", "clip", (0.5, 1)), ("running", "logistic", (0.6224593, 0.8175745)),
    ("horizon", "identity", (0.2, 0.6)), ("horizon", "clip", (0.2, 0.6)), ("horizon", "logistic", (0.549834, 0.645656)),
    ("off", "identity", (1, 1)), ("off", "clip", (1, 1)), ("off", "logistic", (0.7310586, 0.7310586))])
def test_gate_by_hand(ratio, shape, expected):
    """Sampled once and 3 times; expected are p t = 2 at t = 4, or p T = 5."""
    r, count_i, expected = make_round([0, 1], t=4, T=10), torch.tensor([1., 3.], dtype=F64), torch.tensor(expected)
    assert close(gate(count_i, r, ratio=ratio, shape=shape), expected, 2e-6)
    assert close(gate(count_i, r, ratio=ratio, shape=shape, scale=2.0, beta=0.5), 2 * expected + 0.5, 2e-6)


def test_gate_at_its_ends():
    one, r = torch.ones(1, dtype=F64), make_round([2], t=1, T=50)                              # p = 1/4
    assert close(gate(one, r, ratio="running"), [4.0], 1e-4)                                   # 1 / p in round 1
    assert close(gate(one, r, ratio="horizon"), [1 / (0.25 * 50)], 1e-4)                       # first xi = 1 / (p T)
    assert gate(0 * one, r, ratio="running") == gate(0 * one, r, ratio="horizon") == 0
    assert close(gate(one, r, ratio="running", eps=0.75), [1.0])
    with pytest.raises(ValueError, match="ratio"):
        gate(one, r, ratio="walking")
    with pytest.raises(ValueError, match="shape"):
        gate(one, r, shape="round")


@pytest.mark.parametrize("ratio", ["running", "horizon"])
def test_gate_is_monotone_and_bounded(ratio):
    """Whoever is sampled in each of t rounds has the running ratio 1 / p, the largest there is."""
    count_i, r = torch.arange(21, dtype=F64), make_round([0], t=20, T=20)
    for shape, low, high in [("identity", 0, 4), ("clip", 0, 1), ("logistic", 0.5, 1)]:
        phi_i = gate(count_i, r, ratio=ratio, shape=shape)
        step = phi_i.diff()
        assert (step >= 0).all() and (step[:4] > 0).all()
        assert phi_i.min() == low and phi_i.max() <= high and (phi_i.max() - low) > 0.9 * (high - low)


def test_ratios_tend_to_one():
    """Cohorts of 5 of 20 for 2000 rounds: both ratios end at 1, give or take sqrt((1 - p) / (p T)) = 0.04."""
    sampled = np.random.default_rng(0).random((2000, 20)).argsort(1) < 5                        # (rounds, clients)
    count_i = torch.from_numpy(sampled.cumsum(0).astype(float))

    def error(t, ratio):
        r = make_round(list(range(5)), n=[1] * 20, t=t, T=2000)
        return float((gate(count_i[t - 1], r, ratio=ratio) - 1).abs().max())
    assert error(2000, "running") < 0.12 < 0.5 < error(10, "running")
    assert error(2000, "horizon") < 0.12 and error(20, "horizon") > 0.98


# ---- the affine term is the gradient of the penalty ----

def square(x):
    return (x * x).sum()


ALIGNMENT = {"prox": lambda v: v.phi * v.alpha / 2 * square(v.theta - (v.omega - v.h_i)),
             "inner": lambda v: v.alpha * (v.theta - (v.omega - v.h_i)) @ v.h_i,
             "none": lambda v: 0 * v.theta.sum()}
CORRECTION = {"state": lambda v: (v.c - v.c_i) @ v.theta,
              "last": lambda v: (v.D_last_i - v.D_last) @ v.theta / (v.lr * v.K),
              "none": lambda v: 0 * v.theta.sum()}
FEDDYN = lambda v: v.alpha / 2 * square(v.theta - (v.omega - v.h_i))
PENALTIES = {
    "fedavg": (fedavg, {}, lambda v: 0 * v.theta.sum()),
    "fedprox": (fedprox, dict(mu=0.6), lambda v: 0.6 / 2 * square(v.theta - v.omega)),
    "scaffold": (scaffold, {}, CORRECTION["state"]),
    "feddyn": (feddyn, dict(alpha=0.3), FEDDYN),
    "feddisco": (feddisco, dict(alpha=0.3), FEDDYN),
    "feddisco on fedavg": (feddisco, dict(alpha=0.3, base="fedavg"), lambda v: 0 * v.theta.sum()),
    "feddc": (feddc, dict(alpha=0.3), lambda v: FEDDYN(v) + CORRECTION["state"](v)),
    "fedvra": (fedvra, dict(gamma=0.7),
               lambda v: (0.7 * v.h_i) @ (v.theta - v.omega) + 0.7 / 2 * square(v.theta - v.omega)),
    **{f"fedssg {a} {c}": (fedssg, dict(alpha=0.3, alignment=a, correction=c, gate_scale=2.0, beta=0.5),
                           lambda v, a=a, c=c: ALIGNMENT[a](v) + CORRECTION[c](v))
       for a in ALIGNMENT for c in CORRECTION},
}


def affine_term(method, r, s, **hyper):
    """(rho, b) as a method hands them to train."""
    given = []
    method(s, r, lambda rho, b: given.append((rho.clone(), b.clone())) or torch.zeros_like(b), **hyper)
    return given[0]


@pytest.mark.parametrize("name", PENALTIES)
def test_affine_term_is_the_gradient_of_the_penalty(name):
    method, hyper, penalty = PENALTIES[name]
    g = torch.Generator().manual_seed(5)
    shapes = dict(omega=(3,), h=(3,), c=(3,), D_last=(3,), h_i=(4, 3), c_i=(4, 3), D_last_i=(4, 3))
    s = {key: torch.randn(shape, generator=g, dtype=F64) for key, shape in shapes.items()}
    s["count_i"] = torch.tensor([5., 1, 2, 7], dtype=F64)
    before = copy.deepcopy(s)
    r = make_round([1, 2], n=[20, 10, 30, 20], T=8, K=[2, 5], lr=0.1, lr0=0.3)
    rho, b = affine_term(method, r, s, **hyper)
    for j, i in enumerate([1, 2]):
        v = SimpleNamespace(**{key: x[i] if key.endswith("_i") else x for key, x in before.items()})
        v.alpha, v.phi = 0.3 / (0.5, 1.5)[j], 2 * (2, 3)[j] / (0.5 * 8 + 1e-6) + 0.5
        v.lr, v.K, v.theta = 0.1, (2, 5)[j], torch.randn(3, generator=g, dtype=F64, requires_grad=True)
        assert close(torch.autograd.grad(penalty(v), v.theta)[0], rho[j] * v.theta.detach() + b[j])


def test_fedprox_gradient_is_proportional_to_the_displacement():
    omega, D = torch.tensor([1., -2], dtype=F64), torch.tensor([0.5, 0.25], dtype=F64)
    gradients = []
    for mu in (0.1, 1.0, 10.0):
        rho, b = affine_term(fedprox, make_round([0]), {"omega": omega.clone()}, mu=mu)
        gradients += [rho[0] * (omega + k * D) + b[0] for k in (1, 2)]
    assert close(torch.stack(gradients), torch.tensor([0.1, 0.2, 1, 2, 10, 20])[:, None].to(F64) * D, 1e-7)


# ---- one round of each method by hand ----

BEFORE = dict(omega=[2], h_i=[0, 0.4, -0.6, 0.6], h=[0.1], c_i=[0, 1, -2, 3], c=[0.5], count_i=[0, 1, 2, 0],
              D_last_i=[9, 0.7, -0.5, 9], D_last=[0.2])
H = dict(h_i=[0, 0.4 + 1, -0.6 - 2, 0.6], h=[0.1 - 1 / 4])                       # FedDyn's memory after the round
C = dict(c_i=[0, 1 - 0.5 - 1 / (2 * 0.1), -2 - 0.5 + 2 / (4 * 0.1), 3], c=[0.25])    # SCAFFOLD's control variates
A1, A2 = 1 / (1 - 0.6 ** 2), 1 / (1 - 0.6 ** 4)               # FedVRA's `auto` for eta_0 gamma = 0.4
BY_HAND = [
    (fedavg, {}, dict(rho=[0, 0], b=[0, 0], omega=[2 + 0.25 * 1 - 0.75 * 2])),
    (fedprox, dict(mu=0.5), dict(rho=[0.5, 0.5], b=[-0.5 * 2, -0.5 * 2], omega=[0.75])),
    (scaffold, dict(eta_g=0.5), dict(rho=[0, 0], b=[0.5 - 1, 0.5 + 2], omega=[2 + 0.5 * (1 - 2) / 2], **C)),
    # alpha_i = 0.3 / 0.5, 0.3 / 1.5
    (feddyn, dict(alpha=0.3), dict(rho=[0.6, 0.2], b=[0.6 * (0.4 - 2), 0.2 * (-0.6 - 2)], omega=[2 - 0.5 - 0.15], **H,
                                   log=dict(h_norm=2.0))),
    (feddc, dict(alpha=0.3), dict(rho=[0.6, 0.2], b=[-0.96 - 0.5, -0.52 + 2.5], omega=[1.35], **H, **C,
                                  log=dict(h_norm=2.0))),
    (fedvra, dict(gamma=0.5, dual_step=3, server_step=4),
     dict(rho=[0.5, 0.5], b=[0.5 * (0.4 - 2), 0.5 * (-0.6 - 2)], h_i=[0, 0.4 + 3, -0.6 - 6, 0.6], h=[-0.65],
          omega=[2 + 4 / 4 * (1 - 2) - 0.65], log=dict(h_norm=5.0))),
    (fedvra, dict(gamma=2.0), dict(rho=[2, 2], b=[-3.2, -5.2], h_i=[0, 0.4 + A1, -0.6 - 2 * A2, 0.6],
                                   h=[0.1 + (A1 - 2 * A2) / 4], omega=[2 + 2 / 4 * (1 - 2) + 0.1 + (A1 - 2 * A2) / 4],
                                   log=dict(h_norm=(0.4 + A1 + 0.6 + 2 * A2) / 2))),         # d = 1 / p = 2
    (fedvra, dict(gamma=0.0), dict(rho=[0, 0], b=[0, 0], omega=[1.35], **H, log=dict(h_norm=2.0))),      # a = 1
    # kl = 0, ln 2, or 0, 1 of their sum; disco = 0.25 + 0.1, 0.75 - 0.45 + 0.1, over their sum
    (feddisco, dict(alpha=0.3, disco_a=0.45), dict(rho=[0.6, 0.2], b=[-0.96, -0.52], **H, log=dict(h_norm=2.0),
                                                   omega=[2 + (0.35 * 1 - 0.4 * 2) / 0.75 - 0.15])),
    # released: phi = 1 + 2/5, 1 + 3/5
    (fedssg, dict(alpha=0.3),
     dict(rho=[0, 0], b=[0.6 * 0.4 - 0.5, -0.2 * 0.6 + 2.5], count_i=[0, 2, 3, 0],
          h_i=[0, 0.4 + 1.4, -0.6 - 3.2, 0.6], h=[0.1 + (1.4 - 3.2) / 4], omega=[2 - 0.5 - 0.35],
          c_i=[0, 1 - 0.5 - 1.4 / (2 * 0.2), -2 - 0.5 + 3.2 / (4 * 0.2), 3], c=[0.375],
          log=dict(gate=1.5, h_norm=2.8, gain=[1.4 * 0.1 * 2 * 0.6, 1.6 * 0.1 * 4 * 0.2]))),
    # main: phi = 2/1.5, 3/1.5
    (fedssg, {**FORMS["main"], "alpha": 0.3},
     dict(rho=[0.6 * 4 / 3, 0.2 * 2], b=[0.8 * (0.4 - 2), 0.4 * (-0.6 - 2)], count_i=[0, 2, 3, 0],
          h_i=[0, 0.4 + 4 / 3, -0.6 - 4, 0.6], h=[0.1 + (4 / 3 - 4) / 4], omega=[2 - 0.5 + 0.1 - 2 / 3],
          log=dict(gate=5 / 3, h_norm=(5 + 4 / 3) / 2))),
    # appendix: phi = 2/5, 3/5
    (fedssg, {**FORMS["appendix"], "alpha": 0.3},
     dict(rho=[0, 0], b=[0.24 + (0.7 - 0.2) / (2 * 0.1), -0.12 + (-0.5 - 0.2) / (4 * 0.1)], count_i=[0, 2, 3, 0],
          h_i=[0, 0.4 + 0.4, -0.6 - 1.2, 0.6], h=[-0.1], omega=[2 - 0.5 - 0.1], D_last_i=[9, 1, -2, 9], D_last=[-0.6],
          log=dict(gate=0.5, h_norm=1.3, gain=[0.4 * 0.1 * 2 * 0.6, 0.6 * 0.1 * 4 * 0.2]))),
]


@pytest.mark.parametrize("method, hyper, after", BY_HAND, ids=[case[0].__name__ for case in BY_HAND])
def test_one_round_by_hand(method, hyper, after):
    """d = 1: clients 1 and 2 of four, with 10 and 30 samples (size_i 0.5 and 1.5), 2 and 4 steps, rate 0.1 (0.2 in
    round 1), t = 3, T = 10; they return 3 and 0, so D_i = 1 and -2. States that `after` does not name stay."""
    s = {name: torch.tensor(x, dtype=F64) for name, x in BEFORE.items()}
    s |= {name: s[name][:, None] for name in ("h_i", "c_i", "D_last_i")}
    r = make_round([1, 2], n=[20, 10, 30, 20], labels=[[9, 9], [5, 5], [30, 0], [9, 9]], t=3, K=[2, 4], lr=0.1, lr0=0.2)
    given = []
    log = method(s, r, lambda rho, b: given.extend([rho, b]) or torch.tensor([[3.], [0.]], dtype=F64), **hyper)
    got = {"rho": given[0], "b": given[1], **s}
    expected_log = after.get("log", {})
    for name, x in {**BEFORE, **after}.items():
        assert name == "log" or close(got[name].flatten(), x, 3e-6), (name, got[name])
    assert log.keys() == expected_log.keys() and all(close(log[name], x, 3e-6) for name, x in expected_log.items())


def test_fedssg_defaults_are_released_and_unknown_parts_are_refused():
    assert len(ALGORITHMS) == 8 and all(method.__name__ == name for name, method in ALGORITHMS.items())
    defaults = {name: p.default for name, p in inspect.signature(fedssg).parameters.items()}
    assert FORMS["released"].items() <= defaults.items() and FORMS["main"]["alpha"] == 1.0
    for part in ("alignment", "correction", "gate_ratio", "gate_shape"):
        with pytest.raises(ValueError, match=part.split("_")[-1]):
            list(play(fedssg, quadratic(), [[0]], **{part: "something"}))


# ---- the local solver ----

@pytest.mark.parametrize("mode", ["loop", "vmap", "auto"])
def test_one_step_by_hand(mode):
    """1/2 (x theta - y)^2 at theta = (1, 1), x = (3, 4): residual 7, gradient (21, 28), with 10 theta + (-1, 2) it
    is (30, 40) of norm 50, clipped to (3, 4); weight decay 0.5 comes after."""
    def loss(theta, x, y, w):
        return (w * (x @ theta - y) ** 2 / 2).sum()
    one = torch.ones(1, 1, 1, dtype=F64)
    args = (loss, torch.ones(2, dtype=F64), 10 * one[0, 0], torch.tensor([[-1., 2]], dtype=F64),
            torch.tensor([[3., 4]], dtype=F64), 0 * one[0, 0], torch.zeros(1, 1, 1, dtype=int), one, 0.1, 0.5)
    theta_i, loss_i = local_sgd(*args, clip=5.0, mode=mode)
    assert close(theta_i, [[1 - 0.1 * 3.5, 1 - 0.1 * 4.5]]) and close(loss_i, [24.5])
    assert close(local_sgd(*args, clip=100.0, mode=mode)[0], [[1 - 0.1 * 30.5, 1 - 0.1 * 40.5]])


@pytest.mark.parametrize("method", [fedavg, scaffold])
@pytest.mark.parametrize("clip", [math.inf, 0.3])
def test_one_client_is_central_sgd(method, clip):
    """Five rounds with one client = torch.optim.SGD on the same batches, from round to round."""
    problem = classify(sizes=(10,), clip=clip, decay=0.9)
    model, T = copy.deepcopy(problem.model), 5
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=1e-2)
    for t, state in enumerate(play(method, problem, [[0]] * T), 1):
        idx, w, _ = problem.batches([0], t)
        optimizer.param_groups[0]["lr"] = 0.5 * 0.9 ** (t - 1)
        for k in range(len(idx)):
            batch = idx[k, 0][w[k, 0] > 0]          # 10 samples in batches of 4: the last one has 2
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(problem.X[batch]), problem.Y[batch]).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip if clip < 1 else 1e9)
            assert norm > 0.3 or clip > 1 or t > 1, "the clip is never reached"
            optimizer.step()
        assert close(state["omega"], flatten(model)[0], 1e-12 if clip > 1 else 1e-5)    # torch's clip adds 1e-6


def solve(problem, i=(0, 1, 2, 3), rho=(0.0, 0.3, 0.1, 0.5), **how):
    """theta_i and losses of the clients i with an affine term, by local_sgd."""
    idx, w, _ = problem.batches(i)
    b = 0.1 * torch.randn(4, len(problem.omega), generator=torch.Generator().manual_seed(2), dtype=F64)
    rho = torch.tensor(rho, dtype=F64)
    return local_sgd(problem.loss, problem.omega, rho[list(i)], b[list(i)], problem.X, problem.Y, idx, w,
                     **{**dict(lr=0.3, weight_decay=0.05, clip=0.4), **how})


@pytest.mark.parametrize("how", [dict(mode="auto"), dict(mode="vmap"), dict(mode="vmap", chunk=1),
                                 dict(mode="vmap", chunk=2), dict(mode="vmap", chunk=3), dict(mode="vmap", chunk=5)])
def test_loop_vmap_and_chunks_agree(how):
    problem = classify()                            # clients of 1, 3, 6 and 10 samples: 2, 2, 4 and 6 steps
    for clip in (0.4, math.inf):
        expected, got = solve(problem, mode="loop", clip=clip), solve(problem, clip=clip, **how)
        assert close(got[0], expected[0]) and close(got[1], expected[1])
        assert expected[0].shape == (4, len(problem.omega)) and (expected[1] > 0).all()


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_a_client_does_not_depend_on_the_others(mode):
    """Alone, in any order, or padded to the steps of larger clients: the same result. Batches are the client's own."""
    problem = classify()
    theta_i, loss_i = solve(problem, mode=mode)
    turned = solve(problem, i=(3, 0, 2, 1), mode=mode)
    assert close(turned[0], theta_i[[3, 0, 2, 1]], 1e-13) and close(turned[1], loss_i[[3, 0, 2, 1]], 1e-13)
    for j in range(4):
        alone = solve(problem, i=(j,), mode=mode)   # j = 0: two steps, here without padding
        assert close(alone[0][0], theta_i[j], 1e-13) and close(alone[1][0], loss_i[j], 1e-13)


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_augmentation_sees_each_samples_own_draw(mode):
    """Draws that are a function of the sample = training on data that was changed beforehand."""
    problem, changed = classify(), classify()
    factor = torch.linspace(-1, 2, len(problem.X), dtype=F64)
    changed.X = changed.X * factor[:, None]
    idx, _, _ = problem.batches([0, 1, 2, 3])
    theta_i, _ = solve(problem, mode=mode, augment=lambda x, draws: x * draws[..., None], draws=factor[idx])
    assert close(theta_i, solve(changed, mode=mode)[0]) and not close(theta_i, solve(problem, mode=mode)[0], 1e-3)


def test_solver_edges():
    problem = classify()
    threads, before = torch.get_num_threads(), problem.omega.clone()
    torch.set_num_threads(3)
    for mode in ("loop", "vmap"):                   # a process may have no member of the cohort
        theta_i, loss_i = solve(problem, i=(), mode=mode)
        assert theta_i.shape == (0, len(problem.omega)) and loss_i.shape == (0,)
        solve(problem, mode=mode)
    assert torch.equal(problem.omega, before) and torch.get_num_threads() == 3
    torch.set_num_threads(threads)
    with pytest.raises(ValueError, match="mode"):
        solve(problem, mode="both")


def test_flatten_leaves_the_model_alone_and_computes_it():
    problem = classify()
    model, before = problem.model, copy.deepcopy(problem.model.state_dict())
    for mode in ("loop", "vmap"):
        solve(problem, mode=mode)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert close(problem.loss.logits(problem.omega, problem.X), model(problem.X), 1e-14)
    model(problem.X).sum().backward()               # still a model of its owner, trainable
    assert all(p.grad is not None for p in model.parameters()) and not problem.omega.requires_grad
    assert torch.equal(problem.omega, torch.cat([p.detach().flatten() for p in model.parameters()]))


def test_flatten_ties_shared_weights():
    first, second = nn.Linear(3, 3, dtype=F64), nn.Linear(3, 3, dtype=F64)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second)
    omega, loss = flatten(model)
    x, y, w = torch.randn(2, 3, dtype=F64), torch.tensor([0, 2]), torch.ones(2, dtype=F64)
    assert omega.shape == (9 + 3 + 3,)
    expected = nn.functional.cross_entropy(model(x), y)
    assert close(loss(omega, x, y, w / 2), expected.detach(), 1e-14)
    g = torch.cat([g.flatten() for g in torch.autograd.grad(expected, list(model.parameters()))])
    for mode in ("loop", "vmap"):
        theta_i, _ = local_sgd(loss, omega, torch.zeros(1, dtype=F64), torch.zeros(1, 15, dtype=F64), x, y,
                               torch.arange(2)[None, None], w[None, None], 0.1, mode=mode)
        assert close(theta_i[0], omega - 0.1 * g, 1e-13)


def test_flatten_of_a_module_in_two_places():
    """Evaluation leaves the caller's model alone, and the loop trains it still."""
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(4, 3)).double()
    omega, loss = flatten(model)
    X, Y, idx = torch.randn(6, 4, dtype=F64), torch.arange(6) % 3, torch.arange(6).view(3, 1, 2)
    arguments = (loss, omega, omega.new_zeros(1), omega.new_zeros(1, len(omega)), X, Y, idx, torch.ones(3, 1, 2, dtype=F64), 0.5)
    before = local_sgd(*arguments, mode="loop")[0]
    batched = local_sgd(*arguments, mode="vmap")[0]
    assert torch.equal(loss.logits(omega, X), model(X)) and all(type(p) is nn.Parameter for p in (model[0].weight, model[2].bias))
    assert close(before, batched) and torch.equal(local_sgd(*arguments, mode="loop")[0], before) and not close(before, omega, 1e-3)


def test_flatten_of_a_parameter_by_two_names():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = nn.Parameter(torch.eye(3, dtype=F64))

        def forward(self, x):
            return x @ self.a + 2 * x @ self.b
    omega, loss = flatten(Twice())
    X = torch.randn(5, 3, dtype=F64)
    assert len(omega) == 9 and close(loss.logits(2 * omega, X), 6 * X)


def test_flatten_refuses_a_model_that_copies_its_own_parameters():
    class Own(nn.Linear):
        def __deepcopy__(self, memo):
            return Own(2, 3)
    omega, loss = flatten(Own(2, 3))
    with pytest.raises(ValueError, match="mode vmap"):
        loss.private(omega, torch.zeros_like(omega))


@pytest.mark.parametrize("chunk, compiled, width", [(1, 5, 1), (3, 2, 2), (None, 4, 8), (4, 8, 4)])
def test_filled_chunks_are_no_larger_than_asked(chunk, compiled, width, monkeypatch):
    widths = []
    monkeypatch.setattr(fedssg_module, "_compiled_step", lambda: lambda loss, theta, *a: widths.append(len(theta)) or fedssg_module._step(loss, theta, *a))
    sizes = (1, 3, 6, 10, 2, 2)
    plays = [play(fedavg, classify(sizes, **how), cohorts(5, 2, 6)) for how in (dict(mode="loop"), dict(mode="vmap", chunk=chunk, compiled=compiled))]
    assert_same(*plays, tolerance=1e-9)
    assert set(widths) == {width}


def test_flatten_refuses_batch_norm():
    with pytest.raises(ValueError, match="batch norm"):
        flatten(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    flatten(nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4)))


# ---- where methods coincide ----

SOME = cohorts(2, 5)        # five rounds of two of the four clients
EQUAL = dict(sizes=(5, 5, 5, 5))


def test_fedprox_without_mu_is_fedavg():
    assert_same(play(fedprox, classify(dtype=torch.float32), SOME, mu=0.0),
                play(fedavg, classify(dtype=torch.float32), SOME))


def test_fedssg_without_gate_is_feddyn_and_feddc():
    """prox and no correction: FedDyn; with SCAFFOLD's states: FedDC, while the rate stays that of round 1."""
    single = partial(classify, dtype=torch.float32)
    assert_same(play(NO_GATE, single(decay=0.9), SOME, alpha=0.2, alignment="prox", correction="none"),
                play(feddyn, single(decay=0.9), SOME, alpha=0.2), ("omega", "theta_i", "h", "h_i"))
    assert_same(play(NO_GATE, single(), SOME, alpha=0.2, alignment="prox", correction="state"),
                play(feddc, single(), SOME, alpha=0.2), ("omega", "theta_i", "h", "h_i", "c", "c_i"))


@pytest.mark.parametrize("alignment", ["inner", "prox", "none"])
@pytest.mark.parametrize("correction", ["none", "state"])
def test_fedssg_with_gate_zero_is_fedavg(alignment, correction):
    zero = dict(gate_scale=0.0, beta=0.0, alignment=alignment, correction=correction)
    assert_same(play(fedssg, classify(**EQUAL), SOME, **zero), play(fedavg, classify(**EQUAL), SOME), tolerance=1e-12)


def test_feddisco_without_its_weights_is_feddyn_or_fedavg():
    assert_same(play(feddisco, classify(**EQUAL), SOME, disco_a=0.0, disco_b=0.0, alpha=0.2),
                play(feddyn, classify(**EQUAL), SOME, alpha=0.2), ("omega", "theta_i", "h_i"), 1e-12)
    on_fedavg = list(play(feddisco, classify(), SOME, disco_a=0.0, disco_b=0.0, base="fedavg"))
    assert_same(on_fedavg, play(fedavg, classify(), SOME), tolerance=1e-12)
    assert not on_fedavg[-1]["h_i"].any() and not on_fedavg[-1]["h"].any()


def test_first_round_of_fedavg_scaffold_and_feddc():
    """No state yet: the clients do the same. FedDC's server also adds mean_N h_i = mean_S D_i / 2 (m = N / 2)."""
    (avg,), (sca,), (dc,) = (play(method, classify(**EQUAL), SOME[:1], **hyper)
                             for method, hyper in [(fedavg, {}), (scaffold, {}), (feddc, dict(alpha=0.0))])
    assert torch.equal(avg["theta_i"], sca["theta_i"]) and torch.equal(avg["theta_i"], dc["theta_i"])
    assert close(avg["omega"], sca["omega"], 1e-14)
    assert close(dc["omega"] - avg["omega"], dc["h_i"].mean(0), 1e-12)
    assert close(dc["h_i"].mean(0), (avg["omega"] - classify(**EQUAL).omega) / 2, 1e-12)


@pytest.mark.parametrize("server_step", ["auto", 2.0])       # N / m = 2
def test_fedvra_contains_feddyn_fedprox_and_fedavg(server_step):
    vra = partial(fedvra, server_step=server_step)
    assert_same(play(vra, classify(**EQUAL), SOME, gamma=0.3, dual_step=1.0),
                play(feddyn, classify(**EQUAL), SOME, alpha=0.3), ("omega", "theta_i", "h_i"), 1e-12)
    assert_same(play(vra, classify(**EQUAL), SOME, gamma=0.3, dual_step=0.0),
                play(fedprox, classify(**EQUAL), SOME, mu=0.3), tolerance=1e-12)
    assert_same(play(vra, classify(**EQUAL), SOME, gamma=0.0, dual_step=0.0),
                play(fedavg, classify(**EQUAL), SOME), tolerance=1e-12)


def steps(theta, gradient, K=5, lr=0.1):
    for _ in range(K):
        theta = theta - lr * gradient(theta)
    return theta


def test_fedvra_is_federated_admm():
    """Everyone takes part, a = d = 1. FedPD's own form: lambda_i += gamma (theta_i - omega),
    omega = mean (theta_i + lambda_i / gamma)."""
    omega, lambda_i, gamma = torch.zeros(3, dtype=F64), torch.zeros(4, 3, dtype=F64), 0.4
    for state in play(fedvra, quadratic(), [range(4)] * 20, gamma=gamma, dual_step=1.0, server_step=1.0):
        theta_i = steps(omega.expand(4, 3), lambda th: Q * (th - A) + lambda_i + gamma * (th - omega))
        lambda_i = lambda_i + gamma * (theta_i - omega)
        omega = (theta_i + lambda_i / gamma).mean(0)
        assert close(state["omega"], omega) and close(gamma * state["h_i"], lambda_i)


def test_feddyn_is_the_form_of_its_paper():
    """l_i: the client's gradient state. f_i - <l_i, theta> + alpha/2 ||theta - omega||^2;
    l_i -= alpha D_i; h -= alpha/N sum_S D_i; omega = mean_S theta_i - h / alpha."""
    omega, l_i, h, alpha = torch.zeros(3, dtype=F64), torch.zeros(4, 3, dtype=F64), torch.zeros(3, dtype=F64), 0.4
    for state, i in zip(play(feddyn, quadratic(), cohorts(2, 30), alpha=alpha), cohorts(2, 30), strict=True):
        theta_i = steps(omega.expand(2, 3), lambda th: Q[i] * (th - A[i]) - l_i[i] + alpha * (th - omega))
        l_i[i] -= alpha * (theta_i - omega)
        h = h - alpha / 4 * (theta_i - omega).sum(0)
        omega = theta_i.mean(0) - h / alpha
        assert close(state["omega"], omega) and close(-alpha * state["h_i"], l_i) and close(-alpha * state["h"], h)


# ---- invariants ----

@pytest.mark.parametrize("name", METHODS)
def test_invariants_at_partial_participation(name):
    """Server vectors are means over all clients; rows of who is not sampled stay; one sample is enough to take part."""
    before, sampled, who = {}, torch.zeros(4, dtype=F64), [[0, 3], [1], [0, 2, 3], [2], [1, 0], [3, 2]]
    problem = classify(decay=0.9)                   # client 0 has one sample
    for i, state in zip(who, play(METHODS[name], problem, who), strict=True):
        sampled[i] += 1
        assert all(x.isfinite().all() for x in state.values())
        for server, client in [("c", "c_i"), ("h", "h_i")]:
            if server in state:
                assert close(state[server], state[client].mean(0), 1e-13)
        others = [j for j in range(4) if j not in i]
        for row in set(state) & {"c_i", "h_i", "D_last_i", "count_i"}:
            assert torch.equal(state[row][others], before.get(row, torch.zeros_like(state[row]))[others])
        assert "count_i" not in state or torch.equal(state["count_i"], sampled)
        before = state
    assert not close(before["omega"], problem.omega, 1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_clients_that_do_not_move_change_no_memory(name):
    g = torch.Generator().manual_seed(1)
    s = {"omega": torch.randn(3, generator=g), "h_i": torch.randn(4, 3, generator=g)}
    omega, h_i = s["omega"].clone(), s["h_i"].clone()
    r = make_round([1, 2], n=[1, 2, 3, 4], dtype=torch.float32)
    METHODS[name](s, r, lambda rho, b: omega.expand(2, 3))
    assert torch.equal(s["h_i"], h_i)
    assert torch.equal(s["omega"], omega)           # h, made now, is zero


@pytest.mark.parametrize("method", [fedavg, fedprox])
def test_average_is_weighted_by_samples(method):
    s, r = {"omega": torch.tensor([5., 5])}, make_round([0, 1], n=[10, 30], dtype=torch.float32)
    method(s, r, lambda rho, b: torch.tensor([[1., 2], [3., -4]]))
    assert close(s["omega"], [0.25 * 1 + 0.75 * 3, 0.25 * 2 - 0.75 * 4], 1e-6)


@pytest.mark.parametrize("method", [scaffold, partial(feddc, alpha=0.0)])
@pytest.mark.parametrize("N, m", [(1, 1), (4, 2)])
def test_control_variate_is_the_mean_gradient_seen(method, N, m):
    """In every one of 200 rounds, while the rate falls to two thirds; c is the mean over all N."""
    problem, who = quadratic(decay=0.998, N=N), cohorts(m, 200, N)
    for i, state in zip(who, play(method, problem, who), strict=True):
        assert close(state["c_i"][i], problem.seen[-1], 1e-11)
        assert close(state["c"], state["c_i"].mean(0), 1e-11) and len(state["c_i"]) == N


def test_total_does_not_depend_on_the_order():
    """Nor, so, on how the clients are spread over processes: sums of float32 numbers are made in float64."""
    x = torch.randn(15, 10_000) * torch.rand(15, 1).exp()
    (a,), (b,), (c,) = (fedssg_module.total(x[order]) for order in (torch.arange(15), torch.arange(15).flip(0), torch.randperm(15)))
    assert a.dtype == torch.float32 and torch.equal(a, b) and torch.equal(a, c)
    assert torch.equal(a, x.double().sum(0).float())


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")), reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_step_equals_loop():
    """torch.compile of the batched step, on clients of unequal size, every method (and each form of FedSSG), three rounds."""
    for method in METHODS.values():
        plays = [play(method, classify(**how), cohorts(3, 3)) for how in (dict(mode="loop"), dict(mode="vmap", compiled=2))]
        assert_same(*plays, tolerance=1e-9)


def test_the_step_is_compiled_once_per_shape(monkeypatch):
    """Not once per run, rate, weight decay or clip; and cohorts filled up to one size count as one shape."""
    shapes = []

    def backend(graph, inputs):
        shapes.append([x.device.type + str(x.dim()) for x in inputs if torch.is_tensor(x)])
        return graph.forward
    torch.compiler.reset()
    monkeypatch.setattr(fedssg_module, "_compiled_step", lambda step=torch.compile(fedssg_module._step, backend=backend): step)
    for m, lr, weight_decay, clip, compiled in ((4, 0.5, 1e-2, 2.0, 1), (3, 0.4, 1e-5, 3.0, 4), (1, 0.1, 0.0, math.inf, 4)):
        loop, filled = (list(play(fedavg, classify(lr=lr, weight_decay=weight_decay, clip=clip, **how), cohorts(m, 2)))
                        for how in (dict(mode="loop"), dict(mode="vmap", compiled=compiled)))
        assert_same(loop, filled, tolerance=1e-9)
    assert len(shapes) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("how", [dict(mode="loop"), dict(mode="vmap"), dict(mode="vmap", chunk=2), dict(mode="vmap", compiled=1)])
def test_cuda_equals_cpu(how):
    """local_sgd on the GPU in each mode, against the loop on the CPU, in float64."""
    problem = classify()
    idx, w, _ = problem.batches([0, 1, 2, 3])
    rho, b = torch.rand(4, dtype=F64), 0.1 * torch.randn(4, len(problem.omega), dtype=F64)
    arguments = [problem.omega, rho, b, problem.X, problem.Y, idx, w]
    expected = local_sgd(problem.loss, *arguments, 0.5, 1e-2, 2.0, "loop")
    _, loss = flatten(copy.deepcopy(problem.model).cuda())
    result = local_sgd(loss, *(x.cuda() for x in arguments), 0.5, 1e-2, 2.0, **how)
    assert all(close(x.cpu(), y, 1e-9) for x, y in zip(result, expected))


# ---- FedDisco's weights ----

def shares(*weights):
    return np.array(weights) / sum(weights)


def test_disco_weights_by_hand():
    """kl = 0, ln 2, ln 2 - entropy(3/4, 1/4), or 0, 0.841, 0.159 of their sum; n_i/sum n = 1/4, 1/4, 1/2."""
    r = make_round([0, 1, 2], n=[20, 20, 40], labels=[[10, 10], [20, 0], [30, 10]])
    assert close(disco_weights(r, 0.2, 0.1), shares(0.35, 0.35 - 0.2 * 0.84124, 0.6 - 0.2 * 0.15876), 1e-6)
    assert close(disco_weights(r, 0.9, 0.0), shares(0.25, 0, 0.5 - 0.9 * 0.15876), 1e-6)       # the skewed one is clipped
    assert close(disco_weights(r, 0.5, -2.0), [0.25, 0.25, 0.5])                            # all are: sample counts
    same = make_round([0, 1, 2], n=[20, 20, 40], labels=[[10, 10], [10, 10], [20, 20]])
    assert close(disco_weights(same, 0.5, 0.0), [0.25, 0.25, 0.5])                          # nobody is skewed


@pytest.mark.parametrize("classes", [2, 26, 100])
def test_disco_weights_for_any_number_of_classes(classes):
    """One client has a single class, one has half of them evenly: KL ln C and ln 2 (for C = 2: 0)."""
    labels = torch.zeros(4, classes)
    labels[0, 3 % classes], labels[1, ::2], labels[2], labels[3] = classes, 2, 1, 1
    kl = np.array([math.log(classes), math.log(2), 0, 0])
    r = make_round([0, 1, 2, 3], n=[classes] * 4, labels=labels)
    assert close(disco_weights(r, 0.1, 0.2), shares(*(0.25 - 0.1 * kl / kl.sum() + 0.2)))


# ---- convergence on the quadratic ----

@pytest.mark.parametrize("method, hyper", [
    (scaffold, {}), (feddyn, dict(alpha=0.5)), (feddc, dict(alpha=0.2)), (fedvra, {}),
    (fedvra, dict(gamma=0.3, dual_step=1.0)), (feddisco, dict(alpha=0.5)), (fedssg, {}), (fedssg, dict(alpha=0.0)),
    (fedssg, dict(gate_ratio="off", beta=0.0)), (fedssg, {**FORMS["main"], "gate_shape": "clip"}),
    (fedssg, {**FORMS["main"], "alpha": 0.05, "gate_shape": "clip"}),
    (fedssg, {**FORMS["main"], "alpha": 0.05, "gate_shape": "clip", "correction": "state"}),
    (fedssg, {**FORMS["appendix"], "correction": "none", "alpha": 0.2})])
def test_drift_corrected_methods_reach_the_optimum(method, hyper):
    skewed = [[9, 1], [5, 5], [4, 6], [3, 7]]
    *_, state = play(method, quadratic(T=600, labels=skewed), [range(4)] * 600, **hyper)
    assert (state["omega"] - OPTIMUM).norm() < 1e-4 * OPTIMUM.norm()


@pytest.mark.parametrize("method, mu, hyper", [(fedavg, 0.0, {}), (fedprox, 0.5, dict(mu=0.5))])
def test_fedavg_and_fedprox_stop_at_their_bias(method, mu, hyper):
    """K steps of rate eta on f_i + mu/2 ||theta - omega||^2 give D_i = -w_i (omega - A_i), so they stop where
    sum_i w_i (omega - A_i) = 0."""
    q, a = Q.numpy(), A.numpy()
    w = (1 - (1 - 0.1 * (q + mu)) ** 5) * q / (q + mu)
    fixed = torch.from_numpy((w * a).sum(0) / w.sum(0))
    *_, state = play(method, quadratic(), [range(4)] * 200, **hyper)
    assert close(state["omega"], fixed, 1e-8) and (fixed - OPTIMUM).norm() > 1e-2 * OPTIMUM.norm()


# ---- models ----

def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_models_are_the_papers():
    sizes = [("fcn", (1, 28, 28), 10, [200, 200], 199_210), ("fcn", (1, 28, 28), 10, [100], 79_510),
             ("cnn", (3, 32, 32), 10, [], 797_962), ("cnn", (3, 32, 32), 100, [], 815_332), ("linear", (7,), 3, [], 24)]
    for name, shape, classes, hidden, d in sizes:
        model = models.build(name, shape, classes, hidden, seed=0)
        assert parameters(model) == d and model(torch.zeros(2, *shape)).shape == (2, classes)
    assert models.build("cnn", (1, 16, 16), 5, [], 0)(torch.zeros(2, 1, 16, 16)).shape == (2, 5)


@pytest.mark.parametrize("name, shape", [("cnn", (784,)), ("cnn", (3, 32, 28)), ("cnn", (1, 15, 15)),
                                         ("resnet", (3, 32, 32))])
def test_build_refuses_a_misfit(name, shape):
    with pytest.raises(ValueError, match=f"--model {name}"):
        models.build(name, shape, 10, [], 0)


def test_build_draws_from_its_seed_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one, two = (flatten(models.build("fcn", (4,), 3, [5], seed=7))[0] for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(one, two) and torch.equal(one, flatten(models.build("fcn", (4,), 3, [5], seed=7))[0])
    assert not torch.equal(one, flatten(models.build("fcn", (4,), 3, [5], seed=8))[0])


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_an_untrained_zero_layer_has_loss_ln_classes(classes):
    model = models.build("fcn", (1, 6, 6), classes, [8], 0)
    for p in model[-1].parameters():
        nn.init.zeros_(p)
    omega, loss = flatten(model)
    x, y = torch.randn(9, 1, 6, 6), torch.arange(9) % classes
    assert float(loss(omega, x, y, torch.full((9,), 1 / 9))) == pytest.approx(math.log(classes), abs=1e-5)


# ---- the files as others use them ----

def python(folder, program):
    """Run a program in the folder, isolated from this one's paths and environment."""
    program = "import sys; sys.path.insert(0, '')\n" + inspect.cleandoc(program)
    done = subprocess.run([sys.executable, "-I", "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_import_has_no_side_effects():
    here = Path(fedssg_module.__file__).parent
    names = {path.name for path in here.iterdir()} | {"__pycache__"}
    python(here, """
        import os, torch, torchvision, numpy
        sys.dont_write_bytecode = True
        def look():
            return (torch.get_rng_state().tolist(), torch.get_num_threads(), torch.get_default_dtype(),
                    dict(os.environ), torch.cuda.is_initialized(), torch.are_deterministic_algorithms_enabled(),
                    numpy.random.get_state()[1].tolist())
        before = look()
        import fedssg, baselines, models, data
        assert look() == before
        """)
    assert {path.name for path in here.iterdir()} <= names


def test_fedssg_alone_in_an_empty_folder(tmp_path):
    """One file, and the user's own train: a step of rate 0.5 on 1/2 ||theta - target||^2."""
    shutil.copy(fedssg_module.__file__, tmp_path)
    out = python(tmp_path, """
        import torch, fedssg
        target = torch.tensor([[1., 2], [3, 4]])
        ones = torch.ones(2)
        r = fedssg.Round(t=1, T=4, N=2, m=2, p=1.0, lr=0.5, lr0=0.5, num_rows=2, i=torch.arange(2), K_i=ones, n_i=ones,
                         size_i=ones, labels_i=torch.ones(2, 3))
        s = {"omega": torch.zeros(2)}
        fedssg.fedssg(s, r, lambda rho, b: s["omega"] - 0.5 * (s["omega"] - target + rho[:, None] * s["omega"] + b))
        print(s["omega"].tolist(), [m for m in ("baselines", "torchvision", "data") if m in sys.modules])
        """)
    assert out.strip() == "[2.25, 3.375] []"        # mean theta_i = (1, 1.5), and phi = 1 + 1/4 times that in memory


# ---- partition ----


def sizes_and_disjoint(parts, n):
    """Sizes of the parts, after checking that they share no sample and hold only valid ones."""
    every = np.concatenate(parts)
    assert all(p.dtype == np.int64 for p in parts)
    assert len(np.unique(every)) == len(every) and every.min() >= 0 and every.max() < n
    return np.array([len(p) for p in parts])


def labels_of(n, classes=10, seed=0):
    return np.random.default_rng(seed).permutation(n) % classes


def skew(parts, y):
    """Mean total variation distance between a client's label distribution and the uniform one."""
    share = np.array([np.bincount(y[p], minlength=10) / len(p) for p in parts])
    return np.abs(share - 0.1).sum(1).mean() / 2


@pytest.mark.parametrize("num_clients", [100, 500])
@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3, 0.6])
def test_dirichlet_ends_and_keeps_its_sizes(num_clients, alpha):
    y = labels_of(60_000)
    for seed in range(5):
        start = time.perf_counter()
        parts = data.partition(y, num_clients, "dirichlet", seed, dir_alpha=alpha)
        assert time.perf_counter() - start < 2
        assert (sizes_and_disjoint(parts, 60_000) == 60_000 // num_clients).all()


@pytest.mark.parametrize("how", data.PARTITIONS)
@pytest.mark.parametrize("n, num_clients", [(1003, 10), (7, 7), (640, 1), (5000, 33)])
def test_partition_is_disjoint_and_covers(how, n, num_clients):
    y = labels_of(n)
    parts = data.partition(torch.from_numpy(y), num_clients, how, 3, min_samples=0, shards=1)
    sizes = sizes_and_disjoint(parts, n)
    assert len(parts) == num_clients
    if how == "dirichlet-class":
        assert sizes.sum() == n
    else:
        assert (sizes == n // num_clients).all()
    again = data.partition(y, num_clients, how, 3, min_samples=0, shards=1)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again))
    if n > 100 and num_clients > 1:
        other = data.partition(y, num_clients, how, 4, min_samples=0, shards=1)
        assert any(not np.array_equal(a, b) for a, b in zip(parts, other))


@pytest.mark.parametrize("how", ["dirichlet", "dirichlet-class"])
@pytest.mark.parametrize("alpha", [5e-324, 1e-6, 1e300, 1.7e308])
def test_dirichlet_survives_extreme_alpha(how, alpha):
    y = labels_of(2000)
    parts = data.partition(y, 20, how, 0, dir_alpha=alpha, min_samples=0)
    if how == "dirichlet":
        assert (sizes_and_disjoint(parts, 2000) == 100).all()
        first = np.bincount(y[parts[0]], minlength=10)
        assert first.max() == 100 if alpha < 1 else first.max() < 30
    else:
        assert sizes_and_disjoint(parts, 2000).sum() == 2000


def test_skew_grows_as_alpha_falls_and_alpha_1000_looks_iid():
    y = labels_of(20_000)
    for how in ("dirichlet", "dirichlet-class"):
        tv = [skew(data.partition(y, 50, how, 0, dir_alpha=a), y) for a in (1000, 1, 0.3, 0.1)]
        assert tv == sorted(tv) and tv[0] < 0.1 and tv[3] > 0.6
    iid = skew(data.partition(y, 50, "iid", 0), y)
    assert abs(iid - skew(data.partition(y, 50, "dirichlet", 0, dir_alpha=1000), y)) < 0.02


def test_dirichlet_proportions_have_the_promised_spread():
    y = labels_of(60_000)
    parts = data.partition(y, 100, "dirichlet", 1, dir_alpha=0.3)[:40]  # before classes run dry
    share = np.array([np.bincount(y[p], minlength=10) / len(p) for p in parts])
    assert 0.75 < share.var() / (0.1 * 0.9 / (10 * 0.3 + 1)) < 1.25  # variance of a Dirichlet entry


def test_dirichlet_class_meets_its_minimum_or_refuses():
    y = labels_of(10_000)
    parts = data.partition(y, 20, "dirichlet-class", 0, dir_alpha=0.5, min_samples=150)
    sizes = sizes_and_disjoint(parts, 10_000)
    assert sizes.min() >= 150 and sizes.sum() == 10_000 and len(set(sizes)) > 5
    sizes = [len(p) for p in data.partition(labels_of(10_000, 100), 20, "dirichlet-class", 0, dir_alpha=0.05)]
    assert max(sizes) < 500 + 100  # who has n / N samples gets no other class
    with pytest.raises(ValueError) as error:
        data.partition(y, 100, "dirichlet-class", 0, dir_alpha=0.01, min_samples=50)
    assert all(s in str(error.value) for s in ("100 clients", "0.01", "50")) and "\n" not in str(error.value)


def test_shards_give_each_client_k_classes():
    y = labels_of(10_000)
    parts = data.partition(y, 100, "shards", 0, shards=2)
    assert (sizes_and_disjoint(parts, 10_000) == 100).all()
    assert max(len(np.unique(y[p])) for p in parts) <= 2  # 200 shards of 50 end where classes end


@pytest.mark.parametrize("how", ["iid", "dirichlet"])
@pytest.mark.parametrize("sigma", [0.3, 3.0, 1e6])
def test_unbalanced_sizes(how, sigma):
    parts = data.partition(labels_of(6000), 50, how, 0, unbalanced_sigma=sigma, min_samples=5)
    sizes = sizes_and_disjoint(parts, 6000)
    assert sizes.min() >= 5 and 5900 < sizes.sum() <= 6000 and len(set(sizes)) > (1 if sigma > 3 else 15)


@pytest.mark.parametrize("change", [
    dict(num_clients=101), dict(num_clients=0), dict(how="other"), dict(dir_alpha=0.0), dict(dir_alpha=float("nan")),
    dict(how="shards", shards=20), dict(how="shards", unbalanced_sigma=0.5),
    dict(how="dirichlet-class", unbalanced_sigma=0.5), dict(min_samples=11), dict(unbalanced_sigma=-1.0)])
def test_partition_refuses_in_one_line(change):
    with pytest.raises(ValueError) as error:
        data.partition(labels_of(100), **{"num_clients": 10, "how": "dirichlet", "seed": 0, **change})
    assert "\n" not in str(error.value)


# ---- cohorts ----

def test_cohort_sizes():
    table = {0.005: (1, 1, 3), 0.02: (1, 2, 10), 0.15: (2, 15, 75), 0.29: (3, 29, 145), 0.57: (6, 57, 285),
             0.145: (1, 15, 73), 1.0: (10, 100, 500)}
    for p, sizes in table.items():
        for num_clients, m in zip((10, 100, 500), sizes):
            assert data.cohort_size(num_clients, p) == m
            cohort = data.sample_clients(num_clients, p, "fixed", 0, 1)
            assert len(np.unique(cohort)) == len(cohort) == m and (np.sort(cohort) == cohort).all()
            assert cohort.dtype == np.int64 and 0 <= cohort[0] and cohort[-1] < num_clients
    for p in (0, -0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="participation"):
            data.cohort_size(100, p)
    with pytest.raises(ValueError, match="sampling"):
        data.sample_clients(10, 0.5, "other", 0, 1)


def test_seeds_are_not_shifted_rounds():
    for t in range(1, 20):
        a, b = data.sample_clients(100, 0.15, "fixed", 0, t + 1), data.sample_clients(100, 0.15, "fixed", 1, t)
        assert not np.array_equal(a, b)
    streams = {data.rng(seed, purpose, t).integers(2**62) for seed in range(5) for purpose in data.PURPOSES
               for t in range(1, 6)}
    assert len(streams) == 5 * len(data.PURPOSES) * 5
    with pytest.raises(ValueError, match="seed"):
        data.rng(2**32, "split")


def test_bernoulli_is_never_empty_and_has_the_right_mean():
    sizes = [len(data.sample_clients(20, 0.02, "bernoulli", 0, t)) for t in range(1, 200)]
    assert min(sizes) == 1 and len(set(sizes)) > 1
    sizes = [len(data.sample_clients(100, 0.3, "bernoulli", 0, t)) for t in range(1, 200)]
    assert abs(np.mean(sizes) - 30) < 1.5 and np.std(sizes) > 2
    with pytest.raises(ValueError, match="bernoulli"):
        data.sample_clients(10, 1e-9, "bernoulli", 0, 1)


# ---- schedule ----

def ragged():
    order = np.random.default_rng(0).permutation(300)
    return np.split(order, [60, 61, 161, 211])  # 60, 1, 100, 50, 89 samples


@pytest.mark.parametrize("batch_size", [1, 7, 50, 512])
def test_schedule_shows_each_sample_once_an_epoch(batch_size):
    parts, clients, epochs = ragged(), [0, 1, 2, 4], 3
    idx, w, K_i = data.schedule(parts, clients, 5, 2, epochs, batch_size)
    assert idx.shape == w.shape == (K_i.max(), 4, min(batch_size, 100))
    assert (idx.dtype, w.dtype, K_i.dtype) == (np.int64, np.float32, np.int64)
    assert set(np.unique(w)) <= {0, 1} and idx.min() >= 0 and idx.max() < 300
    for j, i in enumerate(clients):
        steps = -(-len(parts[i]) // batch_size)
        assert K_i[j] == epochs * steps
        assert (w[:K_i[j], j].sum(1) > 0).all() and (w[K_i[j]:, j] == 0).all()
        orders = []
        for e in range(epochs):
            now = slice(e * steps, (e + 1) * steps)
            orders.append(idx[now, j][w[now, j] > 0])
            assert np.array_equal(np.sort(orders[-1]), np.sort(parts[i]))
        if len(parts[i]) > 10:
            assert not np.array_equal(orders[0], orders[1])


def test_schedule_of_a_client_does_not_depend_on_the_others():
    parts = ragged()
    for batch_size in (50, 512):
        idx, w, K_i = data.schedule(parts, [0, 1, 2, 3, 4], 0, 7, 2, batch_size)
        for i in range(5):
            idx1, w1, K1 = data.schedule(parts, [i], 0, 7, 2, batch_size)
            assert K1[0] == K_i[i]
            assert np.array_equal(idx1, idx[:K1[0], [i]]) and np.array_equal(w1, w[:K1[0], [i]])    # padding, too
            a, b = data.augment_draws([i], K1, w1, 0, 7), data.augment_draws([0, 1, 2, 3, 4], K_i, w, 0, 7)
            width = int(w1[0, 0].sum())
            assert np.array_equal(a[:, 0, :width], b[:K1[0], i, :width]) and (i == 1 or (a[..., 1:] != 4).any())
            assert (b[K1[0]:, i] == (0, 4, 4)).all() and (b[:, i, width:] == (0, 4, 4)).all()
    again, _, _ = data.schedule(parts, [0], 0, 8, 2, 50)
    assert not np.array_equal(again, data.schedule(parts, [0], 0, 7, 2, 50)[0])


def test_schedule_of_nobody_and_of_a_large_batch():
    idx, w, K_i = data.schedule(ragged(), [], 0, 1, 5, 50)
    assert idx.shape[:2] == w.shape[:2] == (0, 0) and len(K_i) == 0
    assert data.augment_draws([], K_i, w, 0, 1).shape == (*w.shape, 3)
    idx, w, K_i = data.schedule(ragged(), [0], 0, 1, 5, 512)
    assert list(K_i) == [5] and w.shape == (5, 1, 100) and (w.sum(2) == 60).all()      # 100: the largest client


# ---- augmentation ----

def test_augment_equals_slow_reference():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, 2, 6, 5, generator=g)
    draws = torch.stack([torch.randint(0, k, (3, 7), generator=g) for k in (2, 9, 9)], -1)
    draws[0, 0] = torch.tensor([0, 4, 4])
    y = data.augment(x, draws)
    for a in range(3):
        for b in range(7):
            flip, dy, dx = draws[a, b].tolist()
            image = x[a, b].flip(-1) if flip else x[a, b]
            padded = torch.zeros(2, 14, 13)
            padded[:, 4:10, 4:9] = image
            assert torch.equal(y[a, b], padded[:, dy:dy + 6, dx:dx + 5])
    assert torch.equal(y[0, 0], x[0, 0])
    assert torch.equal(data.augment(x[1], draws[1]), y[1])  # one leading size


def test_augment_draws_have_the_documented_frequencies():
    parts = [np.arange(4000)]
    _, w, K_i = data.schedule(parts, [0], 0, 1, 1, 100)
    flip, dy, dx = data.augment_draws([0], K_i, w, 0, 1).reshape(-1, 3).T
    assert set(flip) == {0, 1} and abs(flip.mean() - 0.5) < 0.04
    assert set(dy) == set(dx) == set(range(9))
    still = ((dy == 4) & (dx == 4)).mean()
    assert abs(still - (0.5 + 0.5 / 81)) < 0.04


# ---- reading data sets from their true formats ----

def idx_bytes(a):
    return struct.pack(">I", 0x800 + a.ndim) + struct.pack(f">{a.ndim}I", *a.shape) + a.astype(np.uint8).tobytes()


def images(n, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def write_idx(folder, names, arrays):
    folder.mkdir(parents=True)
    for name, a in zip(names, arrays):
        (folder / name).write_bytes(idx_bytes(a))


MNIST_FILES = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]


def small_mnist(tmp_path, name="MNIST"):
    arrays = [images(30, 28, 28), np.arange(30) % 10, images(20, 28, 28, seed=1), np.arange(20) % 10]
    write_idx(tmp_path / name / "raw", MNIST_FILES, arrays)
    return arrays


def test_mnist_and_fashionmnist_files(tmp_path):
    for name, folder in (("mnist", "MNIST"), ("fashionmnist", "FashionMNIST")):
        a, la, b, lb = small_mnist(tmp_path, folder)
        mean, std = (0.1307, 0.3081) if name == "mnist" else ((a / 255).mean(), (a / 255).std())
        x, y, x_test, y_test, classes = data.load(name, str(tmp_path))
        assert x.shape == (30, 1, 28, 28) and x.dtype == torch.float32 and y.dtype == torch.int64 and classes == 10
        for got, raw in ((x, a), (x_test, b)):
            assert np.allclose(got[:, 0].numpy(), (raw / 255 - mean) / std, atol=1e-5)
        assert y.tolist() == la.tolist() and y_test.tolist() == lb.tolist()
    torch.set_default_dtype(torch.float64)
    try:
        assert data.load("mnist", str(tmp_path))[0].dtype == torch.float64
        assert data.load("synthetic")[0].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_emnist_letters_are_upright_and_start_at_zero(tmp_path):
    files = [f"emnist-letters-{p}-{w}-ubyte" for p in ("train", "test") for w in ("images-idx3", "labels-idx1")]
    upright = images(52, 28, 28)
    upright[:, 0, :] = 255  # a bright upper edge
    upright[:, 27, :] = 0
    labels = np.arange(52) % 26 + 1
    write_idx(tmp_path / "EMNIST" / "raw", files,
              [upright.transpose(0, 2, 1), labels, upright.transpose(0, 2, 1), labels])
    for letters in (10, 26, 1):
        x, y, x_test, y_test, classes = data.load("emnist", str(tmp_path), letters=letters)
        assert classes == letters and sorted(set(y.tolist())) == list(range(letters)) and len(y_test) == 2 * letters
        assert (x[:, 0, 0].mean() > x[:, 0, 1:].mean() + 1) and (x[:, 0, 27] == x.min()).all()
        kept = upright[labels <= letters] / 255
        assert np.allclose(x[:, 0].numpy(), (kept - kept.mean()) / kept.std(), atol=1e-4)
        assert torch.equal(x, x_test)
    for letters in (0, 27):
        with pytest.raises(ValueError, match="letters"):
            data.load("emnist", str(tmp_path), letters=letters)


def small_cifar(tmp_path, monkeypatch, name):
    """Batches as the published ones; torchvision's table of checksums is set to theirs."""
    kind = data.TORCHVISION[name]
    folder = tmp_path / kind.base_folder
    folder.mkdir(parents=True)

    def write(file, content):
        raw = pickle.dumps(content, protocol=2)
        (folder / file).write_bytes(raw)
        return hashlib.md5(raw).hexdigest()

    x, y = {}, {}
    for split in ("train_list", "test_list"):
        table, x[split], y[split] = [], [], []
        for k, (file, _) in enumerate(getattr(kind, split)):
            rows = images(8, 3, 32, 32, seed=k)
            labels = [(k * 8 + j) % (10 if name == "cifar10" else 100) for j in range(8)]
            key = "labels" if name == "cifar10" else "fine_labels"
            table.append([file, write(file, {"data": rows.reshape(8, -1), key: labels, "coarse_labels": [0] * 8})])
            x[split].append(rows)
            y[split] += labels
        monkeypatch.setattr(kind, split, table)
    names = [str(c) for c in range(100)]
    md5 = write(kind.meta["filename"], {kind.meta["key"]: names})
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": md5})
    return folder, np.concatenate(x["train_list"]), y["train_list"], np.concatenate(x["test_list"]), y["test_list"]


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_batches(name, tmp_path, monkeypatch):
    folder, a, la, b, lb = small_cifar(tmp_path, monkeypatch, name)
    x, y, x_test, y_test, classes = data.load(name, str(tmp_path))
    assert classes == int(name[5:]) and y.tolist() == la and y_test.tolist() == lb
    mean, std = ((f(a / 255, axis=(0, 2, 3)).reshape(1, 3, 1, 1)) for f in (np.mean, np.std))
    assert np.allclose(x.numpy(), (a / 255 - mean) / std, atol=1e-4)
    assert np.allclose(x_test.numpy(), (b / 255 - mean) / std, atol=1e-4)
    file = folder / data.TORCHVISION[name].train_list[0][0]

    class Planted:
        def __reduce__(self):
            return print, ("unpickled",)
    file.write_bytes(pickle.dumps(Planted()))  # other content than the checksum's: refused, never unpickled
    monkeypatch.setattr("builtins.print", lambda *a: pytest.fail("the planted pickle was loaded"))
    with pytest.raises(ValueError, match="fetch them again"):
        data.load(name, str(tmp_path))


@pytest.mark.parametrize("file, damage", [
    (MNIST_FILES[0], lambda b: b[:-100]), (MNIST_FILES[1], lambda b: b""), (MNIST_FILES[2], lambda b: b[:3]),
    (MNIST_FILES[0], lambda b: b"<html>not here</html>"), (MNIST_FILES[3], lambda b: b[:-1] + b"\x63"),
    (MNIST_FILES[3], lambda b: idx_bytes(np.arange(19) % 10)), (MNIST_FILES[3], lambda b: b[:12])])
def test_damaged_idx_files_end_in_one_line(file, damage, tmp_path):
    small_mnist(tmp_path)
    path = tmp_path / "MNIST" / "raw" / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError) as error:
        data.load("mnist", str(tmp_path))
    message = str(error.value)
    assert "\n" not in message and "fetch them again" in message and str(tmp_path) in message and file in message


@pytest.mark.parametrize("name", ["mnist", "fashionmnist", "emnist", "cifar10", "cifar100"])
def test_missing_data_offline_is_one_message(name, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_reachable", lambda url: False)
    with pytest.raises(FileNotFoundError) as error:
        data.load(name, str(tmp_path / "d"))
    message = str(error.value)
    assert all(s in message for s in (*data._files(name), str(tmp_path / "d"), "--data-dir", "--dataset synthetic"))
    assert "no download from http" in message and "\n" not in message and not (tmp_path / "d").exists()


def test_a_silent_host_or_name_server_is_given_up_in_time(monkeypatch):
    server = socket.create_server(("127.0.0.1", 0))  # accepts, never answers
    monkeypatch.setenv("no_proxy", "*")
    start = time.perf_counter()
    assert not data._reachable(f"http://127.0.0.1:{server.getsockname()[1]}/", seconds=0.5)
    monkeypatch.setattr(data.urllib.request, "urlopen", lambda *a, **k: time.sleep(5))  # a name look-up that hangs
    assert not data._reachable("http://nowhere.invalid/", seconds=0.5)
    assert time.perf_counter() - start < 4
    server.close()


def test_reachable_tells_an_answer_from_a_refusal(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("here")
    assert data._reachable((tmp_path / "file").as_uri()) and not data._reachable((tmp_path / "absent").as_uri())


def test_archives_are_unpacked_and_half_written_ones_are_not_used(tmp_path, monkeypatch):
    arrays = small_mnist(tmp_path)
    raw, table = tmp_path / "MNIST" / "raw", []
    for file, a in zip(MNIST_FILES, arrays):
        packed = gzip.compress(idx_bytes(a))
        (raw / file).unlink()
        (raw / f"{file}.gz").write_bytes(packed)
        table.append((f"{file}.gz", hashlib.md5(packed).hexdigest()))
    monkeypatch.setattr(data.tv.MNIST, "resources", table)
    monkeypatch.setattr(data.tv.MNIST, "mirrors", [(tmp_path / "gone").as_uri() + "/"])  # nothing to be had there
    monkeypatch.setattr(data, "_reachable", lambda url: True)
    assert data.load("mnist", str(tmp_path))[1].tolist() == arrays[1].tolist()
    (raw / MNIST_FILES[0]).unlink()
    (raw / f"{MNIST_FILES[0]}.gz").write_bytes(b"half a download")
    with pytest.raises(FileNotFoundError, match="Error downloading train-images") as error:
        data.load("mnist", str(tmp_path))
    assert "\n" not in str(error.value) and not (raw / MNIST_FILES[0]).exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="Not a directory"):
        data.load("mnist", str(tmp_path / "file"))


def test_unknown_data_set():
    with pytest.raises(ValueError, match="mnist.*synthetic"):
        data.load("svhn")


def test_synthetic_is_fixed_and_of_the_promised_shape():
    start = time.perf_counter()
    x, y, x_test, y_test, classes = data.load("synthetic")
    assert time.perf_counter() - start < 3
    assert x.shape == (10_000, 1, 28, 28) and x_test.shape == (2000, 1, 28, 28) and classes == 10
    assert x.dtype == torch.float32 and y.dtype == torch.int64
    assert abs(x.mean()) < 1e-3 and abs(x.std() - 1) < 1e-3 and x_test.isfinite().all()
    assert y.bincount().min() > 900 and len(y_test.bincount()) == 10
    assert torch.equal(data.load("synthetic")[0], x)
    means = torch.stack([x[y == c].mean(0) for c in range(10)])  # classes cannot be told apart by their means
    nearest = torch.cdist(x_test.flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == y_test).float().mean() < 0.3


# ---- .npz ----

def arrays_npz(**change):
    arrays = dict(x_train=images(12, 6, 5), y_train=np.arange(12) % 3, x_test=images(6, 6, 5, seed=1),
                  y_test=np.arange(6) % 3)
    arrays.update(change)
    return {k: v for k, v in arrays.items() if v is not None}


def test_npz_uint8_is_normalised(tmp_path):
    arrays = arrays_npz()
    np.savez(tmp_path / "a.npz", **arrays)
    x, y, x_test, y_test, classes = data.load(str(tmp_path / "a.npz"))
    raw = arrays["x_train"] / 255
    assert x.shape == (12, 1, 6, 5) and classes == 3 and y.tolist() == arrays["y_train"].tolist()
    assert np.allclose(x[:, 0].numpy(), (raw - raw.mean()) / raw.std(), atol=1e-5)
    assert np.allclose(x_test[:, 0].numpy(), (arrays["x_test"] / 255 - raw.mean()) / raw.std(), atol=1e-5)
    assert y_test.tolist() == arrays["y_test"].tolist()


@pytest.mark.parametrize("shape, expected", [
    ((6, 5, 3), (3, 6, 5)), ((6, 5, 1), (1, 6, 5)), ((4, 6, 5), (4, 6, 5)), ((3, 6, 5), (3, 6, 5)), ((20,), (20,))])
def test_npz_shapes(shape, expected, tmp_path):
    for dtype in (np.uint8, ">f8", np.float16):
        x = images(12, *shape).astype(dtype)
        x[..., 0] = 7  # a constant channel, where channels are last
        np.savez_compressed(tmp_path / "a.npz", **arrays_npz(x_train=x, x_test=x[:6]))
        got, got_test = data.load(str(tmp_path / "a.npz"))[::2][:2]
        assert got.shape == (12, *expected) and got_test.shape == (6, *expected)
        assert got.dtype == torch.float32 and got.isfinite().all()
        if dtype != np.uint8:
            plain = x.transpose(0, 3, 1, 2) if expected != shape else x
            assert np.array_equal(got.numpy(), plain.astype(np.float32))


FLOATS = np.ones((12, 6, 5))


@pytest.mark.parametrize("change, says", [
    (dict(y_test=None), "y_test is not a file"),
    (dict(x_train=np.array([None] * 12, object)), "allow_pickle"),
    (dict(x_train=np.where(np.arange(5) == 2, np.nan, FLOATS)), "training set: images hold NaN or infinite"),
    (dict(x_train=np.where(np.arange(5) == 2, np.inf, FLOATS)), "training set: images hold NaN or infinite"),
    (dict(x_train=FLOATS * 1e300), "training set: images hold NaN or infinite"),
    (dict(y_train=np.arange(12) % 3 - 1), "labels from -1"),
    (dict(y_test=np.array([0, 1, 2, 3, 0, 1])), "labels from 0 to 3"),
    (dict(y_train=np.arange(12) % 3 * 1.0), "y_train is float64"),
    (dict(y_train=np.zeros((12, 1), int)), "y_train is int64 of shape"),
    (dict(y_train=np.arange(11) % 3), "12 images of shape (1, 6, 5), 11 labels"),
    (dict(x_train=images(0, 6, 5), y_train=np.zeros(0, int)), "training set: 0 images"),
    (dict(x_test=images(0, 6, 5), y_test=np.zeros(0, int)), "test set: 0 images"),
    (dict(x_train=images(12)), "x_train is uint8 of shape"),
    (dict(x_train=FLOATS.astype(int)), "x_train is int64"),
    (dict(x_test=images(6, 6, 6)), "differ"),
    (dict(x_test=np.ones((6, 6, 5))), "differ"),
    (dict(y_train=np.array([2**31 - 1] * 12)), "without gaps")])
def test_npz_faults_end_in_one_line(change, says, tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, **arrays_npz(**change))
    with pytest.raises(ValueError) as error:
        data.load(str(path))
    assert says in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("damage, says", [
    (lambda b: b"x,y\n1,2\n", "not an .npz"), (lambda b: b[:len(b) // 2], "not an .npz"), (lambda b: b"", "not an .npz"),
    (lambda b: b[:200] + b"\0" * 50 + b[250:], ""), (lambda b: pickle.dumps([1]), "not an .npz")])
def test_damaged_npz_ends_in_one_line(damage, says, tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, **arrays_npz())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError) as error:
        data.load(str(path))
    assert all(part in str(error.value) for part in (str(path), says, "numpy.savez")) and "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="no such file"):
        data.load(str(tmp_path / "b.npz"))


# ---- the command line: helpers ----

@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A data set of one's own: 200 + 60 vectors of 12 features in 3 overlapping classes."""
    g, path = np.random.default_rng(0), tmp_path_factory.mktemp("tiny") / "tiny.npz"
    y = g.integers(3, size=260)
    x = (g.normal(size=(260, 12)) + 0.8 * g.normal(size=(3, 12))[y]).astype(np.float32)
    np.savez(path, x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])
    return path


@pytest.fixture(autouse=True)
def leave_no_trace():
    """What run.main sets for its process: handlers, locks, the signals that came in. One thread: these runs are tiny."""
    before, threads = {k: signal.getsignal(k) for k in (signal.SIGINT, signal.SIGTERM)}, torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for k, handler in before.items():
        signal.signal(k, handler)
    release()
    torch.set_default_dtype(torch.float32)


def release():
    while run.LOCKS:
        run.LOCKS.pop().close()
    run.INTERRUPTED.clear()


def start(tiny, out, flags="", algo="fedssg"):
    """run.main in this process, as a new process would; returns its exit code."""
    argv = f"--algo {algo} --dataset {tiny} --model linear --num-clients 10 --participation .4 --rounds 5 --local-epochs 1 --device cpu"
    try:
        run.main([*argv.split(), "--out", str(out), *flags.split()])
        return 0
    except SystemExit as end:
        return end.code
    finally:
        release()


def log_of(folder):
    """The rows of log.csv as they are written, without the seconds."""
    with open(folder / "log.csv", newline="") as file:
        return [row[:-1] for row in csv.reader(file)]


def model_of(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def read(path):
    return json.loads(path.read_text())


def runs_in(out):
    """The runs' folders by method (and form)."""
    return {folder.name.split("-seed")[0].split("-", 1)[1]: folder for folder in Path(out).iterdir()}


def same(a, b, tolerance=None, methods=len(ALGORITHMS)):
    """Two result folders hold equal runs: models and logs bit for bit, or to a tolerance."""
    a, b = runs_in(a), runs_in(b)
    assert a.keys() == b.keys() and len(a) == methods
    for name in a:
        p, q, logs = model_of(a[name]), model_of(b[name]), (log_of(a[name]), log_of(b[name]))
        assert p.keys() == q.keys() and len(logs[0]) == len(logs[1])
        if tolerance is None:
            assert all(torch.equal(p[k], q[k]) for k in p) and logs[0] == logs[1], name
        else:
            p, q = ([*torch.cat([x.flatten() for x in z.values()]).tolist(),
                     *(float(x) for row in log[1:] for x in row if x)] for z, log in zip((p, q), logs))
            assert p == pytest.approx(q, rel=tolerance, abs=tolerance), name
    return True


def prints(folder):
    """Everything in a folder but locks: contents and times of change."""
    return {path: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
            for path in sorted(Path(folder).rglob("*")) if path.is_file() and path.name != ".lock"}


def pickle_that_makes(folder):
    """An object that makes a folder when it is unpickled."""
    return type("Trap", (), {"__reduce__": lambda self: (os.mkdir, (str(folder),))})()


def one_line(capsys, says=""):
    err = capsys.readouterr().err
    assert err.startswith("run.py: ") and err.count("\n") == 1 and says in err, err
    return err


# ---- what a run leaves ----

def test_every_method_leaves_whole_results(tiny, tmp_path, capsys):
    assert start(tiny, tmp_path, "--target-acc 100", algo="all") == 0
    out, (_, _, x, y, _) = capsys.readouterr().out, data.load(str(tiny))
    header = [line for line in out.splitlines() if line.startswith("method ")]
    assert len(header) == 1 and out.count("s/round") == 1 + 5 * len(ALGORITHMS) and "nan" not in out
    assert runs_in(tmp_path).keys() == ALGORITHMS.keys()
    for algo, folder in runs_in(tmp_path).items():
        assert sum(line.startswith(f"{algo} ") and "seed" not in line for line in out.splitlines()) == 1
        assert {path.name for path in folder.iterdir()} == {"config.json", "log.csv", "summary.json", "model.pt", ".lock"}
        config, log, summary = read(folder / "config.json"), log_of(folder), read(folder / "summary.json")
        assert config["settings"]["algo"] == algo and config["torch"] == torch.__version__ and config["processes"] == 1
        assert log[0] == ["round", "test_acc", "test_loss", "train_loss", "gate", "h_norm"]
        assert [row[0] for row in log[1:]] == list("12345")
        for row in log[1:]:
            has = {"fedssg": 6, "fedavg": 4, "fedprox": 4, "scaffold": 4}.get(algo)
            filled = [j for j in range(6) if row[j]]
            assert filled == (list(range(has)) if has else [0, 1, 2, 3, 5]) and all(math.isfinite(float(row[j])) for j in filled)
        acc = [float(row[1]) for row in log[1:]]
        assert summary["last50_mean"] == pytest.approx(np.mean(acc)) and summary["last50_std"] == pytest.approx(np.std(acc))
        assert (summary["last"], summary["best"], summary["round"], summary["rounds_to_target"]) == (acc[-1], max(acc), 5, None)
        model = models.build("linear", x.shape[1:], 3, [], 1)
        model.load_state_dict(model_of(folder))
        logits = model(x).detach()
        assert 100 * np.mean((logits.argmax(dim=1) == y).numpy()) == pytest.approx(acc[-1], abs=1e-4) and acc[-1] > 50
        assert float(torch.nn.functional.cross_entropy(logits, y)) == pytest.approx(float(log[-1][2]), abs=1e-5)


def test_summary_by_hand():
    """Population std over the last 50 evaluations; blanks are no evaluations."""
    log = [dict(round=t, test_acc=None if t % 2 else float(t % 20), seconds=2.0) for t in range(1, 121)]
    tests = [float(t % 20) for t in range(2, 121, 2)]
    s = run.summarise(log, 16)
    assert s["last50_mean"] == pytest.approx(sum(tests[-50:]) / 50) and s["last"] == 0 and s["best"] == 18
    assert s["last50_std"] == pytest.approx(math.sqrt(sum((x - sum(tests[-50:]) / 50) ** 2 for x in tests[-50:]) / 50))
    assert s["rounds_to_target"] == 16 and run.summarise(log, 18.5)["rounds_to_target"] is None and s["seconds_per_round"] == 2


def test_shell_from_another_folder(tiny, tmp_path):
    (tmp_path / "own.npz").write_bytes(tiny.read_bytes())
    program = Path(run.__file__).resolve()
    ended = subprocess.run([sys.executable, program, *"--algo fedavg --dataset own.npz --model linear --num_clients=10 --rounds 2".split()],
                           cwd=tmp_path, capture_output=True, text=True, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    assert ended.returncode == 0 and ended.stderr == "" and "fedavg" in ended.stdout.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"own.npz", "runs"} and len(log_of(runs_in(tmp_path / "runs")["fedavg"])) == 3


def test_table_by_hand(capsys):
    def one(mean, std, met, evaluations=50, seconds=0.5):
        return dict(last50_mean=mean, last50_std=std, rounds_to_target=met, evaluations=evaluations, seconds_per_round=seconds)
    run.table(dict(fedavg=[one(91, 0.5, 76)], fedssg=[one(98, 0.25, 24)], feddyn=[one(90, 1, None)], feddc=[one(90, 1, 9, 49)],
                   fedvra=[one(None, None, None, 0)]), run.parse([]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert lines[1:3] == ["fedavg 91.00 ± 0.50 76 1.00x 0.50".split(), "fedssg 98.00 ± 0.25 24 3.17x 0.50".split()]
    assert lines[3:] == ["feddyn 90.00 ± 1.00 - - 0.50".split(), "feddc - 9 8.44x 0.50".split(), "fedvra - - - 0.50".split()]
    run.table(dict(fedavg=[one(91, 0.5, 70), one(93, 0.5, 90)], fedssg=[one(96, 0.5, 20), one(97, 0.5, None)]), run.parse([]))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line]
    assert lines[1:] == ["fedavg 92.00 ± 1.00 80.0 ± 10.0 1.00x 0.50", "fedssg 96.50 ± 0.50 20 (1 of 2) 4.00x 0.50"]


def test_seeds(tiny, tmp_path, capsys):
    assert start(tiny, tmp_path / "a", "--seeds 0 1", "fedavg") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["method", "fedavg"]
    assert start(tiny, tmp_path / "b", "--seed 1", "fedavg") == 0
    one, (zero,) = next((tmp_path / "a").glob("*seed1*")), (tmp_path / "a").glob("*seed0*")
    assert log_of(one) == log_of(runs_in(tmp_path / "b")["fedavg"]) != log_of(zero)


@pytest.mark.parametrize("flags, says", [("", ""), ("--form main --alpha 9", "--gate-shape clip"), ("--alpha 30", "memory h_i overshoots")])
def test_warnings_come_once(flags, says, tiny, tmp_path, capsys):
    assert start(tiny, tmp_path, flags) == 0
    assert (err := capsys.readouterr().err).count("\n") == bool(flags) and says in err


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as end:
        run.main(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and "default: None" not in text
    for name in ("algo", "form", "resume", "stop-after", *(n for algo in ALGORITHMS for n in run.hyper_parameters(algo))):
        assert "--" + name.replace("_", "-") in text


# ---- command lines that are refused ----

BEFORE_DATA = """--algo fedsgd; --device cuda:00; --algo; --algo fedavg --mu 1; --algo fedssg --eta-g 1; --algo fedavg --form main; --form minor; extra
--participation 0; --participation -0.1; --participation 1.5; --participation nan; --sampling poisson; --num-clients 0; --unknown 1; --partit iid
--dir-alpha 0; --dir-alpha -1; --dir-alpha nan; --dir-alpha inf; --dir-alpha x; --partition even; --partition shards --unbalanced-sigma 1
--unbalanced-sigma nan; --shards 0; --min-samples -1; --batch-size 0; --batch-size 2.5; --rounds 0; --local-epochs 0; --lr; --lr nan; --lr 0; --lr -1
--lr-decay 0; --lr-decay 1.01; --clip 0; --weight-decay -1; --seed -1; --seeds; --seeds 0 -1; --device cuda:9; --device mps; --device foo
--dataset mnist2; --letters 27; --model resnet; --hidden 0; --hidden 5 x; --target-acc 101; --target-acc -1; --eval-every 0; --stop-after 0
--checkpoint-every 0; --mode scan; --chunk 0; --gate-ratio walking; --alpha -1; --alpha nan; --algo fedvra --dual-step soon
--algo feddisco --disco-a nan; --model linear --hidden 5; --dataset cifar10 --hidden 5; --algo feddisco --disco-a -inf""".replace("\n", "; ").split("; ")


@pytest.mark.parametrize("flags", BEFORE_DATA)
def test_refused_before_data_is_loaded(flags, tmp_path, capsys, monkeypatch):
    """The line names the flag, and the value where that is what is wrong."""
    monkeypatch.setattr(run.data, "load", lambda *args, **more: pytest.fail("loaded data"))
    assert start("synthetic", tmp_path / "runs", flags.replace(" -inf", "=-inf")) == 2
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())
    *_, name = [token for token in flags.split() if token.startswith("--")] or [flags]
    err = one_line(capsys, name)
    assert flags.split()[-1] in err or "belongs to" in err or "not with" in err


@pytest.mark.parametrize("flags, says", [
    ("--num-clients 201", "201 clients"), ("--num-clients 11 --partition shards --shards 19", "shards"),
    ("--partition dirichlet-class --min-samples 20", "minimum"), ("--model cnn", "--model cnn"), (f"--seed {2 ** 32}", "seed"),
    ("--sampling bernoulli --participation 1e-9", "bernoulli")])
def test_refused_for_the_data(flags, says, tiny, tmp_path, capsys):
    assert start(tiny, tmp_path, flags) == 2 and one_line(capsys, says) and not list(tmp_path.iterdir())


def test_refused_for_the_memory(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run.os, "sysconf", lambda name: 100)
    assert start(tiny, tmp_path, "", "fedavg") == 0
    capsys.readouterr()
    monkeypatch.setattr(run.os, "sysconf", lambda name: 10)
    assert start(tiny, tmp_path) == 2 and one_line(capsys, "--num-clients 10") and runs_in(tmp_path).keys() == {"fedavg"}


@pytest.mark.parametrize("error, says", [("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes", "out of memory"),
                                         ("CUDA error: an illegal memory access was encountered", None)])
def test_memory_that_is_out_and_memory_that_is_not(error, says, tiny, tmp_path, capsys, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError(error)
    monkeypatch.setattr(run, "local_sgd", fails)
    if says is None:
        with pytest.raises(RuntimeError):       # a fault: its traceback is wanted
            start(tiny, tmp_path)
    else:
        assert start(tiny, tmp_path) == 1 and one_line(capsys, says)


def test_no_compiler(tiny, tmp_path, capsys, monkeypatch):
    def fails(*_, **__):
        raise torch._dynamo.exc.TorchDynamoException("Failed to find C compiler")
    monkeypatch.setattr(run, "local_sgd", fails)
    assert start(tiny, tmp_path) == 1 and one_line(capsys, "--no-compile")


@pytest.mark.parametrize("damage, says", [("absent", "no such file"), ("cut", "cut short"), ("text", ".npz"), ("pickle", "plain numbers")])
def test_bad_data_file(damage, says, tiny, tmp_path, capsys):
    bad, marker = tmp_path / "bad.npz", tmp_path / "ran"
    if damage == "cut":
        bad.write_bytes(tiny.read_bytes()[:-300])
    elif damage == "text":
        bad.write_text("x,y\n1,2\n")
    elif damage == "pickle":
        np.savez(bad, **{**np.load(tiny), "x_train": np.array([pickle_that_makes(marker)] * 200, dtype=object)})
    assert start(bad, tmp_path / "runs") == 1 and one_line(capsys, says)
    assert not marker.exists() and not list((tmp_path / "runs").iterdir())


def test_out_that_is_a_file(tiny, tmp_path, capsys):
    (tmp_path / "f").write_text("kept")
    assert start(tiny, tmp_path / "f") == 2 and one_line(capsys, "--out") and (tmp_path / "f").read_text() == "kept"


# ---- from flags to settings ----

def settings(flags, algo="fedssg"):
    return run.settings_for(algo, 0, run.parse(["--algo", algo, *flags.split()]))


def test_underscore_and_hyphen_are_one():
    flags = "--num-clients 7 --dir-alpha=.5 --eta-g 2 --stop-at-target --out my_out --data-dir=my_data"
    args = run.parse(f"--algo scaffold {flags}".split())
    assert vars(args) == vars(run.parse("--algo scaffold --num_clients 7 --dir_alpha=.5 --eta_g 2 --stop_at_target --out my_out --data_dir=my_data".split()))
    assert (args.num_clients, args.dir_alpha, args.given, args.out, args.data_dir) == (7, 0.5, {"eta_g": 2}, "my_out", "my_data")


@pytest.mark.parametrize("algo, flags, alpha", [
    ("fedssg", "--partition iid", 0.03), ("fedssg", "", 0.05), ("fedssg", "--dir-alpha .6", 0.04), ("fedssg", "--dir-alpha 1", 0.03),
    ("fedssg", "--dataset emnist --num-clients 500 --partition iid", 0.7), ("fedssg", "--dataset emnist --num-clients 500", 0.6),
    ("fedssg", "--dataset emnist --num-clients 500 --dir-alpha .6", 0.6), ("fedssg", "--dataset emnist --partition iid", 0.05),
    ("fedssg", "--dataset emnist", 0.06), ("fedssg", "--dataset emnist --dir-alpha .6", 0.06), ("fedssg", "--dataset cifar10", 0.05),
    ("fedssg", "--dataset cifar10 --num-clients 500", 0.2), ("fedssg", "--dataset cifar100 --partition iid", 0.02),
    ("fedssg", "--dataset cifar100 --num-clients 450", 0.2), ("fedssg", "--dataset synthetic", 0.05), ("fedssg", "--dataset own.npz", 0.05),
    ("fedssg", "--form main", 1), ("fedssg", "--form main --alpha .5", 0.5), ("fedssg", "--form appendix", 0.05), ("fedssg", "--alpha 0", 0),
    ("feddc", "", 0.1), ("feddc", "--dataset emnist --num-clients 500", 0.2), ("feddc", "--dataset cifar10", 0.01),
    ("feddc", "--dataset cifar100 --num-clients 500", 0.05), ("feddc", "--alpha 3", 3), ("feddyn", "", 0.01), ("feddisco", "", 0.01)])
def test_alpha_presets_and_explicit_alpha(algo, flags, alpha):
    assert settings(flags, algo)["hyper"]["alpha"] == alpha


def test_presets_and_explicit_flags():
    assert settings("", "fedprox")["weight_decay"] == 1e-5 and settings("", "fedavg")["weight_decay"] == 1e-3
    assert settings("--weight-decay .001", "fedprox")["weight_decay"] == 1e-3 and settings("--weight-decay 0")["weight_decay"] == 0
    for flags, values in {
            "": ("fcn", [200, 200], 0.15, 300), "--dataset synthetic": ("fcn", [200, 200], 0.15, 300),
            "--dataset emnist": ("fcn", [100], 0.15, 300), "--dataset emnist --num-clients 500": ("fcn", [100], 0.15, 600),
            "--dataset cifar10": ("cnn", None, 0.1, 1000), "--dataset cifar100 --num-clients 500": ("cnn", None, 0.1, 1500),
            "--dataset cifar10 --model fcn --hidden 7 --participation .5 --rounds 3": ("fcn", [7], 0.5, 3)}.items():
        s = settings(flags)
        assert (s["model"], s.get("hidden"), s["participation"], s["rounds"]) == values
        assert (s["local_epochs"], s["batch_size"], s["lr"], s["lr_decay"], s["clip"]) == (5, 50, 0.1, 0.998, 10)
    targets = {name: run.parse(["--dataset", name]).target_acc for name in ("mnist", "emnist", "cifar10", "cifar100", "synthetic")}
    assert targets == dict(mnist=97, emnist=93, cifar10=80, cifar100=42, synthetic=97) and run.parse(["--target-acc", "5"]).target_acc == 5
    hyper = settings("--form main --gate-shape clip --beta .5")["hyper"]
    assert hyper == dict(run.FORMS["main"], gate_shape="clip", beta=0.5, gate_scale=1.0)
    assert settings("")["hyper"] == dict(run.FORMS["released"], alpha=0.05, gate_scale=1.0)
    args = run.parse("--algo fedavg fedprox feddyn --mu .5 --alpha .2 --form released".split())
    hyper = {algo: run.hyper_for(algo, args) for algo in args.algo}
    assert hyper == dict(fedavg={}, fedprox=dict(mu=0.5), feddyn=dict(alpha=0.2))
    assert run.parse("--algo fedavg all fedavg".split()).algo == list(ALGORITHMS)


def test_what_a_method_is_told(tiny, tmp_path, monkeypatch):
    """Horizon, rates, steps and sizes of each round; p as sampled: m / N, or the probability of bernoulli cohorts."""
    seen = []

    @wraps(ALGORITHMS["fedavg"])
    def spy(s, r, train):
        seen.append(r)
        return ALGORITHMS["fedprox"](s, r, train)
    monkeypatch.setitem(ALGORITHMS, "fedavg", spy)
    flags = "--rounds 9 --stop-after 3 --lr .5 --lr-decay .9 --local-epochs 2 --batch-size 8 --unbalanced-sigma 1 --participation .25"
    assert start(tiny, tmp_path / "fixed", flags, "fedavg") == 0 and len(seen) == 3
    parts = data.partition(data.load(str(tiny))[1], 10, "dirichlet", 0, unbalanced_sigma=1.0)
    for t, r in enumerate(seen, 1):
        cohort = data.sample_clients(10, 0.25, "fixed", 0, t)
        n = np.array([len(part) for part in parts])
        assert (r.t, r.T, r.N, r.m, r.p, r.num_rows, r.lr0) == (t, 9, 10, 3, 0.3, 10, 0.5) and r.lr == pytest.approx(0.5 * 0.9 ** (t - 1))
        assert r.i.tolist() == cohort.tolist() and r.n_i.tolist() == n[cohort].tolist() == r.labels_i.sum(dim=1).tolist()
        assert r.size_i.tolist() == pytest.approx(n[cohort] / n.mean()) and r.K_i.tolist() == (2 * -(-n[cohort] // 8)).tolist()
    seen.clear()
    assert start(tiny, tmp_path / "bernoulli", "--sampling bernoulli --rounds 8 --participation .25", "fedavg") == 0
    assert {r.p for r in seen} == {0.25} and len({r.m for r in seen}) > 1 and all(r.m == len(r.i) for r in seen)


# ---- again, elsewhere, on from where it stood ----

def test_finished_unfinished_other_settings_and_two_at_once(tiny, tmp_path, capsys):
    assert start(tiny, tmp_path, "--stop-after 2") == 0
    capsys.readouterr()
    before = prints(tmp_path)
    assert start(tiny, tmp_path) == 2 and one_line(capsys, "--resume") and prints(tmp_path) == before
    assert start(tiny, tmp_path, "--resume") == 0
    before = prints(tmp_path)
    capsys.readouterr()
    for flags in ("", "--resume", "--state-device cpu --mode vmap"):
        assert start(tiny, tmp_path, flags) == 0 and prints(tmp_path) == before
        out = capsys.readouterr().out
        assert "finished at round 5" in out and "round 1/" not in out and out.splitlines()[-1].startswith("fedssg ")
    assert start(tiny, tmp_path, "--lr .2") == 0 and {k: v for k, v in prints(tmp_path).items() if k in before} == before
    assert len(list(tmp_path.iterdir())) == 2
    assert start(tiny, tmp_path / "b", "--stop-after 2") == 0
    before = prints(tmp_path / "b")
    capsys.readouterr()
    with open(runs_in(tmp_path / "b")["fedssg"] / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert start(tiny, tmp_path / "b", "--resume") == 2 and one_line(capsys, "another process") and prints(tmp_path / "b") == before
    assert start(tiny, tmp_path / "b", "--resume") == 0


@pytest.mark.parametrize("algo, form", [("all", "released"), ("fedssg", "main"), ("fedssg", "appendix")])
def test_resumed_is_straight(algo, form, tiny, tmp_path):
    """Every method, and `fedssg` in its three forms, bit for bit; the same with the rows in host memory."""
    flags, methods = f"--form {form} --rounds 10 --unbalanced-sigma .5 --checkpoint-every 4", len(ALGORITHMS) if algo == "all" else 1
    assert start(tiny, tmp_path / "straight", flags, algo) == 0
    for out, how in dict(resumed="", host="--state-device cpu").items():
        assert start(tiny, tmp_path / out, f"{flags} {how} --stop-after 5", algo) == 0
        for folder in runs_in(tmp_path / out).values():
            assert len(log_of(folder)) == 6 and read(folder / "summary.json")["round"] == 5 and (folder / "checkpoint.pt").exists()
            assert read(folder / "config.json")["settings"]["rounds"] == 10
        assert start(tiny, tmp_path / out, f"{flags} {how} --resume", algo) == 0
        assert same(tmp_path / "straight", tmp_path / out, methods=methods) and not list((tmp_path / out).glob("*/checkpoint.pt"))


def at_round(t, monkeypatch, do):
    """Have something happen when round t is logged, before a checkpoint of it is taken."""
    monkeypatch.setattr(run, "progress", lambda algo, seed, row, *more: row["round"] == t and do())


@pytest.mark.parametrize("at, torn", [(1, ""), (3, ""), (7, ""), (7, "8,33.3,1."), (9, "10,50.0,1.0,1.0,1.0,1.0,"), (7, "8,5\n9,6\n"),
                                      (7, "8,50.0,1.0,1.0,1.0,1.0,2e-")])
def test_killed_and_resumed_is_straight(at, torn, tiny, tmp_path, monkeypatch):
    """Killed between two checkpoints, with rows in the log past the last one, the very last torn."""
    flags = "--rounds 10 --checkpoint-every 3"
    assert start(tiny, tmp_path / "straight", flags) == 0
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        at_round(at, patch, lambda: 1 / 0)
        start(tiny, tmp_path / "killed", flags)
    folder = runs_in(tmp_path / "killed")["fedssg"]
    assert len(log_of(folder)) == 1 + at and (folder / "checkpoint.pt").exists() == (at > 3)
    with open(folder / "log.csv", "a") as file:
        file.write(torn)
    assert start(tiny, tmp_path / "killed", flags) == 2
    assert start(tiny, tmp_path / "killed", flags + " --resume") == 0 and same(tmp_path / "straight", tmp_path / "killed", methods=1)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_resumed_is_straight(signum, tiny, tmp_path, monkeypatch, capsys):
    """After an earlier stop, as well: its summary must not outlive it."""
    assert start(tiny, tmp_path / "straight", "--rounds 9") == 0
    for first in ("", "--stop-after 2"):
        signal.signal(signum, lambda *_: None)      # what run.main is to replace
        out = tmp_path / f"interrupted{first}"
        if first:
            assert start(tiny, out, f"--rounds 9 {first}") == 0
        capsys.readouterr()
        with monkeypatch.context() as patch:
            at_round(4, patch, lambda: os.kill(os.getpid(), signum))
            assert start(tiny, out, "--rounds 9 --resume") == 128 + signum and one_line(capsys, "interrupted after round")
        folder = runs_in(out)["fedssg"]
        stood = torch.load(folder / "checkpoint.pt", weights_only=True)["round"]
        assert stood == len(log_of(folder)) - 1 in (4, 5)
        assert start(tiny, out, "--rounds 9 --resume") == 0 and same(tmp_path / "straight", out, methods=1)


def test_no_summary_of_rounds_that_were_gone_beyond(tiny, tmp_path, monkeypatch):
    assert start(tiny, tmp_path, "--stop-after 2") == 0
    monkeypatch.setattr(run, "plan_round", lambda settings, clients, t, *more, plan=run.plan_round: 1 / (t < 4) and plan(settings, clients, t, *more))
    with pytest.raises(ZeroDivisionError):      # killed in round 4
        start(tiny, tmp_path, "--resume")
    assert len(log_of(runs_in(tmp_path)["fedssg"])) == 1 + 3 and not (runs_in(tmp_path)["fedssg"] / "summary.json").exists()


@pytest.mark.parametrize("damage", [lambda lines: lines[:3], lambda lines: lines[:3] + lines[2:]], ids=["short", "repeated"])
def test_log_that_does_not_reach_the_checkpoint(damage, tiny, tmp_path, capsys):
    """Rows lost, or one there twice, so that those up to the checkpoint's round are not whole: nothing to go on with silently."""
    assert start(tiny, tmp_path, "--stop-after 4") == 0
    folder = runs_in(tmp_path)["fedssg"]
    lines = (folder / "log.csv").read_text().splitlines(keepends=True)
    (folder / "log.csv").write_text("".join(damage(lines)))
    (folder / "summary.json").unlink()
    capsys.readouterr()
    assert start(tiny, tmp_path, "--resume") in (1, 2) and one_line(capsys)


@pytest.mark.parametrize("damage, says", [("cut", "not a whole checkpoint"), ("empty", "not a whole checkpoint"), ("other", "other settings"),
                                          ("code", "not a whole checkpoint"), ("list", "checkpoint.pt")])
def test_checkpoint_that_is_refused(damage, says, tiny, tmp_path, capsys):
    assert start(tiny, tmp_path, "--stop-after 2") == 0
    checkpoint, marker = runs_in(tmp_path)["fedssg"] / "checkpoint.pt", tmp_path.parent / f"{tmp_path.name}-ran"
    content = torch.load(checkpoint, weights_only=True)
    if damage in ("cut", "empty"):
        checkpoint.write_bytes(checkpoint.read_bytes()[:-200] if damage == "cut" else b"")
    else:
        torch.save({"other": {**content, "settings": content["settings"].replace('"lr": 0.1', '"lr": 0.2')},
                    "code": {**content, "state": pickle_that_makes(marker)}, "list": [1, 2]}[damage], checkpoint)
    before = checkpoint.read_bytes()
    capsys.readouterr()
    assert start(tiny, tmp_path, "--resume") in (1, 2) and one_line(capsys, says)
    assert not marker.exists() and checkpoint.read_bytes() == before


def test_stop_at_target(tiny, tmp_path, capsys):
    flags = "--rounds 10 --lr .01"
    assert start(tiny, tmp_path / "straight", flags) == 0
    acc = [float(row[1]) for row in log_of(runs_in(tmp_path / "straight")["fedssg"])[1:]]
    t = next(t for t in range(2, 10) if acc[t - 1] > max(acc[:t - 1]))                      # a new best, after round 1
    for _ in range(2):      # the second time there is nothing to do
        assert start(tiny, tmp_path / "a", f"{flags} --stop-at-target --target-acc {acc[t - 1]!r}") == 0
        folder = runs_in(tmp_path / "a")["fedssg"]
        assert len(log_of(folder)) == t + 1 and read(folder / "config.json")["settings"]["rounds"] == 10
        assert read(folder / "summary.json")["rounds_to_target"] == read(folder / "summary.json")["round"] == t
    assert "finished" in capsys.readouterr().out
    assert start(tiny, tmp_path / "a", flags) == 2
    assert start(tiny, tmp_path / "a", flags + " --resume") == 0 and same(tmp_path / "straight", tmp_path / "a", methods=1)


def test_eval_every(tiny, tmp_path, capsys):
    """Blank cells between evaluations; the last round is evaluated; evaluating changes nothing else."""
    assert start(tiny, tmp_path / "a", "--rounds 7 --eval-every 3") == 0 and start(tiny, tmp_path / "b", "--rounds 7") == 0
    rows, every = (log_of(runs_in(tmp_path / out)["fedssg"])[1:] for out in "ab")
    assert [row[0] for row in rows if row[1]] == ["3", "6", "7"] and [row[0] for row in rows if row[2]] == ["3", "6", "7"]
    assert all(row == one or row == [one[0], "", "", *one[3:]] for row, one in zip(rows, every, strict=True))
    assert start(tiny, tmp_path / "c", "--rounds 7 --eval-every 3 --stop-after 2") == 0     # no evaluation yet
    assert "fedssg " in capsys.readouterr().out.splitlines()[-1] and read(runs_in(tmp_path / "c")["fedssg"] / "summary.json")["last"] is None


def test_divergence(tiny, tmp_path, capsys):
    flags = "--lr 1e9 --rounds 50"
    assert start(tiny, tmp_path, flags, "fedavg") == 3
    assert "diverged at round" in (line := capsys.readouterr().err.splitlines()[-1]) and "--lr" in line
    folder = runs_in(tmp_path)["fedavg"]
    log, t = log_of(folder)[1:], int(line.split("diverged at round ")[1].split()[0])
    assert 1 < t < 50 and [int(row[0]) for row in log] == list(range(1, t + 1)) and read(folder / "summary.json")["diverged"] == t
    assert [all(math.isfinite(float(x)) for x in row[2:4]) for row in log] == [True] * (t - 1) + [False]
    before = prints(tmp_path)
    assert start(tiny, tmp_path, flags + " --resume", "fedavg") == 3 and one_line(capsys, f"diverged at round {t}") and prints(tmp_path) == before


# ---- evaluation, and what all methods share ----

def test_evaluate(tiny):
    _, _, x, y, classes = data.load(str(tiny))
    omega, loss = flatten(models.build("linear", x.shape[1:], classes, [], 0))
    acc, value = run.evaluate(loss.logits, torch.zeros_like(omega), x, y)
    assert value == pytest.approx(math.log(3), abs=1e-6) and acc == pytest.approx(100 * float((y == 0).float().mean()), abs=1e-4)
    logits = x.numpy() @ omega[:36].view(3, 12).numpy().T + omega[36:].numpy()
    by_hand = 100 * np.mean(logits.argmax(1) == y.numpy()), np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y.numpy()])
    for batch in (1, 7, 60, 1000, 2000):
        assert [float(v) for v in run.evaluate(loss.logits, omega, x, y, batch)] == pytest.approx(by_hand, abs=1e-4)


def test_methods_share_split_model_cohorts_and_batches(tiny, tmp_path, monkeypatch):
    seen, local_sgd, methods = [], run.local_sgd, {}

    def spy(loss, omega, rho, b, X, Y, idx, w, *more, **named):
        shared = [X[idx], Y[idx], w] + ([omega] if len(seen) % 3 == 0 else [])      # the initial model, in round 1 of 3
        seen.append([hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest() for x in shared])
        return local_sgd(loss, omega, rho, b, X, Y, idx, w, *more, **named)
    monkeypatch.setattr(run, "local_sgd", spy)
    for seed, p in [(0, .4), (1, .4), (1, 1)]:
        seen.clear()
        assert start(tiny, tmp_path / f"{seed}{p}", f"--rounds 3 --seed {seed} --participation {p}", "all") == 0
        methods[seed, p] = [seen[k:k + 3] for k in range(0, len(seen), 3)]
        splits = {read(folder / "config.json")["settings"]["split"] for folder in runs_in(tmp_path / f"{seed}{p}").values()}
        assert len(methods[seed, p]) == len(ALGORITHMS) and all(rounds == methods[seed, p][0] for rounds in methods[seed, p]) and len(splits) == 1
    first, other, everyone = (rounds[0] for rounds in methods.values())
    assert first[0][0] != other[0][0] and first[0][3] != other[0][3]                            # another seed
    assert all(len({x[0] for x in rounds}) == 3 for rounds in (first, other, everyone))         # another round


def test_vmap_and_chunks_equal_loop(tiny, tmp_path):
    """Every method, in float64, with clients of very unequal size."""
    torch.set_default_dtype(torch.float64)
    for out, flags in dict(loop="--mode loop", vmap="--mode vmap", chunk="--mode vmap --chunk 3").items():
        assert start(tiny, tmp_path / out, f"--rounds 3 --unbalanced-sigma 1 --batch-size 8 {flags}", "all") == 0
    assert same(tmp_path / "loop", tmp_path / "vmap", 1e-9) and same(tmp_path / "loop", tmp_path / "chunk", 1e-9)


@pytest.mark.parametrize("flags", ["", "--form main", "--form appendix", "--sampling bernoulli --chunk 2 --unbalanced-sigma 1"])
def test_a_round_never_waits_for_the_device(flags, tiny, tmp_path, monkeypatch):
    """Whole runs on the device `meta`, whose tensors have no values to wait for: the host may ask for them once a round."""
    labels, asked, tolist = torch.from_numpy(np.load(tiny)["y_train"]), [], torch.Tensor.tolist
    monkeypatch.setattr(run, "cuda_or_cpu", lambda *_: torch.device("meta"))
    monkeypatch.setattr(run, "split", lambda _, *more, split=run.split: split(labels, *more))
    monkeypatch.setattr(run, "named", lambda *_: {})
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: asked.append(len(x)) or [0.0] * len(x) if x.is_meta else tolist(x))
    monkeypatch.setattr(torch.Tensor, "new_tensor", lambda *_: pytest.fail("copies the host's numbers, which waits as well"))
    with pytest.raises(RuntimeError, match="meta"):     # what a wait would come to
        float(torch.ones((), device="meta"))
    assert start(tiny, tmp_path, f"--mode vmap --checkpoint-every 9 {flags}", "fedssg" if "form" in flags else "all") == 0
    assert len(asked) == 5 * len(runs_in(tmp_path))     # rounds


@pytest.mark.parametrize("key", run.VECTORS)
def test_vectors_tell_what_a_method_keeps(key, tiny, tmp_path):
    algo = key if key in ALGORITHMS else "fedssg"
    assert start(tiny, tmp_path, "--stop-after 2" + (f" --correction {key}" if algo == "fedssg" else ""), algo) == 0
    state = torch.load(runs_in(tmp_path)[algo] / "checkpoint.pt", weights_only=True)["state"]
    rows = [name for name, x in state.items() if x.dim() == 2 and tuple(x.shape) == (10, len(state["omega"]))]
    assert len(rows) == run.VECTORS[key][0] and all(name.endswith("_i") for name in rows)


# ---- several processes ----

SPREAD = "--rounds 3 --participation .2 --unbalanced-sigma 1 --batch-size 8 --seed 2"
CALLS = [("spread", "all", ""), ("spread", "fedssg", "--form main"), ("spread", "fedssg", "--form appendix"),
         ("host", "all", "--state-device cpu"), ("stopped", "all", "--stop-after 2"), ("single", "all", ""),
         ("alone", "scaffold fedssg", "")]


def one_of_several(rank, ports, W, tiny, out):
    """Process `rank` of W: what torchrun sets, then the runs one after another, the last without the all-reduce of models."""
    for port, (place, algo, flags) in zip(ports, CALLS):
        torch.set_default_dtype(torch.float32 if place == "single" else torch.float64)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(W), LOCAL_WORLD_SIZE="99",   # one thread
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        if place == "alone":
            fedssg_module.dist.all_reduce = lambda x, all_reduce=torch.distributed.all_reduce, **more: len(x) < 39 and all_reduce(x, **more)
        if code := start(tiny, out / place, f"{SPREAD} {flags}", algo):
            raise SystemExit(code)


@pytest.mark.parametrize("W", [2, 3])
def test_processes_equal_one(W, tiny, tmp_path):
    """Every method, in float64, with rounds in which a process has no client; resumed by one process, too. In float32 bit for bit."""
    owners = [len({*(data.sample_clients(10, 0.2, "fixed", 2, t) % W)}) for t in (1, 2, 3)]
    assert min(owners) < W and max(owners) > 1
    context = multiprocessing.get_context("forkserver")     # imports torch once
    context.set_forkserver_preload(["run"])
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in CALLS]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    workers = [context.Process(target=one_of_several, args=(rank, ports, W, tiny, tmp_path)) for rank in range(W)]
    for worker in workers:
        worker.start()
    assert start(tiny, tmp_path / "one single", SPREAD, "all") == 0
    torch.set_default_dtype(torch.float64)
    for place, algo, flags in CALLS[:3]:
        assert start(tiny, tmp_path / "one", f"{SPREAD} {flags}", algo) == 0
    deadline = time.monotonic() + 60
    while any(worker.is_alive() for worker in workers) and not any(worker.exitcode for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    for worker in workers:
        worker.kill()
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * W
    assert start(tiny, tmp_path / "stopped", f"{SPREAD} --resume", "all") == 0
    assert same(tmp_path / "one", tmp_path / "spread", 1e-9, methods=len(ALGORITHMS) + 2)
    assert same(tmp_path / "one single", tmp_path / "single")
    assert {read(folder / "config.json")["processes"] for folder in (tmp_path / "spread").iterdir()} == {W}
    one = {name: model_of(folder) for name, folder in runs_in(tmp_path / "one").items()}
    for place in ("host", "stopped", "alone"):
        for name, folder in runs_in(tmp_path / place).items():
            gap = max(float((x - one[name][k]).abs().max()) for k, x in model_of(folder).items())
            assert gap > 1e-4 if place == "alone" else gap < 1e-9, (place, name)


# ---- damaged files ----

def damaged(content, seed):
    """The bytes of a file, changed in one of six ways: cut, lengthened, bytes flipped, a block cleared, moved or doubled."""
    g, out = np.random.default_rng([seed, 9]), bytearray(content)
    a, size = int(g.integers(len(out))), int(g.integers(1, 64))
    if seed % 6 == 0:
        return bytes(out[:a])
    if seed % 6 == 1:
        return bytes(out) + g.bytes(size)
    if seed % 6 == 2:
        for place in g.integers(min(len(out), 400) if seed % 2 else len(out), size=8):     # the header, or anywhere
            out[place] ^= int(g.integers(1, 256))
    elif seed % 6 == 3:
        out[a:a + size] = bytes(len(out[a:a + size]))
    elif seed % 6 == 4:
        out[a:a] = out[:size]
    else:
        del out[a:a + size]
    return bytes(out)


def ends_well(code, capsys):
    """Success, or one line and an exit code from 1 to 3. A traceback would have left `start` as an exception."""
    return code == 0 or (code in (1, 2, 3) and one_line(capsys))


@pytest.mark.parametrize("seed", range(72))
def test_damaged_npz(seed, tiny, tmp_path, capsys):
    file = tmp_path / "own.npz"
    file.write_bytes(damaged(tiny.read_bytes(), seed))
    before = file.read_bytes()
    assert ends_well(start(file, tmp_path / "out", "--rounds 1", "fedavg"), capsys) and file.read_bytes() == before


@pytest.mark.parametrize("seed", range(72))
def test_damaged_idx(seed, tmp_path, capsys):
    g, folder = np.random.default_rng(seed), tmp_path / "MNIST" / "raw"
    write_idx(folder, MNIST_FILES, [g.integers(256, size=(30, 28, 28)), g.integers(10, size=30),
                                    g.integers(256, size=(20, 28, 28)), g.integers(10, size=20)])
    file = folder / MNIST_FILES[seed // 6 % 4]
    file.write_bytes(damaged(file.read_bytes(), seed))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert ends_well(start("mnist", tmp_path / "out", f"--rounds 1 --data-dir {tmp_path}", "fedavg"), capsys)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.fixture(scope="session")
def stopped(tiny, tmp_path_factory):
    """The folder of a run of fedssg that was stopped after round 2 of 5."""
    out = tmp_path_factory.mktemp("stopped")
    assert start(tiny, out, "--stop-after 2") == 0
    folder, = out.iterdir()
    return folder


@pytest.mark.parametrize("seed", range(72))
def test_damaged_checkpoint(seed, stopped, tiny, tmp_path, capsys):
    capsys.readouterr()
    folder = tmp_path / stopped.name
    shutil.copytree(stopped, folder)
    name = ("checkpoint.pt", "checkpoint.pt", "log.csv", "config.json", "summary.json")[seed % 5]
    (folder / name).write_bytes(damaged((folder / name).read_bytes(), seed))
    assert ends_well(start(tiny, tmp_path, "--resume"), capsys)
    assert {path.name for path in stopped.iterdir()} - {path.name for path in folder.iterdir()} <= {"checkpoint.pt"}
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("limit", [10, 300, 3000])
def test_full_disk(limit, tiny, tmp_path, capsys):
    """A file may not grow past `limit` bytes: the log, or config.json, or the checkpoint cannot be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        code = start(tiny, tmp_path, "--checkpoint-every 2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1 and one_line(capsys) and not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.rglob("model.pt"))


@pytest.mark.parametrize("shape, classes", [((3, 32, 32), 10), ((3, 32, 32), 100), ((28, 28), 26)])
def test_every_method_on_the_shapes_of_the_paper(shape, classes, tmp_path, capsys):
    """CIFAR-10, CIFAR-100 and EMNIST in shape, through the command line: two rounds of the convolutional or the small FCN."""
    g, file = np.random.default_rng(0), tmp_path / "own.npz"
    y = g.permutation(classes * 2) % classes
    x = g.integers(256, size=(len(y), *shape), dtype=np.uint8)
    np.savez(file, x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    model = "--model cnn" if len(shape) == 3 else "--model fcn --hidden 100"
    assert start(file, tmp_path / "out", f"{model} --num-clients 4 --participation .5 --rounds 2 --batch-size 4", "all") == 0
    for folder in (tmp_path / "out").iterdir():
        assert len(log_of(folder)) == 3


# ---- what else may have happened to a run's folder ----

def test_a_run_that_is_over_is_free(tiny, tmp_path, monkeypatch):
    held = []
    monkeypatch.setattr(run, "simulate", lambda *a, simulate=run.simulate: held.append(len(run.LOCKS)) or simulate(*a))
    assert start(tiny, tmp_path, "--seeds 0 1 2") == 0 and held == [0, 0, 0]


def test_show_split(tiny, tmp_path, capsys):
    assert start(tiny, tmp_path, "--show-split --rounds 1 --unbalanced-sigma 1", "fedavg") == 0
    counts, out = np.load(runs_in(tmp_path)["fedavg"] / "split.npz")["counts"], capsys.readouterr().out.splitlines()
    assert counts.shape == (10, 3) and (counts.sum(0) <= np.bincount(np.load(tiny)["y_train"])).all() and counts.sum() > 180
    for i, row in enumerate(counts.tolist()):
        assert [i, sum(row), *row] in [[int(x) for x in line.split()] for line in out if line.replace(" ", "").isdigit()]


def test_a_flag_for_another_method_is_no_part_of_a_run(tiny, tmp_path, capsys):
    assert start(tiny, tmp_path, "--alpha .2", "fedavg fedssg") == 0 and "finished" not in capsys.readouterr().out
    assert start(tiny, tmp_path, "", "fedavg") == 0 and "finished" in capsys.readouterr().out


def test_changed_data_file_is_another_run(tiny, tmp_path):
    file, contents = tmp_path / "own.npz", dict(np.load(tiny))
    np.savez(file, **contents)
    assert start(file, tmp_path / "out", "--partition iid --stop-after 2") == 0
    np.savez(file, **contents | {"x_train": 3 * contents["x_train"]})
    assert start(file, tmp_path / "out", "--partition iid --resume") == 0
    assert sorted(len(log_of(folder)) for folder in (tmp_path / "out").iterdir()) == [3, 6]


def test_a_sweep_goes_on_after_a_divergence(tiny, tmp_path, capsys):
    for _ in range(2):      # the second call finds both runs ended
        assert start(tiny, tmp_path, "--gate-scale 1e9 --rounds 30", "fedssg fedavg") == 3
        out = capsys.readouterr()
        assert "diverged" in out.err and "fedavg" in out.out.splitlines()[-1] and len(log_of(runs_in(tmp_path)["fedavg"])) == 31


@pytest.mark.parametrize("gone", [["config.json"], ["checkpoint.pt"], ["log.csv"], ["config.json", "checkpoint.pt"]])
def test_missing_file_is_not_made_up_for(gone, stopped, tiny, tmp_path, capsys):
    capsys.readouterr()
    folder = tmp_path / stopped.name
    shutil.copytree(stopped, folder)
    for name in gone:
        (folder / name).unlink()
    before = prints(tmp_path)
    assert start(tiny, tmp_path, "--resume") == 1 and one_line(capsys) and prints(tmp_path) == before


@pytest.mark.parametrize("name, content", [("config.json", "{}"), ("config.json", "[]"), ("summary.json", "{}"), ("summary.json", "[]"),
                                           ("log.csv", "round\n" + "9" * 200_000), ("log.csv", "\xff\xfe"), ("summary.json", "")])
def test_edited_file_is_refused(name, content, stopped, tiny, tmp_path, capsys):
    capsys.readouterr()
    shutil.copytree(stopped, tmp_path / stopped.name)
    (tmp_path / stopped.name / name).write_text(content, encoding="latin-1")
    assert start(tiny, tmp_path, "--resume") == 1 and one_line(capsys, stopped.name)


@pytest.mark.parametrize("name, content", [("config.json", '{"settings": 3}'), ("config.json", '{"settings": ["a"]}'),
                                           ("summary.json", '{"round": "x"}'), ("summary.json", '{"round": 2, "diverged": 2}')])
def test_edited_file_ends_well(name, content, stopped, tiny, tmp_path, capsys):
    capsys.readouterr()
    shutil.copytree(stopped, tmp_path / stopped.name)
    (tmp_path / stopped.name / name).write_text(content)
    assert ends_well(start(tiny, tmp_path, "--resume"), capsys)


@pytest.mark.parametrize("change", [dict(round="x"), dict(state={}), dict(settings="not JSON"), dict(state=3)])
def test_edited_checkpoint_is_refused(change, stopped, tiny, tmp_path, capsys):
    capsys.readouterr()
    file = shutil.copytree(stopped, tmp_path / stopped.name) / "checkpoint.pt"
    torch.save(torch.load(file, weights_only=True) | change, file)
    assert start(tiny, tmp_path, "--resume") == 1 and one_line(capsys, "checkpoint.pt")


def test_closed_and_ascii_output(tiny, tmp_path):
    """Without a stdout, and with one that has no ±, the run ends as it should."""
    command = f"{sys.executable} {Path(run.__file__)} --algo fedavg --dataset {tiny} --model linear --num-clients 4 --rounds 50 --local-epochs 1"
    for how, out in ((">&-", "a"), ("| cat", "b")):
        done = subprocess.run(f"set -o pipefail; {command} --out {tmp_path / out} {how}", shell=True, executable="/bin/bash",
                              env=os.environ | {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr


# ---- the README ----

def test_readme_examples(tmp_path, monkeypatch):
    """The example for one's own tensors runs as printed; the added method works and becomes a flag."""
    text = (Path(run.__file__).parent / "README.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    example, = (block for block in blocks if "from fedssg import" in block)
    printed = []
    exec(example, {"print": lambda *args: printed.append(args)})
    assert len(printed) == 50 and all(math.isfinite(printed[-1][1][name]) for name in ("gate", "h_norm"))
    added, = (block for block in blocks if "def fedavgm" in block)
    names = dict(vars(baselines_module))
    exec(added, names)
    s, (omega,) = {"omega": torch.zeros(2)}, [torch.ones(2)]
    r = make_round([0, 1], dtype=torch.float32)
    for step in (1.0, 1.9):
        before = s["omega"].clone()
        names["fedavgm"](s, r, lambda rho, b: s["omega"] + omega)
        assert close(s["omega"] - before, step * omega, 1e-6)
    monkeypatch.setitem(ALGORITHMS, "fedavgm", names["fedavgm"])
    assert run.settings_for("fedavgm", 0, run.parse("--algo fedavgm --momentum .5".split()))["hyper"] == {"momentum": 0.5}
