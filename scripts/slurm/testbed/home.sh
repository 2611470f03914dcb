# shellcheck shell=bash
# Homes of 1 MB, as a quota would leave them. A job that is submitted there has its batch log in
# them.

home_files() {
    local each
    for each in "${USERS[@]}"; do # before the hosts boot: their mount namespaces are copies
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
