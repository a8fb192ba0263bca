"""Data: whole data sets as tensors, how clients share them, who takes part, and in which batches.

Everything random in the project comes from `rng(seed, purpose, *keys)`. So split, cohorts, batches and
augmentation are the same for every method, device and number of processes; nothing random needs saving.
"""

import contextlib
import math
import os
import threading
import urllib.request
import zipfile

import numpy as np
import torch
from torch.nn import functional as F
from torchvision import datasets as tv

TORCHVISION = {"mnist": tv.MNIST, "fashionmnist": tv.FashionMNIST, "emnist": tv.EMNIST,
               "cifar10": tv.CIFAR10, "cifar100": tv.CIFAR100}
DATASETS = (*TORCHVISION, "synthetic")
PARTITIONS = ("iid", "dirichlet", "dirichlet-class", "shards")
SAMPLINGS = ("fixed", "bernoulli")
PURPOSES = {"split": 0, "model": 1, "cohort": 2, "batch": 3, "augment": 4, "synthetic": 5}
PAD = 4  # pixels by which an augmented image may move


def rng(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """An independent stream for each (seed, purpose, keys); keys: nothing, the round, or round and client."""
    if not 0 <= seed < 2**32:  # numpy would spread a longer seed over the place of `purpose`
        raise ValueError(f"seed {seed}: use an integer from 0 to 2**32 - 1")
    return np.random.default_rng([seed, PURPOSES[purpose], *keys])


# ---- data sets ----

def load(name: str, data_dir: str = "data", device="cpu", *, letters: int = 10) -> tuple:
    """Return (x_train, y_train, x_test, y_test, classes), whole sets on `device`.

    x: (n, channels, H, W), or (n, features) from an .npz of plain vectors; default dtype. y: (n,) int64 from 0. Bytes
    are divided by 255, then normalised: MNIST by 0.1307/0.3081, the others by mean and std per channel of the training
    set; floats stay as they are. `name` may be the path of one's own .npz file, see `_read_npz`. `emnist` is the
    letters split, its first `letters` (1..26) letters. `data_dir` is laid out as torchvision does; missing files are
    downloaded: by one process, before others load.
    Raises ValueError (unknown name, damaged file) or FileNotFoundError (no data, no download), one line each.
    """
    if name not in DATASETS and not name.endswith(".npz"):
        raise ValueError(f"data set {name!r}: choose {', '.join(DATASETS)}, or the path of an .npz file")
    if not 1 <= letters <= 26:
        raise ValueError(f"letters {letters}: choose 1 to 26")
    if name == "synthetic":
        sets, classes = _synthetic(), 10
    elif name in TORCHVISION:
        sets, classes = _read(name, os.path.expanduser(data_dir), letters)
    else:
        sets, classes = _read_npz(os.path.expanduser(name))
    (x_train, y_train), (x_test, y_test) = sets
    is_bytes, dtype = x_train.dtype == torch.uint8, torch.get_default_dtype()
    x_train, x_test = (x.contiguous().to(device).to(dtype) for x in (x_train, x_test))
    if is_bytes:
        x_train, x_test = x_train.div_(255), x_test.div_(255)
        axes = [0, 1] if x_train.dim() == 2 else [0, *range(2, x_train.dim())]  # plain vectors: of all entries
        std, mean = torch.std_mean(x_train, dim=axes, correction=0, keepdim=True)
        std[std == 0] = 1  # a constant channel
        if name == "mnist":
            mean, std = 0.1307, 0.3081
        x_train, x_test = x_train.sub_(mean).div_(std), x_test.sub_(mean).div_(std)
    return x_train, y_train.to(device), x_test, y_test.to(device), classes


def _files(name):
    """The files of a data set, relative to data_dir, as torchvision lays them out."""
    kind = TORCHVISION[name]
    if name.startswith("cifar"):
        files = [file for file, _ in kind.train_list + kind.test_list] + [kind.meta["filename"]]
        return [f"{kind.base_folder}/{file}" for file in files]
    parts = ("emnist-letters-train", "emnist-letters-test") if name == "emnist" else ("train", "t10k")
    what = ("images-idx3-ubyte", "labels-idx1-ubyte")
    return [f"{kind.__name__}/raw/{a}-{b}" for a in parts for b in what]


def _reachable(url, seconds=8.0):
    """Whether `url` can be had. Ends in time even if a name look-up hangs, which nothing can interrupt."""
    answered = threading.Event()

    def ask():
        with contextlib.suppress(Exception):
            urllib.request.urlopen(url, timeout=seconds).close()
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()


def _read(name, root, letters):
    """([(images (n, C, H, W) uint8, labels (n,) int64) of the training set, same of the test set], classes).

    torchvision checks the md5 of archives before it unpacks them, and of CIFAR's files before it unpickles them.
    """
    kind, options = TORCHVISION[name], {"split": "letters"} if name == "emnist" else {}
    classes = {"emnist": 26, "cifar100": 100}.get(name, 10)
    missing = [file for file in _files(name) if not os.path.isfile(os.path.join(root, file))]
    url = kind.url if hasattr(kind, "url") else kind.mirrors[0] + kind.resources[0][0]
    try:
        if missing and not _reachable(url):
            raise OSError(f"no download from {url}")
        both = [kind(root, train=train, download=bool(missing), **options) for train in (True, False)]
        sets = [(torch.as_tensor(s.data), torch.as_tensor(s.targets)) for s in both]
        sets = [(x[:, None] if x.dim() == 3 else x.permute(0, 3, 1, 2), y) for x, y in sets]
        if name == "emnist":  # stored column by column, labels from 1
            sets = [(x.transpose(2, 3), y - 1) for x, y in sets]
        _check(sets, classes)
    except Exception as error:  # torchvision and what it calls raise almost anything
        if missing:
            raise FileNotFoundError(
                f"{name}: {root} lacks {', '.join(missing)} ({_brief(error)}); put them there, unpacked, or name "
                "another folder by --data-dir; or use --dataset synthetic") from None
        raise ValueError(f"{name}: {root} holds damaged files ({_brief(error)}); delete "
                         f"{', '.join(_files(name))} and fetch them again") from None
    if name == "emnist":
        sets, classes = [(x[y < letters], y[y < letters]) for x, y in sets], letters
    return sets, classes


def _read_npz(path):
    """One's own data: arrays x_train, y_train, x_test, y_test, e.g. by numpy.savez_compressed.

    x: (n, H, W), (n, C, H, W), (n, H, W, C) if the last axis is 1 or 3, or plain vectors (n, features); uint8, or
    floats, which stay as they are. y: (n,) integers 0..classes-1, told by the training set. Never unpickles.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file")
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("not an .npz file, or cut short")
        with np.load(path, allow_pickle=False) as file:
            (x, y), (x_test, y_test) = (_own_set(file, part) for part in ("train", "test"))
        classes = 1 + max(y.tolist(), default=0)
        _check([(x, y), (x_test, y_test)], classes)
        if classes > len(y):  # a stray marker such as 2**31 - 1 would ask for a giant output layer
            raise ValueError(f"{classes} classes, {len(y)} samples: number the classes without gaps")
        if x.shape[1:] != x_test.shape[1:] or x.dtype != x_test.dtype:
            raise ValueError("x_train and x_test differ in shape or dtype")
    except Exception as error:  # also an absent key; zip, zlib, header and pickle faults
        raise ValueError(f"{path}: {_brief(error)}; write x_train, y_train, x_test, y_test as plain numbers "
                         "with numpy.savez_compressed") from None
    return [(x, y), (x_test, y_test)], classes


def _own_set(file, part):
    """(images, labels (n,) int64) of the part "train" or "test" of an opened .npz file."""
    x, y = np.asarray(file[f"x_{part}"]), np.asarray(file[f"y_{part}"])
    if not (x.dtype == np.uint8 or x.dtype.kind == "f") or x.ndim not in (2, 3, 4):
        raise ValueError(f"x_{part} is {x.dtype} of shape {x.shape}, not uint8 or float of 2, 3 or 4 axes")
    if y.dtype.kind not in "iu" or y.ndim != 1:
        raise ValueError(f"y_{part} is {y.dtype} of shape {y.shape}, not integers (n,)")
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    x = torch.from_numpy(x.astype(x.dtype.newbyteorder("=")))  # torch knows only the native byte order
    if x.is_floating_point():
        x = x.to(torch.get_default_dtype())
    return x, torch.from_numpy(y.astype(np.int64))


def _check(sets, classes):
    """Raise ValueError unless images and labels of each set fit together."""
    for part, (x, y) in zip(("training set", "test set"), sets):
        if x.numel() == 0 or len(x) != len(y):
            raise ValueError(f"{part}: {len(x)} images of shape {tuple(x.shape[1:])}, {len(y)} labels")
        if not x.isfinite().all():
            raise ValueError(f"{part}: images hold NaN or infinite values")
        if y.min() < 0 or y.max() >= classes:
            raise ValueError(f"{part}: labels from {y.min()} to {y.max()}, not 0 to {classes - 1}")


def _brief(error):
    """An exception as one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _synthetic(prototypes=4, noise=1.5, background=1.0, shift=2):
    """Ten classes of 28 x 28 images, 10 000 for training and 2 000 for testing, the same for every seed.

    An image is a background common to all, plus one of `prototypes` smooth random patterns of its class, moved by
    up to `shift` pixels each way and times a gain of either sign and size 0.5 to 1.5, plus white noise. As the
    sign is random, all classes have the same mean: a linear model learns almost nothing.
    """
    g, n, side = rng(0, "synthetic"), 12_000, 28 + 2 * shift
    smooth = torch.from_numpy(g.standard_normal((10 * prototypes + 1, 1, 7, 7), dtype=np.float32))
    smooth = F.interpolate(smooth, (side, side), mode="bicubic", align_corners=True)[:, 0].numpy()
    y = g.permutation(n) % 10
    kind = y * prototypes + g.integers(prototypes, size=n)
    dy, dx = g.integers(2 * shift + 1, size=(2, n, 1, 1))
    gain = g.uniform(0.5, 1.5, (n, 1, 1)) * g.choice([-1.0, 1.0], (n, 1, 1))
    rows, columns = np.arange(28)[:, None] + dy, np.arange(28) + dx
    x = smooth[kind[:, None, None], rows, columns] * gain.astype(np.float32)
    x += background * smooth[-1, shift:-shift, shift:-shift]
    x += noise * g.standard_normal(x.shape, dtype=np.float32)
    x = torch.from_numpy((x - x[:10_000].mean()) / x[:10_000].std())[:, None]
    y = torch.from_numpy(y)
    return (x[:10_000], y[:10_000]), (x[10_000:], y[10_000:])


# ---- who holds what ----

def partition(y, num_clients: int, how: str, seed: int, *, dir_alpha: float = 0.3,
              unbalanced_sigma: float = 0.0, min_samples: int = 1, shards: int = 2) -> list:
    """Split samples over clients: a list of `num_clients` disjoint int64 index arrays into y.

    y: (n,) labels from 0, numpy or tensor. `how`:
      iid              a uniform split; every client floor(n / N) samples
      dirichlet        floor(n / N) samples each, label proportions ~ Dirichlet(dir_alpha * 1), renormalised over
                       the classes left when one is used up (FedDyn, FedDC, FedSSG)
      dirichlet-class  each class is spread by Dirichlet(dir_alpha * 1) over the clients that have less than n / N;
                       redrawn until all have `min_samples`; no sample is dropped (NIID-Bench, Li et al. 2022)
      shards           sorted by label and cut into N * `shards` equal shards, `shards` of them a client (FedAvg)
    Equal sizes drop a random remainder. `unbalanced_sigma` > 0 (iid, dirichlet): sizes are min_samples plus a
    share ~ exp(sigma * normal) of the rest. Raises ValueError if a setting is out of range or cannot be met.
    """
    y = np.asarray(y.cpu() if isinstance(y, torch.Tensor) else y)
    n, floor, g = len(y), max(min_samples, 1), rng(seed, "split")
    if how not in PARTITIONS:
        raise ValueError(f"partition {how!r}: choose {', '.join(PARTITIONS)}")
    if min(num_clients, shards) < 1 or min_samples < 0 or not 0 < dir_alpha < math.inf:
        raise ValueError(f"num_clients {num_clients} and shards {shards} must be 1 or more, min_samples "
                         f"{min_samples} 0 or more, dir_alpha {dir_alpha} above 0")
    if not 0 <= unbalanced_sigma < math.inf or (unbalanced_sigma and how not in ("iid", "dirichlet")):
        raise ValueError(f"unbalanced_sigma {unbalanced_sigma}, {how}: use 0, or with iid and dirichlet more")
    size = n // (num_clients * shards) * shards if how == "shards" else n // num_clients
    if size < floor:
        raise ValueError(f"{num_clients} clients, {how}: {n} samples give each {size}, below the minimum of "
                         f"{floor}; lower the number of clients or of shards, or the minimum")

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
    perm = perm[np.argsort(y[perm], kind="stable")]  # class after class, shuffled within
    # counts[i, c] samples of class c go to client i; row N, if there, is dropped
    owner = np.repeat(np.tile(np.arange(len(counts)), counts.shape[1]), counts.T.ravel())
    perm = perm[np.argsort(owner, kind="stable")]
    return np.split(perm, np.cumsum(counts.sum(1)))[:num_clients]


def _counts_by_client(totals, sizes, alpha, g):
    """(N + 1, C) counts: client i draws sizes[i] labels without replacement; the last row is what nobody drew."""
    left, counts = totals.copy(), np.zeros((len(sizes) + 1, len(totals)), np.int64)
    for i, size in enumerate(sizes):
        p = g.dirichlet(np.full(len(totals), alpha))
        while (need := size - counts[i].sum()) > 0:  # each pass but the last uses up a class: it ends
            p = p * (left > 0)
            q = p if p.sum() > 0 else left  # nothing it wants is left, or p has underflowed: what there is
            drawn = np.minimum(g.multinomial(need, q / q.sum()), left)
            counts[i] += drawn
            left -= drawn
    counts[-1] = left
    return counts


def _counts_by_class(totals, num_clients, alpha, min_samples, g):
    """(N, C) counts: every class is cut up by its own Dirichlet over clients."""
    for _ in range(1000):
        counts = np.zeros((num_clients, len(totals)), np.int64)
        for c, total in enumerate(totals):
            room = counts.sum(1) * num_clients < totals.sum()
            p = g.dirichlet(np.full(num_clients, alpha)) * room
            p = p / p.sum() if p.sum() > 0 else room / max(room.sum(), 1)
            cuts = np.rint(np.cumsum(p)[:-1] * total).astype(np.int64)
            counts[:, c] = np.diff(cuts, prepend=0, append=total)
        if counts.sum(1).min() >= min_samples:
            return counts
    raise ValueError(f"{num_clients} clients, dirichlet-class, dir_alpha {alpha}: no draw in 1000 gave each the "
                     f"minimum of {min_samples}; use fewer clients, a larger dir_alpha or a lower minimum")


# ---- who takes part, and with which batches ----

def cohort_size(num_clients: int, participation: float) -> int:
    """max(1, p N rounded), halves up as written in decimals: .29 of 100 is 29, .15 of 10 is 2."""
    if not 0 < participation <= 1:
        raise ValueError(f"participation {participation}: choose a share above 0 and up to 1")
    return max(1, math.floor(participation * num_clients + 0.5 + 1e-9))  # .29 * 100 is 28.999999999999996


def sample_clients(num_clients: int, participation: float, how: str, seed: int, t: int) -> np.ndarray:
    """Sorted int64 indices of the cohort of round t. fixed: `cohort_size` clients without replacement;
    bernoulli: each client with probability `participation`, drawn again while nobody comes."""
    m, g = cohort_size(num_clients, participation), rng(seed, "cohort", t)
    if how not in SAMPLINGS:
        raise ValueError(f"sampling {how!r}: choose {', '.join(SAMPLINGS)}")
    if how == "fixed":
        return np.sort(g.choice(num_clients, m, replace=False))
    if participation * num_clients < 1e-3:  # it would be drawn again thousands of times a round
        raise ValueError(f"participation {participation} of {num_clients} clients: too few for bernoulli sampling")
    chosen = []
    while len(chosen) == 0:
        chosen = np.flatnonzero(g.random(num_clients) < participation)
    return chosen


def schedule(parts, clients, seed: int, t: int, epochs: int, batch_size: int) -> tuple:
    """Mini-batches of round t for `clients` (any subset, also none) -> (idx, w, K_i).

    parts: the index arrays of all clients. m = len(clients), K = the largest K_i. K_i (m,) int64: epochs * ceil(n_i / B)
    steps, B = min(batch_size, largest n_i of all clients). idx (K, m, B) int64: samples; w (K, m, B) float32: 1, or 0
    for padding (idx 0) in an epoch's last, smaller batch and after K_i. Each epoch is a new permutation; it depends on
    (seed, t, client) alone.
    """
    n_i = np.array([len(parts[i]) for i in clients], np.int64)
    B = min(batch_size, max(map(len, parts)))   # the same for any clients: sums over a batch round alike
    per_epoch = -(-n_i // B)
    K_i = epochs * per_epoch
    idx = np.full((K_i.max(initial=0), len(n_i), B), -1, np.int64)  # -1: padding
    for j, i in enumerate(clients):
        order = rng(seed, "batch", t, i).random((epochs, n_i[j])).argsort(1)
        plan = np.full((epochs, per_epoch[j] * B), -1, np.int64)
        plan[:, :n_i[j]] = np.asarray(parts[i])[order]
        idx[:K_i[j], j] = plan.reshape(-1, B)
    return idx.clip(0), (idx >= 0).astype(np.float32), K_i


def augment_draws(clients, K_i, w, seed: int, t: int) -> np.ndarray:
    """(K, m, B, 3) int64 for `augment`: flip, 1 with probability 1/2; dy, dx, with probability 1/2 uniform in 0..8, else 4, 4.

    clients, K_i, w: as given to and by `schedule`. A client draws for its own K_i steps of its own batch size, so
    its draws do not depend on the other clients; the rest is (0, 4, 4): unchanged.
    """
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

    x: (..., C, H, W); draws: (..., 3) int64 on the same device with the same leading sizes. Returns x's shape.
    """
    H, W = x.shape[-2:]
    flip, dy, dx = (draws.reshape(-1, 3)[:, k, None] for k in range(3))
    columns = torch.arange(W, device=x.device) + dx  # (n, W), in the padded image
    columns = torch.where(flip == 1, W + 2 * PAD - 1 - columns, columns)
    rows = torch.arange(H, device=x.device) + dy
    index = (rows[:, :, None] * (W + 2 * PAD) + columns[:, None]).flatten(1)  # (n, H * W)
    padded = F.pad(x.reshape(-1, *x.shape[-3:]), (PAD,) * 4).flatten(2)
    return padded.gather(2, index[:, None].expand(-1, padded.shape[1], -1)).view(x.shape)
