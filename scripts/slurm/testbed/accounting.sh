# shellcheck shell=bash
# Runs slurmdbd and MariaDB on the head; jobs need an association, and memory is a resource. Users
# see only their own jobs.
#
#   accounts lab (alice's default), course (alice, mallory)
#   QOS normal and scavenge are preempted, urgent preempts
#   QOS tight: 3 jobs of a user in the queue, 30 minutes, 2 nodes; more is refused

readonly DBD_PORT=$((PORT + 2)) SQL_PORT=$((PORT + 3))

accounting_lacks() {
    local command missing=()
    for command in slurmdbd mariadbd mariadb-install-db mariadb sacctmgr; do
        type -P "$command" >/dev/null || missing+=("$command")
    done
    ((${#missing[@]} == 0)) || echo "not installed: ${missing[*]}; run: $SELF install"
}

accounting_files() {
    local word
    word=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    mkdir "$STATE/db"
    (umask 077 &&
        printf '%s\n' AuthType=auth/munge "AuthInfo=socket=$STATE/munge/socket" DbdHost=head \
            "DbdAddr=10.77.$ID.254" "DbdPort=$DBD_PORT" SlurmUser=root \
            StorageType=accounting_storage/mysql StorageHost=127.0.0.1 "StoragePort=$SQL_PORT" \
            StorageUser=slurm "StoragePass=$word" StorageLoc=acct \
            "LogFile=$STATE/log/slurmdbd.log" "PidFile=$STATE/pid/slurmdbd" >"$STATE/slurmdbd.conf")
    set_conf AccountingStorageType=accounting_storage/slurmdbd \
        "AccountingStorageHost=10.77.$ID.254" "AccountingStoragePort=$DBD_PORT" \
        "AccountingStoragePass=$STATE/munge/socket" AccountingStorageTRES=gres/gpu \
        AccountingStorageEnforce=associations,limits,qos JobAcctGatherType=jobacct_gather/linux \
        PrivateData=jobs PreemptType=preempt/qos SelectTypeParameters=CR_Core_Memory \
        DefMemPerCPU=1000
}

accounting_head() {
    local db=$STATE/db word
    word=$(sed -n 's/^StoragePass=//p' "$STATE/slurmdbd.conf")
    [[ -d $db/mysql ]] ||
        mariadb-install-db --no-defaults --user=root --datadir="$db" --skip-test-db >/dev/null
    # The lock timeout is from Slurm's accounting guide.
    mariadbd --no-defaults --user=root --datadir="$db" --socket="$db/socket" --pid-file="$db/pid" \
        --port="$SQL_PORT" --bind-address=127.0.0.1 --innodb-buffer-pool-size=64M \
        --innodb-lock-wait-timeout=900 \
        >"$STATE/log/mariadb.log" 2>&1 &
    wait_for mariadb mariadb --no-defaults --socket="$db/socket" -e 'SELECT 1'
    mariadb --no-defaults --socket="$db/socket" -e "CREATE DATABASE IF NOT EXISTS acct;
        CREATE USER IF NOT EXISTS slurm@'127.0.0.1' IDENTIFIED BY '$word';
        CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED BY '$word';
        GRANT ALL ON acct.* TO slurm@'127.0.0.1'; GRANT ALL ON acct.* TO slurm@localhost"
    slurmdbd -D >"$STATE/log/slurmdbd.out" 2>&1 &
    wait_for slurmdbd sacctmgr -n show cluster
    # A controller does not start without the cluster's entry.
    [[ -n $(sacctmgr -n show cluster "testbed$ID") ]] ||
        accounting_entries >"$STATE/log/sacctmgr" 2>&1
}

accounting_entries() {
    sacctmgr -i add cluster "testbed$ID"
    sacctmgr -i add account lab,course "Cluster=testbed$ID"
    sacctmgr -i modify qos normal set GraceTime=20 PreemptMode=requeue
    sacctmgr -i add qos scavenge GraceTime=20 PreemptMode=requeue
    sacctmgr -i add qos urgent Preempt=scavenge,normal Priority=100
    sacctmgr -i add qos tight MaxSubmitJobsPerUser=3 MaxWall=00:30:00 MaxTRESPerJob=node=2 \
        Flags=DenyOnLimit
    sacctmgr -i add user alice Account=lab,course DefaultAccount=lab \
        QOS=normal,scavenge,urgent,tight
    sacctmgr -i add user mallory Account=course QOS=normal,urgent
    sacctmgr -i modify user root set QOS=normal,scavenge,urgent,tight
}
