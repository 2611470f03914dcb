#!/usr/bin/env bash
# One task per node: copy the tasks' environment, a single file, to this node's own disk.
#
#   stage_node.sh DIR                   creates DIR, private to this user; exit code 1 if it cannot
#                                       be used
#   stage_node.sh DIR IMAGE.sif         DIR/image.sif
#   stage_node.sh DIR ARCHIVE.tar SUM   DIR/environment, unpacked
#   stage_node.sh --has DIR NAME        exit code 0 if the file exists and nobody else can have put
#                                       it there
#   stage_node.sh --remove DIR          removes DIR, if this kit has made it
#
# sbcast has sent the file to DIR/sent; otherwise it is read from its origin. A node whose disk is
# full uses the original of the file: one warning, exit code 0.
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=private.sh
source "${0%/*}/private.sh"

if [[ $1 == --remove ]]; then # outside the container, whose start may take minutes
    [[ -L $2 || ! -O $2 ]] || ! grep -qs '"is": "STAGE"' -- "$2/.kempner" || rm -rf -- "$2"
    exit
fi
if [[ $1 == --has ]]; then
    kp_private "$2" >/dev/null && [[ -e $2/$3 ]]
    exit
fi
readonly DIR=$1 FILE=${2:-} SUM=${3:-}

not_used() { # <why>
    if [[ -z $FILE ]]; then
        echo "stage: WARNING: $(uname -n): $DIR is not used: $1" >&2
        exit 1
    fi
    echo "stage: WARNING: $(uname -n): $FILE is not copied to $DIR ($1); it is used where it is" >&2
    exit 0
}

give_up() { # <why>
    rm -rf -- "$DIR/sent" "$DIR/environment" "$DIR/image.sif"
    not_used "$1"
}

kept() {
    rm -f -- "$DIR/sent"
    echo "stage: $(uname -n): $1: its copy in $DIR is kept"
    exit 0
}

fetch() { # copies the file to DIR/sent, unless it is there already
    [[ -f $DIR/sent && $(stat -c %s -- "$DIR/sent") == $(stat -L -c %s -- "$FILE") ]] && return 0
    cp -fL --preserve=timestamps -- "$FILE" "$DIR/sent" 2>/dev/null ||
        give_up "no room, or not readable"
}

why=$(kp_private "$DIR" make) || not_used "$why"
[[ -n $FILE ]] || exit 0
# not made by kempner.data.prepare.stage
[[ -e $DIR/.kempner || -z $(ls -A -- "$DIR") ]] || not_used "it has other files"
if [[ -z $SUM ]]; then
    [[ ! -e $DIR/image.sif ||
        $(stat -c '%s %Y' -- "$DIR/image.sif") != $(stat -L -c '%s %Y' -- "$FILE") ]] ||
        kept "$FILE"
    fetch
    mv -f -- "$DIR/sent" "$DIR/image.sif"
else
    [[ $(cat -- "$DIR/environment/.complete" 2>/dev/null) != "$SUM" ]] || kept "$FILE"
    fetch
    [[ $(sha256sum <"$DIR/sent") == "$SUM "* ]] || give_up "what arrived is not what was sent"
    rm -rf -- "$DIR/environment"
    { mkdir -- "$DIR/environment" &&
        tar -C "$DIR/environment" --no-same-owner -xf "$DIR/sent"; } 2>/dev/null ||
        give_up "no room"
    # Written last: task.sh uses no environment without it.
    echo "$SUM" >"$DIR/environment/.complete" || give_up "no room"
    rm -f -- "$DIR/sent"
fi
echo "stage: $(uname -n): $FILE: copied to $DIR"
