# shellcheck shell=bash
# Unsolicited output and settings of a site: a TaskProlog that prints, variables that
# change the answers of Slurm's clients, --export=NONE, and a job_submit plugin that
# rewrites each request again.

noise_lacks() {
    compgen -G "$(plugin_dir)/job_submit_lua.so" >/dev/null ||
        echo "this Slurm has no job_submit/lua"
}

plugin_dir() { # prints the plugin directory of this Slurm
    local prefix
    prefix=$(realpath "$(type -P slurmctld)")
    prefix=${prefix%/*/*}
    compgen -G "$prefix/lib*/slurm" || compgen -G "$prefix/lib/*/slurm-wlm" ||
        compgen -G "/usr/lib/*/slurm-wlm"
}

noise_files() {
    echo 'echo "print *** Welcome to this site: scratch is purged on Sunday ***"
echo "the site greets you"
echo "export SITE_TASK_PROLOG=1"' >>"$STATE/task_prolog"
    # "any" becomes "any&any" when a job is submitted with another job's request
    sed -i '/^NodeName=node/s/$/ Feature=any/' "$SLURM_CONF"
    set_conf JobSubmitPlugins=lua
    cat >"$STATE/job_submit.lua" <<'LUA'
function slurm_job_submit(job, partitions, uid)
    if job.features == nil or job.features == "" then
        job.features = "any"
    else
        job.features = job.features .. "&any"
    end
    return slurm.SUCCESS
end
function slurm_job_modify(change, job, partitions, uid) return slurm.SUCCESS end
return slurm.SUCCESS
LUA
    # Login shells on a host have the variables, too, and so do jobs with --export=NONE.
    mkdir "$STATE/etc/profile.d"
    noise_exports | grep -v '^SBATCH_' | sed 's/^/export /' >"$STATE/etc/profile.d/noise.sh"
}

noise_exports() {
    printf '%s\n' SLURM_TIME_FORMAT=relative SLURM_BITSTR_LEN=8 SQUEUE_STATES=PENDING \
        SQUEUE_PARTITION=urgent SQUEUE_FORMAT=%i SINFO_PARTITION=urgent SINFO_FORMAT=%P \
        SINFO_SORT=-N SCONTROL_ALL=1 SBATCH_EXPORT=NONE
}
