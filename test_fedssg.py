"""Checks of the gate, the methods, the client loop, the data and the command line.     python -m pytest -q

    1 gate math, test_gate_*: pytest -k gate            5 client loop, test_client_*
    2 degenerate cases, test_degenerate_*               6 models, test_models_*; the file alone, test_alone_*
    3 affine term; one round by hand, test_method_*     7 data, test_data_*
    4 invariants, convergence, Disco, test_method_*     8 command line, test_cli_*

Each method is compared with something independent of it: numbers worked by hand, autograd, torch.optim,
closed forms, another method at the setting at which both are the same. No network, no data files.
"""

import contextlib
import copy
import csv
import dataclasses
import errno
import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

import baselines as baselines_module
import data
import fedssg as fedssg_module
import models
import run
from baselines import ALGORITHMS, disco_weights, fedavg, feddc, feddisco, feddyn, fedprox, fedvra, scaffold
from fedssg import as_function, fedssg, flatten, FORMS, gate, local_sgd, Round, total

torch.manual_seed(0)        # of the models made below, on import; torch 2.14 starts from a random seed
F32, F64 = torch.float32, torch.float64
METHODS = {**ALGORITHMS, **{f"fedssg {form}": partial(fedssg, **FORMS[form]) for form in FORMS}}


# ---- helpers: a round, two federated problems of four clients, and the loop over rounds ----

def make_round(i, n=(10,) * 4, labels=((9, 1), (5, 5), (4, 6), (3, 7)), t=1, T=10, K=2, lr=0.1, lr0=None,
               dtype=F64):
    """The Round of cohort i among len(n) clients of n[j] samples. K: steps, one number or one a member."""
    i, n = torch.as_tensor(i), torch.tensor(n, dtype=dtype)
    return Round(t=t, T=T, N=len(n), m=len(i), p=len(i) / len(n), lr=lr, lr0=lr0 or lr, num_rows=len(n), i=i,
                 K_i=torch.as_tensor(K, dtype=dtype).expand(len(i)), n_i=n[i], size_i=n[i] / n.mean(),
                 labels_i=torch.as_tensor(labels)[i].to(dtype))


def cohorts(rounds):
    """Random cohorts of two of the four clients."""
    return [np.sort(np.random.default_rng(t).choice(4, 2, replace=False)) for t in range(rounds)]


# f_i(theta) = 1/2 (theta - A_i)^T diag(Q_i) (theta - A_i): the curvatures differ, so client drift has a bias
A = torch.tensor([[3., -1, 0], [-2, 4, 1], [0, 2, -5], [1, 1, 6]], dtype=F64)
Q = torch.tensor([[0.2, 1, 2], [2, 0.3, 0.5], [1, 3, 0.2], [0.4, 1, 1]], dtype=F64)
OPTIMUM = (Q * A).sum(0) / Q.sum(0)


def quadratic(decay=1.0, T=10):
    """Five exact gradient steps on f_i plus the affine term. `seen`: the mean gradients of each round."""
    def start(s, t, i):
        r = make_round(i, t=t, T=T, K=5, lr=0.1 * decay ** (t - 1), lr0=0.1)

        def train(rho, b):
            theta, gradients = s["omega"].expand(len(i), -1), []
            for _ in range(5):
                gradients.append(Q[i] * (theta - A[i]))
                theta = theta - r.lr * (gradients[-1] + rho[:, None] * theta + b)
            seen.append(sum(gradients) / 5)
            return theta
        return r, train
    seen = []
    return SimpleNamespace(omega=torch.zeros(3, dtype=F64), start=start, seen=seen)


def classify(sizes=(1, 3, 6, 10), dtype=F64, decay=1.0, clip=2.0, model=None, device="cpu"):
    """A small network on random data in three classes, trained by local_sgd."""
    g, n = torch.Generator().manual_seed(0), sum(sizes)
    X, Y = torch.randn(n, 4, generator=g).to(device, dtype), torch.randint(3, (n,), generator=g).to(device)
    parts = np.split(np.arange(n), np.cumsum(sizes)[:-1])
    labels = torch.stack([torch.bincount(Y[part], minlength=3) for part in parts])
    model = (model or models.build("fcn", (4,), 3, [5], seed=1)).to(device, dtype)

    def batches(i, t=1):        # two epochs in batches of 4
        idx, w, K_i = map(torch.as_tensor, data.schedule(parts, [int(j) for j in i], 0, t, 2, 4))
        return idx.to(device), w.to(device, dtype), K_i

    def start(s, t, i):
        idx, w, K_i = batches(i, t)
        r = make_round(i, sizes, labels, t, K=K_i, lr=0.5 * decay ** (t - 1), lr0=0.5, dtype=dtype)
        return r, lambda rho, b: local_sgd(model, s["omega"], rho, b, X, Y, idx, w, r.lr, 1e-2, clip)[0]
    return SimpleNamespace(omega=flatten(model), start=start, model=model, X=X, Y=Y, batches=batches)


def play(method, problem, cohorts, **hyper):
    """The rounds of a method; yields, after each, copies of its state together with its clients' theta_i."""
    s = {"omega": problem.omega.clone()}
    for t, i in enumerate(cohorts, 1):
        r, train = problem.start(s, t, torch.as_tensor(i))
        returned = {}

        def train_and_note(rho, b):
            returned["theta_i"] = train(rho, b)
            return returned["theta_i"]
        method(s, r, train_and_note, **hyper)
        yield returned | {name: x.clone() for name, x in s.items()}


def close(a, b, tolerance=1e-10):
    a, b = (torch.as_tensor(x, dtype=F64) for x in (a, b))
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


# ==== 1. Gate math ==========================================================================================

ONE = torch.ones(1, dtype=F64)


@pytest.mark.parametrize("ratio, shape, expected", [
    ("running", "identity", (0.5, 1.5)), ("running", "clip", (0.5, 1)), ("horizon", "identity", (0.2, 0.6)),
    ("horizon", "logistic", (0.549834, 0.645656)), ("off", "logistic", (0.731059, 0.731059))])
def test_gate_by_hand(ratio, shape, expected):
    """Sampled once and 3 times; expected are p t = 2 at t = 4, or p T = 5."""
    r, count_i, expected = make_round([0, 1], t=4), torch.tensor([1., 3.], dtype=F64), torch.tensor(expected)
    assert close(gate(count_i, r, ratio=ratio, shape=shape), expected, 2e-6)
    assert close(gate(count_i, r, ratio=ratio, shape=shape, scale=2.0, beta=0.5), 2 * expected + 0.5, 2e-6)


def test_gate_at_its_ends_monotone_and_bounded():
    """Whoever is sampled in each of t = T rounds has the ratio 1 / p = 4, the largest there is."""
    r = make_round([2], T=50)                                                   # t = 1, p = 1/4
    for ratio, first in (("running", 4.0), ("horizon", 1 / (0.25 * 50))):       # 1 / p; 1 / (p T)
        assert gate(0 * ONE, r, ratio=ratio) == 0 and close(gate(ONE, r, ratio=ratio), [first], 1e-4)
        assert close(gate(ONE, r, ratio=ratio, eps=1 / first), [first / 2])
    for count_i in (3 * ONE, 3 * ONE.float()):      # exactly 1: the FedDyn and FedDC limits are bit for bit
        assert gate(count_i, r, ratio="off", eps=0.5) == gate(count_i, r, ratio="off", shape="clip") == 1.0
    for ratio, (shape, low, high) in itertools.product(("running", "horizon"), (
            ("identity", 0, 4), ("clip", 0, 1), ("logistic", 0.5, 1))):
        phi_i = gate(torch.arange(21, dtype=F64), make_round([0], t=20, T=20), ratio=ratio, shape=shape)
        assert (phi_i.diff() >= 0).all() and (phi_i.diff()[:4] > 0).all()
        assert phi_i[0] == low and 0.9 * (high - low) < phi_i[-1] - low <= high - low


@pytest.mark.parametrize("ratio, t, error", [("running", 10, 0.5), ("horizon", 20, 0.98)])
def test_gate_ratios_tend_to_one(ratio, t, error):
    """Cohorts of 5 of 20 for 2000 rounds: both ratios end at 1, within 3 sqrt((1 - p) / (p T)) = 0.12."""
    count_i = torch.from_numpy((np.random.default_rng(0).random((2000, 20)).argsort(1) < 5).cumsum(0))
    early, late = ((gate(count_i[k - 1].double(), make_round([0], t=k, T=2000), ratio=ratio) - 1).abs().max()
                   for k in (t, 2000))
    assert late < 0.12 < error < early


# ==== 2. Degenerate cases ===================================================================================

SOME = cohorts(5)
EQUAL = dict(sizes=(5, 5, 5, 5))
OFF = dict(gate_ratio="off", beta=0.0, alignment="prox", alpha=0.2)
ZERO = dict(gate_scale=0.0, beta=0.0)
H, C = ("h", "h_i"), ("c", "c_i")
# method A, its hyper-parameters = method B, its hyper-parameters; problem; states compared beside omega and
# theta_i; tolerance, None: bit for bit, in float32. decay: the rate falls by that factor each round
DEGENERATE = [
    (fedprox, dict(mu=0.0), fedavg, {}, {}, (), None),
    (fedssg, dict(OFF, correction="none"), feddyn, dict(alpha=0.2), dict(decay=0.9), H, None),
    (fedssg, {**FORMS["stable"], **OFF}, feddc, dict(alpha=0.2), dict(decay=0.9), H + C, None),
    (fedssg, {**FORMS["released"], **OFF}, feddc, dict(alpha=0.2), {}, H + C, None),
    (fedssg, {**FORMS["stable"], **ZERO}, scaffold, {}, dict(decay=0.9), C, None),
    (fedssg, dict(ZERO, alignment="none", correction="none"), fedavg, {}, EQUAL, (), 1e-12),
    (fedssg, dict(ZERO, alignment="prox", correction="state"), fedavg, {}, EQUAL, (), 1e-12),
    (feddisco, dict(disco_a=0.0, disco_b=0.0, alpha=0.2), feddyn, dict(alpha=0.2), EQUAL, H, 1e-12),
    (fedvra, dict(gamma=0.3, dual_step=1.0), feddyn, dict(alpha=0.3), EQUAL, H, 1e-12),
    (fedvra, dict(gamma=0.3, dual_step=0.0), fedprox, dict(mu=0.3), EQUAL, (), 1e-12),
    (fedvra, dict(gamma=0.0, dual_step=0.0), fedavg, {}, EQUAL, (), 1e-12),
]


@pytest.mark.parametrize("A, hyper_A, B, hyper_B, problem, states, tolerance", DEGENERATE,
                         ids=[f"{row[0].__name__}-{row[2].__name__}" for row in DEGENERATE])
def test_degenerate_cases(A, hyper_A, B, hyper_B, problem, states, tolerance):
    problem = classify(**problem, dtype=F64 if tolerance else F32)
    for a, b in zip(play(A, problem, SOME, **hyper_A), play(B, problem, SOME, **hyper_B), strict=True):
        for name in ("omega", "theta_i", *states):
            assert close(a[name], b[name], tolerance) if tolerance else torch.equal(a[name], b[name]), name
    assert not close(a["omega"], problem.omega, 1e-3)


def test_degenerate_first_round():
    """No state yet: the clients do the same. FedDC's server adds mean_N h_i = mean_S D_i / 2 (m = N / 2)."""
    problem = classify(**EQUAL)
    (avg,), (sca,), (dc,) = (play(method, problem, SOME[:1]) for method in (
        fedavg, scaffold, partial(feddc, alpha=0.0)))
    assert torch.equal(avg["theta_i"], sca["theta_i"]) and torch.equal(avg["theta_i"], dc["theta_i"])
    assert close(avg["omega"], sca["omega"]) and close(dc["omega"] - avg["omega"], dc["h_i"].mean(0))
    assert close(dc["h_i"].mean(0), (avg["omega"] - problem.omega) / 2)


@pytest.mark.parametrize("method", [partial(feddyn, alpha=0.4), partial(fedvra, gamma=0.4, dual_step=1.0)])
def test_degenerate_feddyn_and_fedvra_in_the_form_of_the_papers(method):
    """l_i: the client's gradient state. f_i - <l_i, theta> + alpha/2 ||theta - omega||^2; l_i -= alpha D_i;
    h -= alpha/N sum_S D_i; omega = mean_S theta_i - h / alpha. When all take part, as in the second half, it
    is federated ADMM (FedPD) of multipliers -l_i: omega = mean_N (theta_i - l_i / alpha)."""
    omega, l_i, h, alpha, who = torch.zeros(3), torch.zeros(4, 3, dtype=F64), torch.zeros(3), 0.4, cohorts(20)
    who += [np.arange(4)] * 20
    for state, i in zip(play(method, quadratic(), who), who, strict=True):
        theta_i = omega.expand(len(i), 3)
        for _ in range(5):
            theta_i = theta_i - 0.1 * (Q[i] * (theta_i - A[i]) - l_i[i] + alpha * (theta_i - omega))
        l_i[i] -= alpha * (theta_i - omega)
        h = h - alpha / 4 * (theta_i - omega).sum(0)
        omega = theta_i.mean(0) - h / alpha
        assert len(i) == 2 or close(omega, (theta_i - l_i / alpha).mean(0))
        for name, x in dict(omega=omega, h_i=-l_i / alpha, h=-h / alpha).items():
            assert close(state[name], x)


# ==== 3. The affine term; one round by hand =================================================================

# parts of the penalties of f_i, as functions of a client's theta and of the state before the round
DRIFT = lambda v: v.alpha / 2 * (v.theta - (v.omega - v.h_i)) ** 2                 # noqa: E731
INNER = lambda v: v.alpha * (v.theta - (v.omega - v.h_i)) * v.h_i                  # noqa: E731
VARIATES = lambda v: (v.c - v.c_i) * v.theta                                       # noqa: E731
BEFORE = dict(omega=[2], h_i=[0, 0.4, -0.6, 0.6], h=[0.1], c_i=[0, 1, -2, 3], c=[0.5], count_i=[0, 1, 2, 0],
              D_last_i=[9, 0.7, -0.5, 9], D_last=[0.2])
# FedDyn's memory, SCAFFOLD's control variates and, phi = 1 + 2/5, 1 + 3/5, what `released` and `stable` share
DYN = dict(h_i=[0, 0.4 + 1, -0.6 - 2, 0.6], h=[0.1 - 1 / 4], log=dict(h_norm=[1.4, 2.6]))
SCA = dict(c_i=[0, 1 - 0.5 - 1 / (2 * 0.1), -2 - 0.5 + 2 / (4 * 0.1), 3], c=[0.25])
SSG = dict(count_i=[0, 2, 3, 0], omega=[2 - 0.5 - 0.35], h_i=[0, 0.4 + 1.4, -0.6 - 3.2, 0.6], h=[-0.35],
           log=dict(gate=[1.4, 1.6], h_norm=[1.8, 3.8], gain=[1.4 * 0.1 * 2 * 0.6, 1.6 * 0.1 * 4 * 0.2]))
