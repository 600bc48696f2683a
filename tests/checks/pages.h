/* pages.h: pages of memory that may not be touched until they are opened. */
#ifndef FDM_CHECKS_PAGES_H
#define FDM_CHECKS_PAGES_H

#include <stddef.h>

size_t page_bytes(void);
/* Addresses without memory behind them; NULL: there are none. */
void *pages_reserve(size_t bytes);
/* Makes whole pages of them readable and writable; returns 0 where that fails. */
int pages_open(void *first, size_t bytes);
void pages_release(void *first, size_t bytes);

#endif
