"""FedSSG (arXiv 2509.13895): expectation-gated, history-aware drift alignment for federated learning.

This file stands alone: torch and the standard library. Its idea: in every round each client of the cohort
minimises its own loss plus an affine term that does not change during the round, by SGD, Eq. (18),

    f_i(theta) + (rho_i / 2) ||theta||^2 + <b_i, theta>     with gradient grad f_i(theta) + rho_i theta + b_i

So a method is two things: how it makes (rho, b) before the clients train, and what it does afterwards with
their displacements D_i = theta_i - omega. `gate` and `fedssg` are the method; below is the client's SGD.
Equation numbers count through the paper and its appendices.

    paper        here              shape     meaning
    N            r.N                         clients
    S^t, m       r.i, r.m          (m,)      the cohort of round t (as indices of rows), its size
    p            r.p                         the probability with which a client takes part in a round
    t, T         r.t, r.T                    round (from 1), horizon
    K            r.K_i             (m,)      local steps: epochs E times ceil(n_i / B); Algorithm 1's K is N
    eta          r.lr, r.lr0                 learning rate of this round, of round 1
    omega        s["omega"]        (d,)      the model sent out
    theta_i      theta_i           (m, d)    what client i returns
    Delta_i      D_i               (m, d)    theta_i - omega, the client's displacement
    h_i          s["h_i"]          (rows, d) drift memory; s["h"] (d,) is its mean over all N clients
    -            s["c_i"], s["c"]  (rows, d) control variates as in SCAFFOLD; their mean over all clients
    c_i^{1:t}    s["count_i"]      (rows,)   how often i was sampled, this round included; Algorithm 1's c_i
    phi, xi      phi_i             (m,)      the gate
    n_i          r.n_i, r.size_i   (m,)      sample count, and that divided by the mean over all N clients
    alpha, beta  alpha, beta                 strength of the alignment, Eq. (19); offset of the gate,
                                             Algorithm 1. The alpha of Eq. (6) is gate_scale
    -            kappa                       eta_t K_i alpha_i: the alignment takes kappa h_i from a client's
                                             displacement, whatever the rate, the steps and the sizes

In shapes, m counts the cohort's members that this process trains, rows the clients it keeps. A name that ends
in _i has one row per client; one that does not is the server's.
"""

import copy
import functools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable, Literal, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

State = dict[str, Tensor]                       # everything a method remembers between rounds
Train = Callable[[Tensor, Tensor], Tensor]      # (rho (m,), b (m, d)) -> theta_i (m, d)

# Text, appendix and program of the paper are three algorithms: README, "Which form, which method?". `stable`
# is `released`, the authors' program, with SCAFFOLD's correction: no gate, as in Eq. (23), and eta_t for
# eta_0. `scaled` is `stable` with kappa in place of alpha, and run.py's default. `light` sends no control
# variates, as FedAvg, and its gate is a constant 2. With `stateless` a client keeps nothing either: this is
# FedAvg with server momentum.
STABLE = dict(gate_ratio="horizon", gate_shape="identity", beta=1.0, alignment="inner", correction="plain")
LIGHT = dict(STABLE, kappa=0.25, gate_ratio="off", correction="none")
FORMS = {"scaled": dict(STABLE, kappa=0.25), "stable": STABLE, "light": LIGHT,
         "stateless": dict(LIGHT, alignment="server"), "released": dict(STABLE, correction="state"),
         "appendix": dict(STABLE, beta=0.0, correction="last"),
         "main": dict(STABLE, gate_ratio="running", beta=0.0, alignment="prox", correction="none", alpha=1.0)}


@dataclass(frozen=True)
class Round:
    """What a method may know of round t. Tensors have an entry for each member that this process trains."""
    t: int
    T: int
    N: int
    i: Tensor                           # (m,) int64: the cohort, as indices of this process's rows
    lr: float
    lr0: float
    K_i: Tensor                         # (m,) 1 or more, of omega's dtype, as are the next three
    n_i: Tensor                         # (m,)
    size_i: Optional[Tensor] = None     # (m,) needed by what has an alpha; a server tells the mean n once
    labels_i: Optional[Tensor] = None   # (m, classes) label counts, needed by FedDisco
    m: Optional[int] = None             # over all processes; default: len(i), right in one process
    p: Optional[float] = None           # default: m / N, right for cohorts of a fixed size
    num_rows: Optional[int] = None      # clients that this process keeps rows of; default: N

    def __post_init__(self):
        m = len(self.i) if self.m is None else self.m
        for name, default in dict(m=m, p=m / self.N, num_rows=self.N).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)     # the dataclass is frozen


