# shellcheck shell=bash
# Homes of 1 MB, as under a quota. A job submitted from there has its batch log in the home.

home_files() {
    local each
    for each in "${USERS[@]}"; do # before the hosts boot, whose mount namespaces are copies
        mount -t tmpfs -o "size=1m,mode=700,uid=${each#*:},gid=${each#*:}" home \
            "$STATE/home/${each%:*}"
    done
}

home_down() {
    local each
    for each in "${USERS[@]}"; do
        ! mountpoint -q "$STATE/home/${each%:*}" || umount --lazy "$STATE/home/${each%:*}"
    done
}
