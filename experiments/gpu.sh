#!/usr/bin/env bash
# What is to be seen on a GPU the first day that one can be had, in ten minutes at most.
# It needs MNIST and CIFAR-10.
#
#     bash experiments/gpu.sh cuda data gpu.md        the device, the folder of the data sets, the table
#     bash experiments/gpu.sh cpu data cpu.md         its CPU half, with fewer rounds
#
# It writes one Markdown table: equal results, then seconds a round. What fails gets a row, and
# the rest goes on.
# PYTHON names another Python; CIFAR another data set, such as "cifar10_jpeg.npz --like cifar10".
set -u
device=${1:?cuda or cpu} data_dir=${2:?the folder of the data sets} table=${3:?the file of the table}
here=$(cd "$(dirname "$0")" && pwd)
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
python=${PYTHON:-python} cifar=${CIFAR:-cifar10}
long=300 few=20 small="--num-clients 20 --rounds 5" precisions="float32 tf32 bf16" compile="--compile"
if [ "$device" = cpu ]; then
    long=3 few=1 precisions="float32 bf16" compile=""       # tf32 is CUDA's; compiling takes a minute
fi

row() { echo "| $1 | $2 |" | tee -a "$table"; }

# play NAME FLAGS: a run with its own folder $runs/NAME; what it prints is in $runs/NAME.txt
play() {
    local name=$1
    shift
    timeout 300 "$python" "$here/../run.py" --device "$device" --data-dir "$data_dir" --out "$runs/$name" \
        "$@" > "$runs/$name.txt" 2>&1 && return
    row "$name: $*" "failed: $(tail -n 1 "$runs/$name.txt" | tr '|' ' ' | cut -c1-200)"
    return 1
}

# largest NAME NAME: the largest difference between the models of two runs
largest() {
    "$python" - "$runs/$1" "$runs/$2" <<'PYTHON'
import sys
from pathlib import Path
import torch
a, b = (torch.load(next(Path(folder).glob("*/model.pt")), weights_only=True) for folder in sys.argv[1:])
far = max(float((a[name] - b[name]).abs().max()) for name in a)
print("equal, bit for bit" if far == 0 else f"differ by {far:.2g} at most")
PYTHON
}

# pace NAME: median seconds of its rounds after the second, and its last accuracy
pace() {
    "$python" - "$runs/$1" <<'PYTHON'
import csv, statistics, sys
from pathlib import Path
rows = list(csv.DictReader(open(next(Path(sys.argv[1]).glob("*/log.csv")))))
seconds = statistics.median(float(row["seconds"]) for row in rows[2:] or rows)
accs = [row["test_acc"] for row in rows if row["test_acc"]]
print(f"{seconds:.3g} s a round, {len(rows)} rounds, {float(accs[-1]):.2f} % at the end" if accs else
      f"{seconds:.3g} s a round, {len(rows)} rounds")
PYTHON
}

{
    echo "| what | on $("$python" -c "
import platform, torch
cuda = '$device' == 'cuda' and torch.cuda.is_available()
print(torch.cuda.get_device_name() if cuda else platform.machine(), '/ torch', torch.__version__)") |"
    echo "|---|---|"
} | tee "$table"

# 1. equal results, FedSSG on `synthetic`; modes after one round, since rounding grows from round to round
tiny="--dataset synthetic $small --checkpoint-every 0"
one="$tiny --stop-after 1"
play loop $one --mode loop
play vmap $one --mode vmap && row "vmap against loop, one round" "$(largest loop vmap)"
play chunks $one --mode vmap --chunk 2 && row "chunks of 2 against loop, one round" "$(largest loop chunks)"
if [ "$device" = cuda ]; then
    device=cpu play host $one --mode loop && row "loop on CPU against GPU, one round" "$(largest loop host)"
fi
play straight $tiny --mode vmap
play again $tiny --mode vmap && row "the same five rounds again" "$(largest straight again)"
play stopped $tiny --mode vmap --stop-after 2 && play stopped $tiny --mode vmap &&
    row "stopped after round 2 and gone on, against straight" "$(largest straight stopped)"

# 2. seconds a round: the CNN, which is where precision counts, then the FCN
for precision in $precisions; do
    for way in "" $compile; do
        name="cnn-$precision$way"
        play "$name" --dataset $cifar --precision "$precision" --stop-after "$few" --eval-every 1000 \
            $([ "$device" = cpu ] && echo --participation 0.02) $([ -n "$way" ] && echo --mode vmap $way) &&
            row "CIFAR-10, no evaluation, $precision${way:+, compiled}" "$(pace "$name")"
    done
done
for way in "" $compile; do
    play "mnist$way" --dataset mnist --stop-after "$long" $([ -n "$way" ] && echo --mode vmap $way) &&
        row "MNIST with evaluation${way:+, compiled}" "$(pace "mnist$way")"
done
