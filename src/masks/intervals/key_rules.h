/* key_rules.h: documents, prefixes, windows of each head and key intervals that hold at once, as key intervals. */
#ifndef FDM_KEY_RULES_H
#define FDM_KEY_RULES_H

#include "flash_dmattn.h"

/* Of a key; strides in elements, 0 on axes of extent 1. data is NULL where the rule is absent. */
struct key_rule_view {
    const int32_t *data;
    int64_t batch, head, key;
    int64_t group; /* heads that share one head of the rule */
};

struct key_rules {
    struct key_rule_view ids;                   /* of document_ids; head is 0 */
    struct key_rule_view prefixes;              /* head and key are 0 */
    struct key_rule_view windows;               /* key: from the left side to the right one */
    struct key_rule_view start, end;            /* batch is 0 where sequences are packed */
    const int32_t *cu_seqlens_q, *cu_seqlens_k; /* NULL where they are not */
    int64_t seqlen_q, batch, heads, keys;       /* keys: of all sequences where they are packed */
};

/* Checks the rules and what they are written to, start and end, and fills `out`. */
fdm_status key_rules_resolve(const fdm_key_rules *rules, int64_t seqlen_q, const fdm_tensor *start,
                             const fdm_tensor *end, struct key_rules *out);
void key_rules_on_cpu(const struct key_rules *rules, const fdm_tensor *start, const fdm_tensor *end);

#endif
