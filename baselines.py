"""The seven methods that FedSSG is compared with, in the notation of fedssg.py.

Each is one function of (state, round, train). It makes the affine term (rho, b) of the local objective, lets
the cohort train, updates its state in place, and returns what is worth logging, (m,) each. In every docstring
D_i = theta_i - omega, mean_S is over the cohort, mean_N over all N clients. FedAvg and FedProx weight clients
by sample count; FedDisco uses its own weights; the others take the plain mean, as in their papers.
"""

from typing import Literal, Union

import torch
from torch import Tensor

from fedssg import Round, State, Train, by_size, fedssg, rows, total


def fedavg(s: State, r: Round, train: Train) -> dict:
    """FedAvg, McMahan et al. 2017, arXiv 1602.05629, Algorithm 1.   omega += sum_S n_i D_i / sum_S n_i"""
    omega = s["omega"]
    theta_i = train(torch.zeros_like(r.n_i), omega.new_zeros(len(r.i), len(omega)))     # (m, d)
    omega += mean_by_samples(theta_i - omega, r)
    return {}


def fedprox(s: State, r: Round, train: Train, *, mu: float = 1e-4) -> dict:
    """FedProx, Li et al. 2020, arXiv 1812.06127, Algorithm 2.

    local: f_i + mu/2 ||theta - omega||^2;   server as FedAvg
    """
    omega = s["omega"]
    mu_i = torch.full_like(r.n_i, mu)                                           # (m,)
    theta_i = train(mu_i, -mu_i[:, None] * omega)                               # (m, d)
    omega += mean_by_samples(theta_i - omega, r)
    return {}


def mean_by_samples(D_i: Tensor, r: Round) -> Tensor:
    """sum_S n_i D_i / sum_S n_i, (m, d) -> (d,). Displacements, not models: exact where nothing moved."""
    sum_nD, sum_n = total(r.n_i[:, None] * D_i, r.n_i)
    return sum_nD / sum_n


def scaffold(s: State, r: Round, train: Train, *, eta_g: float = 1.0) -> dict:
    """SCAFFOLD with option II, Karimireddy et al. 2020, arXiv 1910.06378, Algorithm 1.

    local: grad f_i + c - c_i;   c_i' = c_i - c - D_i / (K_i eta_t);   c += (1/N) sum_S (c_i' - c_i)
    omega += eta_g mean_S D_i.   eta_t is the rate the steps were made with; K_i counts steps, not epochs.
    """
    omega, c_i = s["omega"], rows(s, "c_i", r)
    c = s.setdefault("c", torch.zeros_like(omega))
    theta_i = train(torch.zeros_like(r.n_i), c - c_i[r.i])                      # (m, d)
    D_i = theta_i - omega
    dc_i = -c - D_i / (r.K_i * r.lr)[:, None]                                   # (m, d)  c_i' - c_i
    c_i[r.i] += dc_i
    sum_D, sum_dc = total(D_i, dc_i)
    c += sum_dc / r.N
    omega += eta_g * sum_D / r.m
    return {}


def feddyn(s: State, r: Round, train: Train, *, alpha: float = 0.01) -> dict:
    """FedDyn, Acar et al. 2021, arXiv 2111.04263, Algorithm 1, with h_i = -(its gradient state) / alpha_i.

    local: f_i + alpha_i/2 ||theta - (omega - h_i)||^2, alpha_i = alpha / size_i
    h_i += D_i;   omega += mean_S D_i + mean_N h_i
    """
    omega, h_i = s["omega"], rows(s, "h_i", r)
    h = s.setdefault("h", torch.zeros_like(omega))
    alpha_i = by_size(alpha, r)                                                 # (m,)
    theta_i = train(alpha_i, alpha_i[:, None] * (h_i[r.i] - omega))             # (m, d)
    D_i = theta_i - omega
    h_i[r.i] += D_i
    sum_D, = total(D_i)
    h += sum_D / r.N                                                            # h = mean_N h_i
    omega += sum_D / r.m + h
    return {"h_norm": h_i[r.i].norm(dim=1)}


def feddc(s: State, r: Round, train: Train, *, alpha: float = 0.1) -> dict:
    """FedDC, Gao et al. 2022, arXiv 2203.11751, Algorithm 1: FedDyn's alignment and SCAFFOLD's correction.

    The correction is printed as <theta, last D_i - last step of omega> / (eta K) and kept as c - c_i.
    local: f_i + alpha_i/2 ||theta - (omega - h_i)||^2 + <c - c_i, theta>
    c_i, c as SCAFFOLD;   h_i, omega as FedDyn
    """
    omega, h_i, c_i = s["omega"], rows(s, "h_i", r), rows(s, "c_i", r)
    h, c = s.setdefault("h", torch.zeros_like(omega)), s.setdefault("c", torch.zeros_like(omega))
    alpha_i = by_size(alpha, r)                                                 # (m,)
    theta_i = train(alpha_i, alpha_i[:, None] * (h_i[r.i] - omega) + c - c_i[r.i])
    D_i = theta_i - omega                                                       # (m, d)
    dc_i = -c - D_i / (r.K_i * r.lr)[:, None]                                   # (m, d)  c_i' - c_i
    h_i[r.i] += D_i
    c_i[r.i] += dc_i
    sum_D, sum_dc = total(D_i, dc_i)
    c += sum_dc / r.N
    h += sum_D / r.N
    omega += sum_D / r.m + h
    return {"h_norm": h_i[r.i].norm(dim=1)}


