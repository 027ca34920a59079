#!/usr/bin/env bash
# What results/ still lacks, the most wanted first, one after the other on one GPU; what is finished is skipped.
#
#     benchmarks/queue.sh DATA KEEP [STARTS]
#
# DATA has the CIFAR files, STARTS the model folders: weights/, and from the history simclr-cifar10 and simclr-cifar100-20
# (at 0617a12); KEEP gets results, models, logs and the compiler's cache, which saves a minute a stage on the next machine
# of the same kind. Stop it at any time: the same command goes on.
set -u
data=$1 keep=$2 starts=${3:-weights}
python=${PYTHON:-python3}
export PYTHONPATH=src PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR="$keep/inductor"
mkdir -p "$keep/log" "$keep/models" "$keep/results" "$keep/starts"

part() { # NAME COMMAND…: its output goes to the log of that name
    local name=$1 code
    shift
    echo "$(date +%T) $name"
    "$@" >"$keep/log/$name.log" 2>&1
    code=$?
    echo "$(date +%T) $name: exit code $code"
}

start() { # SET NAME MODEL STAGES [OPTION…]: stages from a model folder
    local set=$1 name=$2 model=$3 stages=$4
    shift 4
    part "start-$name" "$python" benchmarks/pretrain.py "$set" --data-dir "$data" --out "$keep/start-$name" \
        --results-name "start-$name" --model "$model" --stages "$stages" "$@"
}

cells() { # NAME OPTION…: a table of the paper, or a part of it; two processes share its cells, so that one compiles,
    # loads or scores while the other one trains
    local worker shared=1
    [ "${workers:-1 2}" = "1 2" ] || shared=0 # alone: the program looks for others by itself
    for worker in ${workers:-1 2}; do
        part "paper-$worker-$(tr -cs 'a-z0-9\n' - <<<"$*")" env CONSTRAINTMATCH_GPU_SHARED=$shared \
            "$python" -m constraintmatch paper "$@" --data-dir "$data" \
            --starts "$keep/starts" --results "$keep/results" --out "$keep/runs" --models "$keep/models" &
    done
    wait
}

curves() { # SET OPTION…: answers instead of pairs, the network trained in every round
    local set=$1
    shift
    part "questions-$set-$(tr -cs 'a-z0-9\n' - <<<"$*")" "$python" benchmarks/label_efficiency.py "$set" \
        --data-dir "$data" --model "$keep/starts/scan-$set" --out "$keep" "$@"
}

cp -rn "$starts/scan-cifar10" "$starts/scan-cifar100-20" "$keep/starts/"
cp -n results/paper/*.json "$keep/results/" # finished

# Table I: 10,000 and 5,000 pairs, the bounds; Table II; the gallery
cells table1 --sets cifar10,cifar100-20 --methods constraintmatch,constrained --constraints 10000 --folds 0-1
cells table2 --sets cifar100-20 --folds 0
cells table1 --sets cifar10,cifar100-20 --folds 0
workers=1 cells gallery --sets cifar10,cifar100-20

# Table III, from starts with five times as many outputs: self-labelling straight from linear heads. The label-free quality
# falls there while the clusters get better, so the last weights are kept; after more than 20 epochs clusters are lost
# (docs/lab-notes.md)
for wide in cifar10:50 cifar100-20:100; do
    set=${wide%:*} outputs=${wide#*:}
    start "$set" "$set-$outputs" "$starts/simclr-$set" linear_scan,self_label --clusters "$outputs" \
        --set self_label.tolerance=1 self_label.epochs=20
    cp -rnT "$keep/start-$set-$outputs/model" "$keep/starts/scan-$set-$outputs"
done
cells table3 --sets cifar10,cifar100-20 --folds 0

# The figures, cut: on the paper's set for all of them first
cells flip links selection entropy amount noise --sets cifar100-20 --folds 0 --steps 2000
cells flip links selection entropy amount noise --sets cifar10 --folds 0 --steps 2000

# Answers instead of pairs: a look at what they reach, up to the aims' 500; then all curves
for set in cifar10 cifar100-20; do
    curves $set --ways chosen-which --errors 0 --budgets 50,100,200,500
done
for set in cifar10 cifar100-20; do curves $set; done
start cifar10 cifar10-byol-heads "$starts/byol-heads-cifar10" self_label # byol-cifar10 at c123dde
