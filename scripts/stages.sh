# stages.sh: named stages that run one after the other, each with its seconds; one that fails does not end the script.
# To be sourced.
stages=$(mktemp) # a line a stage: name, exit code, seconds, report (scripts/test_summary.py reads them)
trap 'rm -f "$stages"' EXIT

compile() { # compile [TARGET...]: by Ninja, with its progress on a terminal
    if [ -t 1 ]; then ninja -C build "$@"; else ninja -C build --quiet "$@"; fi
}

stage() { # stage NAME REPORT COMMAND...: its exit code. REPORT: a file that the command writes about its tests, or -
    local name=$1 report=$2 start=$SECONDS code=0
    shift 2
    echo "== $name ..."
    "$@" || code=$?
    stage_ends "$name" "$report" $code $((SECONDS - start))
}

stage_ends() { # stage_ends NAME REPORT CODE SECONDS: for a stage that ran in the background
    printf '%s\t%d\t%d\t%s\n' "$1" "$3" "$4" "$2" >>"$stages"
    if [ "$3" = 0 ]; then echo "== $1: $4 s"; else echo "== $1: failed after $4 s"; fi
    return "$3"
}

stages_table() { # a line a stage, and one for all; its exit code is 1 when a stage failed
    awk -F '\t' -v all=$SECONDS '
        BEGIN { format = "%-40s %7s  %s\n"; printf "\n" format, "step", "seconds", "result" }
        { printf format, $1, $3, $2 ? "failed, exit code " $2 : "passed"; failed += $2 != 0 }
        END { printf format, "all", all, failed ? failed " failed" : "passed"; exit failed > 0 }' "$stages"
}
