#!/usr/bin/env bash
# Start a training run:
#
#   deploy/train_stage2.sh CONFIG
#       servers are up already: wait for them, then start the learner
#   deploy/train_stage2.sh --server-gpus 0,1,2 --train-gpus 3 CONFIG
#       servers and learner on this machine, by `learner launch`
#
#   --server-gpus IDS   GPUs of a server, once for each server of CONFIG in its order;
#                       or SERVER_GPUS, where a blank ends the GPUs of one server
#   --train-gpus IDS    GPUs of the learner; or TRAIN_GPUS
#   --nproc N           learner processes: as many as --train-gpus, else 1; or NPROC
#
# Reads the shell assignments of `learner preflight` and nothing else of the YAML. Starts nothing
# unless ROLLOUT_CONTRACT_JSON is one line of JSON with rollout_backend, vllm_mode and
# server_base_urls. Unless it starts the servers, every one must pass server_healthy.py, in the
# folder of this script, within ROLLOUT_SERVER_TIMEOUT_S seconds. `learner launch` checks the split
# of the GPUs.
set -euo pipefail

stop() {
  echo "train_stage2.sh: $1; training is not started" >&2
  exit "${2:-1}"
}

usage() {
  stop "usage: $0 [--server-gpus IDS]... [--train-gpus IDS] [--nproc N] CONFIG" 2
}

read -ra server_gpus <<< "${SERVER_GPUS-}"
train_gpus=${TRAIN_GPUS-} nproc=${NPROC-} config='' given=()
while (( $# )); do
  case $1 in
    --server-gpus | --train-gpus | --nproc) (( $# > 1 )) || usage ;;&
    --server-gpus) given+=("$2"); shift ;;
    --train-gpus) train_gpus=$2; shift ;;
    --nproc) nproc=$2; shift ;;
    -*) usage ;;
    *) [[ -z $config ]] || usage; config=$1 ;;
  esac
  shift
done
[[ -n $config ]] || usage
(( ${#given[@]} == 0 )) || server_gpus=("${given[@]}")

if [[ -n $train_gpus ]]; then
  [[ $train_gpus =~ ^[0-9]+(,[0-9]+)*$ ]] \
    || stop "--train-gpus is '$train_gpus', not a list of GPU ids like 0,1,2" 2
  IFS=, read -ra learner_gpus <<< "$train_gpus"
  count=${#learner_gpus[@]}
  [[ ${nproc:-$count} == "$count" ]] \
    || stop "--nproc is '$nproc', and --train-gpus $train_gpus are $count GPUs" 2
fi
nproc=${nproc:-${count:-1}}
[[ $nproc =~ ^[1-9][0-9]*$ ]] || stop "--nproc is '$nproc', not a number of processes" 2

beside=$(dirname "$(realpath "$0")")
[[ -f $beside/server_healthy.py ]] || stop "there is no server_healthy.py in $beside" 2
unset ROLLOUT_CONTRACT_JSON ROLLOUT_SERVER_TIMEOUT_S
assignments=$(learner preflight --config "$config") || stop "learner preflight failed" $?
eval "$assignments" || stop "learner preflight printed no shell assignments"

ROLLOUT_CONTRACT_JSON="${ROLLOUT_CONTRACT_JSON-}" \
ROLLOUT_SERVER_TIMEOUT_S="${ROLLOUT_SERVER_TIMEOUT_S-}" \
STARTED_HERE=${#server_gpus[@]} \
BESIDE=$beside \
python3 - <<'PYTHON'
import json
import math
import os
import sys
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.environ["BESIDE"])
from server_healthy import fault

KEYS = ("rollout_backend", "vllm_mode", "server_base_urls")
# rollout_backend and the vllm_mode it may have
KNOWN = (("vllm", "server"), ("vllm", "colocate"), ("hf", None))

def stop(message):
    sys.exit(f"train_stage2.sh: {message}; training is not started")


def read_contract(text):
    """The checked contract; ends the script for any other text."""
    if not text.endswith("\n") or text.count("\n") != 1:
        stop("ROLLOUT_CONTRACT_JSON is not one line that ends in a newline")
    try:
        contract = json.loads(text)
    except ValueError as error:
        stop(f"ROLLOUT_CONTRACT_JSON is not JSON ({error})")
    if not isinstance(contract, dict):
        stop("ROLLOUT_CONTRACT_JSON is not a JSON object")
    if missing := [key for key in KEYS if key not in contract]:
        stop(f"ROLLOUT_CONTRACT_JSON has no {', '.join(missing)}")
    backend, mode, urls = (contract[key] for key in KEYS)
    if not isinstance(backend, str):
        stop(f"rollout_backend is {backend!r}, not a string")
    if not (mode is None or isinstance(mode, str)):
        stop(f"vllm_mode is {mode!r}, not a string or null")
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        stop(f"server_base_urls is {urls!r}, not a list of strings")
    if (backend, mode) not in KNOWN:
        stop(f"rollout_backend {backend!r} with vllm_mode {mode!r} is not known")
    if mode == "server" and not urls:
        stop("vllm_mode is server, and server_base_urls is empty")
    return mode, urls


def seconds(text):
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        stop(f"ROLLOUT_SERVER_TIMEOUT_S is {text!r}, not a finite positive number")
    return number


def wait_for(url, deadline):
    told = False
    while (found := fault(url)) is not None:
        if not told:
            print(f"train_stage2.sh: waiting for {url}", file=sys.stderr, flush=True)
            told = True
        if time.monotonic() > deadline:
            stop(f"{url}/health/ gives no good answer ({found}): start it, or correct its base_url")
        time.sleep(0.5)


mode, urls = read_contract(os.environ["ROLLOUT_CONTRACT_JSON"])
if mode == "server" and os.environ["STARTED_HERE"] == "0":
    deadline = time.monotonic() + seconds(os.environ["ROLLOUT_SERVER_TIMEOUT_S"])
    for url in urls:
        wait_for(url, deadline)
PYTHON

if (( ${#server_gpus[@]} )); then
  exec learner launch --config "$config" "${server_gpus[@]/#/--server-gpus=}" \
    ${train_gpus:+--train-gpus "$train_gpus"}
fi
[[ -z $train_gpus ]] || export CUDA_VISIBLE_DEVICES=$train_gpus
train=(learner train --config "$config")
(( nproc > 1 )) || exec "${train[@]}"
# torchrun by itself ends with 1 where the learner ends with 2, and would be started again.
python=$(dirname "$(realpath "$(command -v learner)")")/python3
[[ -x $python ]] || python=python3
exec "$python" -m learner.operate.torchrun - --standalone --nproc-per-node "$nproc" -- "${train[@]}"
