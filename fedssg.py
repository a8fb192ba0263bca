"""FedSSG (arXiv 2509.13895): expectation-gated, history-aware drift alignment for federated learning.

This file stands alone: torch and the standard library. The method is `gate` and `fedssg`, below; the rest is the
client loop it needs. Equation numbers count through the paper and its appendices.

    paper        here              shape     meaning
    N            r.N                         clients
    S^t, m       r.i, r.m          (m,)      the cohort of round t (as indices of rows), its size over all processes
    p            r.p                         participation: m/N, or the sampling probability for Bernoulli cohorts
    t, T         r.t, r.T                    round (from 1), horizon
    E, B         -                           local epochs, batch size; they show up as K_i
    K            r.K_i             (m,)      local steps, E * ceil(n_i / B)
    eta          r.lr, r.lr0                 learning rate of this round, of round 1
    omega        s["omega"]        (d,)      the model sent out
    theta_i      theta_i           (m, d)    what client i returns
    Delta_i      D_i               (m, d)    theta_i - omega
    h_i          s["h_i"]          (rows, d) drift memory; s["h"] (d,) is its mean over all N clients
    -            s["c_i"], s["c"]  (rows, d) control variates, kept as SCAFFOLD does but fed with gated steps; their mean_N
    c_i^{1:t}    s["count_i"]      (rows,)   how often i was sampled, this round included; Algorithm 1's c_i
    phi, xi      phi_i             (m,)      the gate
    n_i          r.n_i, r.size_i   (m,)      sample count, and that divided by the mean over all N clients
    alpha, beta  alpha, beta                 strength of the alignment, Eq. (19); offset of the gate, Algorithm 1.
                                             The alpha of Eq. (6) is gate_scale

In shapes, m counts the cohort's members that this process trains, rows the clients it keeps. A name that ends in _i
has one row per client; one that does not is the server's. A client minimises, by SGD, Eq. (18),

    f_i(theta) + (rho_i / 2) ||theta||^2 + <b_i, theta>        so its gradient is  grad f_i + rho_i theta + b_i

and a method is how it makes (rho, b) and what it does with the result: `train(rho, b)` returns theta_i.
"""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable, Literal, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]                       # everything a method remembers between rounds
Train = Callable[[Tensor, Tensor], Tensor]      # (rho (m,), b (m, d)) -> theta_i (m, d)

# The paper states three different algorithms; README, "Where the paper and the released program disagree".
FORMS = {
    "released": dict(gate_ratio="horizon", gate_shape="identity", beta=1.0, alignment="inner", correction="state"),
    "main": dict(gate_ratio="running", gate_shape="identity", beta=0.0, alignment="prox", correction="none", alpha=1.0),
    "appendix": dict(gate_ratio="horizon", gate_shape="identity", beta=0.0, alignment="inner", correction="last"),
}


def gate(count_i: Tensor, r: "Round", *, ratio: str = "horizon", shape: str = "identity", scale: float = 1.0,
         beta: float = 0.0, eps: float = 1e-6) -> Tensor:
    """The expectation gate phi_i = scale * g(observed / expected participations) + beta; (m,) -> (m,).

    count_i  participations, this round's included: 1 or more
    ratio    `running`: expected p t, Eq. (5); `horizon`: expected p T, xi_i of Algorithm 1; `off`: the ratio is 1, so
             phi_i = scale g(1) + beta
    shape    g = `identity` (the paper's default), `clip` to [0, 1], or `logistic` (its two options, Section 2)
    Raises ValueError for another ratio or shape.
    """
    if ratio == "off":
        ratio_i = torch.ones_like(count_i)
    elif ratio in ("running", "horizon"):
        expected = r.p * (r.t if ratio == "running" else r.T)
        ratio_i = count_i / (expected + eps)                                    # Eq. (5)
    else:
        raise ValueError(f"gate ratio {ratio!r}: use running, horizon or off")
    if shape == "clip":
        ratio_i = ratio_i.clamp(0, 1)
    elif shape == "logistic":
        ratio_i = torch.sigmoid(ratio_i)
    elif shape != "identity":
        raise ValueError(f"gate shape {shape!r}: use identity, clip or logistic")
    return scale * ratio_i + beta                                               # Eq. (6), its alpha is scale; beta: Algorithm 1


