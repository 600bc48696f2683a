/* tensor_memory.h: a block's tensor memory and its products under way, shared by tensor_memory.c, tensor_order.c and
 * tensor_product.c. */
#ifndef FDM_EMULATOR_TENSOR_MEMORY_H
#define FDM_EMULATOR_TENSOR_MEMORY_H

#include "state.h"

enum {
    TENSOR_LANES = 128,
    TENSOR_COLUMNS = 512,
    QUARTERS = TENSOR_LANES / LANES, /* a warp touches one of them */
    UNIT = 32,                       /* columns that are allocated together */
    UNITS = TENSOR_COLUMNS / UNIT,
    QUARTER_WARPS = TENSOR_WARPS / QUARTERS,
    ACCUMULATORS_MAX = 32, /* of one issuing warp that are told apart */
    PRODUCTS_PENDING = 1024,
    MOVES_MAX = 64 /* loads and stores of a warp that nobody has waited for */
};

/* 32 lanes of a column: who has touched them last. */
struct cell {
    uint32_t writer, write_clock;
    uint16_t accumulator; /* 1 + that of the product that wrote it; its newest product is the clock */
    uint8_t written;
    place written_at;
    uint32_t reads[QUARTER_WARPS]; /* the last load of each warp of the quarter */
    place read_at;
    uint32_t operand_reader, operand_read; /* a product that took it as its operand a */
    place operand_at;
};

struct accumulator {
    uint32_t d;
    int m, n;
    uint32_t last; /* the newest product on it */
};
/* What a product is told, and who asked for it. */
struct product {
    uint64_t a, b;
    uint32_t d, a_tensor, shape, number;
    int m, n, f16, a_mn_major, b_mn_major, from_tensor, add;
    place at;
};
/* The products of one warp, in order. */
struct queue {
    struct block *block;
    const struct thread *issuer;
    uint32_t component, issued, num_pending, version;
    int group, last_accumulator;
    struct accumulator accumulators[ACCUMULATORS_MAX];
    struct product pending[PRODUCTS_PENDING];
};

/* A load or store of a warp that has not been waited for. */
struct move {
    uint32_t lane, column, count;
    int stores, moved;
    place at;
    uint32_t *registers[LANES];
    uint32_t *words; /* [32][count] */
};

/* A warp that waits for columns, or gives them back; of a pair both must come. */
struct request_of_columns {
    int operation; /* 0: none */
    int group;
    uint32_t columns, address, shared;
    place at;
};

struct tensor {
    struct block *block;
    float words[TENSOR_LANES][TENSOR_COLUMNS];
    struct cell cells[QUARTERS][TENSOR_COLUMNS];
    uint32_t allocated[UNITS]; /* 1 + the first unit of the allocation; 0: free */
    uint32_t least, version;   /* the smallest allocation so far; changes with each access */
    place allocated_at;
    int relinquished, used;
    struct request_of_columns requests[TENSOR_WARPS];
    struct move moves[TENSOR_WARPS][MOVES_MAX];
    int num_moves[TENSOR_WARPS];
    struct queue *queues[TENSOR_WARPS];
};

/* tensor_memory.c */
struct tensor *tensor_of(struct block *b);
void tensor_check_group(struct block *b, int group, place at);
int tensor_is_allocated(const struct tensor *t, uint32_t column, uint32_t count);

/* tensor_order.c: what orders accesses. Each finds and names one that nothing orders before this one. */
struct columns {
    struct tensor *tensor;
    uint32_t quarter, first, count;
};
void order_load(struct columns c, struct warp *w, uint32_t number, place at);
void order_store(struct columns c, struct warp *w, uint32_t number, place at);
void order_operand(struct columns c, const struct queue *q, const struct product *p);
void order_sums(struct columns c, const struct queue *q, const struct product *p, int accumulator);
int order_dealloc(struct columns c, const struct thread *t, place at);

/* tensor_product.c */
void products_of_tensor(struct queue *q, uint32_t upto);

#endif
