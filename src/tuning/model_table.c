/* model_table.c: made by scripts/tune_fit.py. */
#include "tuning/model.h"

const struct model_table model_tables[] = {{9, 0, NULL, 0}};
const int32_t num_model_tables = 0;