def gate(count_i: Tensor, r: Round, *, ratio: str = "horizon", shape: str = "identity", scale: float = 1.0,
         beta: float = 0.0, eps: float = 1e-6) -> Tensor:
    """The expectation gate phi_i = scale * g(observed / expected participations) + beta; (m,) -> (m,).

    count_i  participations, this round's included: 1 or more
    ratio    expected: `running` p t, Eq. (5); `horizon` p T, as xi_i of Algorithm 1. `off`: the ratio is 1
    shape    g: `identity` (the paper's default), `clip` to [0, 1] or `logistic` (its options, Section 2)
    Raises ValueError for another ratio or shape.
    """
    if ratio not in ("running", "horizon", "off"):
        raise ValueError(f"gate ratio {ratio!r}: use running, horizon or off")
    if shape not in ("identity", "clip", "logistic"):
        raise ValueError(f"gate shape {shape!r}: use identity, clip or logistic")
    expected = r.p * (r.t if ratio == "running" else r.T)
    g_i = torch.ones_like(count_i) if ratio == "off" else count_i / (expected + eps)    # Eq. (5), or xi_i
    g_i = g_i.clamp(0, 1) if shape == "clip" else torch.sigmoid(g_i) if shape == "logistic" else g_i
    return scale * g_i + beta       # Eq. (6), whose alpha is scale; beta as in Algorithm 1


