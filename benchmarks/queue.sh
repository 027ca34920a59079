#!/usr/bin/env bash
# What results/ still lacks, the most wanted first, one after the other on one GPU; what is finished is skipped.
#
#     benchmarks/queue.sh DATA KEEP [STARTS]
#
# DATA has the CIFAR files, STARTS the model folders (weights/); KEEP gets results, models and a log of each part.
# Stop it at any time: the same command goes on, a curve of questions from its beginning.
set -u
data=$1 keep=$2 starts=${3:-weights}
python=${PYTHON:-python3}
export PYTHONPATH=src PYTHONUNBUFFERED=1
mkdir -p "$keep/log" "$keep/models" "$keep/results"

part() { # NAME COMMAND…: its output goes to the log of that name
    local name=$1 code
    shift
    echo "$(date +%T) $name"
    "$@" >"$keep/log/$name.log" 2>&1
    code=$?
    echo "$(date +%T) $name: exit code $code"
}

steps() { # NAME OPTION…
    local name=$1
    shift
    [ -e "$keep/$name.json" ] || part "$name" "$python" benchmarks/steps.py --out "$keep/$name.json" "$@"
}

start() { # SET NAME MODEL STAGES: stages from a model folder
    part "start-$2" "$python" benchmarks/pretrain.py "$1" --data-dir "$data" --out "$keep/start-$2" \
        --results-name "start-$2" --model "$3" --stages "$4"
}

cells() { # NAME OPTION…: a table of the paper, or a part of it
    part "paper-$(tr -cs 'a-z0-9\n' - <<<"$*")" "$python" -m constraintmatch paper "$@" --data-dir "$data" \
        --starts "$keep/starts" --results "$keep/results" --out "$keep/runs" --models "$keep/models"
}

mkdir -p "$keep/starts"
cp -rn "$starts/scan-cifar10" "$keep/starts/"
cp -n results/paper/cifar10-*.json "$keep/results/" # finished

# Where a step's time goes, and whether other kernels are faster (aims: 5 and 15 ms)
steps speed-plain --methods constrained,constraintmatch,simclr --profile 40
steps speed-all-algorithms --methods constrained,constraintmatch --algorithms 0
steps speed-wide-stem --methods constrained,constraintmatch --algorithms 0 --stem-channels 8

# Self-labelling straight from the linear heads on BYOL's features: SCAN costs 2.9 points there
start cifar10 cifar10-byol-heads "$starts/byol-cifar10" self_label

# Self-labelling left superclasses without a cluster: heads found anew on its features, and Table I from that start
start cifar100-20 cifar100-20-heads "$starts/scan-cifar100-20" linear_scan
cp -rn "$keep/start-cifar100-20-heads/model" "$keep/starts/scan-cifar100-20"
for fold in 0 1; do
    cells table1 --constraints 10000 --sets cifar100-20 --methods scan,constraintmatch,constrained --folds $fold
    cells table1 --constraints 10000 --sets cifar10 --methods constraintmatch,constrained --folds $fold
done

# Then Table II, 5,000 pairs, the bounds, and the figures, cut. Table III is not here: its starts with 50 and 100
# outputs are not made yet.
cells table2 --sets cifar100-20 --folds 0
cells table1 --sets cifar10,cifar100-20 --methods constraintmatch,constrained --constraints 5000 --folds 0
cells table1 --sets cifar10,cifar100-20 --methods fully_constrained,supervised --folds 0
cells gallery --sets cifar10,cifar100-20
cells flip links selection entropy amount noise --sets cifar10,cifar100-20 --folds 0 --steps 2000

# Answers instead of pairs, the network trained in every round
for set in cifar10 cifar100-20; do
    part "questions-$set" "$python" benchmarks/label_efficiency.py $set --data-dir "$data" \
        --model "$keep/starts/scan-$set" --out "$keep"
done