A1, A2 = 1 / (1 - 0.6 ** 2), 1 / (1 - 0.6 ** 4)         # FedVRA's `auto` for eta_0 gamma = 0.4
BY_HAND = {     # method, hyper-parameters, penalty, state after the round
    "fedavg": (fedavg, {}, lambda v: 0 * v.theta, dict(omega=[2 + 0.25 * 1 - 0.75 * 2])),
    **{f"fedprox {mu}": (fedprox, dict(mu=mu), lambda v, mu=mu: mu / 2 * (v.theta - v.omega) ** 2,
                         dict(omega=[0.75])) for mu in (0.1, 1, 10)},
    "scaffold": (scaffold, dict(eta_g=0.5), VARIATES, dict(SCA, omega=[2 + 0.5 * (1 - 2) / 2])),
    "feddyn": (feddyn, dict(alpha=0.3), DRIFT, dict(DYN, omega=[2 - 0.5 - 0.15])),
    "feddc": (feddc, dict(alpha=0.3), lambda v: DRIFT(v) + VARIATES(v), dict(DYN, **SCA, omega=[1.35])),
    # kl = 0, ln 2, or 0, 1 of their sum; disco = 0.25 + 0.1, 0.75 - 0.45 + 0.1, over their sum
    "feddisco": (feddisco, dict(alpha=0.3, disco_a=0.45), DRIFT, dict(
        DYN, omega=[2 + (0.35 * 1 - 0.4 * 2) / 0.75 - 0.15])),
    **{f"fedvra {name}": (fedvra, hyper, lambda v, gamma=hyper["gamma"]: (
        gamma * v.h_i * (v.theta - v.omega) + gamma / 2 * (v.theta - v.omega) ** 2), dict(
            h_i=[0, 0.4 + a1, -0.6 - 2 * a2, 0.6], h=[0.1 + (a1 - 2 * a2) / 4],
            omega=[2 - d / 4 + 0.1 + (a1 - 2 * a2) / 4], log=dict(h_norm=[0.4 + a1, 0.6 + 2 * a2])))
       for name, hyper, a1, a2, d in [                                          # 1 / p = 2
           ("auto", dict(gamma=2.0), A1, A2, 2), ("auto at its bound", dict(gamma=0.1), 2, 2, 2),
           ("gamma 0", dict(gamma=0.0), 1, 1, 2),
           ("given", dict(gamma=0.5, dual_step=3, server_step=4), 3, 3, 4)]},
    "released": (fedssg, dict(FORMS["released"], alpha=0.3), lambda v: INNER(v) + VARIATES(v), dict(
        SSG, c_i=[0, 1 - 0.5 - 1.4 / (2 * 0.2), -2 - 0.5 + 3.2 / (4 * 0.2), 3], c=[0.375])),
    "stable": (fedssg, dict(alpha=0.3), lambda v: INNER(v) + VARIATES(v), dict(SSG, **SCA)),
    # alpha_i = kappa / (eta_t K_i), so the gain is kappa phi; on the server D_i - kappa h for D_i, no h_i,
    # and c_i from the displacement itself. h = 0.1, so D_i - 0.5 h = 0.95, -2.05; the gated ones sum to -1.95
    "scaled": (fedssg, dict(FORMS["scaled"], kappa=0.5),
               lambda v: 0.5 / (0.1 * v.K) * (v.theta - (v.omega - v.h_i)) * v.h_i + VARIATES(v),
               dict(SSG, **SCA, log=dict(SSG["log"], gain=[0.7, 0.8]))),
    "on the server": (fedssg, dict(FORMS["scaled"], kappa=0.5, alignment="server"), VARIATES, dict(
        SCA, count_i=[0, 2, 3, 0], h=[0.1 - 1.95 / 4], omega=[2 + (0.95 - 2.05) / 2 + 0.1 - 1.95 / 4],
        log=dict(gate=[1.4, 1.6], h_norm=[1.95 / 4 - 0.1] * 2, gain=[0.5 * 0.5 * 1.4, 0.5 * 0.5 * 1.6]))),
    # phi = 2; on the server the gated D_i - 0.5 h sum to 2 (0.95 - 2.05)
    "light": (fedssg, dict(FORMS["light"], kappa=0.5),
              lambda v: 0.5 / (0.1 * v.K) * (v.theta - (v.omega - v.h_i)) * v.h_i, dict(
        count_i=[0, 2, 3, 0], h_i=[0, 0.4 + 2, -0.6 - 4, 0.6], h=[0.1 - 2 / 4], omega=[2 - 0.5 - 0.4],
        log=dict(gate=[2, 2], h_norm=[2.4, 4.6], gain=[1, 1]))),
    "stateless": (fedssg, dict(FORMS["stateless"], kappa=0.5), lambda v: 0 * v.theta, dict(
        count_i=[0, 2, 3, 0], h=[0.1 - 2.2 / 4], omega=[2 - 1.1 / 2 - 0.45],
        log=dict(gate=[2, 2], h_norm=[0.45, 0.45], gain=[0.5, 0.5]))),
    "no alignment": (fedssg, dict(alignment="none"), VARIATES, dict(
        {x: SSG[x] for x in ("count_i", "omega", "h")}, **SCA, log=dict(gate=[1.4, 1.6], h_norm=[0.35] * 2))),
    "main": (fedssg, dict(FORMS["main"], alpha=0.3), lambda v: v.gate * DRIFT(v), dict(     # phi = 4/3, 2
        count_i=[0, 2, 3, 0], h_i=[0, 0.4 + 4 / 3, -0.6 - 4, 0.6], h=[0.1 + (4 / 3 - 4) / 4],
        omega=[2 - 0.5 + 0.1 - 2 / 3], log=dict(gate=[4 / 3, 2], h_norm=[0.4 + 4 / 3, 4.6]))),
    "appendix": (fedssg, dict(FORMS["appendix"], alpha=0.3),                                # phi = 2/5, 3/5
                 lambda v: INNER(v) + (v.D_last_i - v.D_last) * v.theta / (0.1 * v.K), dict(
        count_i=[0, 2, 3, 0], h_i=[0, 0.4 + 0.4, -0.6 - 1.2, 0.6], h=[-0.1], omega=[2 - 0.5 - 0.1],
        D_last_i=[9, 1, -2, 9], D_last=[-0.6],
        log=dict(gate=[0.4, 0.6], h_norm=[0.8, 1.8], gain=[0.4 * 0.1 * 2 * 0.6, 0.6 * 0.1 * 4 * 0.2]))),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_method_affine_term_is_the_gradient_of_the_penalty_and_one_round_by_hand(name):
    """d = 1: clients 1 and 2 of four, with 10 and 30 samples (size_i 0.5 and 1.5), 2 and 4 steps, rate 0.1
    (0.2 in round 1), t = 3, T = 10; they return 3 and 0, so D_i = 1, -2. What BY_HAND does not name stays."""
    method, hyper, penalty, after = BY_HAND[name]
    s = {name: torch.tensor(x, dtype=F64) for name, x in BEFORE.items()}
    s |= {name: s[name][:, None] for name in ("h_i", "c_i", "D_last_i")}
    r = make_round([1, 2], [20, 10, 30, 20], [[9, 9], [5, 5], [30, 0], [9, 9]], t=3, K=[2, 4], lr0=0.2)
    given, log = {}, after.get("log", {})

    def train(rho, b):
        given["rho"], given["b"] = rho, b
        return torch.tensor([[3.], [0.]], dtype=F64)
    got = method(s, r, train, **hyper)
    for got, expected in [(s, {**BEFORE, **after}), (got, log)]:
        assert got.keys() == expected.keys() - {"log"}
        assert all(close(x.flatten(), expected[name], 3e-6) for name, x in got.items()), got
    for j in (0, 1):
        v = {name: x[j + 1] if name.endswith("_i") else x[0] for name, x in BEFORE.items()}
        v |= dict(alpha=0.3 / (0.5, 1.5)[j], K=(2, 4)[j], gate=log.get("gate", [0, 0])[j])
        theta = torch.tensor(1.7, dtype=F64, requires_grad=True)
        gradient, = torch.autograd.grad(penalty(SimpleNamespace(**v, theta=theta)), theta)
        assert close(gradient, given["rho"][j] * 1.7 + given["b"][j, 0], 1e-5)


def test_method_fedssg_is_stable_by_default_and_refuses_unknown_parts():
    assert [method.__name__ for method in ALGORITHMS.values()] == [*ALGORITHMS]
    assert len(ALGORITHMS) == 8
    defaults = {name: p.default for name, p in inspect.signature(fedssg).parameters.items()}
    assert FORMS["stable"].items() <= defaults.items()
    assert FORMS["main"]["alpha"] == 1.0
    for part in ("alignment", "correction", "gate_ratio", "gate_shape"):
        with pytest.raises(ValueError, match=f"{part.replace('_', ' ')} 'round': use"):
            list(play(fedssg, quadratic(), [[0]], **{part: "round"}))


# ==== 4. Invariants, convergence, Disco weights =============================================================

@pytest.mark.parametrize("name", METHODS)
def test_method_invariants_at_partial_participation(name):
    """Server vectors are means over the clients' (but the h of `stateless` is the server's own). Rows of
    others than the cohort stay. One sample, as client 0 has, is enough. Who returns omega changes nothing,
    nor does a training that fails, so a caller can try the round again."""
    before, problem, who = {}, classify(decay=0.9), [[0, 3], [1], [0, 2, 3], [2], [1, 0], [3, 2]]
    for i, state in zip(who, play(METHODS[name], problem, who), strict=True):
        assert all(x.isfinite().all() for x in state.values())
        for server, client in [("c", "c_i"), ("h", "h_i")]:
            alone = server not in state or name == "fedssg stateless"
            assert alone or close(state[server], state[client].mean(0), 1e-13)
        others = [j for j in range(4) if j not in i]
        for row in set(state) & {"c_i", "h_i", "D_last_i", "count_i"}:
            assert torch.equal(state[row][others], before.get(row, torch.zeros_like(state[row]))[others])
        before = state
    assert not close(before["omega"], problem.omega, 1e-3)
    omega, h_i = torch.rand(3), torch.rand(4, 3)
    s = {"omega": omega.clone(), "h_i": h_i.clone()}
    METHODS[name](s, make_round([1, 2], [1, 2, 3, 4], dtype=F32), lambda rho, b: omega.expand(2, 3))
    assert torch.equal(s["omega"], omega) and torch.equal(s["h_i"], h_i)        # h, made now, is zero

    def killed(rho, b):
        raise Killed
    s = {name: x.clone() for name, x in before.items()}
    with pytest.raises(Killed):
        METHODS[name](s, make_round([1, 2]), killed)
    assert s.keys() == before.keys() and all(torch.equal(s[x], before[x]) for x in s)


@pytest.mark.parametrize("method", [scaffold, partial(feddc, alpha=0.0),
                                    partial(fedssg, **FORMS["stable"], alpha=0.0)])
def test_method_control_variate_is_the_mean_gradient_seen(method):
    """In every one of 200 rounds, while the rate falls to two thirds; c is the mean over all four."""
    problem, who = quadratic(decay=0.998, T=200), cohorts(200)
    for i, state in zip(who, play(method, problem, who), strict=True):
        assert close(state["c_i"][i], problem.seen[-1], 1e-9)
        assert close(state["c"], state["c_i"].mean(0), 1e-9) and len(state["c_i"]) == 4


@pytest.mark.parametrize("form, grows", [("released", True), ("stable", False)])
def test_method_control_variates_at_a_constant_rate(form, grows):
    """The gradient is A_i everywhere, and some noise. Gated, a participation multiplies c_i - c by 1 - phi;
    phi = 1 + t / (p T) of clients who always take part ends at 3."""
    s, size = {"omega": torch.zeros(3, dtype=F64)}, []
    for t in range(1, 101):
        gradient = A[:2] + 0.1 * torch.randn(2, 3, dtype=F64)
        fedssg(s, make_round([0, 1], t=t, T=100, K=1), lambda rho, b: s["omega"] - 0.1 * (gradient + b),
               **FORMS[form], alpha=0.0)
        size.append((s["c_i"][0] - s["c"]).norm())
    assert max(size[:50]) < 10 and (max(size) > 1e3 if grows else max(size) < 10)


def drift(alignment, correction, phi, kappa, rounds=40, N=4, K=3, rate=0.1, **more):
    """fedssg on constant gradients A_i, all clients in each of `rounds` rounds, phi constant; the states."""
    s = {"omega": torch.zeros(3, dtype=F64)}
    for t in range(1, rounds + 1):
        r = make_round(range(N), t=t, T=rounds, K=K, lr=rate)
        fedssg(s, r, lambda rho, b: s["omega"] - rate * K * (A[:N] + b), alignment=alignment, beta=phi,
               correction=correction, kappa=kappa, **dict(gate_scale=0.0) | more)
        yield {name: x.clone() for name, x in s.items()}


@pytest.mark.parametrize("alignment, correction, limit", [
    ("inner", "plain", 1), ("inner", "none", 2), ("server", "plain", 2), ("server", "none", 2),
    ("inner", "state", 2 - 1.5)])
def test_method_fedssg_is_stable_up_to_the_stated_gain(alignment, correction, limit):
    """The memory, or what sets the clients' memories apart, moves as far each round as a geometric sequence:
    of the gain's limit times 0.95 it dies out, of 1.05 it grows. With `state` the limit is 2 less phi."""
    for gain, grows in [(0.95 * limit, False), (1.05 * limit, True)]:
        strength = dict(kappa=gain / 1.5)
        if correction == "state":           # which refuses a kappa; eta_t K is 0.1 * 3
            strength = dict(kappa=None, alpha=gain / 1.5 / 0.3)
        h = [s["h"] if alignment == "server" else s["h_i"] - s["h"]
             for s in drift(alignment, correction, phi=1.5, **strength)]
        first, last = (h[1] - h[0]).norm(), (h[-1] - h[-2]).norm()
        assert last > 2 * first if grows else last < first / 2


@pytest.mark.parametrize("gate", [dict(), dict(gate_scale=1.0)])
def test_method_fedssg_on_the_server_is_as_on_the_clients_where_all_are_alike(gate):
    """Constant gradients, all take part with the same phi, SCAFFOLD's correction: the pulls -kappa h_i have
    the mean -kappa h, so the memory may as well be the server's."""
    clients, server = (list(drift(where, "plain", 1.0, 0.3, **gate)) for where in ("inner", "server"))
    assert all(close(a["omega"], b["omega"], 1e-8) for a, b in zip(clients, server))
    assert close(clients[-1]["h"], server[-1]["h"], 1e-8) and "h_i" not in server[-1]
    assert not close(clients[-1]["h_i"][0], server[-1]["h"], 0.1)


def test_method_fedssg_kappa_is_the_memorys_share_of_a_displacement():
    """For any sizes, steps, rate and round: on a flat loss D_i = -kappa h_i, and gain = kappa phi_i. With
    alpha a client of one sample among thousands is pulled size_i times as hard."""
    for t, n, K, rate in [(1, (1, 3999), [1, 400], 0.1), (50, (20, 20), [5, 5], 0.3),
                          (9, (8, 2), [7, 1], 1e-3)]:
        r = make_round([0, 1], n, labels=[[1, 0]] * 2, t=t, T=50, K=K, lr=rate, lr0=0.4)
        h_i = torch.rand(2, 3, dtype=F64)
        for hyper, share in [(dict(kappa=0.25), torch.full((2,), 0.25)),
                             (dict(alpha=0.05), 0.05 * rate * r.K_i / r.size_i)]:
            s, D_i = {"omega": torch.zeros(3, dtype=F64), "h_i": h_i.clone()}, []

            def flat(rho, b):
                D_i.append(-rate * r.K_i[:, None] * b)
                return D_i[0]
            log = fedssg(s, r, flat, correction="none", **hyper)
            assert close(D_i[0], -share[:, None] * h_i, 1e-6)
            assert close(log["gain"], share * log["gate"], 1e-6)


@pytest.mark.parametrize("hyper, says", [
    (dict(alpha=0.1, kappa=0.1), "give one"), (dict(FORMS["released"], kappa=0.1), "unstable"),
    (dict(kappa=0.1, alignment="prox"), "unstable"), (dict(alignment="server"), "give kappa")])
def test_method_fedssg_refuses_a_strength_that_it_cannot_take(hyper, says):
    with pytest.raises(ValueError, match=says):
        list(play(fedssg, quadratic(), [[0]], **hyper))


def test_method_round_has_defaults_for_one_process_and_fixed_cohorts():
    told = make_round([1, 3], t=2)
    required = dict(t=2, T=10, N=4, i=told.i, lr=0.1, lr0=0.1, K_i=told.K_i, n_i=told.n_i)
    plain, given = Round(**required), Round(**required, m=3, p=0.6, num_rows=2)
    assert (plain.m, plain.p, plain.num_rows) == (told.m, told.p, told.num_rows) == (2, 0.5, 4)
    assert (given.m, given.p, given.num_rows) == (3, 0.6, 2)
    for method, missing in [(fedssg, "size_i"), (feddyn, "size_i"), (feddc, "size_i"),
                            (feddisco, "labels_i")]:
        with pytest.raises(ValueError, match=f"Round.{missing} is missing"):
            method({"omega": torch.zeros(3, dtype=F64)}, plain, lambda rho, b: pytest.fail("trained"))
    for method in (fedavg, fedprox, scaffold, fedvra, partial(fedssg, kappa=0.2)):
        method({"omega": torch.zeros(3, dtype=F64)}, plain, lambda rho, b: torch.ones(2, 3, dtype=F64))


def test_method_total_does_not_depend_on_the_order():
    """Nor, so, on how the clients are spread over processes: sums of float32 numbers are made in float64."""
    x = torch.randn(15, 10_000) * torch.rand(15, 1).exp()
    assert all(torch.equal(total(y)[0], x.double().sum(0).float()) for y in (x, x[torch.randperm(15)]))


def where_it_stops(mu):
    """K = 5 steps of rate 0.1 on f_i + mu/2 ||theta - omega||^2 give D_i = -w_i (omega - A_i), so FedAvg and
    FedProx stop where sum_i w_i (omega - A_i) = 0."""
    w = (1 - (1 - 0.1 * (Q + mu)) ** 5) * Q / (Q + mu)
    return (w * A).sum(0) / w.sum(0)


@pytest.mark.parametrize("method, hyper, end", [
    (fedavg, {}, where_it_stops(0)), (fedprox, dict(mu=0.5), where_it_stops(0.5)),
    *[(method, hyper, OPTIMUM) for method, hyper in [
        (scaffold, {}), (feddyn, dict(alpha=0.5)), (feddc, dict(alpha=0.2)), (fedvra, {}),
        (feddisco, dict(alpha=0.5)), (fedssg, {}), (fedssg, dict(alpha=0.0)), (fedssg, FORMS["released"]),
        (fedssg, {**FORMS["main"], "gate_shape": "clip"}),
        (fedssg, {**FORMS["appendix"], "correction": "none", "alpha": 0.2})]]])
def test_method_reaches_the_optimum_or_stops_at_its_bias(method, hyper, end):
    *_, state = play(method, quadratic(T=300), [range(4)] * 300, **hyper)
    assert (state["omega"] - end).norm() < 1e-3 * OPTIMUM.norm()
    assert end is OPTIMUM or (end - OPTIMUM).norm() > 1e-2 * OPTIMUM.norm()


@pytest.mark.parametrize("a, b, labels, expected", [
    (0.2, 0.1, [[10, 10], [20, 0], [30, 10]], [0.35, 0.35 - 0.2 * 0.84124, 0.6 - 0.2 * 0.15876]),
    (0.9, 0.0, [[10, 10], [20, 0], [30, 10]], [0.25, 0, 0.5 - 0.9 * 0.15876]),      # the skewed one: 0
    (0.5, -2.0, [[10, 10], [20, 0], [30, 10]], [1, 1, 2]),                          # all 0: sample counts
    (0.5, 0.1, [[10, 10], [10, 10], [20, 20]], [0.35, 0.35, 0.6]),                  # nobody is skewed
    # C classes: only one of them, half of them, all evenly: kl = ln C, ln 2, 0, or 1 - x, x, 0 of their sum
    *[(1, 1, [[C] + [0] * (C - 1), [2, 0] * (C // 2), [1] * C], [4 / 3 - 1 + x, 4 / 3 - x, 4 / 3])
      for C in (26, 100) for x in [math.log(2) / math.log(2 * C)]]])
def test_method_disco_weights_by_hand(a, b, labels, expected):
    """kl = 0, ln 2, ln 2 - entropy(3/4, 1/4), or 0, 0.841, 0.159 of their sum; n_i/sum n = 1/4, 1/4, 1/2."""
    r = make_round([0, 1, 2], [sum(counts) for counts in labels], labels)
    assert close(disco_weights(r, a, b), np.array(expected) / sum(expected), 1e-6)


def eq34(L, alpha, B=1.0, psi=0.0, K=math.inf, xi=0.0, swapped=False):
    """Appendix B, Eq. (50): f(w) falls by at least this times ||grad f(w)||^2; alpha_bar = alpha, K = |S|.
    swapped: p / 2 of the theorem as it is printed, with (1 + B) psi where (50) has B (1 + psi)."""
    third = (1 + B) * psi if swapped else B * (1 + psi)
    sampling = 0.0 if K == math.inf else (2 * math.sqrt(2 * K) + 2) / K
    fall = (1 - psi * B - B * (1 + psi) * math.sqrt(2 / K)) / alpha - L * third / alpha ** 2
    return (1 + xi) * (fall - L * (B * (1 + psi)) ** 2 * ((1 + xi) / 2 + sampling) / alpha ** 2)


def test_method_theorem_as_printed_promises_too_much():
    """Identical quadratics L/2 ||w||^2 and exact proximal steps: psi 0, B 1, no sampling error."""
    for L, alpha in ((0.1, 1.0), (0.5, 2.0), (1.0, 30.0)):
        w = torch.tensor([3.0, -4], dtype=F64)
        theta = alpha / (L + alpha) * w             # argmin L/2 ||theta||^2 + alpha/2 ||theta - w||^2
        fall = float(L / 2 * (w @ w - theta @ theta) / (L ** 2 * w @ w))
        assert eq34(L, alpha) <= fall < eq34(L, alpha, swapped=True)
    assert eq34(0.1, 1.0) == pytest.approx(0.85) and eq34(0.1, 1.0, swapped=True) == pytest.approx(0.95)
    assert eq34(0.1, 1.0, B=1.2, psi=0.1, K=400, xi=0.5) == pytest.approx(1.5 * (
        1 - 0.12 - 1.32 * math.sqrt(2) / 20 - 0.132 - 0.17424 * (0.75 + (2 * math.sqrt(800) + 2) / 400)))


# ==== 5. The client loop ====================================================================================

MODES = pytest.mark.parametrize("mode", ["loop", "vmap"])


def solve(problem, i=(0, 1, 2, 3), **how):
    """theta_i and losses of the clients i with an affine term, by local_sgd."""
    (idx, w, _), rho_i = problem.batches(i), torch.tensor([0.0, 0.3, 0.1, 0.5])[list(i)].to(problem.omega)
    b_i = (rho_i - 0.2)[:, None].repeat(1, len(problem.omega))
    return local_sgd(problem.model, problem.omega, rho_i, b_i, problem.X, problem.Y, idx, w,
                     **{**dict(lr=0.3, weight_decay=0.05, clip=0.4), **how})


@MODES
def test_client_one_step_by_hand(mode):
    """1/2 (x theta)^2 at theta = (1, 1), x = (3, 4): gradient (21, 28), with 10 theta + (-1, 2) (30, 40) of
    norm 50, clipped to (3, 4); weight decay 0.5 comes after. The second sample is padding."""
    omega, rho, b = (torch.tensor(x, dtype=F64) for x in ([1, 1], [10], [[-1, 2]]))
    X, Y, w = (torch.tensor(x, dtype=F64) for x in ([[3, 4], [5, 5]], [0, 0], [[[1, 0]]]))
    step = partial(local_sgd, nn.Linear(2, 1, bias=False, dtype=F64), omega, rho, b, X, Y,
                   torch.tensor([[[0, 1]]]), w, 0.1, 0.5, mode=mode,
                   criterion=lambda out, y, reduction: (out[:, 0] - y) ** 2 / 2)
    theta_i, loss_i = step(clip=5.0)
    assert close(theta_i, [[1 - 0.1 * 3.5, 1 - 0.1 * 4.5]]) and close(loss_i, [24.5])
    assert close(step(clip=100.0)[0], [[1 - 0.1 * 30.5, 1 - 0.1 * 40.5]])


@pytest.mark.parametrize("method, clip", [(fedavg, math.inf), (fedavg, 0.3), (scaffold, math.inf)])
def test_client_by_itself_is_central_sgd(method, clip):
    """Five rounds with one client = torch.optim.SGD on the same batches, from round to round."""
    problem, norms = classify(sizes=(10,), clip=clip, decay=0.9), []
    model = copy.deepcopy(problem.model)
    for t, state in enumerate(play(method, problem, [[0]] * 5), 1):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5 * 0.9 ** (t - 1), weight_decay=1e-2)
        for i, w in zip(*problem.batches([0], t)[:2]):
            batch = i[w > 0]                        # 10 samples in batches of 4: the last one has 2
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(problem.X[batch]), problem.Y[batch]).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
        assert close(state["omega"], flatten(model), 1e-12 if clip > 1 else 1e-5)   # torch's clip adds 1e-6
    assert max(norms) > 0.3                         # the clip is reached


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("how", [dict(mode="auto"), dict(mode="vmap", compiled=True), dict(mode="vmap"),
                                 dict(mode="vmap", chunk=3)])
def test_client_loop_vmap_chunks_and_compiled_agree(how, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    if device == "cpu" and "compiled" in how and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("no C++ compiler")
    for clip in (0.4, math.inf):                    # clients of 1, 3, 6 and 10 samples: 2, 2, 4 and 6 steps
        expected = solve(classify(), mode="loop", clip=clip)
        got = solve(classify(device=device), clip=clip, **how)
        assert close(got[0].cpu(), expected[0], 1e-9) and close(got[1].cpu(), expected[1], 1e-9)
        assert expected[0].shape == (4, 43) and (expected[1] > 0).all()


def test_client_step_is_compiled_once_per_shape(monkeypatch):
    """Not once per run: a run has its own rate, weight decay, clip and model."""
    graphs, compile = [], partial(torch.compile, backend=lambda g, _: graphs.append(g) or g.forward)
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda step, **_: compile(step))
    for lr, weight_decay, clip in ((0.5, 1e-2, 2.0), (0.4, 1e-5, 3.0), (0.1, 0.0, math.inf)):
        solve(classify(), mode="vmap", compiled=True, lr=lr, weight_decay=weight_decay, clip=clip)
    assert len(graphs) == 1
    with pytest.raises(ValueError, match="mode vmap"):
        solve(classify(), compiled=True)            # on a CPU `auto` is `loop`


@MODES
def test_client_does_not_depend_on_the_others(mode):
    """Alone, in any order, or padded to the steps of larger clients: the same; nobody is a cohort, too."""
    problem = classify()
    theta_i, loss_i = solve(problem, mode=mode)
    for i in ([3, 0, 2, 1], [0], [2], []):          # client 0 alone: two steps, here without padding
        theta, loss = solve(problem, i=i, mode=mode)
        assert close(theta, theta_i[i], 1e-13) and close(loss, loss_i[i], 1e-13)
    with pytest.raises(ValueError, match="mode"):
        solve(problem, mode="both")


@MODES
def test_client_augmentation_sees_each_samples_own_draw(mode):
    """Draws that are a function of the sample = training on data that was changed beforehand."""
    problem, factor = classify(), torch.linspace(-1, 2, 20, dtype=F64)
    theta_i, _ = solve(problem, mode=mode, augment=lambda x, draws: x * draws[..., None],
                       draws=factor[problem.batches([0, 1, 2, 3])[0]])
    assert not close(theta_i, solve(problem, mode=mode)[0], 1e-3)
    problem.X = problem.X * factor[:, None]
    assert close(theta_i, solve(problem, mode=mode)[0])


def stack(*layers, last=nn.Linear(6, 3)):
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Tanh(), last)


TWICE, TIED, ZEROS, NORM = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3), nn.LayerNorm(6)
TIED.weight, NORM.bias = TWICE.weight, NORM.weight
[nn.init.zeros_(p) for p in ZEROS.parameters()]
ACCEPTED = {        # the model, and how many trainable parameters it has beside the 51 of the outer layers
    "frozen": (stack(nn.Linear(6, 6).requires_grad_(False)), 0), "dropout of 0": (stack(nn.Dropout(0)), 0),
    "group norm": (stack(nn.GroupNorm(2, 6)), 12), "parameter twice": (stack(NORM), 6),
    "eval mode": (stack(nn.BatchNorm1d(6), nn.Dropout(0.5)).eval(), 12),
    "tied weights": (stack(TWICE, nn.Tanh(), TIED), 48), "module twice": (stack(TWICE, nn.Tanh(), TWICE), 42),
}
REFUSED = {         # the model, what it does
    "dropout": (stack(nn.Dropout(0.5)), "draws.*dropout"),
    "batch norm": (stack(nn.BatchNorm1d(6)), "mixes.*batch norm"),
    "softmax over the batch": (stack(nn.Softmax(0)), "mixes"),
    "below zeros": (stack(nn.BatchNorm1d(6, track_running_stats=False), last=ZEROS), "mixes"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_client_trains_what_keeps_samples_apart(name):
    """A batch of 5, padded to 10, gives autograd's step; rounds agree; the caller's model stays as it was."""
    (model, d), problem = ACCEPTED[name], classify(model=ACCEPTED[name][0])
    before, parameters = copy.deepcopy(model.state_dict()), list(map(id, model.parameters()))
    models.check(model, problem.X)
    loss = nn.functional.cross_entropy(model(problem.X[:5]), problem.Y[:5])
    g = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    omega, idx, zero = problem.omega, torch.arange(10)[None, None], torch.zeros(1, 51 + d, dtype=F64)
    for mode in ("loop", "vmap"):
        theta_i, loss_i = local_sgd(model, omega, zero[:, 0], zero, problem.X, problem.Y, idx,
                                    (idx < 5).double(), lr=0.1, mode=mode)
        assert close(theta_i[0], omega - 0.1 * torch.cat([x.flatten() for x in g]), 1e-9)
        assert close(loss_i[0], loss.detach(), 1e-9)
    theta_i = solve(problem, mode="loop")[0]
    assert close(theta_i, solve(problem, mode="vmap")[0], 1e-9)
    function = as_function(model)
    for _ in range(2):              # torch's functional_call leaves a model that has a module twice damaged
        assert torch.equal(function(omega, problem.X), model(problem.X))
        assert not close(function(theta_i[3], problem.X), model(problem.X), 1e-3)
    assert parameters == list(map(id, model.parameters())) and not omega.requires_grad
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("name", REFUSED)
def test_client_refuses_what_draws_or_mixes_samples(name):
    problem, drawn = classify(model=REFUSED[name][0]), torch.get_rng_state()
    if name in ("dropout", "batch norm"):
        models.check(problem.model.eval(), problem.X)       # accepted, as long as it is in eval mode
    problem.model.train()
    with pytest.raises(ValueError, match=rf"^the model {REFUSED[name][1]}[^\n]*\Z"):
        models.check(problem.model, problem.X)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_client_refuses_losses_that_are_not_one_a_sample(mode):
    with pytest.raises(ValueError, match="not one a sample"):
        solve(classify(), mode=mode, criterion=lambda output, y, reduction: output)
    with pytest.raises(ValueError, match="no trainable parameter"):
        flatten(nn.Linear(2, 3).requires_grad_(False))


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_client_bf16_rounds_the_operands(mode):
    """One step of softmax regression = the same step on operands that were rounded to bf16 by hand."""
    g = torch.Generator().manual_seed(0)
    model, X, Y = nn.Linear(6, 3, bias=False), torch.randn(8, 6, generator=g), torch.arange(8) % 3
    omega, rho, b = flatten(model), torch.tensor([0.5]), torch.randn(1, 18, generator=g)
    arguments = omega, rho, b, X, Y, torch.arange(8)[None, None], torch.ones(1, 1, 8), 0.1, 0.01, 10.0, mode
    (theta,), loss = local_sgd(model, *arguments, precision="bf16")
    (plain,), _ = local_sgd(model, *arguments)

    def rounded(x):
        return x.bfloat16().float()
    logits = rounded(rounded(X) @ rounded(omega.view(3, 6)).T)
    dlogits = rounded((logits.softmax(1) - nn.functional.one_hot(Y, 3)) / 8)
    grad = rounded(dlogits.T @ rounded(X)).flatten() + 0.5 * omega + b[0]
    assert theta.dtype == loss.dtype == F32 and (theta - plain).abs().max() > 5e-5
    assert (theta - (omega - 0.1 * (grad + 0.01 * omega))).abs().max() < 1e-5
    assert float(loss) == pytest.approx(float(nn.functional.cross_entropy(logits, Y)), rel=1e-5)


# ==== 6. Models; the file alone =============================================================================

@pytest.mark.parametrize("name, shape, classes, hidden, d", [
    ("fcn", (1, 28, 28), 10, [200, 200], 199_210), ("fcn", (1, 28, 28), 10, [100], 79_510),
    ("cnn", (3, 32, 32), 10, [], 797_962), ("cnn", (3, 32, 32), 100, [], 815_332),
    ("linear", (7,), 3, [], 24)])
def test_models_are_the_papers_and_draw_from_their_own_seed(name, shape, classes, hidden, d):
    state = torch.get_rng_state()
    model, again, other = (models.build(name, shape, classes, hidden, seed) for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(flatten(model), flatten(again))
    assert not torch.equal(flatten(model), flatten(other)) and len(flatten(model)) == d
    assert model(torch.zeros(2, *shape)).shape == (2, classes)


def test_models_cnn_is_the_papers_with_relu_before_the_pooling():
    """Pooling first, as the code does, changes no value and no gradient."""
    model, X = models.build("cnn", (3, 20, 20), 4, [], 0).double(), torch.randn(6, 3, 20, 20).double()
    conv, pool, relu, linear = (getattr(nn.functional, x) for x in ("conv2d", "max_pool2d", "relu", "linear"))
    W1, b1, W2, b2, *dense = parameters = list(model.parameters())
    x = pool(relu(conv(X, W1, b1)), 2)
    x = pool(relu(conv(x, W2, b2)), 2).flatten(1)
    for W, b in zip(dense[:4:2], dense[1:4:2]):
        x = relu(linear(x, W, b))
    logits, ours = linear(x, *dense[4:]), model(X)
    torch.testing.assert_close(ours, logits)
    grads = [torch.autograd.grad(out.square().sum(), parameters) for out in (ours, logits)]
    torch.testing.assert_close(*grads)


def test_models_refuse_a_misfit():
    for name, shape in (("cnn", (784,)), ("cnn", (3, 32, 28)), ("cnn", (1, 15, 15)), ("resnet", (3, 32, 32))):
        with pytest.raises(ValueError, match=f"--model {name}"):
            models.build(name, shape, 10, [], 0)


def python(folder, program):
    """Run a program in the folder, isolated from this one's paths and environment."""
    program = "import sys; sys.path.insert(0, '')\n" + inspect.cleandoc(program)
    done = subprocess.run([sys.executable, "-I", "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_alone_import_has_no_side_effects():
    python(Path(fedssg_module.__file__).parent, """
        import os, torch, numpy
        sys.dont_write_bytecode = True
        def look():
            return (torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist(), os.listdir(),
                    torch.get_num_threads(), torch.get_default_dtype(), dict(os.environ),
                    torch.cuda.is_initialized(), torch.are_deterministic_algorithms_enabled())
        before = look()
        import fedssg, baselines, models, data, run
        assert look() == before
        """)


def test_alone_in_an_empty_folder(tmp_path):
    """One file, and the user's own train: a step of rate 0.5 on 1/2 ||theta - target||^2."""
    shutil.copy(fedssg_module.__file__, tmp_path)
    out = python(tmp_path, """
        import torch, fedssg
        one, s, target = torch.ones(2), {"omega": torch.zeros(2)}, torch.tensor([[1., 2], [3, 4]])
        r = fedssg.Round(t=1, T=4, N=2, m=2, p=1.0, lr=0.5, lr0=0.5, num_rows=2, i=torch.arange(2), K_i=one,
                         n_i=one, size_i=one, labels_i=torch.ones(2, 3))
        fedssg.fedssg(s, r, lambda rho, b: s["omega"] - 0.5 * ((1 + rho[:, None]) * s["omega"] - target + b))
        print(s["omega"].tolist(), [m for m in ("baselines", "torchvision", "data") if m in sys.modules])
        """)
    assert out.strip() == "[2.25, 3.375] []"    # mean theta_i = (1, 1.5), and phi = 1 + 1/4 times that in h


# ==== 7. Data ====

def labels_of(n, classes=10):
    return np.random.default_rng(0).permutation(n) % classes


def sizes_of(parts, n):
    every = np.concatenate(parts)  # no sample twice, none that is not there
    assert every.dtype == np.int64 and len(every) == len(set(every.tolist()) & set(range(n)))
    return np.array([len(part) for part in parts])


def refusal(kind, function, *args, **options):
    with pytest.raises(kind, match=r"^[^\n]+\Z") as error:  # one line
        function(*args, **options)
    return str(error.value)


@pytest.mark.parametrize("how", data.PARTITIONS)
def test_data_partition_is_disjoint_and_covers(how):
    for n, N in ((1003, 10), (7, 7), (640, 1)):
        y, options = labels_of(n), dict(min_samples=0, shards=1)
        sizes = sizes_of(parts := data.partition(torch.from_numpy(y), N, how, 3, **options), n)
        assert len(sizes) == N and (sizes.sum() == n if how == "dirichlet-class" else (sizes == n // N).all())
        again, other = (data.partition(y, N, how, seed, **options) for seed in (3, 4))
        assert all(map(np.array_equal, parts, again))
        assert n == 7 or not all(map(np.array_equal, parts, other))


def test_data_dirichlet_ends_and_its_skew_follows_alpha():
    y, skew = labels_of(60_000), {}
    for alpha, N, seed in itertools.product((5e-324, 0.05, 0.1, 0.3, 0.6, 1.7e308), (100, 500), range(5)):
        start = time.process_time()
        parts = data.partition(y, N, "dirichlet", seed, dir_alpha=alpha)
        assert time.process_time() - start < 1 and (sizes_of(parts, 60_000) == 60_000 // N).all()
    for how in ("dirichlet", "dirichlet-class"):
        for alpha in (5e-324, 0.1, 0.3, 1, 1000, 1.7e308):
            parts = data.partition(y, 100, how, 0, dir_alpha=alpha, min_samples=0)
            share = np.array([np.bincount(y[part], minlength=10) / max(len(part), 1) for part in parts])
            skew[alpha] = np.abs(share - 0.1).sum(1).mean() / 2  # 0: all classes alike; 0.9: one class
            if (how, alpha) == ("dirichlet", 0.3):  # the variance of a Dirichlet, before classes run dry
                assert 0.75 < share[:40].var() / (0.1 * 0.9 / (10 * 0.3 + 1)) < 1.25
        assert skew[0.1] > 0.6 and skew[0.1] > skew[0.3] > skew[1] > 0.06 > max(skew[1000], skew[1.7e308])


@pytest.mark.parametrize("how", ["dirichlet", "dirichlet-class"])
def test_data_tiny_alphas_give_the_strongest_skew(how):
    """Almost every client has one class, although numpy's draw rounds most proportions to 0."""
    y = labels_of(60_000)
    for alpha in (1e-300, 1e-9, 1e-4, 1e-3):
        parts = data.partition(y, 100, how, 0, dir_alpha=alpha, min_samples=0)
        classes = [len(np.unique(y[part])) for part in parts if len(part)]
        assert np.mean(classes) < 1.25


def test_data_splits_stay_as_recorded_runs_had_them():
    """A numpy that draws otherwise may fail here: then recorded runs cannot be played again with it."""
    y, drawn = np.arange(6000) % 10, hashlib.sha256()
    for how, alpha in itertools.product(("dirichlet", "dirichlet-class"), (0.05, 0.1, 0.3, 0.6, 1.0, 100.0)):
        for part in data.partition(y, 50, how, 0, dir_alpha=alpha, min_samples=0):
            drawn.update(part.tobytes())
    assert drawn.hexdigest()[:8] == "5ffebbb9"


def test_data_sizes_of_uneven_splits():
    y = labels_of(10_000)
    sizes = sizes_of(data.partition(y, 20, "dirichlet-class", 0, dir_alpha=0.5, min_samples=150), 10_000)
    assert sizes.min() >= 150 and sizes.sum() == 10_000 and len(set(sizes)) > 5
    sizes = sizes_of(data.partition(labels_of(9_000, 100), 18, "dirichlet-class", 0, dir_alpha=0.05), 9_000)
    assert sizes.max() < 500 + 90  # who has n / N samples gets no other class
    parts = data.partition(y, 100, "shards", 0, shards=2)
    assert max(len(np.unique(y[part])) for part in parts) == 2 and (sizes_of(parts, 10_000) == 100).all()
    for how, (sigma, least) in itertools.product(("iid", "dirichlet"), ((0.3, 16), (3.0, 16), (1e6, 2))):
        sizes = sizes_of(data.partition(y, 50, how, 0, unbalanced_sigma=sigma, min_samples=5), 10_000)
        assert sizes.min() >= 5 and 9900 < sizes.sum() <= 10_000 and len(set(sizes)) >= least
    for says, change in (
            ("minimum 1;", dict(num_clients=101)), ("minimum 11;", dict(min_samples=11)),
            ("10 clients, shards", dict(how="shards", shards=20)), ("iid, dirichlet,", dict(how="other")),
            ("20 clients, dirichlet-class, dir_alpha 0.01: no draw in 1000 gave each the minimum of 5;",
             dict(how="dirichlet-class", num_clients=20, dir_alpha=0.01, min_samples=5))):
        options = {"num_clients": 10, "how": "dirichlet", "seed": 0, **change}
        assert says in refusal(ValueError, data.partition, labels_of(100), **options)


def test_data_cohorts():
    for p, *sizes in ((0.005, 1, 1, 3), (0.02, 1, 2, 10), (0.145, 1, 15, 73), (0.15, 2, 15, 75),
                      (0.29, 3, 29, 145), (0.57, 6, 57, 285), (1.0, 10, 100, 500)):
        for N, m in zip((10, 100, 500), sizes):
            cohort = data.sample_clients(N, p, "fixed", 0, 1)
            assert len(cohort) == data.cohort_size(N, p) == m and data.rate_in_force(N, p, "fixed") == m / N
            assert cohort.dtype == np.int64 and (np.diff(cohort) > 0).all() and set(cohort) <= set(range(N))
    assert "bernoulli" in refusal(ValueError, data.rate_in_force, 10, 0.5, "other")
    for how, p in (("other", 0.5), ("bernoulli", 1e-9)):
        assert "bernoulli" in refusal(ValueError, data.sample_clients, 10, p, how, 0, 1)
    keys = [(seed, purpose, t) for seed in range(5) for purpose in data.PURPOSES for t in range(5)]
    assert len({data.rng(*key).integers(2**62) for key in keys}) == len(keys)
    a, b = ([data.sample_clients(99, 0.15, "fixed", seed, t - seed) for t in range(2, 20)] for seed in (0, 1))
    assert not any(map(np.array_equal, a, b))  # seed 1 is not seed 0 shifted by a round


def test_data_rate_in_force_is_the_mean_of_drawn_cohorts():
    cohorts = [data.sample_clients(10, 0.02, "bernoulli", 0, t) for t in range(1, 10_001)]
    often = np.bincount(np.concatenate(cohorts), minlength=10) / 10_000
    assert min(map(len, cohorts)) >= 1 and np.abs(often - 0.109333).max() < 0.02  # each client alike
    assert often.mean() == pytest.approx(0.109333, abs=0.002)
    for p, rate in ((0.02, 0.109333), (1e-12, 0.1), (1.0, 1)):
        assert data.rate_in_force(10, p, "bernoulli") == pytest.approx(rate, rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 7, 512])
def test_data_schedule(batch_size):
    parts = np.split(np.random.default_rng(0).permutation(300), [60, 61, 161, 211])  # of 60, 1, 100, 50, 89
    idx, w, K_i = data.schedule(parts, range(5), 0, 7, 3, batch_size)
    draws = data.augment_draws(range(5), K_i, w, 0, 7)
    assert idx.shape == w.shape == (K_i.max(), 5, min(batch_size, 100)) and set(np.unique(w)) <= {0, 1}
    assert (idx.dtype, w.dtype, K_i.dtype) == (np.int64, np.float32, np.int64)
    for i, part in enumerate(parts):  # each sample once an epoch, in another order
        assert K_i[i] == 3 * -(-len(part) // batch_size) and (w[K_i[i]:, i] == 0).all()
        orders = [a[b > 0] for a, b in zip(*(np.split(x[:K_i[i], i], 3) for x in (idx, w)))]
        assert all(np.array_equal(np.sort(order), np.sort(part)) for order in orders)
        assert i == 1 or not np.array_equal(orders[0], orders[1])
        idx1, w1, (K,) = data.schedule(parts, [i], 0, 7, 3, batch_size)  # alone as beside others
        assert K == K_i[i] and np.array_equal(idx1, idx[:K, [i]]) and np.array_equal(w1, w[:K, [i]])
        draws1, width = data.augment_draws([i], [K], w1, 0, 7), int(w1[0, 0].sum())
        assert np.array_equal(draws1, draws[:K, [i]]) and (i == 1 or (draws1[..., 1:] != 4).any())
        assert (draws[K:, i] == (0, 4, 4)).all() and (draws[:, i, width:] == (0, 4, 4)).all()
    assert not np.array_equal(idx, data.schedule(parts, range(5), 0, 8, 3, batch_size)[0])
    idx, w, K_i = data.schedule(parts, [], 0, 1, 5, batch_size)
    assert data.augment_draws([], K_i, w, 0, 1).shape == (*idx.shape, 3) and idx.shape[:2] == (0, 0)


def test_data_augment():
    g = torch.Generator().manual_seed(0)
    x, draws = torch.randn(20, 2, 6, 5, generator=g), torch.randint(9, (20, 3), generator=g)
    draws[:, 0] %= 2
    y = data.augment(x, draws)
    for image, (flip, dy, dx), got in zip(x, draws.tolist(), y):
        padded = torch.zeros(2, 14, 13)
        padded[:, 4:10, 4:9] = image.flip(-1) if flip else image
        assert torch.equal(got, padded[:, dy:dy + 6, dx:dx + 5])
    assert torch.equal(data.augment(x.view(4, 5, 2, 6, 5), draws.view(4, 5, 3)), y.view(4, 5, 2, 6, 5))
    _, w, K_i = data.schedule([np.arange(4000)], [0], 0, 1, 1, 100)
    flip, dy, dx = data.augment_draws([0], K_i, w, 0, 1).reshape(-1, 3).T
    assert set(flip) == {0, 1} and abs(flip.mean() - 0.5) < 0.04 and set(dy) == set(dx) == set(range(9))
    assert abs(((dy == 4) & (dx == 4)).mean() - (0.5 + 0.5 / 81)) < 0.04


def images(n, *shape):
    return np.random.default_rng(n).integers(0, 256, (n, *shape), dtype=np.uint8)


def put_idx(folder, arrays, parts=("train", "t10k")):
    folder.mkdir(parents=True)
    files = [folder / f"{part}-{what}-ubyte" for part in parts for what in ("images-idx3", "labels-idx1")]
    for file, a in zip(files, arrays):
        file.write_bytes(struct.pack(f">I{a.ndim}I", 0x800 + a.ndim, *a.shape) + a.astype(np.uint8).tobytes())
    return files


def loaded(name, folder, scaled, labels, n, classes, mean, std, **options):
    """Load; x is (scaled - mean) / std, the labels follow; the first n are for training."""
    x, y, x_test, y_test, got = data.load(name, str(folder), **options)
    assert (x.dtype, y.dtype, len(x), len(y), got) == (torch.float32, torch.int64, n, n, classes)
    assert np.allclose(torch.cat([x, x_test]), (scaled - mean) / std, atol=1e-4)
    assert y.tolist() + y_test.tolist() == list(labels)


@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST"])
def test_data_mnist_files(name, tmp_path):
    raw, labels = images(50, 28, 28), np.arange(50) % 10
    put_idx(tmp_path / name / "raw", [raw[:30], labels[:30], raw[30:], labels[30:]])
    a = raw[:, None] / 255
    mean, std = (0.1307, 0.3081) if name == "MNIST" else (a[:30].mean(), a[:30].std())
    loaded(name.lower(), tmp_path, a, labels, 30, 10, mean, std)


@pytest.mark.parametrize("letters", [10, 26, 1])
def test_data_emnist_letters_are_upright_and_start_at_zero(letters, tmp_path):
    raw, labels = images(52, 28, 28), np.arange(52) % 26 + 1  # stored column by column
    parts = ("emnist-letters-train", "emnist-letters-test")
    put_idx(tmp_path / "EMNIST/raw", [raw.transpose(0, 2, 1), labels] * 2, parts)
    a = raw[labels <= letters][:, None] / 255
    loaded("emnist", tmp_path, np.concatenate([a, a]), [*range(letters)] * 4, 2 * letters, letters, a.mean(),
           a.std(), letters=letters)


@pytest.mark.parametrize("name, key, classes", [("CIFAR10", "labels", 10), ("CIFAR100", "fine_labels", 100)])
def test_data_cifar_batches(name, key, classes, tmp_path, monkeypatch):
    kind, raw = getattr(torchvision.datasets, name), images(12, 3, 32, 32)
    labels = [7 * j % classes for j in range(12)]

    def put(file, content):  # -> its entry in torchvision's table of checksums
        (tmp_path / file).write_bytes(content := pickle.dumps(content, protocol=2))
        return [file, hashlib.md5(content).hexdigest()]
    one, two, three = (put(str(j), {"data": raw[j:j + 4].reshape(4, -1), key: labels[j:j + 4]})
                       for j in (0, 4, 8))
    meta = dict(zip(("filename", "md5"), put("meta", {kind.meta["key"]: ["a name"] * classes})))
    for attribute, value in dict(base_folder="", train_list=[one, two], test_list=[three],
                                 meta={**kind.meta, **meta}).items():
        monkeypatch.setattr(kind, attribute, value)
    mean, std = (f(raw[:8] / 255, axis=(0, 2, 3)).reshape(3, 1, 1) for f in (np.mean, np.std))
    loaded(name.lower(), tmp_path, raw / 255, labels, 8, classes, mean, std)
    put("4", "planted")
    assert "corrupted" in refusal(ValueError, data.load, name.lower(), str(tmp_path))


@pytest.mark.parametrize("name, files", [
    ("mnist", "train-images-idx3-ubyte train-labels-idx1-ubyte t10k-images-idx3-ubyte t10k-labels-idx1"),
    ("emnist", "emnist-letters-test-labels-idx1"), ("cifar10", "data_batch_1 test_batch batches.meta")])
def test_data_missing_offline_is_one_message(name, files, tmp_path, monkeypatch):
    """The line says that the download failed, why, and what to do. A server may be slow to answer."""
    def silent(*args, **options):
        assert socket.getdefaulttimeout() == data.TIMEOUT >= 15
        raise TimeoutError("timed out")
    monkeypatch.setattr(socket, "create_connection", silent)
    message = refusal(FileNotFoundError, data.load, name, str(tmp_path))
    assert message.startswith(f"{name}: the download failed (") and "timed out" in message.split(");")[0]
    for part in [*files.split(), str(tmp_path), "--data-dir", "--dataset synthetic"]:
        assert part in message
    assert socket.getdefaulttimeout() is None


def test_data_unresolved_name_fails_at_once(tmp_path, monkeypatch):
    def unresolved(*args, **options):
        raise socket.gaierror(-2, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    began = time.monotonic()
    message = refusal(FileNotFoundError, data.load, "mnist", str(tmp_path))
    assert "Name or service not known" in message and time.monotonic() - began < data.TIMEOUT / 2


def test_data_synthetic_needs_no_torchvision(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)  # so that importing it fails
    spec = importlib.util.spec_from_file_location("fresh", data.__file__)
    spec.loader.exec_module(fresh := importlib.util.module_from_spec(spec))
    x, y, x_test, y_test, classes = fresh.load("synthetic")
    assert (x.shape, x_test.shape, classes) == ((10_000, 1, 28, 28), (2000, 1, 28, 28), 10)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64) and torch.equal(fresh.load("synthetic")[0], x)
    assert abs(x.mean()) < 1e-3 and abs(x.std() - 1) < 1e-3 and y.bincount().min() > 900 and y_test.max() == 9
    means = torch.stack([x[y == c].mean(0).flatten() for c in range(10)])  # they do not tell classes apart
    assert (torch.cdist(x_test.flatten(1), means).argmin(1) == y_test).float().mean() < 0.3
    assert "mnist" in refusal(ValueError, data.load, "svhn")
    assert "no-such" in refusal(FileNotFoundError, data.load, "no-such.npz")


def put_npz(folder, **change):
    arrays = {"x_train": images(12, 6, 5), "y_train": np.arange(12) % 3, "x_test": images(6, 6, 5),
              "y_test": np.arange(6) % 3, **change}
    np.savez_compressed(folder / "own.npz", **{key: a for key, a in arrays.items() if a is not None})
    return folder / "own.npz"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape, axes", [
    ((6, 5, 3), (0, 3, 1, 2)), ((6, 5, 1), (0, 3, 1, 2)), ((4, 6, 5), None), ((6, 5), None), ((20,), None)])
@pytest.mark.parametrize("dtype", [np.uint8, ">f8", np.float16])
def test_data_npz(dtype, shape, axes, tmp_path):
    raw, y = images(18, *shape), np.arange(18) % 4
    raw = (raw if dtype == np.uint8 else raw // 16).astype(dtype)
    raw[..., 0] = 7  # a constant channel, where channels are last
    path = put_npz(tmp_path, x_train=raw[:12], y_train=y[:12], x_test=raw[12:], y_test=y[12:])
    a, mean, std = raw.transpose(axes or range(raw.ndim)).astype(np.float64), 0, 1
    a = a[:, None] if len(shape) == 2 else a
    if dtype == np.uint8:  # by mean and deviation of the training set: of a channel, or of whole vectors
        a, over = a / 255, (0, 1) if a.ndim == 2 else (0, 2, 3)
        mean, std = (f(a[:12], axis=over, keepdims=True) for f in (np.mean, np.std))
    loaded(str(path), "", a, y, 12, 4, mean, np.where(std < 1e-9, 1, std))


def test_data_npz_that_would_train_badly_is_warned_of(tmp_path):
    floats = dict(x_train=np.full((12, 6, 5), -255.0), x_test=np.ones((6, 6, 5)))
    for says, change in (("255.*uint8", floats), ("labels from 0", dict(y_train=np.arange(12) % 3 + 1))):
        with pytest.warns(UserWarning, match=rf"^[^\n]*{says}[^\n]*\Z") as warned:
            data.load(str(put_npz(tmp_path, **change)))
        assert len(warned) == 1


@pytest.mark.parametrize("change, says", [
    (dict(y_test=None), "y_test is not"), (dict(x_train=np.array([None] * 12, object)), "allow_pickle"),
    (dict(x_train=np.ones((12, 6, 5), int)), "x_train is int64"), (dict(x_train=images(12)), "uint8 (12,)"),
    (dict(x_train=np.full((12, 6, 5), 1e300)), "x_train holds NaN or infinite values"),
    (dict(x_test=images(6, 6, 6)), "differ in shape"), (dict(y_train=np.arange(12) / 4), "is float64"),
    (dict(y_train=np.arange(11) % 3), "int64 (11,)"), (dict(y_train=np.arange(12) % 3 - 1), "from -1"),
    (dict(y_test=np.arange(6) % 4), "0 to 3, not 0 to 2"), (dict(y_train=np.array([2**31] * 12)), "gaps")])
def test_data_npz_fault_is_one_line(change, says, tmp_path):
    path = str(put_npz(tmp_path, **change))
    assert says in (message := refusal(ValueError, data.load, path)) and path in message


@pytest.mark.parametrize("damage", [
    lambda whole: whole[:len(whole) // 2], lambda whole: bytes(16) + whole[16:], lambda whole: b"<html>",
    lambda whole: b""], ids=["cut", "header", "web page", "empty"])
def test_data_damaged_file_is_one_line(damage, tmp_path):
    arrays = images(30, 28, 28), np.arange(30) % 10
    for file in (put_npz(tmp_path), *put_idx(tmp_path / "MNIST/raw", arrays * 2)):
        whole = file.read_bytes()
        file.write_bytes(damage(whole))
        name = "mnist" if file.suffix == "" else str(file)
        assert str(tmp_path) in refusal(ValueError, data.load, name, str(tmp_path))
        file.write_bytes(whole)


# ==== 8. The command line ====

@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A data set of your own: 200 + 60 vectors of 12 features in 3 overlapping classes."""
    g, path = np.random.default_rng(0), tmp_path_factory.mktemp("tiny") / "tiny.npz"
    y = g.integers(3, size=260)
    x = (g.normal(size=(260, 12)) + 0.8 * g.normal(size=(3, 12))[y]).astype(np.float32)
    np.savez(path, x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])
    return path


@pytest.fixture(autouse=True)
def leave_no_trace():
    """One thread, because these runs are tiny. One seed, for a test that draws must not fail by chance."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    heard = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {signum: signal.signal(signum, handler) for signum, handler in heard.items()}
    yield
    for signum, handler in before.items():      # who is started by nohup, or with &, ignores them
        signal.signal(signum, handler)
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)


def start(dataset, out, flags="", algo="fedssg"):
    """run.main in this process; returns its exit code."""
    tiny = "--model linear --num-clients 10 --participation .4 --rounds 5 --local-epochs 1 --device cpu"
    with pytest.raises(SystemExit) as end:
        run.main(f"--algo {algo} --dataset {dataset} {tiny} --out {out} {flags}".split())
    return end.value.code


def folders(out):
    """The runs' folders by method; a form of FedSSG other than the default stands behind it."""
    names = {folder: folder.name.split("-seed")[0].split("-", 1)[1] for folder in Path(out).iterdir()}
    return {name.removesuffix("-scaled"): folder for folder, name in names.items()}


def log_of(folder):
    """The rows of log.csv as they are written, without the seconds."""
    with open(folder / "log.csv", newline="") as file:
        return [row[:-1] for row in csv.reader(file)]


def read(file):
    return json.loads(file.read_text()) if file.suffix == ".json" else torch.load(file, weights_only=True)


def rounds_kept(folder):
    """How many rounds the folder's checkpoint holds."""
    file = folder / "checkpoint.pt"
    return len(read(file)["log"]) if file.exists() else 0


def same(a, b, methods=1, tolerance=0):
    """Two folders of results hold equal runs: models and logs bit for bit, or models to a tolerance."""
    a, b = folders(a), folders(b)
    assert a.keys() == b.keys()
    assert len(a) == methods
    for name in a:
        p, q = read(a[name] / "model.pt"), read(b[name] / "model.pt")
        assert p.keys() == q.keys()
        assert all(torch.allclose(p[k], q[k], tolerance, tolerance) for k in p), name
        assert tolerance or log_of(a[name]) == log_of(b[name]), name
    return True


def contents(folder):
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def one_line(capsys, says):
    err = capsys.readouterr().err
    assert err.startswith("run.py: ") and err.count("\n") == 1 and says in err, err
    return err


def at_round(t, monkeypatch, name, do):
    """Have do() called just before run.name, when the log has t rounds."""
    original = getattr(run, name)

    def do_first(first, second, *more):
        log = second["log"] if isinstance(second, dict) else second     # a run is given, or its log
        if len(log) == t:
            do()
        return original(first, second, *more)
    monkeypatch.setattr(run, name, do_first)


def in_round(t, monkeypatch, algo, do):
    """Have do() called while round t of the method is played."""
    method = ALGORITHMS[algo]

    @functools.wraps(method)
    def do_first(s, r, *more, **hyper):
        if r.t == t:
            do()
        return method(s, r, *more, **hyper)
    monkeypatch.setitem(ALGORITHMS, algo, do_first)


class Killed(Exception):
    pass


def kill():
    raise Killed


# ---- refusals, settings, help ----

REFUSED_FLAGS = {                       # flags, and what the line says beside the flag
    "--algo fedsgd": "fedsgd", "--partit iid": "unrecognized", "--num-clients 2.5": "2.5",
    "--participation nan": "nan", "--lr -1e-3": "'-1e-3'", "--alpha -inf": "'-inf'",
    "--seeds 0 -2e1": "'-2e1'", "--algo fedavg --mu 1": "belongs to fedprox",
    "--algo fedavg --form stable": "belongs to fedssg", "--shards 3": "needs --partition shards",
    "--device cuda": "no CUDA device", "--precision tf32": "CUDA only", "--chunk 2": "--mode vmap",
    "--sampling bernoulli --participation 1e-9": "too few", "--rounds 99 --lr-decay .01": "nothing is left",
    "--alpha .1 --kappa .1": "give one", "--form released --kappa .2": "correction state",
    "--alignment none --alpha .1": "without alignment"}


@pytest.mark.parametrize("flags", REFUSED_FLAGS)
def test_cli_refused_before_data_is_loaded(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data, "load", lambda *args, **more: pytest.fail("loaded data"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert start("synthetic", tmp_path / "runs", flags) == 2
    assert not list(tmp_path.iterdir())
    *_, flag = [word for word in flags.split() if word.startswith("--")]
    assert flag in one_line(capsys, REFUSED_FLAGS[flags])


def test_cli_refused_for_the_data(tiny, tmp_path, capsys):
    (tmp_path / "cut.npz").write_bytes(tiny.read_bytes()[:-300])
    for dataset, flags, code, says in [
            (tiny, "--num-clients 201", 2, "201 clients"), (tiny, "--model cnn", 2, "--model cnn"),
            (tiny, "--like cifar10 --model linear", 2, "--augment none"), ("mnist2", "", 2, "mnist2"),
            (tmp_path / "cut.npz", "", 2, "cut.npz"), (tmp_path / "no.npz", "", 1, "no.npz: No such file")]:
        assert start(dataset, tmp_path / "runs", flags) == code
        assert one_line(capsys, says)
    assert [path.name for path in tmp_path.iterdir()] == ["cut.npz"]
    assert start(tiny, tmp_path / "cut.npz") == 1       # --out that is a file
    assert one_line(capsys, "cut.npz")


def settings(flags, algo="fedssg"):
    return run.settings_for(algo, 0, run.parse(["--algo", algo, *flags.split()]))


def test_cli_alpha_by_data_set_split_and_number_of_clients():
    own, many, stable = "--dataset own.npz --like", "--num-clients 450", ("fedssg", "--form stable")
    for algo, *flags, alpha in [
            (*stable, 0.05), (*stable, "--partition iid", 0.03), (*stable, "--dir-alpha 1", 0.03),
            (*stable, "--dir-alpha .6", 0.04), (*stable, f"--dataset emnist {many} --partition iid", 0.7),
            (*stable, "--dataset emnist", 0.06), (*stable, f"--dataset cifar10 {many}", 0.2),
            (*stable, f"{own} cifar100", 0.02), ("fedssg", "--form main", 1), ("fedssg", "--alpha 0", 0),
            ("fedssg", "--form main --alpha .5", 0.5), ("feddc", "", 0.1), ("feddc", f"{own} cifar10", 0.01),
            ("feddc", f"--dataset emnist {many}", 0.2), ("feddyn", "", 0.01), ("feddisco", "", 0.01)]:
        assert settings(" ".join(flags), algo)["hyper"]["alpha"] == alpha, (algo, flags)


def test_cli_what_else_a_data_set_presets():
    own, many = "--dataset own.npz --like", "--num-clients 450"
    for flags, values in {
            "--dataset own.npz": ("fcn", [200, 200], 0.15, 300, False),
            f"--dataset emnist {many}": ("fcn", [100], 0.15, 600, False),
            f"{own} cifar100 {many}": ("cnn", None, 0.1, 1500, True),
            f"{own} cifar10 --augment none": ("cnn", None, 0.1, 1000, False),
            "--dataset cifar10 --model fcn --hidden 7 --rounds 3": ("fcn", [7], 0.1, 3, True)}.items():
        s = settings(flags)
        assert (s["model"], s.get("hidden"), s["participation"], s["rounds"], s["augment"]) == values
    targets = [run.parse(["--dataset", name]).target_acc for name in (*run.PRESETS, "synthetic")]
    assert targets == [97, 80, 42, 93, 97]
    decay = [settings(*x)["weight_decay"] for x in (("",), ("", "fedprox"), ("--weight-decay .1", "fedprox"))]
    assert decay == [1e-3, 1e-5, 0.1]


def test_cli_hyper_parameters_by_form_and_flag():
    for algo, form in [*((algo, "") for algo in ALGORITHMS), *(("fedssg", f"--form {x}") for x in FORMS)]:
        plain = settings(form, algo)        # a default spelled out is the same run: 1 and 1.0 hash apart
        spelled = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in plain["hyper"].items())
        assert json.dumps(settings(f"{form} {spelled}", algo)) == json.dumps(plain)
    hyper = settings("--form stable --kappa .2")["hyper"]
    assert hyper == dict(FORMS["stable"], gate_scale=1.0, kappa=0.2)
    hyper = settings("--form main --gate-shape clip --beta .5")["hyper"]
    assert hyper == dict(FORMS["main"], gate_shape="clip", beta=0.5, gate_scale=1.0)
    args = run.parse("--algo fedavg fedprox feddyn fedavg --mu .5 --alpha .2".split())
    assert run.settings_for("fedavg", 0, args) == settings("", "fedavg")    # not its flags
    assert [run.settings_for(algo, 0, args)["hyper"] for algo in args.algo] == [
        {}, dict(mu=0.5), dict(alpha=0.2)]
    assert run.parse(["--algo", "all"]).algo == [*ALGORITHMS]


def test_cli_form_is_scaled_but_stable_for_who_gives_an_alpha():
    assert settings("") == settings("--form scaled")
    assert settings("")["hyper"] == {**FORMS["scaled"], "gate_scale": 1.0}
    assert settings("--kappa .2")["hyper"]["kappa"] == 0.2
    assert settings("--alpha .2") == settings("--form stable --alpha .2")
    assert "kappa" not in settings("--alpha .2")["hyper"]


def test_cli_folders_of_old_runs_stay():
    """A new flag or another default would give the same runs another folder, and play them again."""
    folder = run.folder_of(settings("--form stable"), run.parse([]))
    assert folder.name == "mnist-fedssg-seed0-fbb67e41"         # as a01a72f made it


# These flags change at most a run's rounding, where it ends, where it is kept, or how often the program asks;
# or settings hold them by another name (algo, seeds, like).
NOT_SETTINGS = {"algo", "seeds", "like", "data_dir", "device", "mode", "chunk", "compile", "out", "overwrite",
                "stop_after", "stop_at_target", "target_acc", "checkpoint_every"}


def test_cli_every_flag_is_a_setting_or_not_by_decision():
    flags = {action.dest for action in run.flag_parser()._actions} - {"help"} - run.hyper_parameters().keys()
    assert not run.SETTINGS & NOT_SETTINGS
    assert flags == run.SETTINGS | NOT_SETTINGS


def test_cli_help_says_every_default(tmp_path, capsys):
    assert start("mnist", tmp_path, "--help") == 0
    text = capsys.readouterr().out
    assert "--gate-scale" in text
    assert "None" not in text
    assert "SUPPRESS" not in text


# ---- what a run leaves, and what the user sees ----

def test_cli_every_method_leaves_whole_results(tiny, tmp_path, capsys):
    assert start(tiny, tmp_path, "--target-acc 100 --seeds 0 1", algo="all") == 0
    out, (_, _, x, y, _) = capsys.readouterr().out, data.load(str(tiny))
    assert out.count(" s/round  ") == 2 * 5 * 8
    assert "nan" not in out
    assert "fedprox seed 1: mu 0.0001" in out
    assert "fedssg scaled seed 1: kappa 0.25" in out
    assert [line.split()[0] for line in out.splitlines()[-9:]] == ["method", *ALGORITHMS]
    assert len(list(tmp_path.iterdir())) == 16
    for algo, folder in folders(tmp_path).items():
        assert {path.name for path in folder.iterdir()} == {
            "checkpoint.pt", "config.json", "log.csv", "model.pt", "summary.json"}
        assert read(folder / "config.json")["settings"]["algo"] == algo
        assert read(folder / "checkpoint.pt")["state"].keys() == {"omega"}      # no round needs the rest
        header, *rows = log_of(folder)
        assert header == ["round", "test_acc", "test_loss", "train_loss", "gate", "h_norm", "gain"]
        assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"]
        columns = {"fedssg": 7, "fedavg": 4, "fedprox": 4, "scaffold": 4}.get(algo, 5)
        assert all(sum(math.isfinite(float(x)) for x in row if x) == columns for row in rows)
        model = models.build("linear", x.shape[1:], 3, [], 1)
        model.load_state_dict(read(folder / "model.pt"))
        right = int((model(x).argmax(dim=1) == y).sum())
        assert 100 * right / len(y) == float(rows[-1][1]) == read(folder / "summary.json")["last"] > 50


def test_cli_summary_and_table_by_hand(capsys):
    """Population std over 50 evaluations, sample std over seeds; `-`, or `(last)` for less than 50."""
    log = [dict(round=t, test_acc=None if t % 2 else float(t % 14), seconds=2.0) for t in range(1, 121)]
    tests, s = [float(t % 14) for t in range(2, 121, 2)][-50:], run.summarise(log, 10)
    assert [s[k] for k in ("last", "best", "evaluations", "rounds_to_target")] == [8, 12, 60, 10]
    assert s["last50_std"] ** 2 == pytest.approx(sum((x - s["last50_mean"]) ** 2 for x in tests) / 50)
    assert s["last50_mean"] == pytest.approx(sum(tests) / 50) and s["seconds_per_round"] == 2
    assert run.summarise(log, 12.5)["rounds_to_target"] is run.summarise(log[:1], 10)["best"] is None

    def one(mean, std, met, evaluations=50, last=90, diverged=None):
        return dict(last50_mean=mean, last50_std=std, rounds_to_target=met, evaluations=evaluations,
                    last=last, diverged=diverged, seconds_per_round=0.5)
    run.table(dict(fedavg=[one(91, 0.5, 76)], fedssg=[one(98, 0.25, 24)], feddyn=[one(90, 1, None)],
                   feddc=[one(80, 1, 9, 49)], fedvra=[one(None, None, None, 0, None)],
                   scaffold=[one(90, 1, 9, 50, 90, 60)]), run.parse([]))
    run.table(dict(fedavg=[one(91, 0.5, 70), one(93, 0.5, 90)], fedssg=[one(96, 1, 20), one(97, 1, None)]),
              run.parse([]))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line]
    assert lines[0] == lines[7] == "method last 50 (%) rounds to 97 % speed-up s/round"
    assert lines[1:7] == ["fedavg 91.00 ± 0.50 76 1.00x 0.50", "fedssg 98.00 ± 0.25 24 3.17x 0.50",
                          "feddyn 90.00 ± 1.00 - - 0.50", "feddc 90.00 (last) 9 8.44x 0.50",
                          "fedvra - - - 0.50", "scaffold diverged 9 8.44x 0.50"]
    assert lines[8:] == ["fedavg 92.00 ± 1.41 80 1.00x 0.50", "fedssg 96.50 ± 0.71 20 (1 of 2) - 0.50"]


@pytest.mark.parametrize("columns", [40, 120])
def test_cli_progress_fits_the_terminal(columns, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: os.terminal_size((columns, 24)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert start(tiny, tmp_path, "", "fedavg") == 0
    out = capsys.readouterr().out
    rounds = [line[:-3] for line in out.replace("\r", "\n").split("\n") if line.endswith("\033[K")]
    assert len(rounds) == 5 == out.count("\r") + 1 and max(map(len, rounds)) < columns
    assert min(map(len, rounds)) == columns - 1 or all("min left" in line for line in rounds)


def test_cli_evaluation(tiny):
    """A model of zeros has loss ln C; batches change nothing; no dropout; the model stays in its mode."""
    _, _, x, y, classes = data.load(str(tiny))
    linear = models.build("linear", x.shape[1:], classes, [], 0)
    model, omega = torch.nn.Sequential(linear, torch.nn.Dropout(0.9)).train(), flatten(linear)
    linear.eval()
    of_zeros = run.evaluate(model, torch.zeros_like(omega), x, y)
    assert [float(v) for v in of_zeros] == pytest.approx([100 * float((y == 0).float().mean()), math.log(3)])
    logits = x @ omega[:36].view(3, 12).T + omega[36:]
    right, loss = (logits.argmax(1) == y).double().mean(), (logits.logsumexp(1) - logits[range(60), y]).mean()
    for batch in (1, 7, 1000):
        result = [float(v) for v in run.evaluate(model, omega, x, y, batch)]
        assert result == pytest.approx([100 * float(right), float(loss)], abs=1e-4)
        assert model.training and not linear.training


def test_cli_accuracy_is_exact_and_a_target_reached_exactly_counts(tmp_path):
    """822 of 1000 right are 82.2 %, which no float32 is. All samples are alike and so have one prediction."""
    y = np.repeat([0, 1], [822, 178])
    np.savez(tmp_path / "own.npz", x_train=np.ones((1000, 2)), y_train=y, x_test=np.ones((1000, 2)), y_test=y)
    flags = "--partition iid --stop-at-target --target-acc 82.2"
    assert start(tmp_path / "own.npz", tmp_path / "runs", flags, "fedavg") == 0
    folder = folders(tmp_path / "runs")["fedavg"]
    assert [row[1] for row in log_of(folder)] == ["test_acc", "82.2"]
    assert read(folder / "summary.json")["rounds_to_target"] == 1


# ---- what every method is given ----

def test_cli_what_a_method_is_told(tiny, tmp_path, monkeypatch):
    """Horizon, rates, steps and sizes of each round; the rate p that is in force."""
    seen = []

    def fedavg_seen(s, r, train):
        seen.append(r)
        return fedavg(s, r, train)
    monkeypatch.setitem(ALGORITHMS, "fedavg", fedavg_seen)
    flags = "--rounds 9 --stop-after 3 --lr .5 --lr-decay .9 --local-epochs 2 --batch-size 8"
    flags += " --participation .25 --unbalanced-sigma 1"
    assert start(tiny, tmp_path / "fixed", flags, "fedavg") == 0 and len(seen) == 3
    labels = data.load(str(tiny))[1]
    n = np.array([len(share) for share in data.partition(labels, 10, "dirichlet", 0, unbalanced_sigma=1.0)])
    for t, r in enumerate(seen, 1):
        i = data.sample_clients(10, 0.25, "fixed", 0, t)
        assert (r.t, r.T, r.N, r.m, r.p, r.num_rows, r.lr0) == (t, 9, 10, 3, 0.3, 10, 0.5)
        assert [r.lr, *r.size_i.tolist()] == pytest.approx([0.5 * 0.9 ** (t - 1), *n[i] / n.mean()])
        assert (r.i.tolist(), r.K_i.tolist()) == (i.tolist(), (2 * -(-n[i] // 8)).tolist())
        assert r.n_i.tolist() == n[i].tolist() == r.labels_i.sum(dim=1).tolist()
    seen.clear()
    assert start(tiny, tmp_path / "random", "--sampling bernoulli --participation .02", "fedavg") == 0
    assert [r.p for r in seen] == pytest.approx([0.02 / (1 - 0.98 ** 10)] * 5) and seen[0].m == len(seen[0].i)


def test_cli_methods_share_split_model_cohorts_and_batches(tiny, tmp_path, monkeypatch):
    seen, local_sgd, by_seed = [], run.local_sgd, []

    def spy(model, omega, rho, b, X, Y, *more, idx, w, **named):
        tensors = [X[idx], Y[idx], w] + [omega] * (len(seen) % 3 == 0)      # in round 1: the initial model
        seen.append([hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest() for x in tensors])
        return local_sgd(model, omega, rho, b, X, Y, *more, idx=idx, w=w, **named)
    monkeypatch.setattr(run, "local_sgd", spy)
    for seed in (0, 1):
        seen.clear()
        assert start(tiny, tmp_path / str(seed), f"--rounds 3 --seed {seed}", "all") == 0
        configs = (tmp_path / str(seed)).glob("*/config.json")
        assert len({read(config)["settings"]["split"] for config in configs}) == 1
        assert len(seen) == 24 and seen == 8 * seen[:3]
        assert len({x[0] for x in seen}) == 3                           # another round, other batches
        by_seed.append(seen[0])
    assert by_seed[0][0] != by_seed[1][0] and by_seed[0][3] != by_seed[1][3]


def test_cli_vmap_and_chunks_equal_loop(tiny, tmp_path):
    """Every method, in float64, with clients of very unequal size."""
    torch.set_default_dtype(torch.float64)
    for out, mode in dict(loop="loop", vmap="vmap", chunk="vmap --chunk 3").items():
        flags = f"--rounds 3 --unbalanced-sigma 1 --batch-size 8 --mode {mode}"
        assert start(tiny, tmp_path / out, flags, "all") == 0
    assert all(same(tmp_path / "loop", tmp_path / out, 8, 1e-9) for out in ("vmap", "chunk"))


def test_cli_images_and_frozen_parameters(tmp_path, monkeypatch):
    """The convolutional network, with flips and shifts, which change the run; a frozen layer stays."""
    original = models.build

    def build(*args):
        model = original(*args)
        model[0].weight.requires_grad_(False)
        return model
    g, file = np.random.default_rng(0), tmp_path / "own.npz"
    x, y = g.integers(256, size=(20, 16, 16, 3), dtype=np.uint8), g.permutation(20) % 10
    np.savez(file, x_train=x, y_train=y, x_test=x, y_test=y)
    monkeypatch.setattr(models, "build", build)
    first = build("cnn", (3, 16, 16), 10, [], int(data.rng(0, "model").integers(2 ** 63))).state_dict()
    losses = set()
    for out, flags in dict(loop="", vmap="--mode vmap", none="--augment none").items():
        flags += " --like cifar10 --model cnn --num-clients 4 --participation 1 --rounds 1"
        assert start(file, tmp_path / out, flags) == 0
        last = read(folders(tmp_path / out)["fedssg"] / "model.pt")
        assert [k for k in first if torch.equal(first[k], last[k])] == ["0.weight"]
        losses.add(log_of(folders(tmp_path / out)["fedssg"])[1][3][:6])
    assert len(losses) == 2


@pytest.mark.parametrize("algo, flags", [
    ("all", ""), ("fedssg", "--form main"), ("fedssg", "--form appendix"), ("feddc", "--chunk 2")])
def test_cli_a_round_asks_the_device_once(algo, flags, tiny, tmp_path, monkeypatch):
    """Runs on the device `meta`, whose tensors have no values: .item() fails, and .tolist() is counted."""
    federate, tolist, asked = run.federate, torch.Tensor.tolist, []

    def federate_on_meta(*args):
        fed = federate(*args)
        fed.model.to("meta")
        moved = {name: getattr(fed, name).to("meta") for name in ("X", "Y", "X_test", "Y_test", "omega")}
        return dataclasses.replace(fed, device=torch.device("meta"), **moved)

    def counted_tolist(x):
        if not x.is_meta:
            return tolist(x)
        asked.append(x)
        return [0.0] * len(x)
    monkeypatch.setattr(models, "check", lambda *_: None)       # it tries the model on the CPU
    monkeypatch.setattr(run, "federate", federate_on_meta)
    monkeypatch.setattr(run, "save", lambda *_: None)
    monkeypatch.setattr(run, "print_out", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "tolist", counted_tolist)
    with pytest.raises(RuntimeError, match="meta"):     # what a wait would come to
        float(torch.ones((), device="meta"))
    assert start(tiny, tmp_path, f"--mode vmap --unbalanced-sigma 1 {flags}", algo) == 0
    assert len(asked) == 5 * len(list(tmp_path.iterdir()))


# ---- on from where it stood ----

@pytest.mark.parametrize("algo, flags", [
    ("all", ""), ("fedssg", "--precision bf16"), *(("fedssg", f"--form {form}") for form in [*FORMS][1:])])
def test_cli_gone_on_is_straight(algo, flags, tiny, tmp_path, capsys):
    """Every method and form, bit for bit, and the run says where it goes on."""
    methods = 8 if algo == "all" else 1
    flags += " --rounds 8 --unbalanced-sigma .5"
    assert start(tiny, tmp_path / "straight", flags, algo) == 0
    assert start(tiny, tmp_path / "a", f"{flags} --stop-after 3", algo) == 0
    for folder in (tmp_path / "a").iterdir():
        checkpoint = read(folder / "checkpoint.pt")
        assert len(checkpoint["log"]) == 3
        assert {x.dtype for x in checkpoint["state"].values()} == {torch.float32}
    assert "goes on" not in capsys.readouterr().out
    assert start(tiny, tmp_path / "a", flags, algo) == 0
    assert capsys.readouterr().out.count("goes on at round 4\n") == methods
    assert same(tmp_path / "straight", tmp_path / "a", methods)


def test_cli_precision_makes_another_run(tiny, tmp_path):
    for precision in ("float32", "bf16"):
        assert start(tiny, tmp_path, f"--precision {precision}") == 0
    losses = {log_of(folder)[-1][3] for folder in tmp_path.iterdir()}
    assert len(losses) == 2


@pytest.mark.parametrize("at, every, name, left", [
    (1, 9999, "progress", 0), (7, 9999, "progress", 0), (6, 0, "save", 5), (6, 0, "print_out", 6),
    (10, 0, "print_out", 10)])
def test_cli_killed_is_straight(at, every, name, left, tiny, tmp_path, monkeypatch):
    """Killed before a checkpoint, between two, or between a checkpoint and its printouts."""
    flags, killed = f"--rounds 10 --checkpoint-every {every}", tmp_path / "killed"
    assert start(tiny, tmp_path / "straight", "--rounds 10") == 0
    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_round(at, patch, name, kill)
        start(tiny, killed, flags)
    assert rounds_kept(folders(killed)["fedssg"]) == left
    assert start(tiny, killed, flags) == 0
    assert same(tmp_path / "straight", killed)


def killed_at_sync(n, signum, *how):
    """Play a run that sends itself the signal when it is about to sync its n-th file to the disk."""
    calls, fsync = itertools.count(1), os.fsync

    def fsync_or_die(file):
        if next(calls) == n:
            os.kill(os.getpid(), signum)
        fsync(file)
    os.fsync = fsync_or_die
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    os._exit(start(*how))


def test_cli_killed_by_signals_at_random_is_straight(tiny, tmp_path):
    """Real processes, ended by SIGKILL, SIGTERM and SIGINT in turn, while they write a file."""
    flags, out = "--rounds 12 --checkpoint-every 0 --form released", tmp_path / "killed"
    assert start(tiny, tmp_path / "straight", flags) == 0
    context, draw, kept = forkserver(), np.random.default_rng(0), [0]
    for signum in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
        how = int(draw.integers(5, 15)), signum, tiny, out, flags      # 5 files a round, 4 at the start
        worker = context.Process(target=killed_at_sync, args=how)
        worker.start()
        worker.join(60)
        assert worker.exitcode == (-signum if signum == signal.SIGKILL else 128 + signum)
        kept.append(rounds_kept(folders(out)["fedssg-released"]))
    assert kept == sorted(kept) and 3 <= kept[-1] < 12
    assert start(tiny, out, flags) == 0
    assert same(tmp_path / "straight", out)


def test_cli_checkpoints_come_by_the_clock(tiny, tmp_path, monkeypatch):
    clock, saves, save = itertools.count(), [], run.save    # a round looks at it three times, a save once

    def save_noted(folder, its_run, *more):
        saves.append(len(its_run["log"]))
        save(folder, its_run, *more)
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(run, "save", save_noted)
    assert start(tiny, tmp_path, "--rounds 10 --checkpoint-every 9") == 0
    assert saves == [3, 6, 9, 10]


def test_cli_nothing_of_the_loaded_file_stays_mapped(tiny, tmp_path, monkeypatch):
    """Else the disk and the memory keep the old checkpoint beside each new one."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    mapped, load = [], run.load

    def count():
        mapped.append(Path("/proc/self/maps").read_text().count("checkpoint.pt"))

    def load_and_count(*args):
        loaded = load(*args)
        count()
        return loaded
    assert start(tiny, tmp_path, "--stop-after 2") == 0
    monkeypatch.setattr(run, "load", load_and_count)
    in_round(3, monkeypatch, "fedssg", count)
    in_round(4, monkeypatch, "fedssg", count)
    assert start(tiny, tmp_path) == 0
    assert mapped[0] > 0
    assert mapped[1:] == [0, 0]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_cli_interrupted_is_straight(signum, tiny, tmp_path, monkeypatch, capsys):
    """It ends at the end of the round with a checkpoint, and prints the table of what is done."""
    flags, stopped = "--rounds 9 --form released", tmp_path / "stopped"
    assert start(tiny, tmp_path / "straight", flags, "feddc fedssg") == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        in_round(4, patch, "fedssg", partial(os.kill, os.getpid(), signum))
        assert start(tiny, stopped, flags, "feddc fedssg") == 128 + signum
    out, err = capsys.readouterr()
    assert err == "run.py: interrupted after round 4; the same command goes on\n"
    assert out.splitlines()[-1].startswith("feddc ")
    folder = folders(stopped)["fedssg-released"]
    assert rounds_kept(folder) == len(log_of(folder)) - 1 == 4
    assert start(tiny, stopped, flags, "feddc fedssg") == 0
    assert same(tmp_path / "straight", stopped, 2)


def test_cli_signals_are_as_before_when_main_returns(tiny, tmp_path, monkeypatch):
    """So that a notebook can call it again: Ctrl-C in one call does not end the next. Also after an error."""
    kinds = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.getsignal(kind) for kind in kinds]
    with monkeypatch.context() as patch:
        in_round(2, patch, "fedavg", partial(os.kill, os.getpid(), signal.SIGINT))
        assert start(tiny, tmp_path, "", "fedavg") == 130
    assert [signal.getsignal(kind) for kind in kinds] == before
    with monkeypatch.context() as patch, pytest.raises(Killed):
        in_round(3, patch, "fedavg", kill)
        start(tiny, tmp_path, "", "fedavg")
    assert [signal.getsignal(kind) for kind in kinds] == before
    assert start(tiny, tmp_path, "", "fedavg") == 0
    assert rounds_kept(folders(tmp_path)["fedavg"]) == 5


def test_cli_an_ignored_signal_stays_ignored(tiny, tmp_path, monkeypatch):
    """As SIGHUP is under nohup."""
    in_round(2, monkeypatch, "fedavg", partial(os.kill, os.getpid(), signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert start(tiny, tmp_path, "", "fedavg") == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_cli_a_closed_terminal_leaves_a_checkpoint(tiny, tmp_path, monkeypatch):
    """The signal comes during the round, and afterwards nothing can be printed."""
    def print_nothing(*_):
        raise OSError(errno.EIO, "Input/output error")

    def close_terminal():
        os.kill(os.getpid(), signal.SIGHUP)
        monkeypatch.setattr(run, "progress", print_nothing)
    in_round(3, monkeypatch, "fedavg", close_terminal)
    assert start(tiny, tmp_path, "", "fedavg") == 1
    assert rounds_kept(folders(tmp_path)["fedavg"]) == 3


def test_cli_finished_run_says_so_and_prints_anew(tiny, tmp_path, capsys):
    assert start(tiny, tmp_path) == 0
    folder, before = folders(tmp_path)["fedssg"], contents(tmp_path)
    (folder / "log.csv").write_text("round\n9\n\xff")
    (folder / "config.json").write_text("[]")
    (folder / "summary.json").unlink()
    (folder / "model.pt").unlink()
    (folder / "checkpoint.pt.7.tmp").write_text("left by a kill")
    os.utime(folder / "checkpoint.pt.7.tmp", (0, 0))
    for flags in ("", "--mode vmap --checkpoint-every 0"):
        capsys.readouterr()
        assert start(tiny, tmp_path, flags) == 0 and contents(tmp_path) == before
        out = capsys.readouterr().out
        assert "finished at round 5" in out and "round 1/" not in out and out.splitlines()[-1][:6] == "fedssg"
    assert start(tiny, tmp_path, "--lr .2") == 0 and len(list(tmp_path.iterdir())) == 2
    assert contents(folder) == before


def test_cli_overwrite_begins_anew(tiny, tmp_path, monkeypatch):
    """With the method's code of now; also where it is stopped before its first checkpoint."""
    assert start(tiny, tmp_path / "a", "", "fedavg") == 0
    monkeypatch.setitem(ALGORITHMS, "fedavg", lambda s, r, train: feddyn(s, r, train))
    assert start(tiny, tmp_path / "new", "", "fedavg") == 0
    folder, new = folders(tmp_path / "a")["fedavg"], folders(tmp_path / "new")["fedavg"]
    old = log_of(folder)
    assert start(tiny, tmp_path / "a", "", "fedavg") == 0
    assert log_of(folder) == old != log_of(new)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        in_round(3, patch, "fedavg", kill)
        start(tiny, tmp_path / "a", "--overwrite", "fedavg")
    assert rounds_kept(folder) == 0
    assert start(tiny, tmp_path / "a", "", "fedavg") == 0
    assert same(tmp_path / "a", tmp_path / "new")


def test_cli_commits_of_a_run(tiny, tmp_path, monkeypatch):
    """Those that played it, in order, not those that looked at it; null for what is not known."""
    for commit, flags, commits in [("a", "--stop-after 2", ["a"]), (None, "--stop-after 3", ["a", None]),
                                   ("b+", "", ["a", None, "b+"]), ("c", "", ["a", None, "b+"])]:
        monkeypatch.setattr(run, "commit", lambda: commit)
        assert start(tiny, tmp_path, flags, "fedavg") == 0
        assert read(folders(tmp_path)["fedavg"] / "config.json")["commits"] == commits


def test_cli_commit_is_told_by_git_if_there_is_one(tmp_path, monkeypatch):
    commit = run.commit.__wrapped__         # without its memory
    assert commit() is None or re.fullmatch(r"[0-9a-f]{7,}\+?", commit())
    with monkeypatch.context() as patch:
        patch.setattr(run, "__file__", str(tmp_path / "run.py"))        # in no repository
        assert commit() is None
    monkeypatch.setenv("PATH", str(tmp_path))                           # no git
    assert commit() is None


def flip_a_number(file):
    omega = read(file)["state"]["omega"].numpy().tobytes()
    file.write_bytes(file.read_bytes().replace(omega, bytes(4) + omega[4:]))


def lose_the_state(file):
    torch.save(read(file) | dict(state={}), file)


def plant_code(file):
    trap = type("Trap", (), {"__reduce__": lambda self: (os.mkdir, (str(file.parent.parent / "ran"),))})()
    torch.save(read(file) | dict(state=trap), file)


def change_the_settings(file):
    whole = read(file)
    torch.save(whole | dict(settings=whole["settings"] | dict(lr=0.2)), file)


@pytest.mark.parametrize("damage, says", [
    (flip_a_number, "checksum"), (lose_the_state, "omega"), (plant_code, "Weights only"),
    (change_the_settings, "its run has lr 0.2, not 0.1")])
def test_cli_checkpoint_that_cannot_be_used(damage, says, tiny, tmp_path, capsys):
    """One line that quotes the error, all files as they were; nothing that it holds is executed."""
    assert start(tiny, tmp_path, "--stop-after 2") == 0
    damage(folders(tmp_path)["fedssg"] / "checkpoint.pt")
    before = contents(tmp_path)
    capsys.readouterr()
    assert start(tiny, tmp_path) == 1
    assert "checkpoint.pt: cannot go on from this file (" in one_line(capsys, says)
    assert contents(tmp_path) == before
    assert not (tmp_path / "ran").exists()


def test_cli_no_message_advises_to_delete_what_may_be_whole(tiny, tmp_path, capsys):
    """torch cannot map a file whose path is not UTF-8."""
    out = os.fsdecode(bytes(tmp_path) + b"/caf\xe9")
    assert start(tiny, out, "--stop-after 2") == 0
    capsys.readouterr()
    assert start(tiny, out) == 1
    err = one_line(capsys, "UnicodeEncodeError").lower()
    assert not any(word in err for word in ("delete", "remove", "whole", "overwrite"))


def test_cli_contents_of_the_data_decide(tiny, tmp_path, monkeypatch):
    """Another spelling or folder of the same file is the same run; other contents are another."""
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    for name in ("d.npz", "./d.npz", tmp_path / "d.npz", "sub/d.npz"):
        shutil.copy(tiny, name)
        assert start(name, "out", "--partition iid --stop-after 2") == 0 and len(os.listdir("out")) == 1
    np.savez("d.npz", **dict(np.load(tiny)) | {"x_train": 3 * np.load(tiny)["x_train"]})
    assert start("d.npz", "out", "--partition iid") == 0
    assert sorted(len(log_of(folder)) for folder in Path("out").iterdir()) == [3, 6]


def test_cli_stop_at_target_and_eval_every(tiny, tmp_path, capsys):
    flags = "--rounds 10 --lr .01"
    assert start(tiny, tmp_path / "straight", flags) == 0
    rows = log_of(folders(tmp_path / "straight")["fedssg"])[1:]
    acc = [float(row[1]) for row in rows]
    t = next(t for t in range(2, 10) if acc[t - 1] > max(acc[:t - 1]))      # a new best, after round 1
    for says in ("left", "finished"):       # the second time there is nothing to do
        assert start(tiny, tmp_path / "a", f"{flags} --stop-at-target --target-acc {acc[t - 1]!r}") == 0
        summary = read(folders(tmp_path / "a")["fedssg"] / "summary.json")
        assert summary["rounds_to_target"] == summary["round"] == t and says in capsys.readouterr().out
    assert start(tiny, tmp_path / "a", flags) == 0
    assert same(tmp_path / "straight", tmp_path / "a")
    assert start(tiny, tmp_path / "b", f"{flags} --eval-every 4") == 0
    some = log_of(folders(tmp_path / "b")["fedssg"])[1:]
    assert [row[0] for row in some if row[1]] == [row[0] for row in some if row[2]] == ["4", "8", "10"]
    assert all(row == one or row == [one[0], "", "", *one[3:]] for row, one in zip(some, rows, strict=True))


# ---- sweeps, divergence, warnings ----

def test_cli_whatever_ends_a_sweep_prints_the_table(tiny, tmp_path, capsys, monkeypatch):
    in_round(1, monkeypatch, "scaffold", kill)
    with pytest.raises(Killed):             # a fault of the program: its traceback is wanted
        start(tiny, tmp_path, "", "fedavg scaffold")
    assert capsys.readouterr().out.splitlines()[-1].startswith("fedavg ")


def test_cli_a_sweep_looks_at_all_folders_first(tiny, tmp_path):
    """It plays nothing before a checkpoint that cannot be used; else it goes on with what is there."""
    assert start(tiny, tmp_path, "--stop-after 2", "feddc") == 0
    file = folders(tmp_path)["feddc"] / "checkpoint.pt"
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    before = contents(tmp_path)
    assert start(tiny, tmp_path, "", "all") == 1
    assert contents(tmp_path) == before
    file.write_bytes(whole)
    assert start(tiny, tmp_path, "", "all") == 0
    assert [len(log_of(folder)) for folder in tmp_path.iterdir()] == [6] * 8


@pytest.mark.parametrize("flags, says", [("--lr=1e9", "lower --lr"), ("--gate-scale=1e9", "phi kappa")],
                         ids=lambda _: "")
def test_cli_divergence(flags, says, tiny, tmp_path, capsys):
    """Exit code 3, a whole log, what overshoots is named; the sweep goes on; again the same."""
    for again in (False, True):
        assert start(tiny, tmp_path, f"{flags} --rounds 30", "fedssg fedavg") == 3
        out, err = capsys.readouterr()
        folder = folders(tmp_path)["fedssg"]
        t = len(log_of(folder)) - 1
        assert 1 < t < 30
        if again:
            assert f"diverged at round {t}" in out
        else:
            assert f"round {t}: diverged" in err and says in err
        assert [line.split()[0] for line in out.splitlines()[-2:]] == ["fedssg", "fedavg"]
    finite = [all(math.isfinite(float(x)) for x in row if x) for row in log_of(folder)[1:]]
    assert finite == [True] * (t - 1) + [False]
    assert read(folder / "summary.json")["diverged"] == t


@pytest.mark.parametrize("algo, flags, says", [
    ("fedssg", "", None), ("fedavg", "--rounds 12", None), ("feddyn", "--rounds 12", None),
    ("fedssg", "--kappa 0.9", "the gain phi kappa is 1.08, above 1; lower --kappa\n"),
    ("fedssg", "--kappa 1.8 --alignment server", "the gain p phi kappa is 2.16, above 2; lower --kappa\n"),
    ("fedssg", "--alpha 9", "phi eta K alpha is 1.08, above 1; lower --alpha or --lr\n"),
    ("fedssg", "--kappa 0.9 --correction none", None),
    ("fedssg", "--kappa 1.1 --correction none", "phi kappa is 2.2, above 2"),
    ("fedssg", "--lr-decay 1 --participation .4 --form released --alpha 0", "as --form stable does"),
    ("fedssg", "--lr-decay 1 --form released --alpha 9", "(eta_t K alpha + eta_t / eta_0) is 2.28, above"),
    ("fedssg", "--lr-decay 1 --participation .4", None),
    ("fedssg", "--lr 50 --batch-size 5 --rounds 14 --lr-decay 1 --form appendix --alpha .01", "on plain\n"),
    ("scaffold", "--lr 50 --batch-size 5 --rounds 14 --lr-decay 1", "ln(classes), 2.2; lower --lr\n")],
                         ids=lambda _: "")
def test_cli_warnings_come_once(algo, flags, says, tiny, tmp_path, capsys):
    """Of memories and of control variates that grow without bound; of a run that learns nothing."""
    assert start(tiny, tmp_path, f"--participation 1 {flags}", algo) == 0
    err = capsys.readouterr().err
    if says is None:
        assert err == ""
    else:
        assert err.startswith("warning: ") and err.count("\n") == 1
        assert says in err


def test_cli_warnings_of_the_data_are_one_line(tiny, tmp_path, capsys):
    np.savez(tmp_path / "own.npz", **dict(np.load(tiny)) | {"x_train": 99 * np.load(tiny)["x_train"]})
    assert start(tmp_path / "own.npz", tmp_path / "out", "--rounds 1", "fedavg") == 0
    err = capsys.readouterr().err
    assert err.startswith("warning: ") and "uint8" in err and err.count("\n") == 1


# ---- disks, pipes, processes, the README ----

@pytest.mark.parametrize("limit", [10, 1200, 3000])
def test_cli_full_disk(limit, tiny, tmp_path):
    """No file may grow past `limit` bytes: the last good checkpoint stays whole, and the run can go on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert start(tiny, tmp_path, "--stop-after 1") == 0
    file = folders(tmp_path)["fedssg"] / "checkpoint.pt"
    before = file.read_bytes()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with pytest.raises((OSError, RuntimeError)):        # torch has its own word for its tensors
            run.write(file, {"c_i": torch.zeros(10, 700)})
        with contextlib.suppress(RuntimeError):
            assert start(tiny, tmp_path) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == before
    assert not list(tmp_path.rglob("*.tmp"))
    assert start(tiny, tmp_path) == 0


def test_cli_printout_that_cannot_be_written_gives_one_warning(tiny, tmp_path, capsys):
    """As where another program holds log.csv. Only checkpoint.pt may stop a run."""
    assert start(tiny, tmp_path, "--stop-after 1") == 0
    folder = folders(tmp_path)["fedssg"]
    (folder / "log.csv").unlink()
    (folder / "log.csv").mkdir()
    capsys.readouterr()
    assert start(tiny, tmp_path, "--checkpoint-every 0") == 0
    err = capsys.readouterr().err
    assert err.startswith("warning: ") and "log.csv" in err and err.count("\n") == 1
    assert read(folder / "summary.json")["round"] == rounds_kept(folder) == 5
    assert not list(tmp_path.rglob("*.tmp"))


def test_cli_shell(tiny, tmp_path):
    """From another folder; RANK of another job; no docstrings; stdout closed, cut short, or without ±."""
    shutil.copy(tiny, tmp_path / "own.npz")
    command = (f"{sys.executable} -OO {Path(run.__file__).resolve()} --algo fedavg --dataset own.npz "
               "--model linear --num-clients 10 --local-epochs 1")
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "WORLD_SIZE")} | dict(
        OMP_NUM_THREADS="1", PYTHONIOENCODING="ascii", LC_ALL="C", RANK="3", LOCAL_RANK="3")
    expected = {"--rounds 50": (0, 54), "--rounds 3 >&-": (0, 0), "--rounds 9 | head -n 1": (141, 1)}
    shells = [subprocess.Popen(["bash", "-c", f"set -o pipefail; {command} {how}"], env=env, cwd=tmp_path,
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for how in expected]
    for shell, (code, lines) in zip(shells, expected.values()):
        out, err = shell.communicate(timeout=60)
        assert (shell.returncode, err, out.count("\n")) == (code, "", lines)
    assert {path.name for path in tmp_path.iterdir()} == {"own.npz", "runs"}


def forkserver():
    """A context for new processes, which imports this file once for all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


SPREAD = "--rounds 4 --participation .2 --unbalanced-sigma 1 --batch-size 8 --seed 2"
CALLS = [("spread", "all", "", 0), *(("forms", "fedssg", f"--form {form}", 0) for form in [*FORMS][1:]),
         ("warned", "fedssg", "--kappa .9 --seed 1", 0),
         ("stopped", "all", "--stop-after 2", 0), ("onward", "all", "", 0),
         ("refused", "fedavg", "--precision tf32", 2), ("signalled", "fedssg", "--checkpoint-every 0", 143)]


def one_of_several(rank, ports, W, tiny, out):
    """Process `rank` of W: what torchrun sets, then the runs one after another."""
    os.dup2(os.open(f"{out} errors {rank}", os.O_CREAT | os.O_WRONLY), 2)
    torch.set_num_threads(1)
    for port, (place, algo, flags, code) in zip(ports, CALLS):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(W), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(port))
        if place == "signalled" and rank == 0:
            in_round(2, pytest.MonkeyPatch(), "fedssg", partial(os.kill, os.getpid(), signal.SIGTERM))
        if start(tiny, out / place, f"{SPREAD} {flags}", algo) != code:
            os._exit(9)


def test_cli_processes_equal_one(tiny, tmp_path, capsys):
    """Bit for bit, with rounds in which a process has no client; gone on by fewer and by more processes."""
    W = 2
    owners = [len({*(data.sample_clients(10, 0.2, "fixed", 2, t) % W)}) for t in (1, 2, 3, 4)]
    assert min(owners) < W and max(owners) > 1
    context = forkserver()
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in CALLS]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    assert start(tiny, tmp_path / "onward", f"{SPREAD} --stop-after 2", "all") == 0
    capsys.readouterr()
    workers = [context.Process(target=one_of_several, args=(k, ports, W, tiny, tmp_path)) for k in range(W)]
    for worker in workers:
        worker.start()
    for place, algo, flags, _ in CALLS[:len(FORMS) + 1]:
        assert start(tiny, tmp_path / "one" / place, f"{SPREAD} {flags}", algo) == 0
    for worker in workers:
        worker.join(90)
        worker.kill()       # where another failed, it waits for ever
    for worker in workers:
        worker.join()
    err = "".join(Path(f"{tmp_path} errors {rank}").read_text() for rank in range(W))
    assert [worker.exitcode for worker in workers] == [0] * W, err
    assert err.count("run.py: --precision tf32") == 1 == err.count("run.py: interrupted"), err
    warnings = capsys.readouterr().err.splitlines()
    assert sum("phi kappa" in warning for warning in warnings) == 1
    assert all(err.count(warning) == 1 for warning in warnings), err
    for place in ("stopped", "signalled"):
        folder = folders(tmp_path / place)["fedssg"]
        assert read(folder / "config.json")["processes"] == W
        assert rounds_kept(folder) == 2
        assert start(tiny, tmp_path / place, SPREAD, "all") == 0        # by one process
    assert same(tmp_path / "one/forms", tmp_path / "forms", len(FORMS) - 1)
    for place in ("spread", "stopped", "onward", "signalled"):
        assert same(tmp_path / "one/spread", tmp_path / place, 8)


def test_cli_readme_examples(monkeypatch):
    """The example for your own tensors runs as printed; the added method works and becomes a flag."""
    text = (Path(run.__file__).parent / "README.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    example, = (block for block in blocks if "from fedssg import" in block)
    added, = (block for block in blocks if "def fedavgm" in block)
    printed, names = [], dict(vars(baselines_module))
    exec(example, {"print": lambda *args: printed.append(args)})
    assert printed and "nan" not in str(printed)
    exec(added, names)
    s, ones = {"omega": torch.zeros(2)}, torch.ones(2)
    r = Round(t=1, T=9, N=2, i=torch.arange(2), lr=.1, lr0=.1, K_i=ones, n_i=ones)
    for omega in (1.0, 2.9):        # momentum 0.9: steps of 1 and 1.9
        assert names["fedavgm"](s, r, lambda rho, b: s["omega"] + torch.ones(2, 2)) == {}
        assert torch.allclose(s["omega"], omega * ones)
    monkeypatch.setitem(ALGORITHMS, "fedavgm", names["fedavgm"])
    assert settings("--momentum .5", "fedavgm")["hyper"] == {"momentum": 0.5}