def fedssg(s: State, r: Round, train: Train, *, alpha: Optional[float] = None, kappa: Optional[float] = None,
           gate_ratio: Literal["running", "horizon", "off"] = "horizon",
           gate_shape: Literal["identity", "clip", "logistic"] = "identity", gate_scale: float = 1.0,
           beta: float = 1.0, alignment: Literal["inner", "server", "prox", "none"] = "inner",
           correction: Literal["plain", "state", "last", "none"] = "plain") -> dict:
    """One round of FedSSG, by default FORMS["stable"]. The cohort's displacements are averaged plainly.

    s        the method's state, changed in place: omega, h, h_i, count_i; c, c_i or D_last, D_last_i
    train    runs the cohort's clients: (rho, b) -> theta_i
    alpha    the alignment's strength, alpha_i = alpha / size_i; 0.05 if neither it nor kappa is given
    kappa    the same in another unit, alpha_i = kappa / (eta_t K_i)
    alignment    where the memory pulls: `inner`, `prox` a client's steps; `server` the server's step, by
             kappa h, so that no client keeps a memory; `none`
    correction   of drift: `plain`, c - c_i as in SCAFFOLD; `state`, the same from gated displacements, as
             released; `last`, from the last displacement, Eq. (24); `none`. gate_* and beta: see `gate`
    Returns what is worth logging, (m,) each: `gate` phi_i; `h_norm` ||h_i||, or ||h||; and `gain`: phi_i
    eta_t K_i alpha_i for `inner`, which is phi_i kappa, and p phi_i kappa for `server`. On constant gradients
    the memory grows without bound if gain is above 2; above 1 for `inner` with `plain`, where c_i takes the
    pull back the next time; with `state`, if gain + phi_i eta_t / eta_0 is above 2. With `last` it also grows
    where kappa is small, as 0.3.
    Raises ValueError for an unknown part, and as `check_strength` and `by_size` do.
    """
    check_strength(alpha, kappa, alignment, correction)

    # server: what it keeps; zeros in the first round
    omega = s["omega"]
    h = s.setdefault("h", torch.zeros_like(omega))                          # (d,)  mean_N h_i
    if correction in ("state", "plain"):
        c = s.setdefault("c", torch.zeros_like(omega))                      # (d,)  mean_N c_i; is sent too
    elif correction == "last":
        D_last = s.setdefault("D_last", torch.zeros_like(omega))            # (d,)  last step; is sent too

    # client: how often it took part, and its gate. A constant gate, ratio `off`, needs no count
    count_i = rows(s, "count_i", r, ())                                     # (rows,)
    phi_i = gate(count_i[r.i] + 1, r, ratio=gate_ratio, shape=gate_shape, scale=gate_scale, beta=beta)  # (m,)

    # client: alignment. Eqs. (8) and (9) are gated; P_i, Eq. (19), is not. Eq. (8) with (10) is not offered
    rho_i, b_i = torch.zeros_like(phi_i), omega.new_zeros(len(r.i), len(omega))     # (m,), (m, d)
    if alignment in ("inner", "prox"):
        h_i = rows(s, "h_i", r)                                             # (rows, d)
        alpha = 0.05 if alpha is None else alpha
        alpha_i = by_size(alpha, r) if kappa is None else kappa / (r.lr * r.K_i)        # (m,)
    if alignment == "inner":        # alpha_i <theta - (omega - h_i), h_i>
        b_i = alpha_i[:, None] * h_i[r.i]
    elif alignment == "prox":       # phi_i alpha_i / 2 ||theta - (omega - h_i)||^2
        rho_i = alpha_i * phi_i
        b_i = rho_i[:, None] * (h_i[r.i] - omega)

    # client: correction of its drift
    if correction in ("state", "plain"):    # SCAFFOLD's control variates
        c_i = rows(s, "c_i", r)                                             # (rows, d)
        b_i = b_i + c - c_i[r.i]
    elif correction == "last":      # Eq. (24), with 1 / (eta K) where the paper prints 1 / (eta E)
        D_last_i = rows(s, "D_last_i", r)                                   # (rows, d)
        b_i = b_i + (D_last_i[r.i] - D_last) / (r.lr * r.K_i)[:, None]

    # client: training
    theta_i = train(rho_i, b_i)                                             # (m, d)
    D_i = theta_i - omega                                                   # (m, d)

    # client: count, memory and control variate. All stays as it was if the training fails
    count_i[r.i] += 1
    if alignment in ("inner", "prox"):
        h_i[r.i] += phi_i[:, None] * D_i                                    # Eq. (7)
    if correction in ("state", "plain"):
        # c_i' - c_i: SCAFFOLD's for plain; gated and divided by eta_0 for state, as released. Over eta_t
        # the gated one would multiply c_i - c by 1 - phi, which is -1 at the end
        step_i, lr = (phi_i[:, None] * D_i, r.lr0) if correction == "state" else (D_i, r.lr)
        dc_i = -c - step_i / (r.K_i * lr)[:, None]                          # (m, d)
        c_i[r.i] += dc_i
    elif correction == "last":
        D_last_i[r.i] = D_i

    # server: it has the cohort's D_i; phi_i too, but for a constant gate; dc_i too, if there is one
    # with `server` it takes the pull off here, which `inner` takes in the client's steps
    pulled_i = D_i - kappa * h if alignment == "server" else D_i            # (m, d)
    sum_D, sum_gated = total(pulled_i, phi_i[:, None] * pulled_i)
    h += sum_gated / r.N                                                    # h = mean_N h_i
    step = sum_D / r.m + h                                                  # (d,)
    # mean_S theta_i + mean_N h_i, as released. Algorithm 1 prints (1/N) sum_S (theta_i + h_i), which scales
    # the model by p each round; Eq. (28) has mean_S (theta_i + h_i)
    omega += step
    if correction in ("state", "plain"):
        c += total(dc_i)[0] / r.N                                           # c = mean_N c_i
    elif correction == "last":
        D_last.copy_(step)

    # for the log of a simulation
    h_norm = h_i[r.i].norm(dim=1) if alignment in ("inner", "prox") else h.norm().expand_as(phi_i)
    log = {"gate": phi_i, "h_norm": h_norm}
    if alignment == "inner":
        log["gain"] = phi_i * r.lr * r.K_i * alpha_i
    elif alignment == "server":
        log["gain"] = r.p * phi_i * kappa
    return log


def check_strength(alpha: Optional[float], kappa: Optional[float], alignment: str, correction: str) -> None:
    """Raise ValueError for an unknown alignment or correction, or a strength that `fedssg` cannot take."""
    if alignment not in ("inner", "server", "prox", "none"):
        raise ValueError(f"alignment {alignment!r}: use inner, server, prox or none")
    if correction not in ("plain", "state", "last", "none"):
        raise ValueError(f"correction {correction!r}: use plain, state, last or none")
    if kappa is not None and alpha is not None:
        raise ValueError("alpha and kappa: two ways to set one strength; give one (forms scaled, light and "
                         "stateless have a kappa)")
    if kappa is not None and (alignment == "prox" or correction == "state"):
        raise ValueError("kappa: would be unstable with alignment prox and with correction state; give alpha "
                         "in its place, or use alignment inner and correction plain")
    if kappa is None and alignment == "server":
        raise ValueError("alignment server: has no alpha; give kappa, and a correction other than state")