def fedssg(s: State, r: "Round", train: Train, *, alpha: float = 0.05,
           gate_ratio: Literal["running", "horizon", "off"] = "horizon",
           gate_shape: Literal["identity", "clip", "logistic"] = "identity",
           gate_scale: float = 1.0, beta: float = 1.0,
           alignment: Literal["inner", "prox", "none"] = "inner",
           correction: Literal["state", "last", "none"] = "state") -> dict:
    """One round of FedSSG; the defaults are FORMS["released"]. Averages plainly over the cohort, as the paper does.

    s       the method's state, changed in place: omega, h, h_i, count_i; c, c_i or D_last, D_last_i
    r       what is known of this round
    train   runs the cohort's clients: (rho, b) -> theta_i
    Returns the cohort's means of phi_i, `gate`, and of ||h_i||, `h_norm`; for `inner` also `gain` (m,), phi_i eta K_i alpha_i:
    its alignment alone multiplies h_i by 1 - gain a participation, so gain must stay below 2.
    Raises ValueError for an unknown gate, alignment or correction.
    """
    omega, h_i, count_i = s["omega"], rows(s, "h_i", r), rows(s, "count_i", r, ())
    h = s.setdefault("h", torch.zeros_like(omega))                              # (d,)   mean_N h_i

    count_i[r.i] += 1
    phi_i = gate(count_i[r.i], r, ratio=gate_ratio, shape=gate_shape, scale=gate_scale, beta=beta)   # (m,)
    alpha_i = alpha / r.size_i                                                  # (m,)

    # alignment: prox is Eqs. (8) and (9), gated; inner is P_i, Eq. (19), which is not. (8) with the inner product (10) would
    # be gated, too: not offered
    rho_i, b_i = torch.zeros_like(phi_i), torch.zeros_like(h_i[r.i])            # (m,), (m, d)
    if alignment == "prox":         # phi_i alpha_i / 2 ||theta - (omega - h_i)||^2
        rho_i = alpha_i * phi_i
        b_i = rho_i[:, None] * (h_i[r.i] - omega)
    elif alignment == "inner":      # alpha_i <theta - (omega - h_i), h_i>
        b_i = alpha_i[:, None] * h_i[r.i]
    elif alignment != "none":
        raise ValueError(f"alignment {alignment!r}: use inner, prox or none")

    # gradient correction
    if correction == "state":       # released program: SCAFFOLD's control variates, fed with the gated step
        c_i, c = rows(s, "c_i", r), s.setdefault("c", torch.zeros_like(omega))
        b_i = b_i + c - c_i[r.i]
    elif correction == "last":      # G_i, Eq. (23), with 1 / (eta K) where the paper prints 1 / (eta E)
        D_last_i, D_last = rows(s, "D_last_i", r), s.setdefault("D_last", torch.zeros_like(omega))
        b_i = b_i + (D_last_i[r.i] - D_last) / (r.lr * r.K_i)[:, None]
    elif correction != "none":
        raise ValueError(f"correction {correction!r}: use state, last or none")

    theta_i = train(rho_i, b_i)                                                 # (m, d)
    D_i = theta_i - omega                                                       # (m, d)
    gated_D_i = phi_i[:, None] * D_i                                            # (m, d)
    h_i[r.i] += gated_D_i                                                       # Eq. (7)

    sums_i = [D_i, gated_D_i, phi_i, h_i[r.i].norm(dim=1)]
    if correction == "state":       # eta_0: c_i - c is multiplied by 1 - phi eta_t / eta_0; with eta_t, by 1 - phi, -1 at the end
        dc_i = -c - gated_D_i / (r.K_i * r.lr0)[:, None]                        # (m, d)  c_i' - c_i
        c_i[r.i] += dc_i
        sums_i.append(dc_i)
    sum_D, sum_gated, sum_phi, sum_norm, *sum_dc = total(*sums_i)
    if sum_dc:
        c += sum_dc[0] / r.N                                                    # c = mean_N c_i
    h += sum_gated / r.N                                                        # h = mean_N h_i
    step = sum_D / r.m + h                                                      # (d,)
    omega += step                   # mean_S theta_i + mean_N h_i, as released. Algorithm 1 prints (1/N) sum_S (theta_i + h_i),
    #                                 which scales the model by p each round; Eq. (28) has mean_S (theta_i + h_i)
    if correction == "last":
        D_last_i[r.i] = D_i
        D_last.copy_(step)

    log = {"gate": sum_phi / r.m, "h_norm": sum_norm / r.m}
    if alignment == "inner":
        log["gain"] = phi_i * r.lr * r.K_i * alpha_i                            # (m,)
    return log