def fedvra(s: State, r: Round, train: Train, *, gamma: float = 0.1,
           dual_step: Union[float, Literal["auto"]] = "auto",
           server_step: Union[float, Literal["auto"]] = "auto") -> dict:
    """FedVRA, Wang et al. 2023, arXiv 2212.01519, h_i = lambda_i / gamma, dual step a, aggregation step d.

    local: f_i + <lambda_i, theta - omega> + gamma/2 ||theta - omega||^2
    lambda_i += a gamma D_i (cohort only);   omega += d/N sum_S D_i + mean_N h_i
    `auto`: d = 1/p; a = min(1 / (1 - (1 - eta_0 gamma)^K_i), 1/p), or 1 if gamma is 0: experiments/notes.md.
    """
    omega, h_i = s["omega"], rows(s, "h_i", r)
    h = s.setdefault("h", torch.zeros_like(omega))
    a_i = torch.ones_like(r.K_i)                                                # (m,)
    if dual_step != "auto":
        a_i = a_i * dual_step
    elif gamma > 0:
        a_i = (1 / (1 - (1 - r.lr0 * gamma) ** r.K_i)).clamp(max=1 / r.p)
    d = 1 / r.p if server_step == "auto" else server_step
    theta_i = train(torch.full_like(r.n_i, gamma), gamma * (h_i[r.i] - omega))  # (m, d)
    D_i = theta_i - omega
    h_i[r.i] += a_i[:, None] * D_i
    sum_D, sum_aD = total(D_i, a_i[:, None] * D_i)
    h += sum_aD / r.N
    omega += d * sum_D / r.N + h
    return {"h_norm": h_i[r.i].norm(dim=1)}


def disco_weights(r: Round, a: float, b: float) -> Tensor:
    """FedDisco's weights (m,), of sum 1: relu(n_i/sum_S n - a kl_i + b), or n_i/sum_S n where all are 0.

    kl_i = KL(label distribution of i || uniform), divided by its sum over the cohort unless that is 0.
    Raises ValueError if the Round does not tell the label counts.
    """
    if r.labels_i is None:
        raise ValueError("Round.labels_i is missing: how many samples of each class a client has")
    q_i = r.labels_i / r.n_i[:, None]                                           # (m, classes)
    kl_i = torch.xlogy(q_i, q_i * q_i.shape[1]).sum(dim=1)                      # (m,)  0 log 0 = 0
    sum_kl, sum_n = total(kl_i, r.n_i)
    kl_i = kl_i / torch.where(sum_kl > 0, sum_kl, torch.ones_like(sum_kl))
    disco_i = torch.relu(r.n_i / sum_n - a * kl_i + b)
    sum_disco, = total(disco_i)
    return torch.where(sum_disco > 0, disco_i / sum_disco, r.n_i / sum_n)


def feddisco(s: State, r: Round, train: Train, *, alpha: float = 0.01, disco_a: float = 0.5,
             disco_b: float = 0.1) -> dict:
    """FedDisco, Ye et al. 2023, arXiv 2305.19229, on FedDyn, as in the FedSSG paper:
    omega += sum_S disco_i D_i + mean_N h_i, the rest as `feddyn`."""
    omega, h_i = s["omega"], rows(s, "h_i", r)
    h = s.setdefault("h", torch.zeros_like(omega))
    disco_i = disco_weights(r, disco_a, disco_b)                                # (m,)
    alpha_i = by_size(alpha, r)                                                 # (m,)
    theta_i = train(alpha_i, alpha_i[:, None] * (h_i[r.i] - omega))             # (m, d)
    D_i = theta_i - omega
    h_i[r.i] += D_i
    sum_D, sum_wD = total(D_i, disco_i[:, None] * D_i)
    h += sum_D / r.N
    omega += sum_wD + h
    return {"h_norm": h_i[r.i].norm(dim=1)}


ALGORITHMS = {"fedavg": fedavg, "fedprox": fedprox, "scaffold": scaffold, "feddyn": feddyn, "feddc": feddc,
              "fedvra": fedvra, "feddisco": feddisco, "fedssg": fedssg}