def by_size(alpha: float, r: Round) -> Tensor:
    """alpha_i = alpha / size_i, (m,). Raises ValueError if the Round does not tell the sizes."""
    if r.size_i is None:
        raise ValueError("Round.size_i is missing: each client's n_i divided by the mean over all N clients")
    return alpha / r.size_i


def rows(s: State, name: str, r: Round, shape: Optional[tuple] = None) -> Tensor:
    """The per-client rows s[name], (r.num_rows, *shape), by default (d,) each; zeros when first asked for."""
    if name not in s:
        s[name] = s["omega"].new_zeros((r.num_rows, *(s["omega"].shape if shape is None else shape)))
    return s[name]


def total(*x_i: Tensor) -> list[Tensor]:
    """Sum over the cohort, (m, *) -> (*), of each argument: over all processes, in one all-reduce.

    In float64, where sums of m float32 numbers are exact unless they differ by a factor of 2^29 / m. Else the
    number of processes would change a run.
    """
    sums = [x.sum(dim=0, dtype=torch.float64) for x in x_i]
    if dist.is_available() and dist.is_initialized():
        flat = torch.cat([x.reshape(-1) for x in sums])
        dist.all_reduce(flat)
        sums = [part.view_as(x) for part, x in zip(flat.split([x.numel() for x in sums]), sums)]
    return [x.to(like.dtype) for x, like in zip(sums, x_i)]


# ---- the client's SGD ------------------------------------------------------------------------------------

def trainable(model: nn.Module) -> list[Tensor]:
    """The parameters that theta holds, each once. Frozen ones (requires_grad=False) are not among them."""
    return [p for p in model.parameters() if p.requires_grad]


def flatten(model: nn.Module) -> Tensor:
    """A copy of the model's trainable parameters as one vector theta (d,)."""
    if not trainable(model):
        raise ValueError("the model has no trainable parameter (requires_grad)")
    return torch.cat([p.detach().flatten() for p in trainable(model)])


def parts(like: list[Tensor], theta: Tensor) -> list[Tensor]:
    """theta (d,) as views in the shapes of the parameters `like`, as `trainable` gives them."""
    return [part.view(p.shape) for p, part in zip(like, theta.split([p.numel() for p in like]))]


def as_function(model: nn.Module, precision: str = "float32") -> Callable[[Tensor, Tensor], Tensor]:
    """The model as a function (theta (d,), x) -> model(x) with theta as its trainable parameters.

    It holds a copy, so the model may change and stays unchanged. precision: as in `local_sgd`.
    """
    own = copy.deepcopy(model)
    # before the first call, after which a copy that has one module under two names is not what it was
    names, like = zip(*[(name, p) for name, p in own.named_parameters() if p.requires_grad])
    call = functools.partial(functional_call, own)

    def function(theta, x):
        return compute(call, precision, dict(zip(names, parts(like, theta))), x)
    return function


def compute(call, precision, *args):
    """call(*args), its last argument a batch; for `bf16` under torch.autocast, forward and backward."""
    if precision != "bf16":
        return call(*args)
    with torch.autocast(args[-1].device.type, torch.bfloat16, cache_enabled=False):     # it keeps old weights
        return call(*args).float()


