"""Kill small runs at random moments, resume them, and compare the end with an undisturbed run, bit for bit.

    python experiments/soak.py --kills 50

Each method runs on `synthetic` until it has been killed its share of times (SIGKILL, SIGTERM, Ctrl-C in turn)
and has finished. Compared are the final weights, and log.csv but for its column of seconds. Exit code 1 if
anything differs.
"""

import argparse
import csv
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from baselines import ALGORITHMS as METHODS      # noqa: E402

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def command(method, out, rounds):
    flags = (f"--algo {method} --dataset synthetic --num-clients 20 --participation 0.2 --rounds {rounds} "
             f"--checkpoint-every 0.7 --eval-every 2 --resume")
    return [sys.executable, str(ROOT / "run.py"), *flags.split(), "--out", str(out)]


def run(method, out, rounds, limit):
    """One undisturbed run, to its end."""
    done = subprocess.run(command(method, out, rounds), capture_output=True, text=True, timeout=limit)
    if done.returncode:
        sys.exit(f"{method}: exit code {done.returncode}: {done.stderr.strip()}")


def kill_one(method, out, rounds, how, delay, limit):
    """Start or resume a run, send the signal `delay` seconds after its first line; whether that ended it."""
    process = subprocess.Popen(
        command(method, out, rounds), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    time.sleep(delay)
    process.send_signal(how)
    _, errors = process.communicate(timeout=limit)
    if process.returncode not in (0, -how, 128 + how):
        sys.exit(f"{method}: exit code {process.returncode} after signal {how}: {errors.strip()}")
    return process.returncode != 0


def result(out):
    """Final weights and log of the only run under `out`."""
    folder, = (path for path in out.iterdir() if path.is_dir())
    with open(folder / "log.csv", newline="") as file:
        log = [row | {"seconds": None} for row in csv.DictReader(file)]
    return torch.load(folder / "model.pt", weights_only=True), log


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="in all")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each run")
    parser.add_argument("--max-delay", type=float, default=3.0, help="of a kill, seconds from the first line")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--limit", type=float, default=300, help="seconds that any one run may take")
    args = parser.parse_args()
    draw, killed, same = random.Random(args.seed), 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        for j, method in enumerate(METHODS):
            share = args.kills * (j + 1) // len(METHODS) - args.kills * j // len(METHODS)
            straight, disturbed = Path(scratch) / f"{method}-straight", Path(scratch) / f"{method}-killed"
            run(method, straight, args.rounds, args.limit)
            mine = 0
            for attempt in range(4 * share):        # a run that finished first is no kill: it starts over
                if mine == share:
                    break
                how, delay = SIGNALS[attempt % 3], draw.uniform(0, args.max_delay)
                if kill_one(method, disturbed, args.rounds, how, delay, args.limit):
                    mine += 1
                else:
                    same += compare(method, straight, disturbed)
                    disturbed = Path(scratch) / f"{method}-killed-{attempt}"
            run(method, disturbed, args.rounds, args.limit)
            same += compare(method, straight, disturbed)
            killed += mine
            print(f"{method}: {mine} kills, the same end", flush=True)
    print(f"{killed} kills, {same} ends compared, all identical")


def compare(method, straight, disturbed):
    """1 if both ended alike; ends the program if not."""
    (weights, log), (weights_2, log_2) = result(straight), result(disturbed)
    if log != log_2 or any(not torch.equal(weights[name], weights_2[name]) for name in weights):
        sys.exit(f"{method}: the resumed run ended otherwise than the undisturbed one")
    return 1


if __name__ == "__main__":
    main()
