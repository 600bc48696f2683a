# draw.sh: says which seeds, shares and parts a run draws: those of the hour, so no commit can choose them. To be
# sourced. A caller that sets FDM_CHECK_SEED, to any text, repeats a run.
if [ -z "${FDM_CHECK_SEED+set}" ]; then
    FDM_CHECK_SEED=$(($(date +%s) / 3600)) # hours since 1970
fi
export FDM_CHECK_SEED
echo "drawn by the hour; the same again: FDM_CHECK_SEED=$FDM_CHECK_SEED $0${*:+ $*}"

drawn_part() { # drawn_part PARTS: a number from 0 to PARTS - 1, the same for the same FDM_CHECK_SEED
    # It is a hash: by the bare hour, a run once a day would meet only some of the parts.
    echo $(($(printf '%s' "$FDM_CHECK_SEED" | cksum | cut -d' ' -f1) % $1))
}
