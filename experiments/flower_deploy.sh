#!/usr/bin/env bash
# Play experiments/flower_app.py on this machine, over the loopback address, and end all that was started.
#   experiments/flower_deploy.sh deployment 3 'participation=1.0'       a process for each of three clients
#   experiments/flower_deploy.sh simulation 10 'method="fedavg"'        Flower's simulation of ten clients
set -euom pipefail      # m: every job is a process group, which ends with all that it has started
kind=$1 clients=$2 config=${3:-} port=${PORT:-39190} here=$(cd "$(dirname "$0")" && pwd) home=$(mktemp -d)
export FLWR_HOME=$home FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 RAY_USAGE_STATS_ENABLED=0
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0      # this keeps Ray to the loopback address
trap '{ for job in $(jobs -p); do kill -- -$job; done; wait; } 2> /dev/null; rm -r "$home"' EXIT

app=$home/fedssg nodes=$clients link=() run=()
mkdir "$app"
cp "$here"/../{fedssg,data,models}.py "$here"/flower_app.py "$app"
cp "$here"/flower.toml "$app"/pyproject.toml
printf '[superlink.here]\naddress = "127.0.0.1:%s"\ninsecure = true\n' "$port" > "$home"/config.toml
if [ "$kind" = simulation ]; then
    nodes=0 link=(--simulation)
    run=(--federation-config "num-supernodes=$clients client-resources-num-cpus=1")
fi

link+=(--insecure --port "$port" --disable-runtime-dependency-installation)
flower-superlink "${link[@]}" &> "$home"/log &
until grep -q 'Uvicorn running' "$home"/log; do
    sleep 1
    kill -0 $! || { cat "$home"/log; exit 1; }
done
for ((i = 0; i < nodes; i++)); do
    flower-supernode --insecure --superlink 127.0.0.1:"$port" --port $((port + 1 + i)) \
        --node-config "partition-id=$i" &> /dev/null &
    echo "client $i is process $!"
done
flwr run "$app" here --stream --run-config "num-clients=$clients $config" "${run[@]}"
