#!/usr/bin/env bash
# A loop over pieces of work, as of downloads or conversions: each rank takes its share, and a piece that is done has a
# file. It handles no signal. usage: shards.sh PIECES
mkdir -p out
for ((piece = RANK; piece < $1; piece += WORLD_SIZE)); do
    [[ ! -e out/piece-$piece ]] || continue
    sleep 0.5 && date >"out/piece-$piece.tmp" && mv "out/piece-$piece.tmp" "out/piece-$piece"
    echo "piece $piece is done"
done
