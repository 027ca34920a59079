#!/usr/bin/env bash
# What results/ still lacks, the most wanted first, on one GPU; what is finished is skipped.
#
#     research/queue.sh DATA KEEP [STARTS]
#
# DATA has the CIFAR files, STARTS the model folders: weights/, and from the history simclr-cifar10 and simclr-cifar100-20
# (at 0617a12); KEEP gets results, models, logs and the compiler's cache, which saves a minute a stage on the next machine
# of the same kind. Stop it at any time: the same command goes on. Start it several times, with CONSTRAINTMATCH_GPU_SHARED=1: the
# copies share the work, and one of them compiles, loads, chooses or scores while another one trains.
set -u
data=$1 keep=$2 starts=${3:-weights}
python=${PYTHON:-python3}
export PYTHONPATH=src PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR="$keep/inductor"
mkdir -p "$keep/log" "$keep/results" "$keep/starts" "$keep/figures"

part() { # NAME COMMAND…: its output goes to the log of that name
    local name=$1 code
    shift
    echo "$(date +%T) $$ $name" | tee -a "$keep/log/all.log"
    "$@" >>"$keep/log/$name-$$.log" 2>&1
    code=$?
    echo "$(date +%T) $$ $name: exit code $code" | tee -a "$keep/log/all.log"
}

cells() { # NAME OPTION…: tables and figures of the paper, or parts of them
    local name
    name=paper-$(tr -cs 'a-z0-9\n' - <<<"$*")
    part "${name:0:80}" "$python" -m constraintmatch paper "$@" --data-dir "$data" --starts "$keep/starts" \
        --results "$keep/results" --out "$keep/runs" --figures "$keep/figures"
}

wide() { # SET OUTPUTS: a start with more outputs than classes; a copy that finds it begun waits
    # 50: self-labelling straight from linear heads, where the label-free quality falls while the clusters get better, so the last
    # weights are kept. 100: linear heads alone that may have large clusters (decision 039)
    local set=$1 outputs=$2 name=scan-$1-$2 last=self_label
    local how="--stages linear_scan,self_label --set self_label.tolerance=1"
    [ "$outputs" = 100 ] && last=linear_scan how="--stages linear_scan --set linear_scan.entropy_weight=1.2"
    (
        flock 9
        [ -d "$keep/starts/$name" ] && exit 0
        part "start-$set-$outputs" "$python" benchmarks/pretrain.py "$set" --data-dir "$data" \
            --out "$keep/start-$set-$outputs" --results-name "start-$set-$outputs" --model "$starts/simclr-$set" \
            --clusters "$outputs" $how
        "$python" -c 'import sys
from constraintmatch.models.cluster_model import load_model, save_model
save_model(load_model(sys.argv[1]), sys.argv[2], half=True)' "$keep/start-$set-$outputs/$last" "$keep/starts/$name.part" &&
            mv "$keep/starts/$name.part" "$keep/starts/$name"
    ) 9>"$keep/start-$set-$outputs.lock"
}

curves() { # SET START OPTION…: answers instead of pairs, the network trained in every round
    local set=$1 start=$2
    shift 2
    part "questions-$set-$(basename "$start")" "$python" benchmarks/label_efficiency.py "$set" --data-dir "$data" \
        --model "$start" --out "$keep" --steps 500 --budgets 50,200,500,2000,10000 "$@"
}

cp -rn "$starts"/scan-* "$keep/starts/"
find results/paper -name '*.json' ! -name '*-k[0-9]*' -exec cp -n {} "$keep/results/" \; # finished; Table III apart
cp -n docs/figures/gallery-* "$keep/figures/"

if [ -z "${REST:-}" ]; then # REST=1 spares the minute that asking for them takes where results/ has them whole
    # Table I: 10,000 and 5,000 pairs, the bounds; the gallery
    cells table1 --sets cifar10,cifar100-20 --methods constraintmatch,constrained --constraints 10000 --folds 0-1
    cells table1 --sets cifar10,cifar100-20 --folds 0
    cells gallery --sets cifar10,cifar100-20

    # For Table III, where none are given: starts with five times as many outputs
    wide cifar10 50
    wide cifar100-20 100
fi

overclustering() { # SET OUTPUTS: Table III; its finished cells are from the starts that are given then
    [ -d "$keep/starts/scan-$1-$2" ] || return
    [ -d "$starts/scan-$1-$2" ] && cp -n "results/paper/$1"-*-k"$2"* "$keep/results/"
    cells table3 --sets "$1" --folds 0
}

runs() { # tables and figures of the paper
    overclustering cifar10 50
    overclustering cifar100-20 100
    # Losses that expect errors, naive pseudo-labels with the mean over selected images
    cells noise --sets cifar100-20 --folds 0 --steps 2000
    cells table2 --sets cifar100-20 --folds 0
    # More folds: the paper has five
    cells table1 --sets cifar100-20,cifar10 --methods constraintmatch,constrained
}

joined() { # SET: the start and its SimCLR side by side; a copy that finds it begun waits
    [ -d "$starts/simclr-$1" ] || return
    (
        flock 9
        [ -d "$keep/starts/joined-$1" ] && exit 0
        part "join-$1" "$python" -m constraintmatch join "$starts/scan-$1" "$starts/simclr-$1" "$1" \
            --data-dir "$data" --out "$keep/starts/joined-$1"
    ) 9>"$keep/joined-$1.lock"
}

answers() { # answers instead of pairs, rounds held apart: what the aims are about, then all curves
    local which="--ways chosen-which --errors 0 --anchors" short="--budgets 50,200,500"
    joined cifar100-20
    local both="$keep/starts/joined-cifar100-20"
    [ -d "$both" ] && curves cifar100-20 "$both" --start joined $which $short --last-steps 2000
    curves cifar10 "$starts/byol-cifar10" --start byol $which $short --last-steps 10000 --seed 1 --out "$keep/seed1"
    for set in cifar10 cifar100-20; do curves $set "$starts/scan-$set" $which; done
    for set in cifar100-20 cifar10; do curves $set "$starts/scan-$set" --anchors; done
}

systems() { # the systems without pairs of Table I, a ResNet-18: about 15 minutes each on an H200; BACKBONE=resnet34 is another
    local set one name=${BACKBONE:+-$BACKBONE}
    for set in cifar10 cifar100-20; do
        for one in cc:600 tcc:600 mice:450 pica:600; do
            part "${one%:*}-$set$name" "$python" benchmarks/pretrain.py "$set" --data-dir "$data" --stages "${one%:*}" \
                --set "${one%:*}.epochs=${one#*:}" --out "$keep/${one%:*}-$set$name" --results-name "start-$set$name" \
                ${BACKBONE:+--backbone "$BACKBONE"}
        done
    done
}

[ "${FIRST:-}" = systems ] && systems
if [ "${FIRST:-}" = answers ]; then # some copies choose questions, on the CPU, while others train
    answers
    runs
else
    runs
    answers
fi

# The other set's figures
cells flip noise amount entropy selection links --sets cifar10 --folds 0 --steps 2000

# Embeddings on this GPU, from the images to the clusters
command="$python -m constraintmatch"
part embed $command embed "$starts/scan-cifar100-20" cifar100-20 --data-dir "$data" --out "$keep/train.npz"
part sample $command sample "$keep/train.npz" --n 10000 --out "$keep/pairs.csv"
part train $command train "$keep/train.npz" --pairs "$keep/pairs.csv" --clusters 20 --out "$keep/embedded"