# ---- what a method may know and use ---------------------------------------------------------------------------

@dataclass(frozen=True)
class Round:
    """What a method may know of round t; the symbols are those of this file's head. Tensors have one entry per cohort
    member that this process trains and are, but for i, of omega's dtype.
    """
    t: int
    T: int
    N: int
    m: int              # over all processes
    p: float
    lr: float
    lr0: float
    num_rows: int       # clients that this process keeps rows of
    i: Tensor           # (m,) int64: which of them are in the cohort
    K_i: Tensor         # (m,)
    n_i: Tensor         # (m,)
    size_i: Tensor      # (m,)
    labels_i: Tensor    # (m, classes) label counts


def rows(s: State, name: str, r: Round, shape: Optional[tuple] = None) -> Tensor:
    """The per-client rows s[name], (r.num_rows, *shape), shape (d,) if not given; zeros when first asked for."""
    if name not in s:
        s[name] = s["omega"].new_zeros((r.num_rows, *(s["omega"].shape if shape is None else shape)))
    return s[name]


def total(*x_i: Tensor) -> list[Tensor]:
    """Sum over the cohort, (m, *) -> (*), of each argument: over all processes, in one all-reduce.

    In float64, where a sum of m float32 numbers is exact unless the largest is more than 2^29 / m times the smallest:
    so it does not depend on their order, nor the run on the number of processes.
    """
    sums = [x.sum(dim=0, dtype=torch.float64) for x in x_i]
    if dist.is_available() and dist.is_initialized():
        flat = torch.cat([x.reshape(-1) for x in sums])
        dist.all_reduce(flat)
        sums = [part.view_as(x) for part, x in zip(flat.split([x.numel() for x in sums]), sums)]
    return [x.to(like.dtype) for x, like in zip(sums, x_i)]


# ---- the local solver -----------------------------------------------------------------------------------------

