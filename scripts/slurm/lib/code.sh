# shellcheck shell=bash
# The submitted code: a job runs from a copy of the repository, RUN/code/HASH, not from the
# checkout, which the user may keep editing. scripts/slurm/submit.sh makes the copy before
# sbatch; otherwise the batch script makes it at its first start, and records it in the job's
# Comment for the next start.

# Names of untracked files that suggest secrets: never copied, even if
# .gitignore does not list them.
KP_UNTRACKED_SECRETS=('*credential*.'{json,yaml,yml,toml,ini,cfg,txt,csv}
    '*secret*.'{json,yaml,yml,toml,ini,cfg,txt,csv} credentials .git-credentials .pypirc .envrc
    kaggle.json '*.pem' '*.key' '*.p12' 'id_rsa*' 'id_ed25519*' '*.token' token '*_token.txt'
    '.*_token' .aws .ssh)
readonly KP_UNTRACKED_SECRETS

kp_code() { # [program in scripts/]: switches to the copy by executing the launch script in it
    local copy='' script='' program=${KEMPNER_TRAIN:-$KP_ROOT/scripts/${1:-train.py}} sizes=()
    kp_tell_code "the code"
    if [[ $KP_ROOT != "$KP_ORIGIN" ]]; then
        KP_CODE_NOTE="the code is ${KP_ROOT##*/}, a copy of $KP_ORIGIN"
        kp_code_inputs
        kp_code_go_on "$KP_ROOT"
        kp_mark code
        return
    fi
    [[ ${KEMPNER_CODE:-1} == 1 && -z $KP_BESIDE && ! " ${KP_WORDS[*]} " =~ \ --(bench|tune)\  ]] ||
        return 0
    kp_tell_code "the code" copied
    [[ -z $KP_DRY ]] && kp_is_batch || return 0

    copy=$(kp_code_of_job)
    kp_code_is_there "$copy"
    if [[ -z $copy || -z $(kp_script_in "$copy") ]]; then
        [[ -n $(kp_script_in "$KP_ROOT") ]] || script=$0
        ((${#KP_INSIDE[@]} == 0)) || [[ -n ${1:-} ]] ||
            read -ra sizes < <(kp_code_sizes) || return 0
        # kp_check reports the problem
        kp_code_find "$program" "${KP_ARGUMENTS[@]}" "${sizes[@]}" 2>/dev/null || return 0
        kp_code_keep "$KP_RUN_DIR/code" "$script" "${KP_INPUTS[@]}" || return 0
        copy=$KP_COPY
        # Starting a container may take minutes, and kp_check needs the same answer: keep it.
        ((${#sizes[@]} == 0)) || printf -v KP_CHECKED ' %q' "${KP_VALUES[@]}"
        export KP_CHECKED
    fi
    [[ -n $(kp_script_in "$copy") ]] ||
        kp_die "the copy of the code lacks this launch script, which .gitignore" \
            "excludes: give it another name, or run the repository itself with KEMPNER_CODE=0"
    kp_code_go_on "$copy"
}

kp_tell_code() { # <kind of code> [copied]: sets KP_CODE_NOTE, which --dry-run shows
    KP_CODE_NOTE="$1 is $KP_ROOT itself"
    [[ -z ${2:-} ]] ||
        KP_CODE_NOTE="$1 would be a copy of $KP_ROOT, RUN/code/HASH (KEMPNER_CODE=0: itself)"
}

kp_code_go_on() { # <copy>: executes the launch script in it, unless Slurm's
    # spooled script is identical
    local script
    if [[ $1 == "$KP_ROOT" ]]; then
        [[ ${0##*/} == slurm_script ]] || return 0
        script=$(kp_script_in "$1")
        [[ -n $script ]] && ! cmp -s -- "$0" "$script" || return 0
    fi
    export KP_BEGAN=$KEMPNER_BATCH_BEGAN KP_PENDING
    # The copy prepends its own src: remove this one.
    PYTHONPATH=${PYTHONPATH#"$KP_ROOT/src"} PYTHONPATH=${PYTHONPATH#:}
    exec bash "$(kp_script_in "$1")" "${KP_WORDS[@]}"
}

kp_script() { # prints the path of this script: if Slurm runs a spooled copy, it is in
    # Command, before the arguments
    local command
    if [[ ${0##*/} == slurm_script ]]; then
        command=$(kp_rest Command)
        echo "${command%" ${KP_CHAIN_ARGUMENTS[*]}"}"
    else
        realpath -ms -- "$0"
    fi
}

kp_script_in() { # <repository, or its copy>: prints the path of this script in it, if any
    local name root path
    path=$(kp_script) name=own.sh # in a copy: a script from outside the repository
    for root in "$KP_ROOT" "$KP_ORIGIN"; do
        [[ $path != "$root"/scripts/slurm/* ]] ||
            name=${path#"$root"/scripts/slurm/} name=${name%%[[:space:]]*}
    done
    [[ ! $path -ef $KP_ROOT/scripts/slurm/${path##*/} ]] || name=${path##*/}
    [[ ! -e $1/scripts/slurm/$name ]] || echo "$1/scripts/slurm/$name"
}

kp_code_sizes() { # prints the check's options that depend on the job; fails if kp_tasks would exit
    kp_tasks >/dev/null 2>&1
    echo "--nodes $KP_NODES --gpus-per-node $KP_TASKS"
}

kp_code_keep() { # <directory> <launch script or nothing> <input files>...: makes a copy for this
    # and later starts of the job; sets KP_COPY
    if ! kp_code_copy "$@"; then
        kp_log "the code is not copied: the run uses $KP_ROOT as it is, even after a requeue"
        return 1
    fi
    kp_code_later "$KP_COPY"
    kp_code_note "$KP_COPY" "$(kp_job_id)" ||
        kp_log "the job's Comment cannot be set: after a requeue the code is again that of $KP_ROOT"
}

kp_code_of_job() { # prints the copy that the job's Comment names, if any
    local copy
    [[ $KP_JOB == *kempner-code=* ]] || return 0
    copy=${KP_JOB##*kempner-code=} copy=${copy%%$'\n'*} copy=${copy% }
    echo "${copy%'"}'}"
}

kp_run_of_job() { # prints the run directory that the job's Comment names, if any
    local run
    run=$(kp_code_of_job) run=${run%/code/*}
    if [[ $KP_JOB == *kempner-run=/* ]]; then
        run=${KP_JOB##*kempner-run=} run=${run%%$'\n'*} run=${run%% kempner-code=*} run=${run% }
        run=${run%'"}'}
    fi
    echo "$run"
}

kp_comment_of_user() { # <comment of a job>: prints it without what the kit has added
    local comment=${1%% }
    if [[ $comment == '{'*'"kempner": "kempner-'[cr]*'"}' ]]; then
        comment=${comment%'"kempner": "kempner-'[cr]*} comment=${comment%, }'}'
    else
        comment=${comment%%kempner-c[oh]*} comment=${comment%%kempner-run=/*}
    fi
    echo "${comment% }"
}

kp_comment_with() { # <the user's comment> <words>: prints both; keeps JSON valid, as a
    # site's programs may parse it
    local comment=${1%% }
    if [[ $comment != '{'*'}' || ($comment != '{}' && $comment != *'":'*) || $2 == *[\"\\]* ]]; then
        echo "${comment:+$comment }$2"
        return
    fi
    comment=${comment%\}}
    [[ $comment == '{' ]] || comment="${comment%% }, "
    echo "$comment\"kempner\": \"$2\"}"
}

kp_code_is_there() { # <copy that the job names, or nothing>: exits if it is gone: other
    # code would be another run
    [[ -z $1 || -d $1 ]] && return
    [[ -e ${1%/code/*} ]] || kp_without_this_host "${1%/code/*}"
    kp_end_early "${1%/code/*}" \
        "the copy of the code that this job runs is gone: $1: put it back, or submit the run" \
        "again: it goes on from its last checkpoint"
}

kp_code_note() { # <copy> <job>: records it in the job's Comment
    kp_comment_note "$2" "kempner-code=$1"
}

kp_run_words() { # prints what the Comment of a job has for later starts: the run directory, if no
    # copy of the code is in it, and the copy, if any
    local copy=${KEMPNER_COPY:-} words=''
    if [[ $KP_ROOT == "$KP_ORIGIN" ]]; then
        copy=${copy:-$(kp_code_of_job)}
        [[ $copy == "$KP_RUN_DIR/code/"* ]] || words="kempner-run=$KP_RUN_DIR"
    fi
    echo "$words${copy:+${words:+ }kempner-code=$copy}"
}

kp_run_note() { # records the run directory in the job's Comment: a later start may end before its
    # check tells it
    kp_is_batch && kp_is_whole_script && [[ $(kp_run_of_job) != "$KP_RUN_DIR" ]] || return 0
    local words
    words=$(kp_run_words)
    [[ $words == kempner-run=* ]] || return 0
    kp_comment_note "$(kp_job_id)" "$words" ||
        kp_log "the job's Comment cannot be set: a later start that ends before its step" \
            "ends the job"
}

kp_comment_note() { # <job> <words>: records them in the job's Comment, beside the user's text
    local comment='' chain='' tries
    [[ ! $KP_JOB =~ (^|[[:space:]])Comment=([^$'\n']*) ]] || comment=${BASH_REMATCH[2]%% }
    [[ ! $comment =~ kempner-chain=[0-9_]+\.[0-9]+ ]] || chain=${BASH_REMATCH[0]}
    comment=$(kp_comment_with "$(kp_comment_of_user "$comment")" "${chain:+$chain }$2")
    for tries in 1 2 3 4 5; do # a busy controller may drop a request
        ! kp_shielded scontrol update JobId="$1" Comment="$comment" 2>/dev/null || return 0
        kp_shielded sleep "$tries"
    done
    return 1
}

kp_code_find() { # <program> <its arguments>...: sets KP_RUN_DIR, and KP_INPUTS, the configuration
    # files including their bases
    kp_check_run "$@" || return
    kp_take_values
}

kp_code_untracked() { # [patterns to leave out]...: prints the untracked, unignored files, each with
    # a NUL; ray.sh writes the last two exclusions
    git -C "$KP_ROOT" ls-files -z --others --exclude-standard -x /runs/ -x /logs/ -x __pycache__/ \
        -x '*.out' -x '/[0-9]*-logs*/' -x '/[0-9]*-attach.sh' "${@/#/--exclude=}" 2>/dev/null
}

kp_code_secrets() { # logs which files are left out because of their names
    local withheld
    mapfile -d '' -t withheld < <(comm -z -23 <(kp_code_untracked | sort -z) \
        <(kp_code_untracked "${KP_UNTRACKED_SECRETS[@]}" | sort -z)) 2>/dev/null || return 0
    ((${#withheld[@]} == 0)) ||
        kp_log "not in the copy of the code, because their names suggest secrets, and git" \
            "does not know them: ${withheld[*]:0:5}"
}

kp_code_list() { # prints the code files in KP_ROOT, each as "kind TAB bytes TAB name NUL"
    local pattern secrets=()
    for pattern in "${KP_UNTRACKED_SECRETS[@]}"; do secrets+=(-o -name "$pattern"); done
    {
        {
            git -C "$KP_ROOT" ls-files -z --cached --recurse-submodules
            kp_code_untracked "${KP_UNTRACKED_SECRETS[@]}"
        } 2>/dev/null | grep -z . || (cd "$KP_ROOT" && find . -name '.?*' -prune -o \
            \( -path ./runs -o -path ./data -o -path ./logs -o -name __pycache__ -o \
            -name '*.out' -o -path './[0-9]*-logs*' -o -path './[0-9]*-attach.sh' \
            "${secrets[@]}" \) -prune -o \
            ! -type d -printf '%P\0')
    } | sort -zu |
        (cd "$KP_ROOT" && xargs -0 -r stat --printf '%F\t%s\t%n\0' -- 2>/dev/null) || true
}

kp_code_copy() { # <directory> <launch script, if outside> <input files>...: makes DIRECTORY/HASH
    # unless it exists; sets KP_COPY
    local mask code=0
    mask=$(umask)
    mkdir -p -- "${1%/*}" || return 1
    umask 077 # private, regardless of the files' modes
    kp_code_copy_files "$@" || code=1
    umask "$mask"
    return "$code"
}

kp_code_copy_files() { # <arguments of kp_code_copy>: makes the copy; sets KP_COPY
    local fresh kind size name total=0 out='' file root run
    local largest=20000000 most=200000000 # limits in bytes: of a file, of all files
    root=$(realpath -- "$KP_ROOT") run=$(dirname -- "$(realpath -m -- "$1")")
    [[ $run != "$root" ]] || run=$run/code # a run directory is not code, wherever it is
    fresh=$1/.new.$(uname -n).$$
    { rm -rf -- "$fresh" && mkdir -p -- "$fresh"; } || return 1
    while IFS=$'\t' read -r -d '' kind size name; do
        case $kind,/$name in
            # another repository
            directory,*) out+=", $name" && continue ;;
            # secrets
            *,*/.env | *,*/.env.* | */site.env | *,*/site.d/*.env | *,*/.netrc) continue ;;
        esac
        [[ $root/$name != "$run"/* ]] || continue
        [[ -z ${KEMPNER_SECRETS:-} || ! $KP_ROOT/$name -ef $KEMPNER_SECRETS ]] || continue
        if ((size > largest)); then
            out+=", $name" && continue
        fi
        total=$((total + size))
        printf '%s\0' "$name"
    done < <(kp_code_list) >"$fresh.list"
    if ((total > most || total == 0)); then
        kp_log "the files of $KP_ROOT take $((total / 1000000)) MB; a copy may take" \
            "$((most / 1000000)): add what is not code to .gitignore"
        rm -rf -- "$fresh" "$fresh.list"
        return 1
    fi
    kp_code_secrets
    [[ -z $out ]] || kp_log "not in the copy of the code, larger than $((largest / 1000000)) MB" \
        "or not a file: ${out#, }"

    # Fresh times (-m): a purge by age must not remove files from under a run.
    if ! { tar -C "$KP_ROOT" --null --no-recursion --verbatim-files-from -T "$fresh.list" -cf - |
        tar -C "$fresh" --no-same-owner -m -xf - &&
        printf '%s\n' "$KP_ROOT" >"$fresh/.kempner-origin"; }; then
        rm -rf -- "$fresh" "$fresh.list"
        return 1
    fi
    rm -f -- "$fresh.list"
    [[ -z ${2:-} ]] || cp -- "$2" "$fresh/scripts/slurm/own.sh" || return 1
    for file in "${@:3}"; do
        [[ $file == "$KP_ROOT"/* && -e $fresh/${file#"$KP_ROOT/"} ]] && continue
        kp_code_inputs_to "$fresh/.inputs" "${@:3}" || return 1
        break
    done
    kp_code_name "$fresh" "$1"
}

kp_code_inputs_to() { # <directory> <files>...: copies the configurations if one is outside the
    # repository or ignored by git
    # Copy all, each under its full path: a "base" is relative to the file that names it.
    local file
    for file in "${@:2}"; do
        mkdir -p -- "$1$(dirname "$file")" && cp -- "$file" "$1$file" || return 1
    done
}

kp_code_name() { # <copy> <directory>: names it by its content hash; writes commit and
    # diff beside it; sets KP_COPY
    local hash commit
    # Hash only names, modes and contents: order, times and owners differ between copies.
    hash=$(tar -C "$1" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf - . |
        sha256sum) || return 1
    KP_COPY=$2/${hash:0:12}
    if [[ ! -d $KP_COPY ]]; then
        commit=$(git -C "$KP_ROOT" rev-parse HEAD 2>/dev/null) || commit=''
        # Without Python on this host, a copy without its commit is better than none.
        kp_records write "$1.json" hash="${hash:0:12}" commit="$commit" origin="$KP_ROOT" ||
            rm -f -- "$1.json"
        [[ -z $commit ]] ||
            git -C "$KP_ROOT" diff HEAD -- . \
                ':(exclude,glob)**/'{.env*,.netrc,site.env,site.d/*.env} >"$1.patch"
        [[ ! -e $1.json ]] || mv -f -- "$1.json" "$KP_COPY.json"
        [[ ! -e $1.patch ]] || mv -f -- "$1.patch" "$KP_COPY.patch"
        # -T: if another start was first, do not move the copy into its directory.
        mv -T -- "$1" "$KP_COPY" 2>/dev/null || [[ -d $KP_COPY ]] || return 1
    fi
    rm -rf -- "$1" # another start was first
}

kp_code_later() { # <copy>: logs the files that changed between sbatch and now
    local since late=()
    since=$(date -d "$(kp_field SubmitTime)" +%s) || return 0
    # Look at the originals of the copied files: the copy has new times.
    # shellcheck disable=SC2016 # the inner shell's
    mapfile -d '' -t late \
        < <(cd "$KP_ROOT" && find "$1" -type f ! -name .kempner-origin -printf './%P\0' |
            sed -z 's,^\./\.inputs/,/,' |
            xargs -0 -r sh -c 'find "$@" -maxdepth 0 -newermt "$0" -print0' \
                "@$since.999999" 2>/dev/null)
    late=("${late[@]#./}")
    ((${#late[@]} == 0)) ||
        kp_log "note: ${#late[@]} file(s) changed since sbatch (${late[*]:0:5}):" \
            "the run has them as they are now; scripts/slurm/submit.sh keeps them as they are" \
            "when you submit"
}

kp_of_copy() { # <file>: prints its path in the copy, if KP_ROOT is a copy with that
    # file; else the path as given
    local file
    file=$(realpath -ms -- "$1")
    if [[ $file == "$KP_ORIGIN"/* && -e $KP_ROOT/${file#"$KP_ORIGIN/"} ]]; then
        echo "$KP_ROOT/${file#"$KP_ORIGIN/"}"
    else
        echo "$1"
    fi
}

kp_code_inputs() { # replaces the configurations in KP_ARGUMENTS by those in the copy
    local word file arguments=()
    for word in "${KP_ARGUMENTS[@]}"; do
        if [[ $word == [!-]*.toml ]]; then
            file=$(realpath -ms -- "$word")
            if [[ -e $KP_ROOT/.inputs$file ]]; then
                word=$KP_ROOT/.inputs$file
            else
                word=$(kp_of_copy "$word")
            fi
        fi
        arguments+=("$word")
    done
    kp_set_arguments "${arguments[@]}"
}
