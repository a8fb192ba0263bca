#!/usr/bin/env bash
# Play experiments/flower_app.py on this machine, over the loopback address, and end all that was started.
#   experiments/flower_deploy.sh deployment 3 'rounds=10 participation=1.0'     a process for each of 3 clients
#   experiments/flower_deploy.sh simulation 10 'method="fedavg"'                Flower's simulation of 10 clients
set -euo pipefail
kind=$1 clients=$2 config=${3:-} port=${PORT:-39190} here=$(cd "$(dirname "$0")" && pwd)
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 RAY_USAGE_STATS_ENABLED=0 FLWR_HOME=$(mktemp -d)
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0      # this keeps Ray to the loopback address
trap 'kill $(jobs -p); wait; rm -r "$FLWR_HOME"' EXIT

app=$FLWR_HOME/fedssg
mkdir "$app"
cp "$here"/../{fedssg,data,models}.py "$here"/flower_app.py "$app"
cp "$here"/flower.toml "$app"/pyproject.toml
printf '[superlink.here]\naddress = "127.0.0.1:%s"\ninsecure = true\n' "$port" > "$FLWR_HOME"/config.toml

if [ "$kind" = simulation ]; then
    nodes=0 link=(--simulation) run=(--federation-config "num-supernodes=$clients client-resources-num-cpus=1")
else
    nodes=$clients link=() run=()
fi
PS4='$ '; set -x    # shows the commands, for whoever wants to stop a node and start it again
flower-superlink --insecure --port "$port" --disable-runtime-dependency-installation "${link[@]}" &
for ((i = 0; i < nodes; i++)); do
    flower-supernode --insecure --superlink 127.0.0.1:"$port" --port $((port + 1 + i)) \
        --node-config "partition-id=$i" &
done
sleep 5
flwr run "$app" here --stream --run-config "num-clients=$clients $config" "${run[@]}"