def flatten(model: torch.nn.Module) -> tuple[Tensor, Callable]:
    """The model's parameters as one vector (d,), and loss(theta, x, y, w): the cross-entropies summed with weights w.

    loss.logits(theta, x) is the model itself. loss.private(theta, g) is loss(theta, ...) for one thread: a function of
    (x, y, w) whose backward() adds the gradient to g (d,). The caller's model is never touched.
    Raises ValueError if it has buffers (batch norm's running statistics): they are no part of theta.
    """
    if next(model.buffers(), None) is not None:
        raise ValueError("the model has buffers (batch norm?): no method here says how clients share running statistics; "
                         "use group norm, or no norm")
    params = list(model.parameters())
    index = {id(p): j for j, p in enumerate(params)}
    # name -> index of its parameter. Each module by one name: functional_call does not put back one that it meets by two
    named = {name: index[id(p)] for path, module in model.named_modules()
             for name, p in module.named_parameters(path, recurse=False, remove_duplicate=False)}
    shapes, sizes = [p.shape for p in params], [p.numel() for p in params]

    def parts(theta):
        return [part.view(shape) for part, shape in zip(theta.split(sizes), shapes)]

    def logits(theta, x):
        own = parts(theta)
        return torch.func.functional_call(model, {name: own[j] for name, j in named.items()}, (x,), tie_weights=False)

    def loss(theta, x, y, w):
        return (F.cross_entropy(logits(theta, x), y, reduction="none") * w).sum()

    def private(theta, g):
        # functional_call swaps the parameters of the one model, which threads must not do at once: so a copy of the
        # model, whose parameters lie in theta, and their gradients in g
        own = [torch.nn.Parameter(part) for part in parts(theta)]
        for p, part in zip(own, parts(g)):
            p.grad = part
        copied = copy.deepcopy(model, {id(p): mine for p, mine in zip(params, own)})
        if any(p is not mine for p, mine in zip(copied.parameters(), own)):
            raise ValueError("copy.deepcopy of the model makes parameters of its own (a ScriptModule, a __deepcopy__ without "
                             "memo?): use mode vmap, or a plain module")
        return lambda x, y, w: (F.cross_entropy(copied(x), y, reduction="none") * w).sum()

    loss.logits, loss.private = logits, private
    return torch.cat([p.detach().reshape(-1) for p in params]), loss


