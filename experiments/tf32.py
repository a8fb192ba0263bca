"""What --tf32 does to a run, without a GPU: run.py, with the operands of all matrix products cut to TF32's ten bits.

    python experiments/tf32.py --algo fedssg --dataset mnist        takes run.py's flags; --tf32, --device and --mode are set

A GPU multiplies such operands exactly and adds up in float32, as is done here. Bits are cut off, not rounded: no GPU is coarser.
"""

import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import run      # noqa: E402

aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, aten.convolution_backward}


def cut(x):
    """x with the last 13 of float32's 23 bits of mantissa set to 0."""
    if not (torch.is_tensor(x) and x.dtype == torch.float32 and x.dim() > 1):      # a bias is added, not multiplied
        return x
    return (x.contiguous().view(torch.int32) & -2 ** 13).view(torch.float32)


class CutProducts(TorchDispatchMode):
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        if f.overloadpacket in PRODUCTS:
            args = [cut(x) for x in args]
        return f(*args, **(kwargs or {}))


if __name__ == "__main__":
    with CutProducts():     # seen by this thread alone, hence vmap
        run.main([*sys.argv[1:], "--tf32", "--device", "cpu", "--mode", "vmap"])