def local_sgd(model: nn.Module, omega: Tensor, rho: Tensor, b: Tensor, X: Tensor, Y: Tensor, idx: Tensor,
              w: Tensor, lr: float, weight_decay: float = 0.0, clip: float = math.inf, mode: str = "auto",
              chunk: Optional[int] = None, augment: Optional[Callable] = None, draws: Optional[Tensor] = None,
              compiled: bool = False, criterion: Callable = F.cross_entropy,
              precision: str = "float32") -> tuple[Tensor, Tensor]:
    """K steps of SGD of every client of the cohort, from omega, with the affine term of this file's head:

        g = grad f_i(theta) + rho_i theta + b_i
        theta <- theta - lr (min(1, clip / ||g||) g + weight_decay theta)

    model    must draw no random numbers and keep the samples of a batch apart: `check` in models.py tells
    rho, b   (m,) and (m, d), constant during the round
    X, Y     the data set, (n, ...) each; criterion(model(x), y, reduction="none") gives the losses (B,)
    idx, w   (K, m, B): samples of each step, and 1 for a sample, 0 for padding; a client's own steps first
    mode     `loop`: each client by itself, as many at once as torch has threads (CPU). `vmap`: all clients in
             one batched step (CUDA), `chunk` at once. `auto` picks. compiled: that step by torch.compile
    augment  augment(x, draws) changes a batch of images; draws (K, m, B, ...)
    precision   `bf16`: the model computes under torch.autocast; all else is in float32
    Returns theta_i (m, d), and the sum over each client's steps of the mini-batch's mean loss (m,).
    Raises ValueError for another mode, or `compiled` beside `loop`.
    """
    if mode not in ("auto", "loop", "vmap"):
        raise ValueError(f"mode {mode!r}: use loop, vmap or auto")
    loop = mode == "loop" or (mode == "auto" and not omega.is_cuda)
    if loop and compiled:
        raise ValueError("compiled: works with mode vmap")
    m, filled = idx.shape[1], w.sum(dim=2)                                  # (K, m)  samples in a batch
    w = w / filled.clamp(min=1)[:, :, None]                                 # a batch's loss becomes its mean
    if m == 0:
        return torch.empty_like(b), torch.empty_like(rho)

    def batches(k, j):
        samples = idx[k, j]
        x = X.index_select(0, samples.flatten())                            # on a CPU half the time of X[...]
        x = x.view(*samples.shape, *X.shape[1:])
        return x if augment is None else augment(x, draws[k, j])

    def one(j):     # `loop`: in place on one vector, in which the client's own copy of the model lies
        own, theta, g = copy.deepcopy(model), omega.clone(), torch.empty_like(omega)
        params = trainable(own)
        for p, part, g_part in zip(params, parts(params, theta), parts(params, g)):
            p.data, p.grad = part, g_part
        losses, steps, rho_j = omega.new_zeros(()), slice(K_i[j]), float(rho[j])
        for k, (y, w_k) in enumerate(zip(Y[idx[steps, j]], w[steps, j])):
            g.copy_(b[j])               # the affine term, to which backward() adds the gradient of f_i
            if rho_j:
                g.add_(theta, alpha=rho_j)
            loss = _loss(criterion, compute(own, precision, batches(k, j)), y, w_k)
            loss.backward()
            losses += loss.detach()
            norm = float(g.norm())
            theta.mul_(1 - lr * weight_decay).sub_(g, alpha=lr * (clip / norm if norm > clip else 1.0))
        return theta, losses

    def many(j):    # `vmap`: the clients j, a tensor of indices
        rho_j, b_j = rho[j], b[j]
        theta, losses = omega.expand_as(b_j).clone(), torch.zeros_like(rho_j)
        for x, y, w_k in zip(batches(slice(None), j), Y[idx[:, j]], w[:, j]):
            theta, loss = step(function, criterion, *numbers, theta, rho_j, b_j, x, y, w_k)
            losses = losses + loss
            theta = theta.clone() if compiled else theta        # a CUDA graph writes it anew
        return theta, losses

    if loop:
        K_i = (filled > 0).sum(dim=0).tolist()
        theta_i, loss_i = zip(*_threads(torch.get_num_threads()).map(one, range(m)))
        return torch.stack(theta_i), torch.stack(loss_i)
    function = as_function(model, precision)
    step = torch.compile(_steps, mode="reduce-overhead") if compiled else _steps
    numbers = [omega.new_full((), x) for x in (lr, weight_decay, clip)]     # floats would be compiled in
    theta_i, loss_i = zip(*map(many, torch.arange(m, device=idx.device).split(chunk or m)))
    return torch.cat(theta_i), torch.cat(loss_i)


def _loss(criterion, output, y, w):
    losses = criterion(output, y, reduction="none")
    if losses.shape != w.shape:
        raise ValueError(f"the criterion gives losses of shape {tuple(losses.shape)}, not one a sample")
    return (losses * w).sum()


def _step(function, criterion, lr, weight_decay, clip, theta, rho, b, x, y, w):
    """One step of one client, as a function: (d,) -> (d,), and the loss ()."""
    def loss(theta):
        return _loss(criterion, function(theta, x), y, w)
    g, value = grad_and_value(loss)(theta)
    g = g + rho * theta + b
    scale = (clip / g.norm()).clamp(max=1)
    moved = theta - lr * (scale * g + weight_decay * theta)
    return torch.where(w.sum() > 0, moved, theta), value                    # as it was, if all is padding


def _steps(*args):      # of all clients at once: theta (m, d) and what follows it
    return vmap(functools.partial(_step, *args[:5]))(*args[5:])


@functools.cache
def _threads(n):        # permanent, each limited to one torch thread; new ones would each leave memory behind
    return ThreadPoolExecutor(n, initializer=torch.set_num_threads, initargs=(1,))