def local_sgd(loss: Callable, omega: Tensor, rho: Tensor, b: Tensor, X: Tensor, Y: Tensor, idx: Tensor, w: Tensor,
              lr: float, weight_decay: float = 0.0, clip: float = float("inf"), mode: str = "auto",
              chunk: Optional[int] = None, augment: Optional[Callable] = None, draws: Optional[Tensor] = None,
              compiled: int = 0) -> tuple[Tensor, Tensor]:
    """K steps of SGD of every client of the cohort, each from omega, with the affine term of this file's head:

        g = grad f_i(theta) + rho_i theta + b_i;   theta <- theta - lr (min(1, clip / ||g||) g + weight_decay theta)

    loss     loss(theta (d,), x, y, w) -> scalar, the samples' losses summed with weights w. `loop` calls it from several
             threads at once, or loss.private if it has that, see `flatten`
    rho, b   (m,) and (m, d), constant during the round
    X, Y     the data set, (n, ...) and (n,) int64; idx, w (K, m, B): the samples of each step, and 1 for a sample, 0 for
             padding. A client's own steps come first; a step that is all padding leaves it unchanged
    lr, weight_decay, clip   above 0, 0 or more, above 0; the same for all clients. The paper's program: 0.1, 1e-3, 10
    mode     `loop`: each client by itself, as many at once as torch has threads (CPU); `vmap`: all clients in one
             batched step (CUDA), at most `chunk` at once; `auto` picks. The same result to rounding
    augment  augment(x, draws) changes a batch of images; draws (K, m, B, ...)
    compiled 0: no. c: `vmap`'s step by torch.compile, once per shape, replayed as a CUDA graph; the cohort is filled up to
             a multiple of c, so that cohorts of changing size need few compilations
    Returns theta_i (m, d), detached, and the sum over each client's steps of the mini-batch's mean loss (m,).
    Raises ValueError for another mode.
    """
    if mode == "auto":
        mode = "vmap" if omega.is_cuda else "loop"
    if mode not in ("loop", "vmap"):
        raise ValueError(f"mode {mode!r}: use loop, vmap or auto")
    m = idx.shape[1]
    if m == 0:
        return torch.empty_like(b), torch.empty_like(rho)
    filled = w.sum(dim=2)                                                       # (K, m)  samples in a batch
    w = w / filled.clamp(min=1)[:, :, None]                                     # so that a batch's loss is its mean

    def batch(k, j):
        i = idx[k, j]
        x = X.index_select(0, i.flatten()).view(*i.shape, *X.shape[1:])         # on a CPU half the time of X[i]
        return x if augment is None else augment(x, draws[k, j]), Y[i], w[k, j]

    if mode == "loop":
        steps, rho = (filled > 0).sum(dim=0).tolist(), rho.tolist()

        def client(j):
            return _one_client(loss, omega, rho[j], b[j], lambda k: batch(k, j), steps[j], lr, weight_decay, clip)
        theta_i, loss_i = zip(*_threads(torch.get_num_threads()).map(client, range(m)))
        return torch.stack(theta_i), torch.stack(loss_i)

    step, fill = (_compiled_step(), compiled) if compiled else (_step, 1)
    if chunk:
        fill = min(fill, chunk)
        chunk -= chunk % fill               # what is filled up to, too, is no more than was asked for
    chunk, theta_i, loss_i = chunk or m, [], []
    lr, weight_decay, clip = (omega.new_full((), x) for x in (lr, weight_decay, clip))      # numbers would be compiled in
    for start in range(0, m, chunk):
        mine = min(chunk, m - start)
        j = torch.arange(start, start + -(-mine // fill) * fill, device=idx.device)
        j = j.clamp(max=m - 1)                                                  # filled up with the last client
        x, y, w_j = batch(slice(None), j)                                       # (K, m, B, ...)
        rho_j, b_j, theta, losses = rho[j], b[j], omega.repeat(len(j), 1), omega.new_zeros(len(j))
        for k in range(len(idx)):
            theta, value = step(loss, theta, rho_j, b_j, x[k], y[k], w_j[k], lr, weight_decay, clip)
            losses = losses + value
            if compiled:
                theta = theta.clone()           # the next replay writes where this one did
        theta_i.append(theta[:mine])
        loss_i.append(losses[:mine])
    return torch.cat(theta_i), torch.cat(loss_i)


def _one_client(loss, omega, rho, b, batch, steps, lr, weight_decay, clip):
    """`loop`: the steps of one client, in place on one vector."""
    theta, g = omega.clone(), torch.empty_like(omega)                           # (d,), (d,)
    if hasattr(loss, "private"):
        loss_here = loss.private(theta, g)
    else:
        leaf = theta.detach().requires_grad_()      # the same memory, seen by autograd
        leaf.grad = g
        loss_here = functools.partial(loss, leaf)
    losses = omega.new_zeros(())
    for k in range(steps):
        torch.add(b, theta, alpha=rho, out=g)       # the affine term; backward() adds the gradient of f_i to it
        value = loss_here(*batch(k))
        value.backward()
        losses += value.detach()
        norm = float(g.norm())
        scale = clip / norm if norm > clip else 1.0
        theta.mul_(1 - lr * weight_decay).sub_(g, alpha=lr * scale)
    return theta, losses


def _step(loss, theta, rho, b, x, y, w, lr, weight_decay, clip):
    """`vmap`: one step of all clients; (m, d) -> (m, d), and the losses (m,)."""
    g, value = torch.func.vmap(torch.func.grad_and_value(loss))(theta, x, y, w)
    g = g + rho[:, None] * theta + b
    scale = (clip / g.norm(dim=1, keepdim=True)).clamp(max=1)                   # (m, 1)
    moved = theta - lr * (scale * g + weight_decay * theta)
    active = w.sum(dim=1) > 0                                                   # (m,)  not all padding
    return torch.where(active[:, None], moved, theta), torch.where(active, value, torch.zeros_like(value))


@functools.cache
def _threads(n):
    """n threads that stay (new ones would each leave memory behind); torch itself uses one in each."""
    return ThreadPoolExecutor(n, initializer=torch.set_num_threads, initargs=(1,))


@functools.cache
def _compiled_step():
    return torch.compile(_step, mode="reduce-overhead")
