/* windows.h: text and errors between this library, UTF-8 with '/', and Windows, UTF-16 with '\'; inside src/system. */
#ifndef FDM_SYSTEM_WINDOWS_H
#define FDM_SYSTEM_WINDOWS_H

#include <stddef.h>
#include <wchar.h>

/* Returns `wide`, of `size` words, or NULL where the text is longer or no UTF-8. */
wchar_t *windows_wide(const char *text, wchar_t *wide, int size);
/* Returns 0 where the text is longer than size - 1 bytes. */
int windows_narrow(const wchar_t *wide, char *text, size_t size);
/* errno of what GetLastError() says. */
void windows_set_errno(void);

#endif
