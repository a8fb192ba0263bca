"""The models of the paper, as plain torch modules. None has batch norm or dropout: `check` says why."""

import copy
from math import prod
from typing import Sequence

import torch
from torch import Tensor, nn

MODELS = ("fcn", "linear", "cnn")


def linear(features: int, classes: int) -> nn.Module:
    """Softmax regression, (n, *shape) -> logits (n, classes); features * classes + classes parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))


def fcn(features: int, hidden: Sequence[int], classes: int) -> nn.Module:
    """Fully connected, ReLU between, (n, *shape) -> logits (n, classes).
    MNIST, hidden 200-200: 199 210 parameters; EMNIST-L, hidden 100: 79 510."""
    layers, sizes = [nn.Flatten()], [features, *hidden]
    for size_in, size_out in zip(sizes, sizes[1:]):
        layers += [nn.Linear(size_in, size_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def cnn(channels: int, size: int, classes: int) -> nn.Module:
    """Two 5x5 convolutions of 64 channels, each with 2x2 max pooling, then 384 and 192 hidden units;
    (n, channels, size, size) -> logits (n, classes).

    CIFAR-10: 797 962 parameters. The paper names the convolutions only; the rest is the released program's.
    """
    side = ((size - 4) // 2 - 4) // 2
    model = nn.Sequential(      # ReLU after the pooling: the same values and gradients, a quarter of its work
        nn.Conv2d(channels, 64, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(64, 64, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * side * side, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, classes))
    model.register_forward_pre_hook(_channels_last)
    return model


def _channels_last(module, inputs):     # faster on a CPU; vmap knows no .contiguous(memory_format=...)
    return inputs[0].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def build(name: str, shape: Sequence[int], classes: int, hidden: Sequence[int], seed: int) -> nn.Module:
    """The named model for samples of the given shape, with torch's initial weights drawn from the seed.

    The draw is the same on every device, and leaves torch's generator alone. Raises ValueError for a misfit.
    """
    if name == "cnn" and (len(shape) != 3 or shape[1] != shape[2] or shape[1] < 16):
        raise ValueError(f"--model cnn: needs square images, 16x16 or more, not {tuple(shape)}; use fcn")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "linear":
            return linear(prod(shape), classes)
        if name == "fcn":
            return fcn(prod(shape), hidden, classes)
        if name == "cnn":
            return cnn(shape[0], shape[1], classes)
    raise ValueError(f"--model {name}: use one of {', '.join(MODELS)}")


def check(model: nn.Module, X: Tensor) -> None:
    """Raise ValueError if the model, on samples of X (n, ...), draws random numbers, for then a run would not
    repeat, or mixes the samples of a batch, for then `local_sgd`'s padding would count. It tries a copy, in
    the mode that the model is in, and leaves torch's generator alone."""
    tried, x = copy.deepcopy(model).cpu(), X[torch.linspace(0, len(X) - 1, 16).long()].cpu()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for p in filter(torch.is_floating_point, tried.parameters()):
            p += 0.01               # a last layer of zeros would hide what comes before it
        before, output = torch.get_rng_state(), tried(x)[:8]
        x[8:] = x[:8].clone()
        alone, after = torch.allclose(tried(x)[:8], output, 1e-3, equal_nan=True), torch.get_rng_state()
    if not torch.equal(before, after):
        raise ValueError("the model draws random numbers (dropout?): set p to 0, or take that layer out")
    if not alone:
        raise ValueError("the model mixes the samples of a batch (batch norm?): use group norm, or no norm")
