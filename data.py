"""Data: how clients share a data set, who takes part, in which batches; and, last, the data sets themselves.

Everything random in the project comes from `rng(seed, purpose, *keys)`. So split, cohorts, batches and
augmentation are the same for every method, device and number of processes; nothing random needs saving.
"""

import math
import os
import socket
import warnings
import zipfile
from textwrap import shorten

import numpy as np
import torch
from torch.nn import functional as F

DATASETS = ("mnist", "fashionmnist", "emnist", "cifar10", "cifar100", "synthetic")
PARTITIONS = ("iid", "dirichlet", "dirichlet-class", "shards")
SAMPLINGS = ("fixed", "bernoulli")
PURPOSES = {"split": 0, "model": 1, "cohort": 2, "batch": 3, "augment": 4, "synthetic": 5}
PAD = 4        # pixels by which an augmented image may move
TIMEOUT = 20  # seconds that a server may be silent during a download


def rng(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """One stream for each seed below 2**32, purpose and keys: none, the round, or round and client."""
    return np.random.default_rng([seed, PURPOSES[purpose], *keys])


def partition(y, num_clients: int, how: str, seed: int, *, dir_alpha: float = 0.3,
              unbalanced_sigma: float = 0.0, min_samples: int = 1, shards: int = 2) -> list:
    """Split samples over clients: a list of `num_clients` disjoint int64 index arrays into y.

    y: (n,) labels from 0, numpy or tensor. `how`:
      iid              a uniform split; every client floor(n / N) samples
      dirichlet        floor(n / N) samples each, label proportions ~ Dirichlet(dir_alpha * 1), renormalised
                       over the classes left when one is used up (FedDyn, FedDC, FedSSG)
      dirichlet-class  each class is spread by Dirichlet(dir_alpha * 1) over the clients below n / N samples,
                       redrawn until all have `min_samples`; drops no sample (NIID-Bench, Li et al. 2022)
      shards           sorted by label, cut into N * `shards` equal shards, `shards` of them a client (FedAvg)
    Equal sizes drop a random remainder. `unbalanced_sigma` > 0 (iid, dirichlet): sizes are min_samples plus a
    share ~ exp(sigma * normal) of the rest. Raises ValueError if `how` is unknown or the split impossible."""
    y = np.asarray(y.cpu() if isinstance(y, torch.Tensor) else y)
    n, floor, g = len(y), max(min_samples, 1), rng(seed, "split")
    if how not in PARTITIONS:
        raise ValueError(f"partition {how!r}: choose {', '.join(PARTITIONS)}")
    size = n // (num_clients * shards) * shards if how == "shards" else n // num_clients
    if size < floor:
        raise ValueError(f"{num_clients} clients, {how}: {size} samples each, minimum {floor}; use fewer")
    perm = g.permutation(n)
    if how == "shards":
        perm = perm[:num_clients * size]  # dropped before sorting, so that no class loses more than others
        perm = perm[np.argsort(y[perm], kind="stable")].reshape(num_clients * shards, -1)
        return list(perm[g.permutation(len(perm))].reshape(num_clients, size))
    sizes = np.full(num_clients, size)
    if unbalanced_sigma:
        z = unbalanced_sigma * g.standard_normal(num_clients)
        z = np.exp(z - z.max())
        sizes = floor + ((n - num_clients * floor) * (z / z.sum())).astype(np.int64)
    if how == "iid":
        return np.split(perm, np.cumsum(sizes))[:num_clients]
    if how == "dirichlet":
        counts = _counts_by_client(np.bincount(y), sizes, dir_alpha, g)
    else:
        counts = _counts_by_class(np.bincount(y), num_clients, dir_alpha, min_samples, g)
    # counts[i, c] samples of class c go to client i; row N, if there, is dropped
    perm = perm[np.argsort(y[perm], kind="stable")]  # class after class, shuffled within
    owner = np.repeat(np.tile(np.arange(len(counts)), counts.shape[1]), counts.T.ravel())
    perm = perm[np.argsort(owner, kind="stable")]
    return np.split(perm, np.cumsum(counts.sum(1)))[:num_clients]


def _counts_by_client(totals, sizes, alpha, g):
    """(N + 1, C) counts. Client i draws sizes[i] labels without replacement; row N is what nobody drew."""
    left, counts = totals.copy(), np.zeros((len(sizes), len(totals)), np.int64)
    for i, size in enumerate(sizes):
        p = g.dirichlet(np.full(len(totals), alpha))
        while (need := size - counts[i].sum()) > 0:  # each pass but the last uses up a class, so it ends
            p = _among(p, left > 0, alpha, g)
            q = p if p.sum() > 0 else left  # numpy's draw for a giant alpha is no number: all classes alike
            drawn = np.minimum(g.multinomial(need, q / q.sum()), left)
            counts[i] += drawn
            left -= drawn
    return np.vstack([counts, left])


def _among(p, room, alpha, g):
    """p ~ Dirichlet(alpha * 1), set to 0 where there is no room; the caller renormalises it. For small alpha
    numpy rounds most of p to 0. If all that has room was rounded, its shares are drawn again, since a part of
    a Dirichlet, renormalised, is a Dirichlet of its own, however small the part was."""
    p = p * room
    if alpha < 1 and p.sum() == 0 and room.any():
        p[room] = g.dirichlet(np.full(room.sum(), alpha))
    return p


def _counts_by_class(totals, num_clients, alpha, min_samples, g):
    """(N, C) counts: every class is cut up by its own Dirichlet over clients."""
    for _ in range(1000):
        counts = np.zeros((num_clients, len(totals)), np.int64)
        for c, total in enumerate(totals):
            room = counts.sum(1) * num_clients < totals.sum()
            p = _among(g.dirichlet(np.full(num_clients, alpha)), room, alpha, g)
            p = p / p.sum() if p.sum() > 0 else room / max(room.sum(), 1)
            cuts = np.rint(np.cumsum(p)[:-1] * total).astype(np.int64)
            counts[:, c] = np.diff(cuts, prepend=0, append=total)
        if counts.sum(1).min() >= min_samples:
            return counts
    raise ValueError(f"{num_clients} clients, dirichlet-class, dir_alpha {alpha}: no draw in 1000 gave each "
                     f"the minimum of {min_samples}; use fewer clients, a larger alpha or a lower minimum")


def cohort_size(num_clients: int, participation: float) -> int:
    """max(1, p N), rounded half up; the 1e-9 makes 0.29 * 100 = 29."""
    return max(1, math.floor(participation * num_clients + 0.5 + 1e-9))


def rate_in_force(num_clients: int, participation: float, how: str) -> float:
    """The probability that a client takes part in a round of `sample_clients`. fixed: cohort_size / N;
    bernoulli: p / (1 - (1 - p)^N) with p = `participation`, because empty cohorts are drawn again."""
    p, N = participation, num_clients
    if how == "fixed":
        return cohort_size(N, p) / N
    if how != "bernoulli":
        raise ValueError(f"sampling {how!r}: choose {', '.join(SAMPLINGS)}")
    return p / -math.expm1(N * math.log1p(-p)) if p < 1 else 1.0  # written so that it is exact for small p


def sample_clients(num_clients: int, participation: float, how: str, seed: int, t: int) -> np.ndarray:
    """Sorted int64 indices of the cohort of round t. fixed: `cohort_size` clients without replacement;
    bernoulli: each client with probability `participation` in (0, 1], drawn again while nobody comes."""
    g = rng(seed, "cohort", t)
    if how == "fixed":
        return np.sort(g.choice(num_clients, cohort_size(num_clients, participation), replace=False))
    if how != "bernoulli" or participation * num_clients < 1e-3:  # thousands of draws until somebody comes
        raise ValueError(f"sampling {how!r}, share {participation}: use fixed, or bernoulli from 0.001 / N")
    while True:
        chosen = np.flatnonzero(g.random(num_clients) < participation)
        if len(chosen):
            return chosen


def schedule(shares, clients, seed: int, t: int, epochs: int, batch_size: int) -> tuple:
    """Mini-batches of round t for `clients` (m of them, any subset, also none) -> (idx, w, K_i).

    shares: the index arrays of all clients. K_i (m,) int64: epochs * ceil(n_i / B) steps, B = min(batch_size,
    largest n_i of all clients). idx (K, m, B) int64, K = max K_i: samples, in a new order each epoch. w
    (K, m, B) float32: 1, or 0 for padding (idx 0) in an epoch's last, smaller batch and after K_i. What a
    client gets depends on (seed, t, client) alone."""
    n_i = np.array([len(shares[i]) for i in clients], np.int64)
    B = min(batch_size, max(map(len, shares)))  # the same for any clients: sums over a batch round alike
    per_epoch = -(-n_i // B)
    K_i = epochs * per_epoch
    idx = np.full((K_i.max(initial=0), len(n_i), B), -1, np.int64)  # -1: padding
    for j, i in enumerate(clients):
        order = rng(seed, "batch", t, i).random((epochs, n_i[j])).argsort(1)
        plan = np.full((epochs, per_epoch[j] * B), -1, np.int64)
        plan[:, :n_i[j]] = np.asarray(shares[i])[order]
        idx[:K_i[j], j] = plan.reshape(-1, B)
    return idx.clip(0), (idx >= 0).astype(np.float32), K_i


def augment_draws(clients, K_i, w, seed: int, t: int) -> np.ndarray:
    """(K, m, B, 3) int64 for `augment`: flip, 1 with probability 1/2; dy and dx, with probability 1/2 uniform
    in 0..8, else 4 and 4. clients, K_i, w: as given to and by `schedule`. A client draws for its own K_i
    steps of its own batch size, so others do not change its draws; the rest is (0, 4, 4): unchanged."""
    draws = np.zeros((*w.shape, 3), np.int64) + (0, PAD, PAD)
    for j, i in enumerate(clients):
        if K_i[j]:
            g, shape = rng(seed, "augment", t, i), (K_i[j], int(w[0, j].sum()))
            flip, move = g.integers(2, size=(2, *shape))
            shift = np.where(move[..., None], g.integers(2 * PAD + 1, size=(*shape, 2)), PAD)
            draws[:K_i[j], j, :shape[1]] = np.concatenate([flip[..., None], shift], -1)
    return draws


def augment(x: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Flip left-right, pad by 4 with 0 (in normalised units) and crop at (dy, dx), by one gather.
    x: (..., C, H, W); draws: (..., 3) int64 on the same device, same leading sizes. Returns x's shape."""
    H, W = x.shape[-2:]
    flip, dy, dx = (draws.reshape(-1, 3)[:, k, None] for k in range(3))
    columns = torch.arange(W, device=x.device) + dx  # (n, W), in the padded image
    columns = torch.where(flip == 1, W + 2 * PAD - 1 - columns, columns)
    rows = torch.arange(H, device=x.device) + dy
    index = (rows[:, :, None] * (W + 2 * PAD) + columns[:, None]).flatten(1)  # (n, H * W)
    padded = F.pad(x.reshape(-1, *x.shape[-3:]), (PAD,) * 4).flatten(2)
    return padded.gather(2, index[:, None].expand(-1, padded.shape[1], -1)).view(x.shape)


# ---- loading ----

def load(name: str, data_dir: str = "data", device="cpu", *, letters: int = 10) -> tuple:
    """Return (x_train, y_train, x_test, y_test, classes), whole sets on `device`.

    x: (n, channels, H, W), or (n, features) from an .npz of plain vectors; default dtype. y: (n,) int64.
    Bytes are divided by 255, then normalised: MNIST by 0.1307/0.3081, the others by mean and std per channel
    of the training set. Floats stay as they are. `name` may be the path of your own .npz: see `_read_npz`.
    `emnist` is the letters split, its first `letters` (1..26) letters. `data_dir` is laid out as torchvision
    does. Missing files are downloaded, by one process before others load.
    Raises ValueError (unknown name, damage) or FileNotFoundError (no data, no download), one line each."""
    own = name.endswith(".npz")
    if not own and name not in DATASETS:
        raise ValueError(f"data set {name!r}: choose {', '.join(DATASETS)}, or the path of an .npz file")
    path = os.path.expanduser(name if own else data_dir)
    try:
        sets, classes = (_synthetic() if name == "synthetic" else _read_npz(path) if own else
                         _read_torchvision(name, path, letters))
    except (FileNotFoundError, PermissionError, IsADirectoryError, MemoryError):
        raise
    except Exception as error:  # a damaged file makes torchvision, numpy and zipfile raise almost anything
        remedy = "save plain numbers by numpy.savez" if own else f"delete {name}'s files to fetch them again"
        raise ValueError(f"{path}: {shorten(str(error) or repr(error), 200)}; {remedy}") from None
    (x_train, y_train), (x_test, y_test) = sets
    x_train, x_test = (x.contiguous().to(device).to(torch.get_default_dtype()) for x in (x_train, x_test))
    if sets[0][0].dtype == torch.uint8:
        x_train, x_test = x_train.div_(255), x_test.div_(255)
        axes = [0, 1] if x_train.dim() == 2 else [0, 2, 3]  # of plain vectors: all entries
        std, mean = torch.std_mean(x_train, dim=axes, correction=0, keepdim=True)
        std[std == 0] = 1  # a constant channel
        if name == "mnist":
            mean, std = 0.1307, 0.3081
        x_train, x_test = x_train.sub_(mean).div_(std), x_test.sub_(mean).div_(std)
    return x_train, y_train.to(device), x_test, y_test.to(device), classes


def _read_torchvision(name, root, letters):
    """(sets, classes) as `_checked` returns them, of files in torchvision's layout, downloaded if missing.
    torchvision checks the md5 of archives before it unpacks, and of CIFAR's files before it reads them."""
    from torchvision import datasets as tv  # here, because all the rest runs without it
    kind = tv.FashionMNIST if name == "fashionmnist" else getattr(tv, name.upper())
    classes = {"emnist": 26, "cifar100": 100}.get(name, 10)
    if name.startswith("cifar"):
        folder = os.path.join(root, kind.base_folder)
        files = [file for file, _ in kind.train_list + kind.test_list] + [kind.meta["filename"]]
    else:
        folder = os.path.join(root, kind.__name__, "raw")
        parts = ("emnist-letters-train", "emnist-letters-test") if name == "emnist" else ("train", "t10k")
        files = [f"{part}-{what}-ubyte" for part in parts for what in ("images-idx3", "labels-idx1")]
    missing = [file for file in files if not os.path.isfile(os.path.join(folder, file))]
    options = {"split": "letters"} if name == "emnist" else {}
    if missing:
        timeout = socket.getdefaulttimeout()
        socket.setdefaulttimeout(TIMEOUT)  # torchvision sets none, and would wait for ever
        try:
            kind(root, download=True, **options)
        except Exception as error:
            raise FileNotFoundError(
                f"{name}: the download failed ({shorten(str(error) or repr(error), 300)}); try again, or put "
                f"{', '.join(missing)} into {folder}, unpacked, or name another folder by --data-dir, or use "
                "--dataset synthetic") from None
        finally:
            socket.setdefaulttimeout(timeout)
    sets = [kind(root, train=train, **options) for train in (True, False)]
    if name != "emnist":
        return _checked([(s.data, s.targets) for s in sets], classes)
    sets, _ = _checked([(s.data.mT, s.targets - 1) for s in sets], classes)  # stored by columns, from 1
    return [(x[y < letters], y[y < letters]) for x, y in sets], letters


def _read_npz(path):
    """(sets, classes) of your own data: x_train, y_train, x_test, y_test in an .npz file. Never unpickles.
    x: (n, H, W), (n, C, H, W), (n, H, W, C) if the last axis is 1 or 3, or plain vectors (n, features);
    uint8, or floats, which stay as they are. y: (n,) integers 0..classes-1, told by the training set."""
    zipfile.ZipFile(path).close()  # np.load takes what is no zip file for a pickle, and says so
    with np.load(path, allow_pickle=False) as file:
        sets, classes = _checked([(file[f"x_{part}"], file[f"y_{part}"]) for part in ("train", "test")])
    x, y = sets[0]
    if classes > len(y):  # a stray marker such as 2**31 - 1 would ask for a giant output layer
        raise ValueError(f"{classes} classes, {len(y)} samples: number the classes without gaps")
    if x.is_floating_point() and (size := x.abs().max()) > 20:
        warnings.warn(f"{path}: x_train reaches {size:.0f}, as raw images do; save it as uint8, or scale it")
    if y.min() > 0:
        warnings.warn(f"{path}: no label in y_train is 0, so that class is empty; number the labels from 0")
    return sets, classes


def _checked(arrays, classes=None):
    """([(x (n, C, H, W) or (n, features), y (n,) int64) of the training set, same of the test set], classes).
    arrays: x and y of both, numpy or torch. Raises ValueError if they cannot be data of so many classes."""
    sets = []
    for part, (x, y) in zip(("train", "test"), arrays):
        x, y = np.asarray(x), np.asarray(y)
        if not (x.dtype == np.uint8 or x.dtype.kind == "f") or x.ndim not in (2, 3, 4):
            raise ValueError(f"x_{part} is {x.dtype} {x.shape}, not uint8 or float of 2, 3 or 4 axes")
        if y.dtype.kind not in "iu" or y.ndim != 1 or len(x) != len(y) or x.size == 0:
            raise ValueError(f"y_{part} is {y.dtype} {y.shape}, not one integer for each x of {x.shape}")
        if x.ndim == 4 and x.shape[3] in (1, 3):
            x = x.transpose(0, 3, 1, 2)
        x = x[:, None] if x.ndim == 3 else x
        x = torch.from_numpy(x.astype(x.dtype.newbyteorder("=")))  # torch knows only the native byte order
        x = x.to(torch.get_default_dtype()) if x.is_floating_point() else x
        if sets and (x.shape[1:] != sets[0][0].shape[1:] or x.dtype != sets[0][0].dtype):
            raise ValueError("x_train and x_test differ in shape or dtype")
        if not x.isfinite().all():
            raise ValueError(f"x_{part} holds NaN or infinite values")
        classes = classes or 1 + int(y.max())  # None: told by the training set, which comes first
        if y.min() < 0 or y.max() >= classes:
            raise ValueError(f"y_{part} holds labels from {y.min()} to {y.max()}, not 0 to {classes - 1}")
        sets.append((x, torch.from_numpy(y.astype(np.int64))))
    return sets, classes


def _synthetic(prototypes=4, noise=1.5, shift=2):
    """Ten classes of 28 x 28 images, 10 000 for training and 2 000 for testing, the same for every seed.
    An image is a background common to all, plus one of `prototypes` smooth random patterns of its class,
    moved by up to `shift` pixels each way and times a gain of either sign and size 0.5 to 1.5, plus white
    noise. As the sign is random, all classes have the same mean: a linear model learns almost nothing."""
    g, n, side = rng(0, "synthetic"), 12_000, 28 + 2 * shift
    smooth = torch.from_numpy(g.standard_normal((10 * prototypes + 1, 1, 7, 7), dtype=np.float32))
    smooth = F.interpolate(smooth, (side, side), mode="bicubic", align_corners=True)[:, 0].numpy()
    y = g.permutation(n) % 10
    kind = y * prototypes + g.integers(prototypes, size=n)
    dy, dx = g.integers(2 * shift + 1, size=(2, n, 1, 1))
    gain = g.uniform(0.5, 1.5, (n, 1, 1)) * g.choice([-1.0, 1.0], (n, 1, 1))
    rows, columns = np.arange(28)[:, None] + dy, np.arange(28) + dx
    x = smooth[kind[:, None, None], rows, columns] * gain.astype(np.float32)
    x += smooth[-1, shift:-shift, shift:-shift]
    x += noise * g.standard_normal(x.shape, dtype=np.float32)
    x, y = torch.from_numpy((x - x[:10_000].mean()) / x[:10_000].std())[:, None], torch.from_numpy(y)
    return [(x[:10_000], y[:10_000]), (x[10_000:], y[10_000:])], 10
