# shellcheck shell=bash
# Part of every site: unprivileged users, known only to the hosts of this cluster, and what
# they may read: the repository, its packages and its Python, which may lie in a directory that
# they cannot enter.
#
#   $STATE/kit        the repository
#   $STATE/venv       a Python with its packages, KEMPNER_PYTHON of users
#   $STATE/project    alice's, on every host
#   $STATE/home       the homes
#
# KEMPNER_TESTBED_KIT=DIR gives the users another checkout as their repository.
#
# The machine's /etc stays unchanged: hosts and `testbed.sh as` mount another one over it.

readonly USERS=(alice:4201 mallory:4202)

users_files() {
    local each name id base version packages root=${KEMPNER_TESTBED_KIT:-${SELF%/scripts/*}}
    mkdir "$STATE"/{etc,home,kit,python,packages}
    mkdir -p "$STATE/venv/bin"
    cp -p /etc/{passwd,shadow,group} "$STATE/etc"
    for each in "${USERS[@]}"; do
        name=${each%:*} id=${each#*:}
        sed -i "/^$name:/d" "$STATE"/etc/{passwd,shadow,group}
        echo "$name:x:$id:$id::$STATE/home/$name:/bin/bash" >>"$STATE/etc/passwd"
        echo "$name:*:19000:0:99999:7:::" >>"$STATE/etc/shadow"
        echo "$name:x:$id:" >>"$STATE/etc/group"
        command install -d -o "$id" -g "$id" -m 700 "$STATE/home/$name"
    done
    command install -d -o "${USERS[0]#*:}" -g "${USERS[0]#*:}" "$STATE/project"
    printf '#!/bin/sh\n' >"$STATE/task_prolog"
    chmod 755 "$STATE/task_prolog"
    set_conf "TaskProlog=$STATE/task_prolog"

    { read -r base && read -r version && read -r packages; } < <("$(kit_python)" -c '
import sys, sysconfig
print(sys.base_prefix, "%d.%d" % sys.version_info[:2], sysconfig.get_path("purelib"), sep="\n")')
    printf '%s\n' "$root" "$base" "$packages" >"$STATE/kit.paths"
    ln -s "$STATE/python/bin/python$version" "$STATE/venv/bin/python"
    printf '#!/bin/sh\nexec %s -m torch.distributed.run "$@"\n' "$STATE/venv/bin/python" \
        >"$STATE/venv/bin/torchrun"
    chmod 755 "$STATE/venv/bin/torchrun"
    echo "home = $STATE/python/bin" >"$STATE/venv/pyvenv.cfg"
    mkdir -p "$STATE/venv/lib/python$version/site-packages"
    printf '%s\n' "$STATE/packages" "$STATE/kit/src" \
        >"$STATE/venv/lib/python$version/site-packages/kit.pth"
}

kit_python() { # prints the Python whose packages the users have
    local python=${SELF%/scripts/*}/.venv/bin/python
    [[ -x $python ]] || python=$(type -P python3) || die "no python3 here: users of a site need one"
    echo "${KEMPNER_PYTHON:-$python}"
}

users_host() { # mounts the directories only in this namespace: `down` removes $STATE, which must
    # not contain the repository
    local name path paths root over=$STATE/etc
    mapfile -t paths <"$STATE/kit.paths"
    root=${paths[0]}
    for name in kit python packages; do
        path=${paths[0]} paths=("${paths[@]:1}")
        mount --bind "$path" "$STATE/$name"
        mount -o remount,bind,ro "$STATE/$name"
    done
    # The batch script finds this Python if --export=NONE hides KEMPNER_PYTHON from it.
    for path in "$STATE/kit" "$root"; do
        [[ ! -d $path/.venv ]] || mount --bind "$STATE/venv" "$path/.venv"
    done
    # For a shared libpython in a closed directory: otherwise a user's Python would load the
    # system's, which may be another version.
    if [[ ! $STATE/python -ef /usr && -e $STATE/python/lib/libpython3.so ]]; then
        path=$(mktemp -d "$STATE/libraries.XXXXXX")
        chmod 755 "$path"
        PATH=$PATH:/usr/sbin:/sbin ldconfig -X -C "$path/ld.so.cache" "$STATE/python/lib"
        over=$path:$over
    fi
    mount -t overlay overlay -o "ro,lowerdir=$over:/etc" /etc
}

users_exports() {
    printf '%s\n' "SLURM_CONF=$SLURM_CONF" "KEMPNER_PYTHON=$STATE/venv/bin/python" \
        KEMPNER_SITE=/dev/null OMP_NUM_THREADS=1
}

as() { # <user> <command>...: runs it as on a login node of the site, in the project's directory
    local user=$1 exports
    ((${#SITE[@]} > 0)) ||
        die "cluster $ID is not a site and has no users: KEMPNER_TESTBED_SITE=hostile testbed.sh up"
    [[ " ${USERS[*]%:*} " == *" $user "* ]] ||
        die "no user '$user' at this site: give one of ${USERS[*]%:*}"
    mapfile -t exports < <(site exports)
    exec unshare --mount bash "$SELF" login "$user" "${exports[@]}" -- "${@:2}"
}

login() { # <user> NAME=VALUE... -- <command>...: the part of as in a separate mount namespace
    local user=$1 exports=()
    shift
    while [[ $1 != -- ]]; do exports+=("$1") && shift; done
    shift
    users_host
    exec env -i -C "$STATE/project" HOME="$STATE/home/$user" USER="$user" LOGNAME="$user" \
        SHELL=/bin/bash TERM=dumb LANG=C.UTF-8 PATH="$PATH" "${exports[@]}" setpriv \
        --reuid "$user" --regid "$user" --init-groups "$@"
}
