/* items.c: the names of the orders of items. */
#include "gpu/items.h"

#include "contract/family.h"

const char *const items_order_names[SCHEDULER_COUNT] = {"Static", "Longest", "Dynamic"};
_Static_assert((int)ITEMS_STATIC == (int)SCHEDULER_STATIC && (int)ITEMS_LONGEST == (int)SCHEDULER_LONGEST &&
                   (int)ITEMS_DYNAMIC == (int)SCHEDULER_DYNAMIC,
               "the kernels' numbers are the plan's");
